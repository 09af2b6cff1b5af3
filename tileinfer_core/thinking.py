"""Splits what a model says into its thinking and its answer, while it streams.

`<think>` opens only at the start of an answer: further on it is a word that the model talks about. Markers that no text
contains by chance (Apertus) open anywhere. Newlines next to the markers belong to neither part, as in the templates
that put the parts together again. Thinking that is never closed stays thinking.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from tileinfer_core.errors import UsageError
from tileinfer_core.messages import Segment

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Markers:
    """What a model writes around its thinking. `anywhere`: it may open again after text of the answer."""

    open: str
    close: str
    anywhere: bool = False


KNOWN_MARKERS = (
    Markers("<think>", "</think>"),
    Markers("<|inner_prefix|>", "<|inner_suffix|>", anywhere=True),
    Markers("[THINK]", "[/THINK]"),
)


def find_markers(template_source: str | None) -> Markers | None:
    """The markers that a chat template writes or looks for; None for a model that doesn't think."""
    source = template_source or ""
    return next((markers for markers in KNOWN_MARKERS if markers.close in source or markers.open in source), None)


def takes_thinking_apart(template_source: str, markers: Markers) -> bool:
    """Does a template know thinking as something apart from the answer, by a field of its own or by splitting?"""
    calls = (f"split({quote}{markers.close}{quote})" for quote in "'\"")
    return "reasoning_content" in template_source or any(call in template_source for call in calls)


def split_whole(content: str, markers: Markers | None) -> tuple[str | None, str]:
    """(thinking, answer) of a finished answer that still holds its block in front; (None, content) otherwise."""
    start = content.lstrip()
    if markers is None or not start.startswith(markers.open) or markers.close not in start:
        return None, content
    thinking, _, answer = start.removeprefix(markers.open).partition(markers.close)
    return thinking.strip("\n"), answer.lstrip("\n")


def is_opened(prompt: Sequence[Segment], markers: Markers | None) -> bool:
    """Does the prompt end inside a thinking block, so that the model goes on with its thoughts at once?

    Only the template's own text after the last message counts: a message that says `<think>` opens nothing.
    """
    if markers is None:
        return False
    ending = ""
    for segment in reversed(prompt):
        if not segment.special:
            break
        ending = segment.text + ending
    return ending.rfind(markers.open) > ending.rfind(markers.close)


class Part(NamedTuple):
    """A piece of the stream."""

    text: str
    thinking: bool


class ThinkingSplitter:
    """`push` text as it comes, get its parts; `flush` at the end. `opened` as `is_opened` says.

    What could still become a marker, and newlines that may turn out to stand before one, are held back.
    """

    def __init__(self, markers: Markers | None, *, opened: bool = False) -> None:
        self._markers = markers
        self._held = ""
        self._at_edge = opened  # right after a marker: newlines are dropped
        self._begun = opened  # text of the answer, or a whole block of thinking, has gone by
        self.thinking = opened

    def push(self, text: str) -> list[Part]:
        if self._markers is None:
            return [Part(text, thinking=False)] if text else []
        self._held += text
        parts: list[Part] = []
        while self._step(self._markers, parts):
            pass
        return parts

    def flush(self) -> list[Part]:
        held, self._held = self._held.rstrip("\n") if self.thinking else self._held, ""
        return [Part(held, self.thinking)] if held else []

    def _step(self, markers: Markers, parts: list[Part]) -> bool:
        """Emit what is decided; True if a marker was passed and there may be more."""
        if self._at_edge:
            self._held = self._held.lstrip("\n")
            self._at_edge = not self._held
        marker = markers.close if self.thinking else markers.open
        place = self._held.find(marker) if self._looks_for_marker(markers) else -1
        if place >= 0 and (self.thinking or markers.anywhere or not self._held[:place].strip()):
            self._pass_marker(place, marker, parts)
            return True
        self._emit(self._decided(marker, markers), parts)
        return False

    def _looks_for_marker(self, markers: Markers) -> bool:
        return self.thinking or markers.anywhere or not self._begun

    def _pass_marker(self, place: int, marker: str, parts: list[Part]) -> None:
        if self.thinking:
            self._emit(len(self._held[:place].rstrip("\n")), parts)
        elif self._begun or self._held[:place].strip():
            self._emit(place, parts)
        self._held = self._held[self._held.index(marker) + len(marker) :]
        self._begun = self._begun or self.thinking
        self.thinking, self._at_edge = not self.thinking, True

    def _decided(self, marker: str, markers: Markers) -> int:
        """How much of the held text can go out."""
        if not self._looks_for_marker(markers):
            return len(self._held)
        end = len(self._held) - _overlap(self._held, marker)
        if self.thinking:
            return len(self._held[:end].rstrip("\n"))
        if self._begun:
            return end
        if not self._held[:end].strip():
            return 0  # space before a first marker is dropped with it
        return end if markers.anywhere else len(self._held)

    def _emit(self, length: int, parts: list[Part]) -> None:
        text, self._held = self._held[:length], self._held[length:]
        if text:
            parts.append(Part(text, self.thinking))
            self._begun = self._begun or not self.thinking


def _overlap(text: str, marker: str) -> int:
    """The length of the longest end of `text` that begins `marker`."""
    return next((n for n in range(min(len(text), len(marker) - 1), 0, -1) if marker.startswith(text[-n:])), 0)


class ThinkBudget:
    """`--think-budget N`: after N tokens of thinking the block is closed for the model, once.

    The caller feeds the ids of `closing_text` as if the model had said them, so that it goes on with its answer.
    """

    def __init__(self, limit: int | None) -> None:
        if limit is not None and limit < 0:
            raise UsageError(f"--think-budget must be at least 0, found {limit}")
        self._limit = limit
        self.used = 0

    def spend(self, *, thinking: bool) -> bool:
        """Count one token that left the splitter in the state `thinking`; True when it is time to close."""
        self.used += thinking
        if self._limit is None or not thinking or self.used < max(1, self._limit):
            return False
        self._limit = None
        return True


def closing_text(markers: Markers) -> list[Segment]:
    return [Segment(f"\n{markers.close}\n\n", special=True)]
