"""The command list of `tileinfer --help`: names, order, headings. One file per command."""

import importlib

import typer

from tileinfer_cli.commandline import SectionedCommand, SectionedGroup, command

_EPILOG = """
Examples:
  tileinfer pull demo
  tileinfer generate "What is the capital of France?"
  tileinfer chat

`tileinfer COMMAND --help` explains a command.
"""


# Order and headings of the help page. A command's module is named after it, but for two that Python's own names take.
_HEADINGS = {
    "chat": "Talk",
    "generate": "Talk",
    "pull": "Models",
    "quantize": "Models",
    "list": "Models",
    "show": "Models",
    "rm": "Models",
    "verify": "Models",
    "tokens": "Look inside",
    "bench": "Look inside",
    "eval": "Look inside",
    "doctor": "Look inside",
}
_MODULES = {"list": "list_models", "eval": "eval_text"}


def register(first_word: str | None = None) -> typer.Typer:
    """A new application: with the one command that `first_word` names, or with every command.

    One command alone saves the 20 ms that importing and declaring the others takes.
    """
    from tileinfer_cli.commands import root

    app = typer.Typer(
        cls=SectionedGroup,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
        epilog=_EPILOG,
    )
    app.callback(invoke_without_command=True)(root.root)
    for name in (first_word,) if first_word in _HEADINGS else _HEADINGS:
        module = importlib.import_module(f"tileinfer_cli.commands.{_MODULES.get(name, name)}")
        app.command(
            module.NAME,
            cls=SectionedCommand,
            short_help=module.SHORT,
            epilog=module.EXAMPLES,
            rich_help_panel=_HEADINGS[name],
        )(command(module.run))
    if first_word not in _HEADINGS:
        from tileinfer_cli.commands import kernels

        app.add_typer(kernels.group(), name=kernels.NAME, rich_help_panel="Look inside")
    return app
