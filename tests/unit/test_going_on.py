"""Going on with an answer that was cut short, and with another model."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import pytest

from tests.scripted_model import write_scripted_model
from tileinfer_core.engine import Engine, Request
from tileinfer_core.errors import UsageError
from tileinfer_core.events import TextDelta
from tileinfer_core.messages import Message
from tileinfer_core.sampling import SamplingParams
from tileinfer_core.session import Session

REQUEST = Request(SamplingParams(temperature=0.0))
WORDS = ["one", " two", " thr", "ee", " four"]
SAID = "one two three four"


@pytest.fixture
def session(tmp_path):
    def make(script=WORDS, **kinds):
        return Session(Engine.load(write_scripted_model(tmp_path / "model", script, **kinds)))

    return make


def say(session, text="hello", request=REQUEST):
    return list(session.send(text, request))[-1]


def test_an_answer_cut_at_any_token_goes_on_to_the_same_whole(session):
    chat = session()
    whole = say(chat, "a")
    for cut in range(1, whole.usage.completion_tokens):
        chat.clear()
        first = say(chat, "a", replace(REQUEST, max_tokens=cut))
        events = list(chat.go_on(REQUEST))
        new = "".join(event.text for event in events if isinstance(event, TextDelta))
        assert first.text + new == events[-1].text == SAID
        assert events[-1].usage.completion_tokens == whole.usage.completion_tokens - cut
        assert events[-1].usage.prompt_tokens == whole.usage.prompt_tokens + cut
        assert events[-1].usage.reused_tokens >= whole.usage.prompt_tokens - 1
        assert chat.messages == [Message("user", "a"), Message("assistant", SAID)]


def test_going_on_counts_new_tokens_and_may_be_cut_again(session):
    chat = session()
    say(chat, "a", replace(REQUEST, max_tokens=1))
    for said in ("one two", "one two thr"):
        assert list(chat.go_on(replace(REQUEST, max_tokens=1)))[-1].text == said
    assert list(chat.go_on(REQUEST))[-1].reason == "stop"
    assert [m.content for m in chat.messages] == ["a", SAID]


def test_a_split_character_is_whole_once_the_answer_goes_on(session):
    chat = session(["a", "\N{SNOWMAN}".encode()[:1], "\N{SNOWMAN}".encode()[1:], "z"])
    assert say(chat, "q", replace(REQUEST, max_tokens=2)).text == "a\N{REPLACEMENT CHARACTER}"
    assert list(chat.go_on(REQUEST))[-1].text == "a\N{SNOWMAN}z"


def test_the_draws_are_those_of_the_answer_in_one_piece(session):
    """Penalties and the random counter see the first part as output, not as prompt."""
    drawn = Request(SamplingParams(temperature=3.0, top_k=0, seed=5, presence_penalty=1.0), max_tokens=24)
    chat = session()
    whole = say(chat, "a", drawn).text
    chat.clear()
    say(chat, "a", replace(drawn, max_tokens=9))
    assert list(chat.go_on(replace(drawn, max_tokens=15)))[-1].text == whole


def test_what_was_thought_before_the_cut_is_kept(session):
    chat = session(["<think>", "hm", "m", "</think>", "yes", " sir"], thinking=True)
    for cut in (2, 3, 5):
        chat.clear()
        say(chat, "a", replace(REQUEST, max_tokens=cut))
        end = list(chat.go_on(REQUEST))[-1]
        assert (end.thinking, end.text) == ("hmm", "yes sir")
        assert chat.messages[-1] == Message("assistant", "yes sir", "hmm")


def test_a_loaded_answer_goes_on_from_its_text(session, tmp_path):
    chat = session()
    say(chat, "a", replace(REQUEST, max_tokens=2))
    chat.save(tmp_path / "talk")
    say(chat, "b")
    chat.load(tmp_path / "talk")
    # Read again byte by byte, it ends with no token of the script: this model starts anew after any other.
    assert list(chat.go_on(REQUEST))[-1].text == "one two" + SAID
    assert [m.content for m in chat.messages] == ["a", "one two" + SAID]


def test_there_must_be_an_answer_to_go_on_with_and_it_must_be_cut(session):
    chat = session()
    with pytest.raises(UsageError, match="no answer to go on with"):
        chat.go_on(REQUEST)
    say(chat, "a")
    with pytest.raises(UsageError, match="complete"):
        chat.go_on(REQUEST)
    assert [m.content for m in chat.messages] == ["a", SAID]


@pytest.mark.parametrize("events_read", [0, 1])
def test_going_on_that_says_nothing_keeps_what_was_said(session, events_read):
    chat = session()
    say(chat, "a", replace(REQUEST, max_tokens=3))
    before = chat.messages
    with closing(chat.go_on(REQUEST)) as events:
        for _ in range(events_read):
            next(events)
    assert chat.messages == before
    assert list(chat.go_on(REQUEST))[-1].text == SAID


def test_another_model_takes_over(session, tmp_path):
    chat = session()
    say(chat, "a", replace(REQUEST, max_tokens=2))
    chat.adopt(Engine.load(write_scripted_model(tmp_path / "other", ["uno", " dos"])))
    assert say(chat, "b").text == "uno dos"
    assert [m.content for m in chat.messages] == ["a", "one two", "b", "uno dos"]
