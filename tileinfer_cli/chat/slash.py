"""The slash commands. What they print goes to stderr: stdout has the answers alone.

A message is a command only if it starts with a slash and has one line, so that a pasted listing of paths or a
traceback stays a message. /system alone takes text of several lines.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tileinfer_cli import completion
from tileinfer_cli.answer import stats_text
from tileinfer_cli.render import print_note, print_pairs
from tileinfer_core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from tileinfer_cli.chat.loop import Chat

    Handler = Callable[[Chat, str], None]

_THINK = {"on": True, "off": False, "default": None}
# What other chat programs call some of the commands.
_ELSEWHERE = {"bye": "exit", "quit": "exit", "q": "exit", "?": "help", "new": "clear", "reset": "clear"}


@dataclass(frozen=True)
class SlashCommand:
    """`act` gets the text after the name."""

    usage: str
    help: str
    act: Handler


def is_command(message: str) -> bool:
    return message.startswith("/") and ("\n" not in message or message.startswith("/system "))


def carry_out(chat: Chat, line: str) -> None:
    """Raises UsageError with the nearest name for a command that doesn't exist."""
    name, rest = _first_word(line[1:])
    command = COMMANDS.get(name)
    if command is None:
        raise UsageError(
            f"no command /{name}{nearest(_ELSEWHERE.get(name, name), COMMANDS, prefix='/')}",
            hint="/help lists them; // starts a message with a slash",
        )
    command.act(chat, rest)


def _first_word(text: str) -> tuple[str, str]:
    """The word that `text` starts with, if it starts with one, and what follows."""
    name = "" if text[:1].isspace() else "".join(text.split(maxsplit=1)[:1])
    return name, text[len(name) :].strip()


def complete(chat: Chat, line: str) -> list[tuple[int, str]]:
    """What Tab offers: see completion.slash_line."""
    return completion.slash_line(
        line,
        COMMANDS,
        {
            "model": completion.models_here,
            "set": lambda _: _settings(chat),
            "think": lambda _: _THINK,
            "save": completion.paths,
            "load": completion.paths,
        },
    )


def nearest(name: str, known: Iterable[str], *, prefix: str = "") -> str:
    """ "; did you mean X?", or nothing."""
    known = list(known)
    close = difflib.get_close_matches(name.lower(), known, n=1) or [
        word for word in known if name and word.startswith(name)
    ]
    return f"; did you mean {prefix}{close[0]}?" if close else ""


def _help(chat: Chat, _rest: str) -> None:
    print_pairs(chat.streams.err, [(command.usage, command.help, None) for command in COMMANDS.values()])
    print_note(chat.streams.err, "Enter sends · Alt-Enter starts a line · Ctrl-C stops an answer · // sends a slash")


def _exit(chat: Chat, _rest: str) -> None:
    chat.leaving = True


def _clear(chat: Chat, _rest: str) -> None:
    chat.session.clear()
    print_note(chat.streams.err, "the conversation starts anew")


def _system_text(value: str) -> str | None:
    """`default` leaves the system prompt to the template, "" is an empty one."""
    return None if value == "default" else "" if value == '""' else value


def _system(chat: Chat, rest: str) -> None:
    """No text shows it, "" sends none."""
    if rest:
        chat.session.set_system("" if rest == '""' else rest)
    _show_system(chat)


def _show_system(chat: Chat) -> None:
    system = chat.session.system
    print_note(chat.streams.err, "system: " + ("the template's own" if system is None else system or '""'))
    if system is not None:
        print_note(chat.streams.err, "/set system default gives it back to the template")


def _settings(chat: Chat) -> list[str]:
    return [*chat.flags, "max_tokens", "system"]


def _set(chat: Chat, rest: str) -> None:
    name, value = _first_word(rest)
    name = name.removeprefix("--").replace("-", "_")
    known = _settings(chat)
    if not value:
        raise UsageError("/set wants NAME VALUE", hint=f"settings: {', '.join(known)}")
    if name not in known:
        raise UsageError(f"no setting {name!r}{nearest(name, known)}", hint=f"settings: {', '.join(known)}")
    if name == "system":
        chat.session.set_system(_system_text(value))
        _show_system(chat)
        return
    number = None if value == "default" else _number(name, value)
    if name == "max_tokens":
        chat.until = replace(chat.until, max_tokens=_positive(number))
    else:
        chat.flags[name] = _in_range(name, number)
    (chat.set_here.discard if number is None else chat.set_here.add)(name)
    print_pairs(chat.streams.err, [row for row in _rows(chat) if row[0] == name])


def _number(name: str, value: str) -> float | int:
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    raise UsageError(f"/set: {name} wants a number or `default`, found {value!r}")


def _positive(number: float | None) -> int | None:
    if number is not None and (not isinstance(number, int) or number < 1):
        raise UsageError(f"/set: max_tokens must be a whole number of at least 1, found {number}")
    return number


def _in_range(name: str, number: float | None) -> float | None:
    from tileinfer_core.sampling import check_setting

    if number is not None:
        check_setting(name, number, "/set")
    return number


def _params(chat: Chat, _rest: str) -> None:
    print_pairs(chat.streams.err, _rows(chat))


def _rows(chat: Chat) -> list[tuple[str, str, str]]:
    """Name, value and origin of every setting of the next answer."""
    wanted = chat.wanted()
    settings = {**wanted.sampling, "max_tokens": wanted.max_tokens}
    return [
        (name, "drawn for each answer", "default")
        if setting.origin == "random"
        else (name, _shown(setting.value), setting.origin)
        for name, setting in settings.items()
    ]


def _shown(value: object) -> str:
    if value is None:
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _think(chat: Chat, rest: str) -> None:
    if rest:
        if rest not in _THINK:
            raise UsageError(f"/think wants on, off or default, found {rest!r}")
        chat.thinking = replace(chat.thinking, think=_THINK[rest])
    template = chat.session.engine.template
    if chat.thinking.think and template is not None and not template.switches_thinking:
        print_note(chat.streams.err, "think: on, but this model's chat template has no switch for it")
        return
    word = next(word for word, value in _THINK.items() if value is chat.thinking.think)
    print_note(chat.streams.err, f"think: {word if word != 'default' else 'as the template does by default'}")


def _stats(chat: Chat, _rest: str) -> None:
    last = chat.session.last
    print_note(chat.streams.err, stats_text(last) if last is not None else "no answer yet")


def _tokens(chat: Chat, _rest: str) -> None:
    print_note(chat.streams.err, f"{chat.gauge()} of {chat.session.engine.context_length:,}")


def _prompt(chat: Chat, _rest: str) -> None:
    """What the model is given, special tokens and all."""
    err = chat.streams.err
    err.write(chat.session.prompt_text(think=chat.thinking.think))
    err.end_line()


def _save(chat: Chat, rest: str) -> None:
    path = _path(rest, "/save")
    chat.session.save(path)
    print_note(chat.streams.err, f"saved {len(chat.session.messages)} messages to {path}")


def _load(chat: Chat, rest: str) -> None:
    path = _path(rest, "/load")
    chat.session.load(path)
    print_note(chat.streams.err, f"loaded {len(chat.session.messages)} messages from {path}")


def _path(rest: str, command: str) -> Path:
    if not rest:
        raise UsageError(f"{command} wants a file name")
    from tileinfer_core.files import expanded

    return expanded(rest)


def _retry(chat: Chat, _rest: str) -> None:
    chat.answer_again()


def _continue(chat: Chat, _rest: str) -> None:
    chat.go_on()


def _edit(chat: Chat, rest: str) -> None:
    """With a text: that in place of the last message. Without: the last message, to be changed at the prompt."""
    question = chat.session.last_question
    if question is None:
        raise UsageError("there is no message to edit")
    text = rest or (chat.edit(question) if chat.edit is not None else None)
    if text is None:
        print_note(chat.streams.err, "the message stays as it is")
        return
    chat.answer_instead(text)


def _model(chat: Chat, rest: str) -> None:
    """Without a name: which model it is."""
    if rest:
        chat.models.replace(chat.session, rest)
    engine = chat.session.engine
    print_note(chat.streams.err, f"model: {engine.folder.name} · {engine.backend.name} · {chat.status()}")


def _undo(chat: Chat, _rest: str) -> None:
    text = chat.session.undo()
    if text is None:
        raise UsageError("there is no answer to take back")
    print_note(chat.streams.err, f"taken back: {text.strip().partition(chr(10))[0][:60]}")


COMMANDS = {
    "help": SlashCommand("/help", "this list", _help),
    "exit": SlashCommand("/exit", "leave (Ctrl-D does too)", _exit),
    "clear": SlashCommand("/clear", "forget the conversation, keep system prompt and settings", _clear),
    "system": SlashCommand("/system TEXT", 'set the system prompt; "" sends none; without TEXT show it', _system),
    "set": SlashCommand("/set NAME VALUE", "change a setting, or give it back: /set system default, say", _set),
    "params": SlashCommand("/params", "the settings of the next answer and their origins", _params),
    "model": SlashCommand("/model NAME", "go on with another model; without NAME show which it is", _model),
    "think": SlashCommand("/think on|off", "ask the template for thinking or for none", _think),
    "retry": SlashCommand("/retry", "answer the last message again", _retry),
    "edit": SlashCommand("/edit [TEXT]", "change the last message, or put TEXT in its place, and send it", _edit),
    "continue": SlashCommand("/continue", "go on with an answer that was cut short", _continue),
    "undo": SlashCommand("/undo", "take the last message and its answer back", _undo),
    "stats": SlashCommand("/stats", "counts and speeds of the last answer", _stats),
    "tokens": SlashCommand("/tokens", "tokens used and left", _tokens),
    "prompt": SlashCommand("/prompt", "what the model is given, special tokens and all", _prompt),
    "save": SlashCommand("/save FILE", "write the conversation to a file", _save),
    "load": SlashCommand("/load FILE", "go on with a saved conversation", _load),
}
