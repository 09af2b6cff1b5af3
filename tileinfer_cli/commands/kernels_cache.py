"""`tileinfer kernels cache`: where compiled kernels are kept, what is there, how much it takes, and removing it."""

from typing import TYPE_CHECKING, Annotated

import typer

from tileinfer_cli import opening, render
from tileinfer_cli.commandline import Cli
from tileinfer_cli.options import CompilerFlags, JsonFlag
from tileinfer_core.errors import UsageError

if TYPE_CHECKING:
    from tileinfer_core.kernel_cache import CacheReport

NAME = "cache"
SHORT = "the compiled kernels on disk: list, size, clear"
EXAMPLES = """
Examples:
  tileinfer kernels cache
  tileinfer kernels cache --trim --cache-size-bytes 100000000
  tileinfer kernels cache --clear
"""


def run(
    cli: Cli,
    *,
    clear: Annotated[bool, typer.Option("--clear", help="Remove every compiled kernel.")] = False,
    trim: Annotated[
        bool, typer.Option("--trim", help="Remove what was used longest ago, until the size limit holds.")
    ] = False,
    compiler: CompilerFlags,
    as_json: JsonFlag = False,
) -> None:
    """List the compiled kernels on disk, what was used last first.

    A kernel that the engine has used is there twice: in cuda-tile's own cache, and in TileInfer's beside it.
    """
    from tileinfer_core import kernel_cache

    if clear and trim:
        raise UsageError("--clear removes everything, --trim only the oldest: give one of them")
    settings = opening.set_compiler(compiler, opening.load_settings())
    if clear or trim:
        count, size = (kernel_cache.clear if clear else kernel_cache.trim)(settings)
        render.print_note(cli.streams.err, f"removed {count} compiled kernels, {render.bytes_text(size)}")
    report = kernel_cache.report(settings)
    if as_json:
        render.print_json(cli.streams.out, report.as_dict())
    else:
        _print(cli, report)


def _print(cli: Cli, report: "CacheReport") -> None:
    out, count = cli.streams.out, len(report.entries)
    held = f"{count} compiled kernel{'' if count == 1 else 's'}, {render.bytes_text(report.size)}"
    limit = render.bytes_text(report.settings.cache_size_bytes.value)
    render.print_heading(out, f"{report.settings.cache_dir.value}: {held} of {limit}")
    pairs = [(name, _text(setting.value), setting.origin) for name, setting in report.settings.items()]
    render.print_pairs(out, pairs, indent="  ")
    if report.entries:
        header = ["KERNEL", "TARGET", "COMPILER", "SIZE", "LAST USE", "STORE"]
        rows = [
            [
                entry.kernel,
                entry.target or "unknown",
                entry.compiler or "unknown",
                render.bytes_text(entry.size),
                entry.last_use.replace("T", " ").replace("+00:00", " UTC"),
                entry.store,
            ]
            for entry in report.entries
        ]
        render.print_table(out, header, rows, right=[3])


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)
