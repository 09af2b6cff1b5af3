"""An answer that Ctrl-C ends, at any instruction of those that make and show it."""

from __future__ import annotations

import sys
from itertools import count

import pytest

from tests.interrupts import interrupted
from tests.scripted_model import write_scripted_model
from tileinfer_cli.answer import AnswerView
from tileinfer_core.engine import Engine, Request
from tileinfer_core.sampling import SamplingParams
from tileinfer_core.session import Session

REQUEST = Request(SamplingParams(temperature=0.0))
OURS = ("answer.py", "terminal.py", "patience.py", "session.py", "decode.py", "answer_stream.py", "contextlib.py")


@pytest.mark.parametrize("tty", [True, False])
def test_the_last_line_is_ended_and_nothing_else_is_said(recorded, tmp_path, monkeypatch, *, tty: bool) -> None:
    engine = Engine.load(write_scripted_model(tmp_path / "m", ["a\n", "b"]))
    monkeypatch.setattr("tileinfer_cli.terminal._READER_LAG_S", 0)
    ignored: list[object] = []
    missing = 0
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    for steps in count():
        streams, session = recorded(tty=tty), Session(engine)
        view = AnswerView(streams, show_thinking=False, quiet=True)
        said = lambda s=session: s.settled.text if s.settled else ""  # noqa: E731
        came = interrupted(lambda v=view, s=session, t=said: v.show(s.send("hi", REQUEST), t), steps, inside=OURS)
        assert streams.stdout == "" or streams.stdout.endswith("\n"), f"after {steps} instructions"
        assert "a\nb".startswith(streams.stdout.rstrip("\n"))
        assert "a\nb".startswith(view.text)
        missing += said().rstrip("\n") != streams.stdout.rstrip("\n")
        if not came:
            break
    assert missing < steps / 10  # what a write that was cut has written, nobody knows; without `said` twice as often
    assert streams.stdout == "a\nb\n"
    assert steps > 1000
    assert not ignored
