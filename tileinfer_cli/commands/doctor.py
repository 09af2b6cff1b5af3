"""`tileinfer doctor`: what this machine has, what it lacks, and the command that mends it."""

from typing import TYPE_CHECKING

import typer

from tileinfer_cli import opening, render
from tileinfer_cli.commandline import Cli
from tileinfer_cli.options import JsonFlag

if TYPE_CHECKING:
    from tileinfer_core.findings import Finding

NAME = "doctor"
SHORT = "what this machine has, and what is missing"
EXAMPLES = """
Examples:
  tileinfer doctor
  tileinfer doctor --json
"""


def run(cli: Cli, *, as_json: JsonFlag = False) -> None:
    """Report GPU, driver, compiler, CuPy, folders, and which backend `auto` picks and why.

    Ends with exit code 1 if something is broken that TileInfer needs.
    """
    from tileinfer_core.doctor import diagnose

    findings: list[Finding] = diagnose(opening.load_settings())
    if as_json:
        render.print_json(cli.streams.out, [opening.plain(finding) for finding in findings])
    else:
        render.print_findings(cli.streams.out, findings)
    if any(finding.status == "problem" for finding in findings):
        raise typer.Exit(1)
