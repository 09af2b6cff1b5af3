"""Typer's usage errors in the words of every other message here: what was wanted, what was found, what to do.

A message that has no rule keeps Typer's words, without capital letter and full stop.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    Said = tuple[str, str | None]  # a message, and a way out that is better than --help

# Commands of ollama, llama.cpp, mlx-lm and others by what they are called here.
_ELSEWHERE = {
    "benchmark": "bench",
    "complete": "generate",
    "completion": "generate",
    "convert": "quantize",
    "delete": "rm",
    "download": "pull",
    "help": "--help",
    "info": "show",
    "ls": "list",
    "perplexity": "eval",
    "ppl": "eval",
    "prompt": "generate",
    "remove": "rm",
    "repl": "chat",
    "run": "chat -m MODEL",
    "tokenize": "tokens",
    "version": "--version",
}


# Their flags likewise, for generate, chat and what else has those.
_FLAGS_ELSEWHERE = {
    "--ctx-size": "--context",
    "--device": "--backend",
    "--max-new-tokens": "--max-tokens",
    "--n-predict": "--max-tokens",
    "--num-ctx": "--context",
    "--num-predict": "--max-tokens",
    "--repeat-penalty": "--repetition-penalty",
    "--system-prompt": "--system",
    "--temp": "--temperature",
    "--verbose": "--stats",
    "-c": "--context",
    "-v": "--stats",
}
_PROMPT_FLAGS, _WITH_PROMPT = {"--prompt", "-p"}, {"generate", "tokens"}


def explain_usage(error: Any) -> tuple[str, str | None]:
    """Message and way out of an exception that has a `format_message` and perhaps a `ctx`."""
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else None
    text = " ".join(error.format_message().replace("Value error, ", "").split())
    for pattern, say in _RULES:
        if (found := re.fullmatch(pattern, text)) is not None:
            message, hint = say(found, path or "tileinfer")
            break
    else:
        message, hint = (text[:1].lower() + text[1:]).removesuffix("."), None
    return message, hint or (f"try: {path} --help" if path else None)


def _no_command(found: re.Match[str], path: str) -> Said:
    name = found["name"]
    near = found["near"] and found["near"].replace("'", "").replace(", ", " or ")
    if not near and path == "tileinfer" and name in _ELSEWHERE:
        return f"no command {name!r}", f"try: tileinfer {_ELSEWHERE[name]}"
    return f"no command {name!r}", f"did you mean {near}?" if near else None


def _no_option(found: re.Match[str], path: str) -> Said:
    name, command = found["name"], path.rpartition(" ")[2]
    if name in _PROMPT_FLAGS and command in _WITH_PROMPT:
        return f"no option {name}", f'the prompt needs none: {path} "…"'
    near = _FLAGS_ELSEWHERE.get(name) if command in {"generate", "chat"} else None
    near = near or (found["near"] and found["near"].replace(", ", " or "))
    return f"no option {name}", f"did you mean {near}?" if near else None


def _too_much(found: re.Match[str], path: str) -> Said:
    command = path.rpartition(" ")[2]
    if command == "chat":
        return f"unexpected: {found['extra']}", 'for one answer: tileinfer generate "…"'
    return f"unexpected: {found['extra']}", "put the prompt in quotes" if command in _WITH_PROMPT else None


def _bad_value(found: re.Match[str], _path: str) -> Said:
    kind = "a whole number" if found["kind"].startswith("int") else "a number"
    return f"{_flag(found)} must be {kind}, found {found['value']}", None


def _bad_choice(found: re.Match[str], _path: str) -> Said:
    choices = found["choices"].replace("'", "")
    return f"{_flag(found)} must be {'one of ' * (',' in choices)}{choices}, found {found['value']}", None


def _flag(found: re.Match[str]) -> str:
    """The long form of '--max-tokens' / '-n'."""
    return found["flag"].partition(" / ")[0].strip("'")


_INVALID = r"Invalid value for (?P<flag>'.+?'): "
_RULES: list[tuple[str, Callable[[re.Match[str], str], Said]]] = [
    (r"No such command '(?P<name>.*?)'\.?(?: Did you mean (?P<near>.*)\?)?", _no_command),
    (r"No such option:? '?(?P<name>[^ ']+)'?\.?(?: \(Possible options: (?P<near>.*)\))?", _no_option),
    (r"Got unexpected extra arguments?(?:\(s\))? \((?P<extra>.*)\)", _too_much),
    (r"Missing argument '(?P<name>.*)'\.", lambda found, _path: (f"{found['name']} is missing", None)),
    (r"Missing command\.", lambda _found, _path: ("a command is missing", None)),
    (_INVALID + r"(?P<value>'.*') is not a valid (?P<kind>int|float)\w*\.", _bad_value),
    (_INVALID + r"(?P<value>'.*') is not one of (?P<choices>'.*')\.", _bad_choice),
    (r"Option '(?P<name>.*)' requires an argument\.", lambda found, _path: (f"{found['name']} wants a value", None)),
    (r"Option '(?P<name>.*)' does not take a value\.", lambda found, _path: (f"{found['name']} takes no value", None)),
]
