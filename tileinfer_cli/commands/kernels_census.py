"""`tileinfer kernels census`: every kernel of a step in order, what it moves, needs and takes."""

from pathlib import Path
from typing import Annotated

import typer

from tileinfer_cli import opening, render
from tileinfer_cli.census_table import print_census
from tileinfer_cli.commandline import Cli
from tileinfer_cli.options import ArchOption, JsonFlag, ModelFlags, QuietFlag, RandomWeightsOption

NAME = "census"
SHORT = "the kernels of a step, in order, with times and bytes"
EXAMPLES = """
Examples:
  tileinfer kernels census -m qwen3:4b
  tileinfer kernels census -m Qwen3-4B --arch sm_90 --step prefill
  tileinfer kernels census --random-weights Qwen3-4B --svg step.svg
"""


def run(
    cli: Cli,
    *,
    where: ModelFlags,
    random_weights: RandomWeightsOption = None,
    step: Annotated[str, typer.Option("--step", metavar="KIND", help="decode, verify or prefill.")] = "decode",
    tokens: Annotated[
        int | None, typer.Option("--tokens", metavar="N", help="Tokens of the step: verify 2 to 8, prefill to 2,048.")
    ] = None,
    position: Annotated[
        int, typer.Option("--at", metavar="N", help="Positions of the sequence, those of the step included.")
    ] = 512,
    arch: ArchOption = None,
    every: Annotated[bool, typer.Option("--every", help="A line for every launch, not for every kind.")] = False,
    svg: Annotated[Path | None, typer.Option("--svg", metavar="FILE", help="Draw the step as a timeline.")] = None,
    as_json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Show what a step consists of. Without a GPU, or for another --arch, everything but the times.

    TIME is what a launch adds to the step; ALONE its time among its own kind; GAP the difference, negative where it
    overlaps the launch before. docs/lab.md says how it is measured.
    """
    settings = opening.load_settings()
    options = opening.engine_options(where, settings)
    from tileinfer_core import kernel_census, kernel_tools

    wanted, store = kernel_census.chosen_step(step, tokens, position), opening.open_store(settings)
    here = kernel_tools.this_gpu()
    targets = kernel_tools.chosen_archs(arch or ())
    reference = where.model if where.model is not None else settings.model.value
    if here in targets and len(targets) == 1 and options.backend != "cpu":
        shape = None if random_weights is None else kernel_census.config_of(str(random_weights), store)[1]
        name, loaded = opening.load_for_bench(cli, where, random_weights, quiet=quiet, shape=shape)
        with render.Progress(cli.streams.err, quiet=quiet) as progress:
            found = [kernel_census.census_on_gpu(name, loaded, wanted, on_progress=progress)]
    else:
        source = reference if random_weights is None else str(random_weights)
        name, config = kernel_census.config_of(source, store)
        load = options.for_loading(config)
        with render.Progress(cli.streams.err, lasting=True, quiet=quiet) as progress:
            found = [
                kernel_census.census_without_gpu(name, config, target, wanted, load, on_progress=progress)
                for target in targets
            ]
    if svg is not None:
        opening.save_text(svg, kernel_census.picture(found[0]))
    if as_json:
        render.print_json(cli.streams.out, [census.as_dict() for census in found])
    for census in found if not as_json else ():
        print_census(cli.streams.out, census, every=every)
