"""Thinking and answer, whatever the pieces; prompts that opened the block; the budget."""

from __future__ import annotations

import pytest

from tests.text_fixtures import TEMPLATES
from tileinfer_core.errors import UsageError
from tileinfer_core.messages import Segment
from tileinfer_core.thinking import (
    KNOWN_MARKERS,
    ThinkBudget,
    ThinkingSplitter,
    closing_text,
    find_markers,
    is_opened,
    split_whole,
)

THINK, INNER, BRACKETS = KNOWN_MARKERS


def run(text, size, markers=THINK, *, opened=False):
    splitter = ThinkingSplitter(markers, opened=opened)
    parts = [part for at in range(0, len(text), size) for part in splitter.push(text[at : at + size])]
    parts += splitter.flush()
    assert all(part.text for part in parts)
    return tuple("".join(part.text for part in parts if part.thinking == kind) for kind in (True, False))


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    ("text", "opened", "thinking", "answer"),
    [
        ("<think>\nab\n\nc\n</think>\n\nHello <think> x\n", False, "ab\n\nc", "Hello <think> x\n"),
        ("\n <think>a</think>b", False, "a", "b"),
        ("<think>\n\n</think>\n\nHi", False, "", "Hi"),
        ("plain < answer <think>", False, "", "plain < answer <think>"),
        ("<thi", False, "", "<thi"),
        ("  \n<thin x", False, "", "  \n<thin x"),
        (" lead", False, "", " lead"),
        ("\n", False, "", "\n"),
        ("", False, "", ""),
        ("hm\n</think>\n\nyes </think> no", True, "hm", "yes </think> no"),
        ("\n\nnever closed\n\n</thin", True, "never closed\n\n</thin", ""),
        ("never closed\n", True, "never closed", ""),
        ("", True, "", ""),
        ("<think>a <think> b</think>c", False, "a <think> b", "c"),
    ],
)
def test_split(text, opened, thinking, answer, size):
    assert run(text, size, opened=opened) == (thinking, answer)


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
def test_markers_that_open_anywhere(size):
    text = "pre <|inner_prefix|>deep<|inner_suffix|>mid <|inner_prefix|>\nx\n<|inner_suffix|>\nend"
    assert run(text, size, INNER) == ("deepx", "pre mid end")


def test_a_model_without_thinking_is_left_alone():
    assert run("<think>a</think>", 3, None) == ("", "<think>a</think>")


def test_text_comes_at_once_when_nothing_is_undecided():
    splitter = ThinkingSplitter(THINK)
    assert splitter.push("Hello <") == [("Hello <", False)]
    splitter = ThinkingSplitter(THINK, opened=True)
    assert splitter.push("I think </th") == [("I think ", True)]
    assert splitter.thinking
    assert splitter.push("ink>A") == [("A", False)]
    assert not splitter.thinking


def test_prompt_that_opened_the_block():
    head = [Segment("<|im_start|>user\n", True), Segment("<think>", False)]
    assert is_opened([*head, Segment("<|im_end|>\n<|im_start|>assistant\n<think>\n", True)], THINK)
    assert is_opened([*head, Segment("<|assistant|>", True), Segment("<think>", True)], THINK)
    assert not is_opened([*head, Segment("<|assistant|><think>\n\n</think>\n\n", True)], THINK)
    assert not is_opened([*head, Segment("<|assistant|>", True)], THINK)
    assert not is_opened(head, THINK)
    assert not is_opened([Segment("<think>", True)], None)


def test_find_markers():
    assert find_markers((TEMPLATES / "reasoning.jinja").read_text()) == THINK
    assert find_markers((TEMPLATES / "chatml.jinja").read_text()) is None
    assert find_markers("{{ '<|inner_prefix|>' }}") == INNER
    assert find_markers("[THINK]") == BRACKETS
    assert find_markers(None) is None


def test_split_whole():
    assert split_whole("<think>\na\n</think>\n\nb", THINK) == ("a", "b")
    assert split_whole("b <think>a</think>", THINK) == (None, "b <think>a</think>")
    assert split_whole("<think>a", THINK) == (None, "<think>a")


def test_budget():
    budget = ThinkBudget(3)
    assert [budget.spend(thinking=True) for _ in range(5)] == [False, False, True, False, False]
    budget = ThinkBudget(3)
    assert [budget.spend(thinking=thinking) for thinking in (True, True, False, False, True)] == [False] * 4 + [True]
    assert budget.used == 3
    assert not any(ThinkBudget(None).spend(thinking=True) for _ in range(10))
    assert ThinkBudget(0).spend(thinking=True)
    with pytest.raises(UsageError, match="--think-budget"):
        ThinkBudget(-1)
    splitter = ThinkingSplitter(THINK, opened=True)
    splitter.push("on and on")
    splitter.push(closing_text(THINK)[0].text)
    assert splitter.push("Answer") == [("Answer", False)]
