"""`tileinfer eval`: how well a model predicts a text."""

import math
from pathlib import Path
from typing import Annotated

import typer

from tileinfer_cli import opening, render
from tileinfer_cli.commandline import Cli
from tileinfer_cli.options import JsonFlag, ModelFlags, QuietFlag
from tileinfer_cli.prompt import read_text

NAME = "eval"
SHORT = "perplexity of a text"
EXAMPLES = """
Examples:
  tileinfer eval book.txt
  tileinfer eval book.txt -m qwen3:0.6b --window 1024 --json
"""


def run(
    cli: Cli,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A text, UTF-8.", show_default=False)],
    *,
    where: ModelFlags,
    window: Annotated[
        int | None, typer.Option("--window", metavar="N", help="Tokens read at once; without it, the context.")
    ] = None,
    as_json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Measure the perplexity of a text: lower is better."""
    text = read_text(file)
    settings = opening.load_settings()
    folder = opening.find_model(cli, settings, where.model)
    engine = opening.load_engine(cli, folder, opening.engine_options(where, settings), quiet=quiet)
    from tileinfer_core.evaluate import perplexity

    with render.Progress(cli.streams.err, quiet=quiet) as progress:
        result = perplexity(engine, text, window=window, on_progress=progress)
    if as_json:
        render.print_json(cli.streams.out, {"model": engine.folder.name, **opening.plain(result)})
        return
    cli.streams.out.write(f"perplexity {result.perplexity:.4f}\n")
    render.print_note(
        cli.streams.err, f"{result.tokens:,} tokens, {result.nll:.4f} nats each ({result.nll / math.log(2):.4f} bits)"
    )
