"""The command list of `tileinfer --help`: names, order, headings. One file per command."""

import typer

from tileinfer_cli.commandline import SectionedCommand, SectionedGroup, command

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
        bench,
        chat,
        doctor,
        eval_text,
        generate,
        kernels,
        list_models,
        pull,
        quantize,
        rm,
        root,
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
    app.callback(invoke_without_command=True)(root.root)
    for module, heading in (
        (chat, "Talk"),
        (generate, "Talk"),
        (pull, "Models"),
        (quantize, "Models"),
        (list_models, "Models"),
        (show, "Models"),
        (rm, "Models"),
        (verify, "Models"),
        (tokens, "Look inside"),
        (bench, "Look inside"),
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
    app.add_typer(kernels.group(), name=kernels.NAME, rich_help_panel="Look inside")
    return app
