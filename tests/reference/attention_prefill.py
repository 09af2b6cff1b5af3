"""Float64 oracle of kernels/attention_prefill.py, and a paged pool to read from."""

from __future__ import annotations

import numpy as np

PAGE = 64


def fill_pool(pool: np.ndarray, rows: np.ndarray, block_table: np.ndarray, kv_heads: int) -> None:
    """Write rows [positions, kv_heads, D] into pool [pages * kv_heads * 64, D] through the block table."""
    paged = pool.reshape(-1, kv_heads, PAGE, pool.shape[1])
    for position, row in enumerate(rows):
        paged[block_table[position // PAGE], :, position % PAGE] = row


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, start: int, scale: float) -> np.ndarray:
    """Causal attention. q [T, Hq, D]; k, v [start + T, Hkv, D]; returns [T, Hq, D] float64."""
    tokens, heads, _ = q.shape
    group = heads // k.shape[1]
    keys, values = (np.repeat(a.astype(np.float64), group, axis=1) for a in (k, v))  # [S, Hq, D]
    scores = np.einsum("thd,shd->hts", q.astype(np.float64), keys) * scale
    visible = np.arange(k.shape[0])[None, :] <= np.arange(tokens)[:, None] + start
    scores = np.where(visible, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hts,shd->thd", weights / weights.sum(-1, keepdims=True), values)
