"""Progress: in plain lines one for each quarter, on a terminal one that moves and is gone whatever ends the work."""

from __future__ import annotations

import io
import re
import sys
import threading
from itertools import count

import pytest

from tests.interrupts import interrupted
from tileinfer_cli import render
from tileinfer_cli.terminal import TextStream
from tileinfer_core.progress import ProgressEvent


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(render.time, "monotonic", lambda: now[0])
    return now


def lines(clock, events):
    file = io.TextIOWrapper(raw := io.BytesIO(), "utf-8")
    stream = TextStream(file, {}, name="stderr", required=False)
    with render.Progress(stream, lasting=True) as progress:
        for seconds, done in events:
            clock[0] = 100.0 + seconds
            progress(ProgressEvent("quantize", done, 400_000_000, "bytes"))
    return raw.getvalue().decode().splitlines()


def test_rate_and_time_left(clock):
    shown = lines(clock, [(0, 0), (2, 100_000_000), (4, 200_000_000), (8, 400_000_000)])
    assert shown == [
        "quantize   0 B of 400.0 MB   0 %",
        "quantize   100.0 MB of 400.0 MB   25 %   50.0 MB/s   6.0 s left",
        "quantize   200.0 MB of 400.0 MB   50 %   50.0 MB/s   4.0 s left",
        "quantize   400.0 MB   100 %   50.0 MB/s",
    ]


def test_work_that_goes_on_counts_only_what_is_new(clock):
    shown = lines(clock, [(0, 300_000_000), (2, 350_000_000), (4, 400_000_000)])
    assert shown[-1] == "quantize   400.0 MB   100 %   25.0 MB/s"


def test_short_work_has_no_rate(clock):
    assert lines(clock, [(0, 0), (0.5, 400_000_000)])[-1] == "quantize   400.0 MB   100 %"


# On a terminal


class Terminal(io.TextIOWrapper):
    def __init__(self):
        super().__init__(io.BytesIO(), encoding="utf-8")

    def isatty(self):
        return True

    def sent(self):
        return self.buffer.getvalue().decode()


def moving(columns=80, **environ):
    terminal = Terminal()
    look = {"TERM": "xterm", "COLUMNS": str(columns), **environ}
    return terminal, TextStream(terminal, look, name="stderr", required=False)


def drawn(terminal):
    """What each redraw put on the line, without colours."""
    return [re.sub(r"\x1b\[\d*m", "", part) for part in terminal.sent().split("\r\x1b[2K")[1:]]


def test_the_moving_line_comes_late_moves_and_goes(clock):
    terminal, err = moving()
    with render.Progress(err) as progress:
        for seconds, done in ((0, 0), (0.1, 10), (0.2, 20), (0.21, 21), (2.2, 50)):
            clock[0] = 100.0 + seconds
            progress(ProgressEvent("load", done * 10**6, 100 * 10**6, "bytes"))
    early, later, gone = drawn(terminal)
    assert early == "load   " + "━" * 24 + "   20.0 MB of 100.0 MB"
    assert later == "load   " + "━" * 24 + "   50.0 MB of 100.0 MB   15.0 MB/s   3.3 s left"
    assert gone == ""
    assert "━" * 12 + "\x1b[90m" + "━" * 12 in terminal.sent()


def test_lasting_work_leaves_a_line_for_each_task(clock):
    terminal, err = moving(NO_COLOR="1")
    with render.Progress(err, lasting=True) as progress:
        clock[0] += 1
        for task in ("a", "b"):
            progress(ProgressEvent(task, 0, 4, "files"))
            progress(ProgressEvent(task, 4, 4, "files"))
    assert terminal.sent().replace("\r\x1b[2K", "").count("   4 files\n") == 2
    assert "\x1b[9" not in terminal.sent()


@pytest.mark.parametrize("columns", [1, 8, 30, 50, 80])
def test_the_moving_line_never_wraps(clock, columns):
    terminal, err = moving(columns)
    with render.Progress(err) as progress:
        clock[0] += 1
        progress(ProgressEvent("模型 of a long name", 0, 10**9, "bytes"))
        clock[0] += 2
        progress(ProgressEvent("模型 of a long name", 5 * 10**8, 10**9, "bytes"))
    assert max(render._cells(line) for line in drawn(terminal)) < columns
    assert len(drawn(terminal)) == 3


def test_an_interrupt_at_any_instruction_leaves_no_line_no_thread_and_a_cursor(monkeypatch):
    monkeypatch.setattr(render, "_SHOW_AFTER_S", 0)

    def work(err):
        with render.Progress(err, lasting=True) as progress:
            progress(ProgressEvent("load", 1, 10, "bytes"))
            progress.close()
            progress(ProgressEvent("load", 10, 10, "bytes"))

    threads, stdout = threading.active_count(), sys.stdout
    for steps in count():
        terminal, err = moving()
        came = interrupted(lambda err=err: work(err), steps, inside=("render.py", "terminal.py"))
        assert drawn(terminal)[-1:] in ([], [""], ["load   10 B\n"]), f"after {steps} instructions"
        assert "\x1b[?25l" not in terminal.sent()
        if not came:
            break
    assert steps > 100
    assert (threading.active_count(), sys.stdout) == (threads, stdout)
