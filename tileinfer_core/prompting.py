"""From a conversation, or a raw text, to the ids a model is given. Needs a model's folder, not its weights."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, overload

from tileinfer_core.config import ModelConfig
from tileinfer_core.errors import ModelError
from tileinfer_core.thinking import closing_text, find_markers, is_opened

if TYPE_CHECKING:
    from tileinfer_core.chat_template import ChatTemplate
    from tileinfer_core.messages import Message, Segment
    from tileinfer_core.store import ModelFolder
    from tileinfer_core.tokenizer import Tokenizer

Conversation = str | Sequence["Message"]  # a text is continued as it is, without the template


@dataclass(frozen=True, slots=True, eq=False)
class Prompt(Sequence[int]):
    """Token ids, and how their continuation is to be read.

    `raw`: the answer continues a text. `thinking_open`: the prompt ends inside a thinking block.
    """

    ids: tuple[int, ...]
    raw: bool = False
    thinking_open: bool = False

    @classmethod
    def of(cls, ids: Sequence[int]) -> Prompt:
        """Plain ids become a prompt of a chat; a Prompt stays itself."""
        return ids if isinstance(ids, Prompt) else cls(tuple(ids))

    def __len__(self) -> int:
        return len(self.ids)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...
    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        return self.ids[index]


class PromptEncoder:
    """A model's tokenizer and chat template. `markers` are those of its thinking, None for a model that has none."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self._folder = folder
        self.tokenizer = tokenizer
        self.template = template
        self.markers = find_markers(template.source) if template else None
        self.closing_ids = tokenizer.encode_segments(closing_text(self.markers)) if self.markers else []

    @classmethod
    def load(cls, folder: Path | ModelFolder, config: ModelConfig | None = None) -> PromptEncoder:
        """
        Raises:
            ModelError: a file of the tokenizer or the template is damaged or asks for what TileInfer doesn't have.
        """
        # Importing the two libraries below takes 30 ms, in which the CPU backend can read weights already.
        from tileinfer_core.tokenizer import Tokenizer  # noqa: I001, PLC0415
        from tileinfer_core.chat_template import ChatTemplate  # noqa: PLC0415

        path = folder if isinstance(folder, Path) else folder.path
        config = config or ModelConfig.load(path)
        return cls(path, Tokenizer.load(path, config.vocab_size), ChatTemplate.load(path))

    def encode(
        self,
        conversation: Conversation,
        *,
        think: bool | None = None,
        date: dt.date | None = None,
        add_generation_prompt: bool = True,
    ) -> Prompt:
        """The ids. A raw text follows the tokenizer's own rule for BOS; a template prints its own.

        Raises:
            ModelError: there is no chat template, or it refuses the conversation.
        """
        if isinstance(conversation, str):
            return Prompt(tuple(self.tokenizer.encode(conversation, special=False)), raw=True)
        segments = self.render(conversation, think=think, date=date, add_generation_prompt=add_generation_prompt)
        ids = self.tokenizer.encode_segments(segments)
        return Prompt(tuple(ids), thinking_open=add_generation_prompt and is_opened(segments, self.markers))

    def render(
        self,
        messages: Sequence[Message],
        *,
        think: bool | None = None,
        date: dt.date | None = None,
        add_generation_prompt: bool = True,
    ) -> list[Segment]:
        """The prompt as text, in segments."""
        if self.template is None:
            raise ModelError(
                f"{self._folder}: this model has no chat template, so it can't chat",
                hint="`tileinfer generate --raw` continues a text without one",
            )
        return self.template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            think=think,
            date=date or dt.datetime.now().astimezone().date(),
        )
