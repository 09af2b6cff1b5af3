"""`tileinfer eval`: how well a model predicts a text, alone or against another model."""

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tileinfer_cli import opening, render
from tileinfer_cli.commandline import Cli
from tileinfer_cli.options import JsonFlag, ModelFlags, QuietFlag
from tileinfer_cli.prompt import read_text
from tileinfer_cli.receipt_table import divergence_pairs

if TYPE_CHECKING:
    from tileinfer_core.engine import Engine, EngineOptions
    from tileinfer_core.store import ModelFolder

NAME = "eval"
SHORT = "perplexity of a text"
EXAMPLES = """
Examples:
  tileinfer eval book.txt
  tileinfer eval book.txt -m qwen3:0.6b --window 1024 --json
  tileinfer eval book.txt -m demo-int8 --against demo
"""


def run(
    cli: Cli,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A text, UTF-8.", show_default=False)],
    *,
    where: ModelFlags,
    against: Annotated[
        str | None,
        typer.Option("--against", metavar="MODEL", help="Compare with MODEL: KL divergence, same top token."),
    ] = None,
    window: Annotated[
        int | None,
        typer.Option("--window", metavar="N", help="Tokens read at once; without it, the context, or 1024 to compare."),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option("--tokens", metavar="N", help="Score the first N tokens; without it, all.")
    ] = None,
    as_json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Measure the perplexity of a text: lower is better. With --against, also how far two models' predictions differ.

    The other model uses the same flags, but keeps its keys and values as its own folder says.
    """
    text = read_text(file)
    settings = opening.load_settings()
    folder = opening.find_model(cli, settings, where.model)
    options = opening.engine_options(where, settings)
    if against is not None:
        reference = opening.find_model(cli, settings, against)
        _compare(cli, (folder, reference), options, text, (window, tokens), as_json=as_json, quiet=quiet)
        return
    from tileinfer_core.evaluate import perplexity

    engine = opening.load_engine(cli, folder, options, quiet=quiet)
    with render.Progress(cli.streams.err, quiet=quiet) as progress:
        result = perplexity(engine, text, window=window, tokens=tokens, on_progress=progress)
    if as_json:
        render.print_json(cli.streams.out, {"model": engine.folder.name, **opening.plain(result)})
        return
    cli.streams.out.write(f"perplexity {result.perplexity:.4f}\n")
    render.print_note(
        cli.streams.err, f"{result.tokens:,} tokens, {result.nll:.4f} nats each ({result.nll / math.log(2):.4f} bits)"
    )


def _compare(
    cli: Cli,
    folders: "tuple[ModelFolder, ModelFolder]",
    options: "EngineOptions",
    text: str,
    limits: tuple[int | None, int | None],
    *,
    as_json: bool,
    quiet: bool,
) -> None:
    from tileinfer_core.compare import compare

    folder, reference = folders

    def load_reference() -> "Engine":
        return opening.load_engine(cli, reference, replace(options, kv=None), quiet=quiet)

    def load_model() -> "Engine":
        return opening.load_engine(cli, folder, options, quiet=quiet)

    with render.Progress(cli.streams.err, quiet=quiet) as progress:
        found = compare(load_reference, load_model, text, window=limits[0], tokens=limits[1], on_progress=progress)
    document = asdict(found)
    if as_json:
        render.print_json(cli.streams.out, {"model": folder.name, "against": reference.name, **document})
        return
    pairs = [
        ("perplexity", f"{found.perplexity:.4f} ({found.change * 100:+.2f} %)"),
        (f"of {reference.name}", f"{found.reference_perplexity:.4f}"),
        *divergence_pairs(document),
    ]
    render.print_pairs(cli.streams.out, [(name, value, None) for name, value in pairs])
    render.print_note(cli.streams.err, f"{found.tokens:,} tokens in windows of {found.window:,}")
