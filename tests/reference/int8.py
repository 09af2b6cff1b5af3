"""INT8 weights and keys as float64: what the kernels' sums stand for, exactly."""

from __future__ import annotations

import numpy as np

from tests.reference.decode import PAGE, cached, pools_of


def quantised(w: np.ndarray, group: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """int8 [N, K] and float32 scales [N, K / group]: the largest of each group becomes 127."""
    n, k = w.shape
    parts = w.astype(np.float64).reshape(n, -1, group or k)
    scale = np.maximum(np.abs(parts).max(2) / 127, 1e-12).astype(np.float32)
    values = np.rint(parts / scale.astype(np.float64)[:, :, None])
    return np.clip(values, -127, 127).astype(np.int8).reshape(n, k), scale


def dequantised(w: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """float64 [N, K] = scale · w."""
    n, k = w.shape
    parts = w.astype(np.float64).reshape(n, scale.shape[1], -1)
    return (parts * scale.astype(np.float64)[:, :, None]).reshape(n, k)


def quantised_rows(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int8 [..., d] and float32 scales [...]: largest |x| / 127 for each row of d, half to even."""
    x = x.astype(np.float32)
    scale = np.maximum(np.abs(x).max(-1) / np.float32(127), np.float32(2**-100))
    return np.rint(x * (np.float32(1) / scale)[..., None]).astype(np.int8), scale


def pools_of_int8(
    keys: np.ndarray, values: np.ndarray, table: np.ndarray, pages: int
) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray], np.ndarray, np.ndarray]:
    """Int8 pools and their scales holding keys, values [n, Hkv, d]; and what they stand for, float64 [n, Hkv, d]."""
    (k, ks), (v, vs) = quantised_rows(keys), quantised_rows(values)
    scales = []
    for s in (ks, vs):
        pool = np.zeros((pages, k.shape[1], PAGE), np.float32)
        for p in range(len(s)):
            pool[table[p // PAGE], :, p % PAGE] = s[p]
        scales.append(pool.reshape(-1, PAGE))
    wide = [q.astype(np.float64) * s.astype(np.float64)[..., None] for q, s in ((k, ks), (v, vs))]
    return pools_of(k, v, table, pages), (scales[0], scales[1]), wide[0], wide[1]


def cached_int8(
    pools: tuple[np.ndarray, np.ndarray], scales: tuple[np.ndarray, np.ndarray], table: np.ndarray, heads: int, n: int
) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values of positions 0 … n - 1 as float64 [n, Hkv, d]."""
    at = np.arange(n)
    rows = cached(*pools, table, heads, n)
    found = [s.reshape(-1, heads, PAGE)[table[at // PAGE], :, at % PAGE] for s in scales]
    return tuple(q.astype(np.float64) * s.astype(np.float64)[..., None] for q, s in zip(rows, found, strict=True))


def widened_pages(
    pool: np.ndarray, scales: np.ndarray, table: np.ndarray, heads: int, dtype: np.dtype, *, by_column: bool
) -> np.ndarray:
    """Pages `table` of an int8 pool [pages · Hkv · rows, columns] as `dtype`: one rounding of a float32 product.

    scales [pages · Hkv, 64] are those of a page's rows (keys) or columns (values).
    """
    parts = pool.reshape(len(scales), -1, pool.shape[1]).astype(np.float32)  # [pages · Hkv, rows, columns]
    wide = parts * (scales[:, None, :] if by_column else scales[:, :, None])
    return wide.reshape(-1, heads, *parts.shape[1:])[table].astype(dtype)
