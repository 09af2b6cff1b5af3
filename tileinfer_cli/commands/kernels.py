"""`tileinfer kernels …`: the commands about kernels, one file each."""

import typer

from tileinfer_cli.commandline import SectionedCommand, SectionedGroup, command

NAME = "kernels"
SHORT = "look at the GPU kernels, compile them ahead of time"
EXAMPLES = """
Examples:
  tileinfer kernels list
  tileinfer kernels compile --arch sm_90 --model Qwen3-4B
  tileinfer kernels probe padding --arch sm_90
"""


def group() -> typer.Typer:
    """A new application with the commands."""
    from tileinfer_cli.commands import (
        kernels_cache,
        kernels_census,
        kernels_compile,
        kernels_explain,
        kernels_list,
        kernels_probe,
    )

    app = typer.Typer(cls=SectionedGroup, short_help=SHORT, epilog=EXAMPLES)
    app.callback()(run)
    for module in (kernels_list, kernels_compile, kernels_cache, kernels_explain, kernels_probe, kernels_census):
        app.command(
            module.NAME,
            cls=SectionedCommand,
            short_help=module.SHORT,
            epilog=module.EXAMPLES,
            rich_help_panel="Commands",
        )(command(module.run))
    return app


def run() -> None:
    """Look at the GPU kernels, and compile them ahead of time. Needs no GPU."""
