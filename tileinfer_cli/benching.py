"""What `bench` does with one model, or with two after each other."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tileinfer_cli import opening, render
from tileinfer_cli.bench_table import print_ratios, print_report
from tileinfer_core.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from tileinfer_cli.commandline import Cli
    from tileinfer_cli.options import ModelFlags
    from tileinfer_core.bench import BenchOptions
    from tileinfer_core.config import ModelConfig


@dataclass(frozen=True)
class Models:
    """A model by its flags or a shape to fill with noise, and the model to measure it against."""

    where: ModelFlags
    random_weights: Path | None
    against: str | None


def run(cli: Cli, models: Models, options: BenchOptions, *, markdown: bool, as_json: bool, quiet: bool) -> None:
    """Measure, and print a table or one JSON document."""
    if models.against is not None:
        if models.random_weights is not None:
            raise UsageError("--against compares two models; --random-weights measures a shape")
        opening.find_model(cli, opening.load_settings(), models.against)  # an unknown name is said before the work
    document = _measure(cli, models, options, quiet=quiet)
    if models.against is not None:
        other = replace(models, where=replace(models.where, model=models.against))
        document["against"] = _measure(cli, other, options, quiet=quiet)
    if as_json:
        render.print_json(cli.streams.out, document)
        return
    out = cli.streams.out
    print_report(out, document, options, markdown=markdown)
    if models.against is not None:
        out.write("\n")
        print_report(out, document["against"], options, markdown=markdown)
        out.write("\n")
        print_ratios(out, document, markdown=markdown)


def _measure(cli: Cli, models: Models, options: BenchOptions, *, quiet: bool) -> dict[str, Any]:
    """The model is closed before this returns, so that the next one has the memory."""
    from tileinfer_core.bench import run_bench

    config = models.random_weights
    shape = None if config is None or config.exists() else _shape_named(str(config))
    name, loaded = opening.load_for_bench(cli, models.where, config, quiet=quiet, shape=shape)
    with contextlib.closing(loaded.runner), render.Progress(cli.streams.err, quiet=quiet) as progress:
        report = run_bench(loaded.runner, loaded.model, options, load_s=loaded.load_s, on_progress=progress)
    return {"model": name, "backend_reason": loaded.backend.reason, **opening.plain(report)}


def _shape_named(name: str) -> ModelConfig:
    """The kernels' catalogue knows the shapes, so this needs cuda-tile; a config.json does not."""
    from tileinfer_core.kernel_census import config_of

    return config_of(name, opening.open_store(opening.load_settings()))[1]
