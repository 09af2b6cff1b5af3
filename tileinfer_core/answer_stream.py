"""Token ids in, decided text out: the chain of detokenizer, thinking splitter and stop strings for one answer.

Stop strings are looked for in the answer, not in the thinking before it: thoughts may mention what must end the answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tileinfer_core.events import TextDelta
from tileinfer_core.thinking import ThinkingSplitter

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tileinfer_core.prompting import Prompt, PromptEncoder
    from tileinfer_core.stopping import StopRules
    from tileinfer_core.thinking import Part


class AnswerStream:
    """`push` each id, `flush` at the end. `matched` is the stop string once it is complete; the rest is dropped."""

    def __init__(self, encoder: PromptEncoder, rules: StopRules, prompt: Prompt) -> None:
        markers = None if prompt.raw else encoder.markers
        keep = (markers.open, markers.close) if markers else ()
        self._detokenizer = encoder.tokenizer.stream(keep=keep, continues=prompt.raw)
        self._splitter = ThinkingSplitter(markers, opened=prompt.thinking_open and markers is not None)
        self._matcher = rules.matcher()
        self._answer: list[str] = []
        self._thinking: list[str] = []
        self.matched: str | None = None

    @property
    def thinking_now(self) -> bool:
        return self._splitter.thinking

    @property
    def answer(self) -> str:
        return "".join(self._answer)

    @property
    def thinking(self) -> str:
        return "".join(self._thinking)

    def push(self, token_id: int) -> list[TextDelta]:
        text = self._detokenizer.push(token_id)
        return self._deltas(self._splitter.push(text)) if text else []

    def flush(self) -> list[TextDelta]:
        """What was held back, once it is known that no token follows."""
        deltas = self._deltas([*self._splitter.push(self._detokenizer.flush()), *self._splitter.flush()])
        if self.matched is None and (held := self._matcher.flush()):
            deltas.append(self._delta(held, thinking=False))
        return deltas

    def _deltas(self, parts: Iterable[Part]) -> list[TextDelta]:
        deltas = []
        for part in parts:
            text = part.text
            if not part.thinking:
                text, self.matched = self._matcher.push(text)
            if text:
                deltas.append(self._delta(text, thinking=part.thinking))
            if self.matched is not None:
                break
        return deltas

    def _delta(self, text: str, *, thinking: bool) -> TextDelta:
        (self._thinking if thinking else self._answer).append(text)
        return TextDelta(text, thinking)
