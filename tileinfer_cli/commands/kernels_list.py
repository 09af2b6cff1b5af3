"""`tileinfer kernels list`: the kernels, what each computes, and for which models."""

from tileinfer_cli import opening, render
from tileinfer_cli.commandline import Cli
from tileinfer_cli.options import ArchToLookAtOption, JsonFlag, ShapeOption

NAME = "list"
SHORT = "the kernels and what they compute"
EXAMPLES = """
Examples:
  tileinfer kernels list
  tileinfer kernels list --model Qwen3-4B --json
"""


def run(cli: Cli, *, arch: ArchToLookAtOption = None, model: ShapeOption = None, as_json: JsonFlag = False) -> None:
    """List the kernels. VARIANTS counts what is compiled of each: its shapes, types and launch forms."""
    from tileinfer_core import kernel_tools as tools

    store = opening.open_store(opening.load_settings())
    models = tools.chosen_models(model or (), store)
    archs = tools.chosen_archs(arch or [tools.this_gpu() or "sm_90"])
    document = {name: tools.list_kernels(name, models) for name in archs}
    if as_json:
        render.print_json(cli.streams.out, opening.plain(document))
        return
    rows = [
        [name, kernel.family, kernel.kernel, str(kernel.variants), kernel.formula]
        for name, kernels in document.items()
        for kernel in kernels
    ]
    render.print_table(cli.streams.out, ["ARCH", "FAMILY", "KERNEL", "VARIANTS", "COMPUTES"], rows, right=[3])
    for note in tools.notes(archs):
        render.print_note(cli.streams.err, note)
