"""Every `tileinfer …` of the README, the docs and the help pages is a command line that the program takes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer.main

from tileinfer_cli.app import build
from tileinfer_cli.commandline import Cli
from tileinfer_cli.terminal import Streams

ROOT = Path(__file__).resolve().parents[2]
PAGES = "\n".join(path.read_text("utf-8") for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))])
BLOCK = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMAND = typer.main.get_command(build())


def epilogs(command: Any) -> list[str]:
    """The examples of a help page and of those below it."""
    below = [text for sub in getattr(command, "commands", {}).values() for text in epilogs(sub)]
    return [command.epilog or "", *below]


def examples() -> set[str]:
    """Whole lines, to be copied."""
    blocks = [line for block in BLOCK.findall(PAGES) for line in block.splitlines()]
    helps = [line for text in epilogs(COMMAND) for line in text.splitlines() if line.startswith("  ")]
    return {line.strip() for line in [*blocks, *helps] if re.search(r"\btileinfer [a-z]", line)}


def mentions() -> set[str]:
    """What a sentence says of a command, perhaps without all it needs."""
    found = re.findall(r"`(tileinfer [^`]+)`", BLOCK.sub("", PAGES))
    return {" ".join(line.split()) for line in found if not re.search(r"[A-Z]{4,}…|…|\.\.\.", line)}


def calls(line: str) -> list[list[str]]:
    """The arguments of each call of tileinfer in a shell line."""
    reader = shlex.shlex(line, posix=True, punctuation_chars=True)
    reader.whitespace_split = True
    found: list[list[str]] = []
    mine = file_follows = False
    for word in reader:
        if set(word) <= set("|&;()"):
            mine = False
        elif set(word) <= set("<>"):
            file_follows = True
        elif file_follows:
            file_follows = False
        elif word.rpartition("/")[2] == "tileinfer":
            mine = True
            found.append([])
        elif mine:
            found[-1].append(word)
    return found


def parse(command: Any, words: list[str], parent: Any = None) -> None:
    """Raises what the program would; nothing is run."""
    context = command.make_context(command.name, list(words), parent=parent, obj=Cli(Streams.of_process()))
    if hasattr(command, "commands"):
        _, sub, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        parse(sub, rest, context)


@pytest.mark.parametrize("line", sorted(examples()))
def test_an_example_is_taken(line: str) -> None:
    found = calls(line)
    assert found, "the line names tileinfer and does not call it"
    for words in found:
        parse(COMMAND, words)


@pytest.mark.parametrize("line", sorted(mentions()))
def test_what_a_sentence_names_exists(line: str) -> None:
    (words,) = calls(line)
    try:
        parse(COMMAND, words)
    except Exception as error:
        if type(error).__name__ not in {"MissingParameter", "Exit"}:
            raise


def test_there_are_some() -> None:
    assert len(examples()) > 60
    assert len(mentions()) > 15
