"""`tileinfer doctor`: what this machine, or a model's folder, has and lacks, and the command that mends it."""

from typing import TYPE_CHECKING, Annotated

import typer

from tileinfer_cli import opening, render
from tileinfer_cli.commandline import Cli
from tileinfer_cli.options import ExaminedModelArgument, JsonFlag, QuietFlag
from tileinfer_core.errors import ModelError

if TYPE_CHECKING:
    from tileinfer_core.findings import Finding

NAME = "doctor"
SHORT = "what this machine, or a model, has and lacks"
EXAMPLES = """
Examples:
  tileinfer doctor
  tileinfer doctor qwen3:0.6b
  tileinfer doctor ./my-finetune --skip-values --json
"""


def run(
    cli: Cli,
    model: ExaminedModelArgument = None,
    *,
    skip_values: Annotated[
        bool, typer.Option("--skip-values", help="With MODEL: don't read all of its weights for NaN and infinity.")
    ] = False,
    as_json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Report on this machine: GPU, driver, compiler, CuPy, folders, and which backend `auto` picks and why.

    With MODEL, report on that model's folder: config, weight files, shapes, positions, tokenizer, end-of-sequence ids,
    chat template, values and memory. Ends with exit code 1 (machine) or 7 (model) if something is broken.
    """
    findings = _machine() if model is None else _model(cli, model, values=not skip_values, quiet=quiet)
    if as_json:
        render.print_json(cli.streams.out, [opening.plain(finding) for finding in findings])
    else:
        render.print_findings(cli.streams.out, findings)
    if any(finding.status == "problem" for finding in findings):
        raise typer.Exit(1 if model is None else ModelError.exit_code)


def _machine() -> "list[Finding]":
    from tileinfer_core.doctor import diagnose

    return diagnose(opening.load_settings())


def _model(cli: Cli, model: str, *, values: bool, quiet: bool) -> "list[Finding]":
    from tileinfer_core.model_doctor import diagnose_model

    folder = opening.open_store(opening.load_settings()).folder_to_examine(model)
    pull = None if folder.kind == "local" else f"tileinfer pull {folder.name}"
    with render.Progress(cli.streams.err, quiet=quiet) as progress:
        return diagnose_model(folder.path, pull=pull, values=values, on_progress=progress)
