"""How a command is declared: groups of flags as dataclasses, help in sections, one object for the process.

    @command
    def generate(cli: Cli, prompt: PromptArgument = None, sampling: SamplingFlags = SamplingFlags()) -> None: ...

`command` gives Typer a signature in which every flag group is spread out into its fields, adds `--debug`, and hands
the function the groups put together again. So each flag, its default and its help text exist once (options.py).
Help pages are plain text made by Typer's own formatter: importing Rich for them would cost 60 ms.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

if TYPE_CHECKING:
    from collections.abc import Callable

    from tileinfer_cli.terminal import Streams

_OPTIONS, _GENERAL = "Options", "General"
_FIRST, _LAST = ("Arguments", _OPTIONS), ("Compiler", _GENERAL)  # of the sections of a command's help page


@dataclass
class Cli:
    """What the process gives a command: its streams, and whether `--debug` was asked for."""

    streams: Streams
    debug: bool = False


def _set_debug(context: typer.Context, value: bool) -> bool:
    if value:
        context.obj.debug = True
    return value


DebugOption = Annotated[
    bool,
    typer.Option(
        "--debug",
        callback=_set_debug,
        is_eager=True,
        help="Show the traceback of an error.",
        rich_help_panel=_GENERAL,
    ),
]


def command(function: Callable[..., None]) -> Callable[..., None]:
    """The function as Typer sees it: a context, every field of every flag group, `--debug`."""
    hints = typing.get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {
        name: kind for name, kind in hints.items() if dataclasses.is_dataclass(kind) and kind is not Cli
    }

    def run(ctx: typer.Context, debug: bool = False, **given: Any) -> None:
        del debug  # its callback has told the Cli
        for name, kind in groups.items():
            given[name] = kind(**{field.name: given.pop(field.name) for field in dataclasses.fields(kind)})
        function(ctx.obj, **given)

    run.__name__ = function.__name__
    run.__doc__ = function.__doc__
    run.__annotations__ = {}
    run.__signature__ = inspect.Signature(list(_spread(function, hints, groups)))  # type: ignore[attr-defined]
    return run


def _spread(
    function: Callable[..., None], hints: dict[str, Any], groups: dict[str, Any]
) -> typing.Iterator[inspect.Parameter]:
    kind = inspect.Parameter.KEYWORD_ONLY
    yield inspect.Parameter("ctx", kind, annotation=typer.Context)
    for parameter in list(inspect.signature(function).parameters.values())[1:]:
        if parameter.name in groups:
            group = groups[parameter.name]
            fields = typing.get_type_hints(group, include_extras=True)
            for field in dataclasses.fields(group):
                yield inspect.Parameter(field.name, kind, default=field.default, annotation=fields[field.name])
        else:
            yield parameter.replace(kind=kind, annotation=hints[parameter.name])
    yield inspect.Parameter("debug", kind, default=False, annotation=DebugOption)


class SectionedCommand(TyperCommand):
    """A command whose options appear under the headings that their flag groups name (rich_help_panel).

    What the command alone has comes first, what one hardly ever needs last.
    """

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """MODEL for what must be there, in place of Typer's {MODEL}."""
        return [re.sub(r"^\{(.*)\}$", r"\1", piece) for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                heading = "Arguments" if param.param_type_name == "argument" else _heading(param)
                heading = _GENERAL if param.name == "help" else heading
                sections.setdefault(heading, []).append(record)
        for heading in sorted(sections, key=_place):
            with formatter.section(heading):
                formatter.write_dl(sections[heading])

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        del ctx
        _write_epilog(self.epilog, formatter)


class SectionedGroup(TyperGroup):
    """The command list under its headings, in the order of registration."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        del ctx
        sections: dict[str, list[tuple[str, str]]] = {}
        width = max(len(name) for name in self.commands)
        for name, sub in self.commands.items():
            if not sub.hidden:
                help_text = sub.get_short_help_str(formatter.width - width - 6)
                sections.setdefault(_heading(sub), []).append((name.ljust(width), help_text))
        for heading, rows in sections.items():
            with formatter.section(heading):
                formatter.write_dl(rows)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        self.format_commands(ctx, formatter)
        TyperCommand.format_options(self, ctx, formatter)  # type: ignore[arg-type]

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        del ctx
        _write_epilog(self.epilog, formatter)


def _place(heading: str) -> int:
    """Where a section stands; those of equal place as they come."""
    if heading in _FIRST:
        return _FIRST.index(heading) - len(_FIRST)
    return 1 + _LAST.index(heading) if heading in _LAST else 0


def _heading(param: Any) -> str:
    heading = getattr(param, "rich_help_panel", None)
    return heading if isinstance(heading, str) else _OPTIONS


def _write_epilog(epilog: str | None, formatter: Any) -> None:
    """Examples, line for line as they are written."""
    if epilog:
        formatter.write_paragraph()
        for line in inspect.cleandoc(epilog).splitlines():
            formatter.write(f"{line}\n")
