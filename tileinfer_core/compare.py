"""Two models on one text: perplexity of both, and how far one's predictions are from the other's.

    mean KL        mean over tokens of Σ p · log(p / q), p of the reference and q of the other model, in nats
    99 % KL        the value that 99 of 100 tokens stay below
    agreement      share of tokens at which both find the same token likeliest

The models run one after the other, so that memory needs to hold only one. The reference's log-probabilities wait in a
temporary file: 4 bytes for each token and vocabulary entry (800 MB for 4,096 tokens of a vocabulary of 49,152).
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tileinfer_core.errors import DiskError, TileinferError, UsageError
from tileinfer_core.evaluate import check_window, perplexity_of, scored, text_ids
from tileinfer_core.files import disk_errors, free_bytes
from tileinfer_core.progress import OnProgress, silent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import IO

    from tileinfer_core.backends.base import Float32Array
    from tileinfer_core.engine import Engine

    Float64Array = np.ndarray[Any, np.dtype[np.float64]]

WINDOW = 1024


@dataclass(frozen=True, slots=True)
class Comparison:
    """`reference_…` is of the model that is compared with. Means are over the scored `tokens`, in nats."""

    perplexity: float
    nll: float
    reference_perplexity: float
    reference_nll: float
    mean_kl: float
    kl_99: float
    agreement: float
    tokens: int
    window: int

    @property
    def change(self) -> float:
        """Perplexity over the reference's, less 1."""
        return perplexity_of(self.nll - self.reference_nll) - 1


def compare(
    load_reference: Callable[[], Engine],
    load_other: Callable[[], Engine],
    text: str,
    *,
    window: int | None = None,
    tokens: int | None = None,
    folder: Path | None = None,
    on_progress: OnProgress = silent,
) -> Comparison:
    """Score the text with both. Engines are loaded when they are needed and closed after.

    Args:
        window: tokens read at once; None takes 1,024, or the shorter context.
        tokens: score no more than so many; None scores all.
        folder: where the temporary file lies; None is the system's folder.

    Raises:
        UsageError: a text of fewer than two tokens, a window that does not fit, or models of different vocabularies.
        DiskError: no room for the temporary file.
    """
    folder = folder or Path(tempfile.gettempdir())
    with disk_errors(folder), tempfile.TemporaryFile(dir=folder) as spool:
        engine = load_reference()
        try:
            ids = text_ids(engine, text, tokens)
            window = check_window(engine, window) or min(WINDOW, engine.context_length)
            vocabulary = engine.config.vocab_size
            _check_room(folder, 4 * (len(ids) - 1) * vocabulary)
            nll = _spool(engine, ids, window, spool, on_progress)
        finally:
            engine.close()
        engine = load_other()
        try:
            if engine.config.vocab_size != vocabulary or text_ids(engine, text, tokens) != ids:
                raise UsageError("the two models have different vocabularies: their predictions can't be compared")
            check_window(engine, window)
            pairs = _rows(spool, engine, ids, window, on_progress)
            other, kl, agree = (np.concatenate(column) for column in zip(*pairs, strict=True))
        finally:
            engine.close()
    reference_nll, other_nll = float(nll.mean()), float(other.mean())
    return Comparison(
        perplexity=perplexity_of(other_nll),
        nll=other_nll,
        reference_perplexity=perplexity_of(reference_nll),
        reference_nll=reference_nll,
        mean_kl=float(kl.mean()),
        kl_99=float(np.quantile(kl, 0.99)),
        agreement=float(agree.mean()),
        tokens=len(ids) - 1,
        window=window,
    )


def _check_room(folder: Path, needed: int) -> None:
    if needed > (free := free_bytes(folder)):
        hint = "score fewer tokens (--tokens), or set TMPDIR to a folder on a larger disk"
        raise DiskError(f"{folder}: the comparison needs {needed:,} bytes there, free are {free:,}", hint=hint)


def _spool(engine: Engine, ids: Sequence[int], window: int, spool: IO[bytes], on_progress: OnProgress) -> Float64Array:
    """Writes the log-probabilities of every scored token; returns its -log p."""
    found = []
    for logits, targets in scored(engine.runner, ids, window, on_progress, task="evaluate the reference"):
        rows = log_softmax(logits)
        spool.write(rows.reshape(-1).view(np.uint8).data)
        found.append(_nll(rows, targets))
    return np.concatenate(found)


def _rows(
    spool: IO[bytes], engine: Engine, ids: Sequence[int], window: int, on_progress: OnProgress
) -> Iterator[tuple[Float64Array, Float64Array, Any]]:
    """-log p, KL and agreement of the tokens in the order in which the reference saw them."""
    spool.seek(0)
    for logits, targets in scored(engine.runner, ids, window, on_progress):
        mine = log_softmax(logits)
        raw = spool.read(mine.nbytes)
        base = np.frombuffer(raw, np.float32).reshape(mine.shape)
        yield _nll(mine, targets), divergence(base, mine), base.argmax(axis=1) == mine.argmax(axis=1)


def log_softmax(logits: Float32Array) -> Float32Array:
    """Of each row of logits [T, V]; the sum is taken in float64."""
    shifted: Float32Array = logits - logits.max(axis=1, keepdims=True)
    if not np.isfinite(shifted).all():
        raise TileinferError("the model's logits are not finite; check its files with `tileinfer verify`")
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True, dtype=np.float64)).astype(np.float32)
    return shifted


def divergence(base: Float32Array, other: Float32Array) -> Float64Array:
    """KL(base ‖ other) of each row of log-probabilities [T, V]."""
    return (np.exp(base) * (base - other)).sum(axis=1, dtype=np.float64)  # type: ignore[no-any-return]


def _nll(rows: Float32Array, targets: Sequence[int]) -> Float64Array:
    return -rows[np.arange(len(targets)), targets].astype(np.float64)
