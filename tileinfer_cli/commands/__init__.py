"""The command list of `tileinfer --help`: names, order, headings. One file per command."""

from typing import Annotated

import typer

from tileinfer_cli.commandline import DebugOption, SectionedCommand, SectionedGroup, command

_EPILOG = """
Examples:
  tileinfer pull demo
  tileinfer generate "What is the capital of France?"
  tileinfer chat

`tileinfer COMMAND --help` explains a command.
"""


def register() -> typer.Typer:
    """A new application with every command."""
    from tileinfer_cli.commands import (
        chat,
        doctor,
        eval_text,
        generate,
        list_models,
        pull,
        rm,
        show,
        tokens,
        verify,
    )

    app = typer.Typer(
        cls=SectionedGroup,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
        epilog=_EPILOG,
    )
    app.callback(invoke_without_command=True)(_root)
    for module, heading in (
        (chat, "Talk"),
        (generate, "Talk"),
        (pull, "Models"),
        (list_models, "Models"),
        (show, "Models"),
        (rm, "Models"),
        (verify, "Models"),
        (tokens, "Look inside"),
        (eval_text, "Look inside"),
        (doctor, "Look inside"),
    ):
        app.command(
            module.NAME,
            cls=SectionedCommand,
            short_help=module.SHORT,
            epilog=module.EXAMPLES,
            rich_help_panel=heading,
        )(command(module.run))
    return app


def _version(value: bool) -> None:
    if value:
        from importlib import metadata

        try:
            number = metadata.version("tileinfer")
        except metadata.PackageNotFoundError:
            number = "(a source tree, not installed)"
        typer.echo(f"tileinfer {number}")
        raise typer.Exit


def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: DebugOption = False,
) -> None:
    """Chat with a language model on your own GPU, or on the CPU without one."""
    del version, debug  # their callbacks have acted
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(2)
