"""Float64 oracle of kernels/sampling.py: a whole sort, then the definition word by word.

Independent of the kernels on purpose: it sorts where they select, and knows nothing of chunks or candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_MASK = 0xFFFFFFFF


@dataclass(frozen=True)
class Settings:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    seed: int = 0


def philox_uniform(seed: int, step: int) -> float:
    """Philox4x32-10, first word's top 24 bits / 2^24."""
    c = [step & _MASK, step >> 32, 0, 0]
    k0, k1 = seed & _MASK, seed >> 32 & _MASK
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [p1 >> 32 ^ c[1] ^ k0, p1 & _MASK, p0 >> 32 ^ c[3] ^ k1, p0 & _MASK]
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return (c[0] >> 8) / 2**24


def penalised(
    logits: np.ndarray, s: Settings, in_prompt: np.ndarray, counts: np.ndarray, allowed: np.ndarray
) -> np.ndarray:
    """logits [V] float64 after masks and penalties; in_prompt, allowed [V] bool, counts [V] of the output ids."""
    x = logits.astype(np.float64)
    seen = in_prompt | (counts > 0)
    x = np.where(seen, np.where(x > 0, x / s.repetition, x * s.repetition), x)
    x = x - s.presence * (counts > 0) - s.frequency * counts
    return np.where(allowed, x, -np.inf)


def distribution(scores: np.ndarray, s: Settings) -> tuple[np.ndarray, np.ndarray]:
    """(ids, probabilities) kept, by falling probability, the smaller id first of equals."""
    order = np.argsort(-scores, kind="stable")
    if s.temperature == 0:
        return order[:1], np.ones(1)
    weights = np.exp((scores[order] - scores[order[0]]) / s.temperature)
    n = len(order) if s.top_k == 0 else min(s.top_k, len(order))
    running = np.cumsum(weights[:n])
    if s.top_p < 1:
        n = min(n, 1 + int(np.sum(running < s.top_p * running[-1])))
    n = max(1, min(n, int(np.sum(weights >= max(s.min_p, np.finfo(np.float64).tiny)))))
    return order[:n], weights[:n] / weights[:n].sum()


def sample(scores: np.ndarray, s: Settings, step: int) -> int:
    """The id drawn at `step`: the first whose running probability exceeds u."""
    ids, probabilities = distribution(scores, s)
    index = int(np.searchsorted(np.cumsum(probabilities), philox_uniform(s.seed, step), side="right"))
    return int(ids[min(index, len(ids) - 1)])


def logprob(logits: np.ndarray, allowed: np.ndarray, token: int) -> float:
    """log-softmax of the raw logits over the allowed ids, at `token`."""
    x = np.where(allowed, logits.astype(np.float64), -np.inf)
    top = x.max()
    return float(x[token] - top - np.log(np.exp(x - top).sum()))
