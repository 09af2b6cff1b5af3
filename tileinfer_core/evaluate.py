"""Perplexity of a text: exp of the mean negative log-likelihood per token, in float64.

The text is encoded as `--raw` does. The first token has nothing before it and is not scored. A text longer than the
window is read in windows that overlap by half: each one scores only the tokens that the one before has not, so that
every token but those of the first window sees at least half a window of context.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tileinfer_core.errors import TileinferError, UsageError
from tileinfer_core.progress import OnProgress, ProgressEvent, silent

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tileinfer_core.backends.base import Float32Array, Runner
    from tileinfer_core.engine import Engine

LOGIT_BYTES = 32 << 20  # logits held at once


@dataclass(frozen=True, slots=True)
class EvalResult:
    """`nll` is the mean over the scored `tokens`, in nats; perplexity = exp(nll)."""

    perplexity: float
    nll: float
    tokens: int
    window: int


def perplexity(
    engine: Engine,
    text: str,
    *,
    window: int | None = None,
    tokens: int | None = None,
    on_progress: OnProgress = silent,
) -> EvalResult:
    """Score a text, or its first `tokens`. `window` None takes the engine's context.

    Raises:
        UsageError: a text of fewer than two tokens, or a window that the context doesn't allow.
        TileinferError: the model's logits are not finite.
    """
    window = check_window(engine, window) or engine.context_length
    ids = text_ids(engine, text, tokens)
    total = 0.0
    for logits, targets in scored(engine.runner, ids, window, on_progress):
        total -= _log_probabilities(logits, targets)
    nll = total / (len(ids) - 1)
    return EvalResult(perplexity_of(nll), nll, len(ids) - 1, window)


def perplexity_of(nll: float) -> float:
    """exp(nll); infinity beyond what a number can hold, from 709.8 nats."""
    try:
        return math.exp(nll)
    except OverflowError:
        return math.inf


def text_ids(engine: Engine, text: str, tokens: int | None) -> list[int]:
    """The ids of a text, or of so much of it that `tokens` can be scored. Raises UsageError for too few."""
    if tokens is not None and tokens < 1:
        raise UsageError(f"--tokens must be at least 1, found {tokens}")
    ids = engine.tokenizer.encode(text, special=False)
    if len(ids) < 2:
        raise UsageError(f"the text has {len(ids)} tokens; at least 2 are needed to measure anything")
    return ids if tokens is None else ids[: tokens + 1]


def check_window(engine: Engine, window: int | None) -> int | None:
    """The window as it is. Raises UsageError for one that the context doesn't allow."""
    longest = engine.context_length
    if window is not None and not 2 <= window <= longest:
        raise UsageError(f"--window must be from 2 to {longest:,}, this model's context here, found {window:,}")
    return window


def windows(count: int, window: int) -> Iterator[tuple[int, int, int]]:
    """(start, first scored, stop) of each window. Every token but the first is scored exactly once."""
    start, first = 0, 1
    while first < count:
        stop = min(start + window, count)
        yield start, first, stop
        first, start = stop, stop - window + max(1, window // 2)


def scored(
    runner: Runner, ids: Sequence[int], window: int, on_progress: OnProgress, task: str = "evaluate"
) -> Iterator[tuple[Float32Array, Sequence[int]]]:
    """Logits [T, V] and the ids that follow them, T of every id but the first, each once and in order."""
    for start, first, stop in windows(len(ids), window):
        yield from _scored_window(runner, ids[start:stop], first - start)
        on_progress(ProgressEvent(task, stop, len(ids), "tokens"))


def _scored_window(runner: Runner, ids: Sequence[int], first: int) -> Iterator[tuple[Float32Array, Sequence[int]]]:
    """Logits and targets of ids[first:], some rows at a time."""
    cache = runner.new_cache(len(ids))
    rows = 16
    while cache.length < len(ids) - 1:
        start = cache.length
        stop = min(start + rows, len(ids) - 1)
        logits = runner.logits(cache, ids[start:stop])  # [T, V]
        rows = min(512, max(16, LOGIT_BYTES // (4 * logits.shape[1])))
        skip = max(0, first - 1 - start)
        if skip < len(logits):
            yield logits[skip:], ids[start + 1 + skip : stop + 1]


def _log_probabilities(logits: Float32Array, targets: Sequence[int]) -> float:
    """Sum of log-softmax(logits [T, V]) at each row's target."""
    if not len(targets):
        return 0.0
    peak = logits.max(axis=1, keepdims=True)
    if not np.isfinite(peak).all():
        raise TileinferError("the model's logits are not finite; check its files with `tileinfer verify`")
    sums = np.exp(logits - peak).sum(axis=1, dtype=np.float64)
    chosen: np.ndarray[Any, np.dtype[np.float64]] = logits[np.arange(len(targets)), targets].astype(np.float64)
    return float((chosen - peak[:, 0] - np.log(sums)).sum())
