"""The line editor, driven with the bytes a terminal sends."""

from __future__ import annotations

import os
import pty
import re
import select
import stat
import time
from threading import Thread
from typing import TYPE_CHECKING

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input

from tileinfer_cli.chat.editor import LineEditor, open_history
from tileinfer_cli.completion import slash_line
from tileinfer_cli.terminal import TextStream

if TYPE_CHECKING:
    from pathlib import Path

PASTE, END = "\x1b[200~", "\x1b[201~"
TRACEBACK = "Traceback (most recent call last):\n" + "\n".join(f"\tline {n}" for n in range(37)) + "\n\n/help\n"


def complete(line: str) -> list[tuple[int, str]]:
    return slash_line(line, ["help", "exit", "edit", "think"], {"think": lambda _: ["on", "off"]})


@pytest.fixture
def keys(tmp_path: Path):
    """Types text into a new editor; gives (what `read` returned, the editor)."""
    master, slave = pty.openpty()
    stream = TextStream(os.fdopen(slave, "w"), {"TERM": "xterm", "NO_COLOR": "1"}, name="stderr", required=False)
    with create_pipe_input() as pipe:
        with create_app_session(input=pipe):
            editor = LineEditor(stream, stream, tmp_path / "state" / "history", complete, lambda: "gauge")

        def type_text(text: str, then: tuple[str, str] | None = None) -> str | None:
            """`then`: once the first of the two is shown, the second is typed."""
            pipe.send_text(text)
            if then is None:
                return editor.read()
            waiting = Thread(target=type_after, args=then)
            waiting.start()
            try:
                return editor.read()
            finally:
                waiting.join()

        def type_after(sign: str, text: str) -> None:
            text_seen, end = "", time.monotonic() + 10
            while sign not in text_seen and time.monotonic() < end:
                text_seen += re.sub(r"\x1b\[[?\d;]*[a-zA-Z]", "", shown(patience_s=1))
            seen.append(text_seen)
            pipe.send_text(text)

        def shown(patience_s: float = 0) -> str:
            ready, _, _ = select.select([master], [], [], patience_s)
            return os.read(master, 1 << 20).decode(errors="replace") if ready else ""

        seen: list[str] = []
        type_text.seen = seen  # type: ignore[attr-defined]
        type_text.editor = editor  # type: ignore[attr-defined]
        type_text.shown = shown  # type: ignore[attr-defined]
        yield type_text
    os.close(master)


def test_enter_sends_and_alt_enter_starts_a_line(keys) -> None:
    assert keys("hi\r") == "hi"
    assert keys("one\x1b\rtwo\r") == "one\ntwo"


def test_a_pasted_text_is_one_message(keys) -> None:
    assert keys(f"{PASTE}{TRACEBACK}{END}\r") == TRACEBACK


def test_windows_line_ends_in_a_paste_are_newlines(keys) -> None:
    assert keys(f"{PASTE}a\r\nb\rc{END}\r") == "a\nb\nc"


def test_empty_lines_are_not_messages(keys) -> None:
    assert keys("\r  \r\tx\r").strip() == "x"


def test_ctrl_d_leaves_only_on_an_empty_line(keys) -> None:
    assert keys("\x04") is None


def test_ctrl_c_clears_the_line(keys) -> None:
    assert keys("wrong\x03right\r") == "right"


def test_ctrl_c_twice_leaves(keys) -> None:
    with pytest.raises(KeyboardInterrupt):
        keys("wrong\x03\x03")
    with pytest.raises(KeyboardInterrupt):
        keys("\x03\x03")


def test_typing_in_between_keeps_the_session(keys) -> None:
    assert keys("a\x03b\x03c\r") == "c"


def test_the_hint_replaces_the_gauge_after_ctrl_c(keys) -> None:
    assert keys.editor.placeholder()[0][1] == "gauge"
    keys.editor._leaving = True
    assert "again" in keys.editor.placeholder()[0][1]


def test_tab_completes_a_command_and_what_follows_it(keys) -> None:
    assert keys("/h\t\r") == "/help"
    assert keys("/th\t of\t\r") == "/think off"
    assert keys("no /h\t\r").rstrip() == "no /h"


def test_tab_shows_what_there_is_to_choose_from(keys) -> None:
    assert keys("/e\t", then=("/exit", "\x15/exit\r")) == "/exit"


def test_a_tab_in_a_paste_looks_like_one(keys) -> None:
    assert keys(f"{PASTE}a\tb{END}\r") == "a\tb"
    assert "^I" not in keys.shown()


def test_no_colour_on_request(keys) -> None:
    keys("hi\r")
    assert not re.search(r"\x1b\[[\d;]*(3[0-8]|9[0-7])[;m]", keys.shown())


def test_the_marks_of_a_paste_stay_on_from_prompt_to_prompt(keys) -> None:
    keys("hi\r")
    shown = keys.shown()
    assert "\x1b[?2004h" in shown
    assert "\x1b[?2004l" not in shown


def test_a_search_of_the_history_shows_what_it_finds_alone(keys) -> None:
    keys("first\r")
    keys("second\r")
    keys.shown()
    assert keys("\x12fir", then=("first", "\r\r")) == "first"
    assert "firstgauge" not in keys.seen[-1]
    assert keys("\x12sec\x03\x15third\r") == "third"


def test_history_is_kept_private_and_read_again(keys, tmp_path: Path) -> None:
    keys("first\r")
    keys("line 1\x1b\rline 2\r")
    file = tmp_path / "state" / "history"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    strings = list(open_history(file, keys.editor._session.output).load_history_strings())
    assert strings == ["line 1\nline 2", "first"]


def test_arrow_up_brings_the_last_message_back(keys) -> None:
    keys("first\r")
    assert keys("\x1b[A\r") == "first"


def test_a_history_that_cannot_be_kept_is_a_warning(tmp_path: Path, recorded) -> None:
    (tmp_path / "state").write_text("a file where the folder should be")
    streams = recorded()
    history = open_history(tmp_path / "state" / "history", streams.err)
    history.append_string("x")
    assert "the history can't be kept" in streams.stderr


def test_a_history_that_stops_to_be_writable_is_a_warning(tmp_path: Path, recorded) -> None:
    streams = recorded()
    history = open_history(tmp_path / "state" / "history", streams.err)
    (tmp_path / "state" / "history").unlink()
    (tmp_path / "state").rmdir()
    history.append_string("x")
    assert "the history can't be kept" in streams.stderr
