"""Ctrl-C before any instruction of the session's own code: the conversation is the one before or the one after."""

from __future__ import annotations

import copy
from contextlib import closing
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING

import pytest

from tests.interrupts import interrupted
from tests.scripted_model import write_scripted_model
from tileinfer_core.engine import Engine, Request
from tileinfer_core.sampling import SamplingParams
from tileinfer_core.session import Session

if TYPE_CHECKING:
    from tileinfer_core.events import EventStream

REQUEST = Request(SamplingParams(temperature=0.0))
SAID = ["", "one", "one two", "one two thr"]
FIRST, LAST = ["a", SAID[3]], ["b", SAID[2]]  # the second answer was cut short


def drain(events: EventStream) -> None:
    with closing(events):
        for _ in events:
            pass


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    base = tmp_path_factory.mktemp("models")
    scripts = {"one": ["one", " two", " thr"], "uno": ["uno"]}
    return {name: Engine.load(write_scripted_model(base / name, script)) for name, script in scripts.items()}


@pytest.fixture(scope="module")
def begun(engines, tmp_path_factory):
    """A session after two answers; a copy of it has a life of its own, but for the KV cache."""
    session = Session(engines["one"])
    drain(session.send("a", REQUEST))
    drain(session.send("b", replace(REQUEST, max_tokens=2)))
    return session


def contents(session):
    assert [message.role for message in session.messages] == ["user", "assistant"] * (len(session.messages) // 2)
    return [message.content for message in session.messages]


ACTIONS = {
    "send": (lambda s: drain(s.send("c", REQUEST)), [[*FIRST, *LAST], *([*FIRST, *LAST, "c", said] for said in SAID)]),
    "retry": (lambda s: drain(s.retry(REQUEST)), [[*FIRST, *LAST], *([*FIRST, "b", said] for said in SAID[1:])]),
    "edit": (lambda s: drain(s.retry(REQUEST, "z")), [[*FIRST, *LAST], *([*FIRST, "z", said] for said in SAID[1:])]),
    "continue": (lambda s: drain(s.go_on(REQUEST)), [[*FIRST, *LAST], [*FIRST, "b", SAID[3]]]),
    "undo": (lambda s: s.undo(), [[*FIRST, *LAST], FIRST]),
    "clear": (lambda s: s.clear(), [[*FIRST, *LAST], []]),
}


@pytest.mark.parametrize("name", ACTIONS)
def test_an_interrupt_at_any_instruction_leaves_a_whole_conversation(begun, name):
    act, allowed = ACTIONS[name]
    seen = []
    for steps in count():
        session = copy.copy(begun)
        came = interrupted(lambda s=session: act(s), steps, inside=("session.py",))
        assert contents(session) in allowed, f"after {steps} instructions"
        seen.append(contents(session))
        if steps % 16 == 0:
            drain(session.send("more", REQUEST))
            assert contents(session)[-2:] == ["more", SAID[3]]
        if not came:
            break
    assert seen[0] == allowed[0]
    assert seen[-1] == allowed[-1]


def test_an_interrupt_where_an_answer_is_read_again_keeps_what_it_said(begun):
    """/continue gives the model's stream what was said before; a part of that is no answer."""
    for steps in range(0, 400, 3):
        session = copy.copy(begun)
        interrupted(lambda s=session: drain(s.go_on(REQUEST)), steps, inside=("decode.py",))
        assert contents(session) in ([*FIRST, *LAST], [*FIRST, "b", SAID[3]])
        assert session.last_question == "b"


def test_a_model_and_its_cache_change_together(begun, engines):
    for steps in count():
        session = copy.copy(begun)
        came = interrupted(lambda s=session: s.adopt(engines["uno"]), steps, inside=("session.py",))
        drain(session.send("c", REQUEST))
        assert contents(session)[-1] == ("uno" if session.engine is engines["uno"] else SAID[3])
        if not came:
            break
    assert session.engine is engines["uno"]


def test_a_saved_conversation_and_its_system_prompt_come_together(begun, engines, tmp_path):
    other = Session(engines["one"], "be brief")
    drain(other.send("x", replace(REQUEST, max_tokens=1)))
    other.save(tmp_path / "talk")
    for steps in count():
        session = copy.copy(begun)
        came = interrupted(lambda s=session: s.load(tmp_path / "talk"), steps, inside=("session.py",))
        loaded = session.system == "be brief"
        assert contents(session) == (["x", "one"] if loaded else [*FIRST, *LAST])
        if not came:
            break
    assert loaded
