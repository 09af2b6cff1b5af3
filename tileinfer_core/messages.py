"""What a conversation is made of, and how its rendered text says which parts the user controls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class Message:
    """One turn. `thinking` is what the model thought before `content`; the template decides whether it is kept."""

    role: Role
    content: str
    thinking: str | None = None


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of a rendered prompt.

    `special` is True for the template's own text, where `<|im_end|>` is a control token, and False for text that came
    in through a message, where the same characters are characters.
    """

    text: str
    special: bool
