"""`python -m tileinfer_cli` is `tileinfer`."""

from tileinfer_cli.app import main

main()
