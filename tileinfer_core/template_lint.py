"""Renders the dialogues people have with a model through its chat template, and says what goes wrong with them.

Looked at: whether each dialogue renders; whether what the template writes for control tokens are tokens; whether asking
for an answer changes the prompt; which token ends an answer, and whether generation stops at it.
"""

from __future__ import annotations

import datetime as dt
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tileinfer_core.errors import TileinferError
from tileinfer_core.findings import Finding
from tileinfer_core.messages import Message

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tileinfer_core.messages import Segment
    from tileinfer_core.prompting import PromptEncoder

NAME = "chat template"
DATE = dt.date(2026, 2, 3)
ANSWER = "Answer"
_HI, _HELLO, _BYE = Message("user", "Hi"), Message("assistant", ANSWER), Message("user", "Bye")
DIALOGUES: dict[str, tuple[Message, ...]] = {
    "one question": (_HI,),
    "three turns": (_HI, _HELLO, _BYE),
    "a system prompt": (Message("system", "Be brief."), _HI),
    "an empty system prompt": (Message("system", ""), _HI),
    "an empty message": (Message("user", ""),),
    "an earlier thought": (_HI, Message("assistant", ANSWER, "A thought."), _BYE),
}
TOOL = {"name": "look_up", "description": "Looks it up.", "parameters": {"type": "object", "properties": {}}}
OPTIONS: dict[str, dict[str, Any]] = {
    "thinking on": {"think": True},
    "thinking off": {"think": False},
    "tools": {"tools": [{"type": "function", "function": TOOL}]},
}
NEEDED = ("one question", "three turns")
_CONTROL = re.compile(r"<\|[^<>|\s]{1,40}\|>")  # not Mistral's [INST]: in some of its tokenizers that is plain text


@dataclass(frozen=True, slots=True)
class Linter:
    encoder: PromptEncoder
    eos_ids: frozenset[int]

    def findings(self) -> Iterator[Finding]:
        if self.encoder.template is None:
            cure = "put the model's chat_template.jinja into the folder, or use `tileinfer generate --raw`"
            yield Finding(NAME, "warning", "none: the model can continue a text, but not chat", cure)
            return
        rendered: dict[str, list[Segment]] = {}
        failed: list[Finding] = []
        wanted: list[tuple[str, tuple[Message, ...], dict[str, Any]]]
        wanted = [(name, messages, {}) for name, messages in DIALOGUES.items()]
        wanted += [(name, (_HI,), options) for name, options in OPTIONS.items()]
        for name, messages, options in wanted:
            try:
                rendered[name] = self._render(messages, **options)
            except TileinferError as error:
                needed = name in NEEDED
                hint = error.hint if needed else None
                failed.append(Finding(NAME, "problem" if needed else "info", f"with {name}: {error}", hint))
        yield Finding(NAME, "ok", f"{len(rendered)} of {len(wanted)} usual dialogues render{self._thinking()}")
        yield from failed
        if all(name in rendered for name in NEEDED):
            yield from self._unknown_tokens(rendered["three turns"])
            yield from self._generation_prompt(rendered["one question"])
            yield from self._end_of_answer()

    def _render(
        self,
        messages: Sequence[Message],
        *,
        prompt: bool = True,
        think: bool | None = None,
        tools: list[dict[str, Any]] | None = None,
    ) -> list[Segment]:
        assert self.encoder.template is not None  # noqa: S101 - `findings` has looked
        options: dict[str, Any] = {"add_generation_prompt": prompt, "think": think, "tools": tools}
        return self.encoder.template.render(messages, date=DATE, **options)

    def _thinking(self) -> str:
        template, markers = self.encoder.template, self.encoder.markers
        if template is None or markers is None:
            return ""
        switch = "--think and --no-think reach it" if template.switches_thinking else "it has no switch for thinking"
        return f"; thoughts stand in {markers.open}; {switch}"

    def _unknown_tokens(self, segments: Sequence[Segment]) -> Iterator[Finding]:
        """Text that looks like a control token and is none is read as so many letters: the model never saw that."""
        text = "".join(segment.text for segment in segments if segment.special)
        for token in dict.fromkeys(_CONTROL.findall(text)):
            if self.encoder.tokenizer.token_id(token) is None:
                detail = f"it writes {token}, which is no token of this tokenizer"
                yield Finding(NAME, "warning", detail, "take template and tokenizer from the same model")

    def _generation_prompt(self, with_prompt: Sequence[Segment]) -> Iterator[Finding]:
        without = self._render(DIALOGUES["one question"], prompt=False)
        if "".join(s.text for s in without) == "".join(s.text for s in with_prompt) and not self._marks_users(without):
            detail = "it ignores add_generation_prompt: the model may write the user's next turn instead of an answer"
            yield Finding(NAME, "warning", detail, "use the chat template that the model was trained with")

    def _marks_users(self, segments: Sequence[Segment]) -> bool:
        """Templates like Mistral's end a user's turn with a token of its own, and need no prompt for the answer."""
        return bool(segments) and segments[-1].special and segments[-1].text.strip() != ""

    def _end_of_answer(self) -> Iterator[Finding]:
        """The control token that the template puts after an answer must be one at which generation stops."""
        segments = self._render(DIALOGUES["three turns"], prompt=False)
        places = [index for index, segment in enumerate(segments) if not segment.special and ANSWER in segment.text]
        after = segments[places[0] + 1].text if places and places[0] + 1 < len(segments) else ""
        token_id = self._leading_control(after.lstrip())
        if token_id is not None and token_id not in self.eos_ids:
            token = self.encoder.tokenizer.piece(token_id)
            detail = f"it ends an answer with {token} (id {token_id}), at which generation does not stop"
            cure = f"add {token_id} to eos_token_id in generation_config.json"
            yield Finding("end of sequence", "warning", detail, cure)

    def _leading_control(self, text: str) -> int | None:
        tokenizer = self.encoder.tokenizer
        pieces = {token_id: tokenizer.piece(token_id) for token_id in tokenizer.control_ids}
        found = [token_id for token_id, piece in pieces.items() if piece.strip() and text.startswith(piece)]
        return max(found, key=lambda token_id: len(pieces[token_id]), default=None)
