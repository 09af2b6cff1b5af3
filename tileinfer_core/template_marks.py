"""Finds out which characters of a rendered chat template came in through a message.

The template is rendered twice: once with the messages as they are, and once with each character of their texts
replaced by a private-use character of its own. Trimming, splitting at newlines, slicing, indexing, joining and lengths
do the same to both. If the second rendering, translated back, equals the first, every character of it tells where it
came from. Whitespace is never replaced, so that `trim` works; it is no part of a control token's identity.

A template may also look at the text (`'/no_think' in content`, `content | tojson`). Then the two renderings differ, and
fewer characters are replaced, down to the brackets and symbols that make a control token one. If none of these agrees,
the template's decision depends on a control token's own characters in a message (`content.startswith
('<tool_response>')`), and the first rendering counts in which they were replaced: a message's text does not steer the
template any more than the model.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tileinfer_core.messages import Segment

if TYPE_CHECKING:
    from collections.abc import Iterable

_PRIVATE_USE = range(0xF0000, 0x10FFFE)
_QUOTED = frozenset("\"'\\&")  # what JSON and HTML escapes rewrite
_PLAIN_MARKS = frozenset("/_-.,:;!?")  # marks of commands such as /no_think, in no control token by themselves

Render = Callable[[Callable[[str], str]], str]


def _all(character: str) -> bool:
    return not character.isspace() and unicodedata.category(character) not in {"Cc", "Cs"}


def _not_quoted(character: str) -> bool:
    return _all(character) and character not in _QUOTED


def _not_letters(character: str) -> bool:
    return _not_quoted(character) and not character.isalnum()


def _symbols(character: str) -> bool:
    return _not_letters(character) and character not in _PLAIN_MARKS


LEVELS = (_all, _not_quoted, _not_letters, _symbols)


@dataclass(frozen=True, slots=True)
class Marks:
    """A one-to-one replacement of characters by private-use characters that occur in no text involved."""

    there: dict[int, int]
    back: dict[int, int]

    @classmethod
    def make(cls, characters: Iterable[str], used: set[str]) -> Marks | None:
        """None if there are not enough private-use characters."""
        wanted = sorted(characters)
        free = (code for code in _PRIVATE_USE if chr(code) not in used and code & 0xFFFE != 0xFFFE)
        there = dict(zip(map(ord, wanted), free, strict=False))
        return cls(there, {code: char for char, code in there.items()}) if len(there) == len(wanted) else None

    def mark(self, text: str) -> str:
        return text.translate(self.there)

    def unmark(self, text: str) -> str:
        return text.translate(self.back)

    def segments(self, marked: str) -> list[Segment]:
        """Runs of replaced characters, with the whitespace inside a run, are the messages'; the rest the template's."""
        if not self.back:
            return [Segment(marked, special=True)] if marked else []
        own = f"[{_ranges(self.back)}]+"
        parts = re.split(f"({own}(?:\\s+{own})*)", marked)
        return [Segment(self.unmark(part), special=index % 2 == 0) for index, part in enumerate(parts) if part]


def _ranges(codes: Iterable[int]) -> str:
    """Rising code points for a character class. Runs as ranges: a class of 20,000 single characters takes 0.5 s."""
    runs: list[list[int]] = []
    for code in codes:
        if runs and runs[-1][1] == code - 1:
            runs[-1][1] = code
        else:
            runs.append([code, code])
    return "".join(f"{chr(first)}-{chr(last)}" for first, last in runs)


def mark_segments(render: Render, texts: Iterable[str], template: str, refusals: type[Exception]) -> list[Segment]:
    """Render and split. `render(change)` renders with `change` applied to every text of a message.

    `texts` are these texts, `template` is the template's source, and `refusals` are the errors of a template that
    doesn't take the changed texts. Errors of the unchanged rendering pass through.
    """
    plain = render(str)
    characters = set().union(*texts)
    used = characters | set(template)
    safest: list[Segment] | None = None
    failure: Exception | None = None
    for level in LEVELS:
        marks = Marks.make(filter(level, characters), used)
        if marks is None:
            continue
        try:
            marked = render(marks.mark)
        except refusals as error:
            failure = failure or error
            continue
        segments = marks.segments(marked)
        if marks.unmark(marked) == plain:
            return segments
        safest = safest or segments
    if safest is None:
        raise failure or refusals("the messages use too many different characters")
    return safest
