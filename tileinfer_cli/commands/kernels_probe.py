"""`tileinfer kernels probe`: what the compiler makes of a choice, variant beside variant."""

from pathlib import Path
from typing import Annotated

import typer

from tileinfer_cli import opening, render
from tileinfer_cli.commandline import Cli
from tileinfer_cli.options import ArchOption, CompilerFlags, JsonFlag, QuietFlag, WorkersOption
from tileinfer_cli.probe_table import print_probe

NAME = "probe"
SHORT = "the same kernel written differently, measured side by side"
EXAMPLES = """
Examples:
  tileinfer kernels probe --list
  tileinfer kernels probe padding --arch sm_90
  tileinfer kernels probe reductions topk --json
"""


def run(
    cli: Cli,
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME...", help="Probes, by a part of their name. Without it: all.")
    ] = None,
    *,
    arch: ArchOption = None,
    save: Annotated[
        Path | None,
        typer.Option("--save", metavar="DIR", help="Where Tile IR and SASS go. Without it: the state folder."),
    ] = None,
    list_only: Annotated[bool, typer.Option("--list", help="Name the probes and their questions, run none.")] = False,
    times: Annotated[bool, typer.Option("--times/--no-times", help="Time the variants on this machine's GPU.")] = True,
    workers: WorkersOption = None,
    compiler: CompilerFlags,
    as_json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Compare ways to write a kernel. Variants are held equal first, in an interpreter, then compiled.

    Without a GPU, or for another --arch, everything but the times. Times are for one launch, in microseconds.
    """
    settings = opening.load_settings()
    opening.set_compiler(compiler, settings)
    from tileinfer_core import kernel_probe, kernel_tools

    if list_only:
        found = [[probe.name, probe.question] for probe in kernel_probe.find_probes(names or ())]
        if as_json:
            render.print_json(cli.streams.out, [{"probe": name, "question": question} for name, question in found])
        else:
            render.print_table(cli.streams.out, ["PROBE", "QUESTION"], found)
        return
    kernel_probe.find_probes(names or ())
    archs, folder = kernel_tools.chosen_archs(arch or ()), save or settings.state_dir.value / "probes"
    with render.Progress(cli.streams.err, lasting=True, quiet=quiet) as progress:
        results = kernel_probe.run_probes(
            names or (), archs, folder=folder.absolute(), timed=times, workers=workers, on_progress=progress
        )
    if as_json:
        render.print_json(cli.streams.out, [result.as_dict() for result in results])
        return
    for result in results:
        print_probe(cli.streams.out, result)
    render.print_note(cli.streams.err, f"Tile IR and SASS of every variant: {folder.absolute()}")
