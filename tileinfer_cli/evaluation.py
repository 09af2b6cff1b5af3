"""What `eval` does with one model, or with two."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from tileinfer_cli import opening, render
from tileinfer_cli.receipt_table import divergence_pairs

if TYPE_CHECKING:
    from tileinfer_cli.commandline import Cli
    from tileinfer_cli.options import ModelFlags
    from tileinfer_core.engine import Engine


@dataclass(frozen=True)
class Limits:
    """--window and --tokens; None: all there is."""

    window: int | None
    tokens: int | None


def score(cli: Cli, where: ModelFlags, text: str, limits: Limits, *, as_json: bool, quiet: bool) -> None:
    """Perplexity of one model."""
    settings = opening.load_settings()
    folder = opening.find_model(cli, settings, where.model)
    engine = opening.load_engine(cli, folder, opening.engine_options(where, settings), quiet=quiet)
    from tileinfer_core.evaluate import perplexity

    with render.Progress(cli.streams.err, quiet=quiet) as progress:
        result = perplexity(engine, text, window=limits.window, tokens=limits.tokens, on_progress=progress)
    if as_json:
        render.print_json(cli.streams.out, {"model": engine.folder.name, **opening.plain(result)})
        return
    cli.streams.out.write(f"perplexity {result.perplexity:.4f}\n")
    render.print_note(
        cli.streams.err, f"{result.tokens:,} tokens, {result.nll:.4f} nats each ({result.nll / math.log(2):.4f} bits)"
    )


def compare_models(
    cli: Cli, where: ModelFlags, against: str, text: str, limits: Limits, *, as_json: bool, quiet: bool
) -> None:
    """A model against a reference, which keeps its keys and values as its own folder says."""
    settings = opening.load_settings()
    folder = opening.find_model(cli, settings, where.model)
    reference = opening.find_model(cli, settings, against)
    options = opening.engine_options(where, settings)
    from tileinfer_core.compare import compare

    def load_reference() -> Engine:
        return opening.load_engine(cli, reference, replace(options, kv=None), quiet=quiet)

    def load_model() -> Engine:
        return opening.load_engine(cli, folder, options, quiet=quiet)

    with render.Progress(cli.streams.err, quiet=quiet) as progress:
        found = compare(
            load_reference, load_model, text, window=limits.window, tokens=limits.tokens, on_progress=progress
        )
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
