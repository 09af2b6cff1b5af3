"""`tileinfer kernels compile`: ahead of time, for any architecture, on a machine with or without a GPU."""

from typing import TYPE_CHECKING

from tileinfer_cli import opening, render
from tileinfer_cli.commandline import Cli
from tileinfer_cli.options import ArchOption, CompilerFlags, JsonFlag, QuietFlag, ShapeOption, WorkersOption

if TYPE_CHECKING:
    from tileinfer_core.kernel_tools import CompiledKernel

NAME = "compile"
SHORT = "compile kernels ahead of time"
EXAMPLES = """
Examples:
  tileinfer kernels compile --arch sm_90 --model Qwen3-4B
  tileinfer kernels compile --arch sm_89,sm_120 --model qwen3:0.6b --json
"""


def run(
    cli: Cli,
    *,
    arch: ArchOption = None,
    model: ShapeOption = None,
    workers: WorkersOption = None,
    compiler: CompilerFlags,
    as_json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Compile kernels into the cache, and show what each needs of a GPU.

    A model whose kernels are there starts without compiling, also on another machine with the same versions.
    """
    from tileinfer_core import kernel_tools as tools

    settings = opening.load_settings()
    cache = opening.set_compiler(compiler, settings)
    store = opening.open_store(settings)
    models = tools.chosen_models(model or (), store)
    archs = tools.chosen_archs(arch or ())
    with render.Progress(cli.streams.err, lasting=True, quiet=quiet) as progress:
        results = list(tools.compile_kernels(archs, models, workers=workers, on_progress=progress))
    if as_json:
        render.print_json(cli.streams.out, opening.plain(results))
    else:
        _print(cli, [result for result in results if result.error is None])
    for note in tools.notes(archs):
        render.print_note(cli.streams.err, note)
    if not cache.disk_cache.value:
        render.print_note(cli.streams.err, f"nothing is kept: disk_cache is off ({cache.disk_cache.origin})")
    if error := tools.failure(results):
        raise error


def _print(cli: Cli, results: "list[CompiledKernel]") -> None:
    rows = [
        [
            kernel.arch,
            kernel.kernel,
            str(kernel.registers),
            str(kernel.shared_bytes),
            str(kernel.spills),
            "not counted" if kernel.tensor_core is None else ", ".join(kernel.tensor_core) or "-",
            "cached" if kernel.cached else render.seconds_text(kernel.seconds),
            ", ".join(kernel.models[:2]) + (f" and {len(kernel.models) - 2} more" if len(kernel.models) > 2 else ""),
        ]
        for kernel in sorted(results, key=lambda kernel: (kernel.arch, kernel.family, kernel.kernel, kernel.pdl))
    ]
    header = ["ARCH", "KERNEL", "REGISTERS", "SHARED", "SPILLS", "TENSOR CORES", "TIME", "MODELS"]
    render.print_table(cli.streams.out, header, rows, right=[2, 3, 4])
