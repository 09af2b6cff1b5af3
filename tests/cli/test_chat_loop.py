"""The loop and the slash commands, on a session that echoes."""

from __future__ import annotations

from dataclasses import asdict
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from tileinfer_cli.chat.editor import LineReader
from tileinfer_cli.chat.loop import Chat, run_chat
from tileinfer_cli.chat.slash import COMMANDS
from tileinfer_cli.options import SamplingFlags, StopFlags, ThinkingFlags
from tileinfer_core.errors import ContextLengthError, ModelNotFoundError, UsageError
from tileinfer_core.events import Finished, TextDelta, Timings, Usage
from tileinfer_core.generation_config import GenerationConfig
from tileinfer_core.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TIMINGS = Timings(1.0, 0.0, 0.1, 100.0, 20.0)


class EchoSession:
    """What the loop needs of a Session. Answers `<text>`; "long" does not fit; "stop" is interrupted half-way."""

    def __init__(self) -> None:
        self.engine = SimpleNamespace(
            generation=GenerationConfig(temperature=0.6),
            context_length=100,
            folder=SimpleNamespace(name="a[q8]"),
            backend=SimpleNamespace(name="cpu"),
            template=None,
        )
        self.messages: list[str] = []
        self.requests: list[object] = []
        self.system: str | None = None
        self.last: Finished | None = None
        self.used_tokens = 7

    def send(self, text: str, request) -> Iterator[object]:
        self.requests.append(request)
        if text == "long":
            raise ContextLengthError("the prompt has 123 tokens, the context 100")
        self.messages.append(text)
        yield TextDelta("thought", thinking=True)
        yield TextDelta(f"<{text}>")
        if text == "stop":
            raise KeyboardInterrupt
        self.last = Finished("stop", Usage(3, 0, 2), TIMINGS, request.sampling.seed, f"<{text}>", "thought")
        yield self.last

    def clear(self) -> None:
        self.messages.clear()

    def set_system(self, text: str | None) -> None:
        self.system = text

    @property
    def settled(self) -> Finished | None:
        return self.last

    last_answer: str | None = None

    @property
    def last_question(self) -> str | None:
        return self.messages[-1] if self.messages else None

    def retry(self, request, text: str | None = None) -> Iterator[object]:
        if not self.messages:
            raise UsageError("there is no answer to make again")
        last = self.messages.pop()
        return self.send(last if text is None else text, request)

    def go_on(self, request) -> Iterator[object]:
        if not self.messages:
            raise UsageError("there is no answer to go on with")
        return self.send(self.messages.pop() + ", and on", request)

    def undo(self) -> str | None:
        return self.messages.pop() if self.messages else None

    def prompt_text(self, *, think: bool | None = None) -> str:
        return "<|im_start|>[bold]x"

    def save(self, path: Path) -> None:
        path.write_text("\n".join(self.messages))

    def load(self, path: Path) -> None:
        self.messages = path.read_text().splitlines()


class EchoModels:
    """Models that can be had but for "gone", whose absence is known before the old one is let go."""

    def replace(self, session: EchoSession, reference: str) -> None:
        if reference == "gone":
            raise ModelNotFoundError("no model named gone on this disk")
        session.engine.folder = SimpleNamespace(name=reference)


def chat_with(recorded, tmp_path: Path, stdin: str, *, tty: bool, **flags: object) -> Chat:
    streams = recorded(tty=tty, stdin=stdin.encode())
    settings = Settings.load({"HOME": str(tmp_path)}, tmp_path / "none.toml")
    sampling = asdict(SamplingFlags(**flags))
    thinking = ThinkingFlags(show_thinking=False)
    return Chat(streams, EchoSession(), settings, sampling, StopFlags(), thinking, EchoModels())


@pytest.fixture
def piped(recorded, tmp_path):
    def run(stdin: str, **flags: object) -> Chat:
        chat = chat_with(recorded, tmp_path, stdin, tty=False, **flags)
        run_chat(chat, LineReader(chat.streams))
        return chat

    return run


@pytest.fixture
def typed(recorded, tmp_path):
    """The same in front of a person, at a terminal too plain for the editor."""

    def run(stdin: str, **flags: object) -> Chat:
        chat = chat_with(recorded, tmp_path, stdin, tty=True, **flags)
        run_chat(chat, LineReader(chat.streams))
        return chat

    return run


def test_each_line_of_a_pipe_is_a_message_and_stdout_has_the_answers_alone(piped) -> None:
    chat = piped("hi\n\n  \nthere [bold]\n")
    assert chat.streams.stdout == "<hi>\n<there [bold]>\n"
    assert chat.streams.stderr == ""


def test_lines_between_triple_quotes_are_one_message(piped) -> None:
    traceback = 'Traceback:\n\tFile "x"\n\n/help\n  ^^^'
    chat = piped(f'"""\n{traceback}\n"""\nnext')
    assert chat.session.messages == [traceback, "next"]


def test_commands_do_not_reach_the_model_and_a_double_slash_does(piped) -> None:
    chat = piped("/tokens\n//etc/passwd\n/exit\nnever\n")
    assert chat.session.messages == ["/etc/passwd"]
    assert "7 tokens used, 93 left of 100" in chat.streams.stderr


def test_an_unknown_command_is_refused_with_the_nearest_name(piped, typed) -> None:
    with pytest.raises(UsageError, match=r"no command /hlep; did you mean /help\?"):
        piped("/hlep\n")
    chat = typed("/hlep\n/pa\nhi\n")
    assert "did you mean /help?" in chat.streams.stderr
    assert "did you mean /params?" in chat.streams.stderr
    assert chat.session.messages == ["hi"]


def test_several_lines_are_a_message_even_if_the_first_looks_like_a_command(piped) -> None:
    assert piped('"""\n/help\nis not a command here\n"""\n').session.messages == ["/help\nis not a command here"]
    assert piped('"""\n/system be\nbrief\n"""\n').session.system == "be\nbrief"


def test_an_error_ends_a_pipe_and_not_a_person(piped, typed) -> None:
    with pytest.raises(ContextLengthError):
        piped("long\nhi\n")
    chat = typed("long\nhi\n")
    assert "error: the prompt has 123 tokens, the context 100" in chat.streams.stderr
    assert chat.session.messages == ["hi"]


def test_ctrl_c_ends_the_answer_and_not_the_session(typed, piped) -> None:
    chat = typed("stop\nhi\n")
    assert chat.streams.stdout == "<stop>\n<hi>\n"
    assert "interrupted" in chat.streams.stderr
    with pytest.raises(KeyboardInterrupt):
        piped("stop\nhi\n")


def test_set_wins_and_params_show_every_origin(piped) -> None:
    chat = piped("/set temperature 0.25\n/set top-p 0.5\n/set max_tokens 9\nhi\n/params\n", top_k=5)
    request = chat.session.requests[0]
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.top_k) == (0.25, 0.5, 5)
    assert request.max_tokens == 9
    lines = [line.split() for line in chat.streams.stderr.splitlines()]
    assert ["temperature", "0.25", "/set"] in lines
    assert ["top_k", "5", "--top-k"] in lines
    assert ["min_p", "0", "default"] in lines
    assert ["max_tokens", "9", "/set"] in lines


def test_set_default_gives_a_setting_back(piped) -> None:
    chat = piped("/set temperature 0.25\n/set temperature default\nhi\n")
    assert chat.session.requests[0].sampling.temperature == 0.6
    assert chat.streams.stderr.splitlines()[-1] != ""
    assert any(
        line.split() == ["temperature", "0.6", "generation_config.json"] for line in chat.streams.stderr.splitlines()
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/set temprature 1", "no setting 'temprature'; did you mean temperature?"),
        ("/set temperature -1", "/set: temperature must be a number from 0"),
        ("/set temperature hot", "wants a number"),
        ("/set top_k 1.5", "whole number"),
        ("/set max_tokens 0", "at least 1"),
        ("/think maybe", "on, off or default"),
        ("/save", "wants a file name"),
        ("/retry", "no answer to make again"),
        ("/set", "/set wants NAME VALUE"),
        ("/set temperature", "/set wants NAME VALUE"),
        ("/ help", "no command /"),
        ("/undo", "no answer to take back"),
        ("/continue", "no answer to go on with"),
        ("/edit", "no message to edit"),
        ("/edit other", "no message to edit"),
        ("/model gone", "no model named gone"),
        ("/set system", "/set wants NAME VALUE"),
        ("/", "no command /"),
        ("/bye", "no command /bye; did you mean /exit?"),
        ("/?", "no command /?; did you mean /help?"),
    ],
)
def test_wrong_arguments_are_named(line: str, message: str, piped) -> None:
    with pytest.raises((UsageError, ModelNotFoundError)) as caught:
        piped(line + "\n")
    assert message in str(caught.value)


def test_a_seed_is_drawn_for_each_answer_unless_it_is_given(piped) -> None:
    seeds = [request.sampling.seed for request in piped("a\n/retry\n").session.requests]
    assert seeds[0] != seeds[1]
    seeds = [request.sampling.seed for request in piped("a\nb\n", seed=3).session.requests]
    assert seeds == [3, 3]


def test_retry_undo_clear_system_think(piped, tmp_path: Path) -> None:
    chat = piped("a\n/retry\nb\n/undo\n")
    assert chat.session.messages == ["a"]
    assert "taken back: b" in chat.streams.stderr
    assert len(chat.session.requests) == 3
    assert piped("a\n/clear\n").session.messages == []
    assert piped('/system ""\n').session.system == ""
    assert piped("/think off\na\n").session.requests[0].think is False


def test_the_system_prompt_goes_back_to_the_template(piped) -> None:
    chat = piped("/system be brief\n/set system default\n/system\n")
    assert chat.session.system is None
    assert chat.streams.stderr.splitlines() == [
        "system: be brief",
        "/set system default gives it back to the template",
        "system: the template's own",
        "system: the template's own",
    ]
    assert piped("/set system be very brief\n").session.system == "be very brief"
    assert piped("/system default\n").session.system == "default"  # a text like any other


def test_continue_goes_on(piped) -> None:
    assert piped("a\n/continue\n").streams.stdout == "<a>\n<a, and on>\n"


def test_edit_replaces_the_last_message(piped) -> None:
    chat = piped("a\nb\n/edit /c [x]\n")
    assert chat.session.messages == ["a", "/c [x]"]
    with pytest.raises(UsageError, match="needs a terminal"):
        piped("a\n/edit\n")


def test_edit_at_a_prompt_sends_what_comes_of_it_or_nothing(recorded, tmp_path: Path) -> None:
    for comes, messages in (("a\nand b", ["a\nand b"]), (None, ["a"])):
        chat = chat_with(recorded, tmp_path, "a\n/edit\n", tty=False)
        reader = LineReader(chat.streams)
        shown: list[str] = []
        reader.edit = lambda text, shown=shown, comes=comes: shown.append(text) or comes  # type: ignore[method-assign]
        run_chat(chat, reader)
        assert (shown, chat.session.messages) == (["a"], messages)
        assert ("stays as it is" in chat.streams.stderr) is (comes is None)


def test_model_names_and_changes_the_model(piped, typed) -> None:
    chat = piped("/model\na\n/model b[q4]\n")
    notes = [line for line in chat.streams.stderr.splitlines() if line.startswith("model:")]
    assert notes == [
        "model: a[q8] · cpu · 7 tokens used, 93 left",
        "model: b[q4] · cpu · 7 tokens used, 93 left",
    ]
    chat = typed("a\n/model gone\nb\n")
    assert chat.session.messages == ["a", "b"]
    assert "error: no model named gone" in chat.streams.stderr


def test_a_template_that_refuses_the_conversation_breaks_no_gauge(piped, monkeypatch) -> None:
    def refuse(_session):
        raise UsageError("roles must alternate")

    monkeypatch.setattr(EchoSession, "used_tokens", property(refuse, lambda _session, _value: None), raising=False)
    chat = piped("/model\n")
    assert "chat template refuses this conversation" in chat.streams.stderr
    assert chat.status() in chat.streams.stderr


def test_save_and_load(piped, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    piped(f"a\nb\n/save {file}\n")
    assert piped(f"/load {file}\n").session.messages == ["a", "b"]


def test_stats_and_prompt(piped) -> None:
    chat = piped("/stats\na\n/stats\n/prompt\n")
    assert "no answer yet" in chat.streams.stderr
    assert "decode 20.0 tok/s" in chat.streams.stderr
    assert "<|im_start|>[bold]x\n" in chat.streams.stderr


def test_help_lists_every_command_and_only_those(piped) -> None:
    shown = [line.split()[0] for line in piped("/help\n").streams.stderr.splitlines() if line.startswith("/")]
    assert shown == [f"/{name}" for name in COMMANDS]


def test_thinking_goes_to_stderr_and_only_when_shown(recorded, tmp_path: Path) -> None:
    for shown in (True, False):
        chat = chat_with(recorded, tmp_path, "hi\n", tty=False)
        chat.thinking = ThinkingFlags(show_thinking=shown)
        run_chat(chat, LineReader(chat.streams))
        assert chat.streams.stdout == "<hi>\n"
        assert ("thought" in chat.streams.stderr) is shown
