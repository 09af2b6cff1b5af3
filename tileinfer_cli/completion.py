"""What Tab offers, in a shell (Typer calls these) and in a chat: names of models, commands, settings, files.

Only what is on this disk is looked at, and whatever goes wrong on the way (a config file with a fault, a folder that
can't be read) means nothing to offer: the command itself will say what is wrong.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from tileinfer_core.store import Store

    Arguments = Mapping[str, Callable[[str], Iterable[str]]]


def models_here(incomplete: str) -> list[str]:
    """Names of models on this disk that begin like this; for -m and every command that wants a model."""
    return _names(lambda store: store.names_here(), incomplete)


def models_to_pull(incomplete: str) -> list[str]:
    """Names that `pull` knows without asking the Hub."""
    return _names(lambda store: store.known_names(), incomplete)


def _names(of: Callable[[Store], list[str]], incomplete: str) -> list[str]:
    from tileinfer_cli.opening import load_settings, open_store
    from tileinfer_core.errors import TileinferError

    try:
        names = of(open_store(load_settings()))
    except (TileinferError, OSError):
        return []
    return [name for name in names if name.startswith(incomplete)]


def paths(incomplete: str) -> list[str]:
    """Files and folders that begin like this, as the user writes them; hidden ones only where a dot is typed."""
    head, slash, name = incomplete.rpartition("/")
    try:
        found = sorted((Path(head + slash).expanduser() if slash else Path()).iterdir())
    except (OSError, RuntimeError, ValueError):  # RuntimeError: ~nobody
        return []
    return [
        head + slash + path.name + ("/" if path.is_dir() else "")
        for path in found
        if path.name.startswith(name) and (name or not path.name.startswith("."))
    ]


def slash_line(line: str, commands: Iterable[str], arguments: Arguments) -> list[tuple[int, str]]:
    """(where the completed word begins, what it may become) for the beginning of a slash command.

    `commands` and the keys of `arguments` have no slash; `arguments` gives what may stand after a command.
    """
    if not line.startswith("/") or "\n" in line:
        return []
    command, space, rest = line[1:].partition(" ")
    if not space:
        return [(0, f"/{name}") for name in sorted(commands) if name.startswith(command)]
    if command not in arguments:
        return []
    start = len(line) - len(rest)
    return [(start, word) for word in arguments[command](rest) if word.startswith(rest)]
