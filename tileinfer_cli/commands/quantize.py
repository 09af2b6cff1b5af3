"""`tileinfer quantize`: an INT8 model from an unquantised one, and the receipt of what it cost."""

from pathlib import Path
from typing import Annotated

import typer

from tileinfer_cli import opening, quantizing
from tileinfer_cli.commandline import Cli
from tileinfer_cli.options import BackendOption, JsonFlag, KvOption, ModelArgument, QuantizeFlags, QuietFlag

NAME = "quantize"
SHORT = "make an INT8 model"
EXAMPLES = """
Examples:
  tileinfer quantize demo
  tileinfer quantize qwen3:4b --calibrate notes.txt
  tileinfer quantize ./my-model ./my-model-int8 --group-size 128
"""


def run(
    cli: Cli,
    model: ModelArgument,
    dest: Annotated[
        Path | None,
        typer.Argument(metavar="DEST", help="A new folder. Without it: MODEL-int8, in the store or beside MODEL."),
    ] = None,
    *,
    how: QuantizeFlags,
    kv: KvOption = None,
    backend: BackendOption = None,
    force: Annotated[bool, typer.Option("--force", help="Make it again where it is.")] = False,
    as_json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Round a model's weights to INT8: half the bytes of BF16. Prints what that cost on a bundled text.

    Transformers reads the folder too, through the package compressed-tensors, and so does vLLM where the embedding is
    not INT8.
    """
    quantizing.check(how, wanted=True)
    settings = opening.load_settings()
    source = opening.find_model(cli, settings, model)
    plan = quantizing.plan_of(settings, source, dest, how, kv=kv.value if kv else None, force=force)
    where, copies = backend.value if backend else settings.backend.value, settings.half_copies.value
    quantizing.make(cli, plan, how, where, half_copies=copies, as_json=as_json, quiet=quiet)
