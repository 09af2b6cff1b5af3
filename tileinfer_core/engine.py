"""One loaded model: text or messages in, text events out. It keeps no conversation; session.py does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tileinfer_core.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How to load a model. `context` None takes the model's own; `prefill_chunk` tokens go in one matrix product."""

    backend: str = "auto"
    context: int | None = None
    prefill_chunk: int = 512


@dataclass(frozen=True, slots=True)
class Request:
    """What one answer is asked to be. `max_tokens` None: until the model stops or the context is full.

    `think` reaches the chat template (None: its own default); `think_budget` closes the thinking after so many tokens.
    """

    sampling: SamplingParams
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    think: bool | None = None
    think_budget: int | None = None
