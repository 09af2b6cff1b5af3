"""`tileinfer` without a command: `--version`, `--help`, and the help page for who forgot the command."""

from typing import Annotated

import typer

from tileinfer_cli.commandline import DebugOption


def _version(value: bool) -> None:
    if value:
        from importlib import metadata

        try:
            number = metadata.version("tileinfer")
        except metadata.PackageNotFoundError:
            number = "(a source tree, not installed)"
        typer.echo(f"tileinfer {number}")
        raise typer.Exit


def root(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: DebugOption = False,
) -> None:
    """Chat with a language model on your own GPU, or on the CPU without one."""
    del version, debug  # their callbacks have acted
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help(), err=True)
        raise typer.Exit(2)
