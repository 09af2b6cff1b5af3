"""What a generation says while it runs. The command line renders these; nothing here prints.

Order of a generation's events: PrefillProgress (one per chunk, the last one with done == total), TextDelta as
text is decided, one Finished at the end. Ctrl-C raises KeyboardInterrupt out of the generator instead; a session
then keeps the partial answer and a Finished("interrupted") as `Session.last`.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "context", "interrupted"]


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """`done` of `total` prompt tokens are in the KV cache. `total` leaves out tokens that were reused."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text in whole characters, never empty. `thinking` marks the model's hidden reasoning."""

    text: str
    thinking: bool = False


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts. `reused_tokens` of the `prompt_tokens` were already in the KV cache.

    `completion_tokens` counts every new id, with an end-of-sequence id and hidden thinking.
    """

    prompt_tokens: int
    reused_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds and tokens per second. None where there was nothing to measure (no token, or only one).

    `ttft_s` runs from the call to the first sampled id; `decode_tok_s` counts the ids after the first one.
    """

    load_s: float
    compile_s: float
    ttft_s: float | None
    prefill_tok_s: float | None
    decode_tok_s: float | None


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One new id. `logprob`: natural log of the model's own soft-max, before temperature and penalties; None for an id
    that was put in (the end of a thought that ran over its budget)."""

    id: int
    logprob: float | None


@dataclass(frozen=True, slots=True)
class Finished:
    """The end. `text` is the whole answer without the thinking, equal to the joined TextDeltas that were not thinking.

    `reason`: stop (end-of-sequence id or stop string), length (max_tokens), context (no room left), interrupted.
    `stop` is the stop string that matched, if one did. `tokens` are all new ids, with thinking and end of sequence.
    `warnings` are what the backend noticed while it decoded.
    """

    reason: FinishReason
    usage: Usage
    timings: Timings
    seed: int
    text: str
    thinking: str = ""
    stop: str | None = None
    tokens: tuple[SampledToken, ...] = ()
    warnings: tuple[str, ...] = ()


Event = PrefillProgress | TextDelta | Finished
EventStream = Generator[Event, None, None]  # close() stops the work
