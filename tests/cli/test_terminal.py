"""Streams: control characters, colour, closed and full outputs."""

from __future__ import annotations

import errno
import io
import os
from itertools import count

import pytest

from tests.interrupts import interrupted
from tileinfer_cli.terminal import Look, TextStream, keys_unseen, look_of, neutralise
from tileinfer_core.errors import DiskError, TileinferError


class FakeTerminal(io.TextIOWrapper):
    def __init__(self, *, tty: bool = True) -> None:
        super().__init__(io.BytesIO(), encoding="latin-1")
        self._tty = tty

    def isatty(self) -> bool:
        return self._tty

    def shown(self) -> str:
        return self.buffer.getvalue().decode("utf-8")  # type: ignore[attr-defined]


def stream_of(terminal: FakeTerminal, **environ: str) -> TextStream:
    return TextStream(terminal, {"TERM": "xterm"} | environ, name="stdout", required=True)


def test_control_characters_become_visible_and_layout_stays() -> None:
    assert neutralise("a\x1b[2J\x1b]52;c;aGk=\x07b\tc\nd\r\x7f\x9b31m\0") == "a␛[2J␛]52;c;aGk=␇b\tc\nd␍␡\ufffd31m␀"


def test_text_is_neutralised_on_a_terminal_and_raw_in_a_pipe() -> None:
    terminal, pipe = FakeTerminal(), FakeTerminal(tty=False)
    for target in (terminal, pipe):
        stream_of(target).write("x\x1b[2J y\n")
    assert terminal.shown() == "x␛[2J y\n"
    assert pipe.shown() == "x\x1b[2J y\n"


def test_text_is_utf8_whatever_the_locale_says() -> None:
    terminal = FakeTerminal()
    stream_of(terminal).write("नमस्ते 🧑🏽‍🚀 \ud800")
    assert terminal.shown() == "नमस्ते 🧑🏽‍🚀 ?"


def test_styles_only_where_there_is_colour() -> None:
    plain, colour, pipe = FakeTerminal(), FakeTerminal(), FakeTerminal(tty=False)
    stream_of(plain, NO_COLOR="1").styled("x", "2")
    stream_of(colour).styled("x", "2")
    stream_of(pipe, FORCE_COLOR="1").styled("x", "2")
    assert (plain.shown(), colour.shown(), pipe.shown()) == ("x", "\x1b[2mx\x1b[0m", "x")


@pytest.mark.parametrize(
    ("tty", "environ", "look"),
    [
        (True, {"TERM": "xterm"}, Look(True, True, True)),
        (True, {"TERM": "xterm", "NO_COLOR": "1"}, Look(True, False, True)),
        (True, {"TERM": "xterm", "NO_COLOR": ""}, Look(True, True, True)),
        (True, {"TERM": "dumb"}, Look(True, False, False)),
        (True, {}, Look(True, False, False)),
        (False, {"TERM": "xterm", "FORCE_COLOR": "1"}, Look(False, False, False)),
    ],
)
def test_look(tty: bool, environ: dict[str, str], look: Look) -> None:
    assert look_of(FakeTerminal(tty=tty), environ) == look


def test_a_closed_stderr_swallows_and_a_closed_stdout_is_an_error() -> None:
    TextStream(None, {}, name="stderr", required=False).write("talk")
    with pytest.raises(TileinferError, match="stdout is closed"):
        TextStream(None, {}, name="stdout", required=True).require()


def pipe_without_reader() -> TextStream:
    reader, writer = os.pipe()
    os.close(reader)
    return TextStream(os.fdopen(writer, "w"), {}, name="stdout", required=True)


def test_a_reader_that_left_is_noticed_with_and_without_writing() -> None:
    with pytest.raises(BrokenPipeError):
        pipe_without_reader().check_reader()
    with pytest.raises(BrokenPipeError):
        pipe_without_reader().write("x")


def test_a_reader_that_is_there_is_no_error() -> None:
    reader, writer = os.pipe()
    stream = TextStream(os.fdopen(writer, "w"), {}, name="stdout", required=True)
    stream.check_reader()
    stream.write("abc")
    assert os.read(reader, 10) == b"abc"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")  # noqa: PTH110
def test_a_full_device_is_a_disk_error_for_stdout_and_nothing_for_stderr() -> None:
    with open("/dev/full", "w") as full, pytest.raises(DiskError, match="stdout: " + os.strerror(errno.ENOSPC)):  # noqa: PTH123
        TextStream(full, {}, name="stdout", required=True).write("x")
    with open("/dev/full", "w") as full:  # noqa: PTH123
        stderr = TextStream(full, {}, name="stderr", required=False)
        stderr.write("x")
        stderr.write("y")


def test_end_line_adds_a_newline_only_where_one_is_missing() -> None:
    terminal = FakeTerminal()
    stream = stream_of(terminal)
    for text in ("", "a", "b\n"):
        stream.write(text)
        stream.end_line()
    assert terminal.shown() == "a\nb\n"


@pytest.mark.parametrize("styled", [False, True])
def test_a_line_is_ended_wherever_in_a_write_a_signal_comes(*, styled: bool) -> None:
    for steps in count():
        terminal = FakeTerminal()
        stream = stream_of(terminal)
        stream.write("tick\n")
        came = interrupted(lambda s=stream: s.styled("tock", "2") if styled else s.write("tock"), steps)
        stream.end_line()
        assert terminal.shown().endswith("\n"), f"after {steps} instructions"
        if not came:
            break
    assert steps > 20


def test_echo_is_back_wherever_a_signal_comes() -> None:
    pty, termios = pytest.importorskip("pty"), pytest.importorskip("termios")
    master, slave = pty.openpty()
    try:
        with os.fdopen(slave, closefd=False) as stdin:
            before = termios.tcgetattr(slave)

            def unseen() -> None:
                with keys_unseen(stdin):
                    assert not termios.tcgetattr(slave)[3] & termios.ECHO

            for steps in count():
                came = interrupted(unseen, steps)
                assert termios.tcgetattr(slave) == before, f"after {steps} instructions"
                if not came:
                    break
        assert steps > 100
    finally:
        os.close(slave)
        os.close(master)


def test_a_width_that_is_none_is_80() -> None:
    for columns in ("", "0", "-5", "x", "9" * 5000):
        stream = TextStream(FakeTerminal(), {"COLUMNS": columns}, name="stderr", required=False)
        assert stream.columns == 80
