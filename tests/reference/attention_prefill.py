"""Float64 oracle of kernels/attention_prefill.py, and paged pools to read from."""

from __future__ import annotations

import numpy as np

PAGE = 64


def fill_pools(k_pool: np.ndarray, v_pool: np.ndarray, k: np.ndarray, v: np.ndarray, block_table: np.ndarray) -> None:
    """Write k, v [positions, kv_heads, D] through the block table into their pools.

    k_pool [pages * kv_heads * 64, D], row (page * kv_heads + head) * 64 + slot;
    v_pool [pages * kv_heads * D, 64], row (page * kv_heads + head) * D + d, column slot.
    """
    _, kv_heads, dim = k.shape
    keys = k_pool.reshape(-1, kv_heads, PAGE, dim)
    values = v_pool.reshape(-1, kv_heads, dim, PAGE)
    for position in range(len(k)):
        page, slot = block_table[position // PAGE], position % PAGE
        keys[page, :, slot] = k[position]
        values[page, :, :, slot] = v[position]


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, start: int, scale: float) -> np.ndarray:
    """Causal attention. q [T, Hq, D]; k, v [start + T, Hkv, D]; returns [T, Hq, D] float64."""
    tokens, heads, _ = q.shape
    group = heads // k.shape[1]
    keys, values = (np.repeat(a.astype(np.float64), group, axis=1) for a in (k, v))  # [S, Hq, D]
    scores = np.einsum("thd,shd->hts", q.astype(np.float64), keys, optimize=True) * scale
    visible = np.arange(k.shape[0])[None, :] <= np.arange(tokens)[:, None] + start
    scores = np.where(visible, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hts,shd->thd", weights / weights.sum(-1, keepdims=True), values, optimize=True)
