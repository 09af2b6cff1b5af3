"""Stop strings that span pieces, false starts, and the rules around them."""

from __future__ import annotations

import random

import pytest

from tileinfer_core.errors import UsageError
from tileinfer_core.stopping import StopMatcher, StopRules


def run(stop, pieces):
    matcher = StopMatcher(stop)
    out = ""
    for piece in pieces:
        text, found = matcher.push(piece)
        out += text
        if found is not None:
            assert matcher.flush() == ""
            return out, found
    return out + matcher.flush(), None


@pytest.mark.parametrize(
    ("stop", "pieces", "expected"),
    [
        (("END",), ["the E", "ND of"], ("the ", "END")),
        (("END",), ["an EN", "GINE"], ("an ENGINE", None)),
        (("END",), ["E", "E", "N", "D"], ("E", "END")),
        (("END",), ["x EN"], ("x EN", None)),
        (("\n\n",), ["a\n", "b\n\nc"], ("a\nb", "\n\n")),
        (("aab",), ["aaaab"], ("aa", "aab")),
        (("ab", "xaby"), ["xaby"], ("x", "ab")),
        (("b", "ab"), ["a", "b"], ("", "ab")),
        (("🧑🏽‍🚀",), ["hi 🧑🏽", "‍🚀!"], ("hi ", "🧑🏽‍🚀")),
        ((), ["END"], ("END", None)),
    ],
)
def test_stop_strings(stop, pieces, expected):
    assert run(stop, pieces) == expected


def test_nothing_of_a_possible_stop_string_is_shown_early():
    matcher = StopMatcher(("END",))
    assert matcher.push("go EN") == ("go ", None)
    assert matcher.push("D") == ("", "END")
    assert matcher.push("more") == ("", "END")


def test_pieces_do_not_change_the_result():
    rng = random.Random(1)
    for _ in range(2000):
        stop = tuple({"".join(rng.choices("ab", k=rng.randint(1, 4))) for _ in range(rng.randint(1, 3))})
        text = "".join(rng.choices("abc", k=12))
        whole = run(stop, [text])
        assert run(stop, list(text)) == whole
        cut = sorted(rng.sample(range(13), 3))
        assert run(stop, [text[: cut[0]], text[cut[0] : cut[1]], text[cut[1] :]]) == whole
        shown, found = whole
        assert not any(string in shown for string in stop)
        assert (shown == text) if found is None else text.startswith(shown + found)


def test_rules():
    rules = StopRules(frozenset({1, 2}), ("x",), 5)
    assert rules.is_end(2)
    assert not rules.is_end(3)
    assert not StopRules(frozenset({1}), ignore_eos=True).is_end(1)
    assert [rules.is_full(count) for count in (4, 5, 6)] == [False, True, True]
    assert not StopRules().is_full(10**9)
    assert rules.matcher().push("x") == ("", "x")


def test_refused():
    with pytest.raises(UsageError, match="--stop"):
        StopRules(stop=("a", ""))
    with pytest.raises(UsageError, match="--max-tokens must be at least 1, found 0"):
        StopRules(max_tokens=0)
