"""INT8 weights and keys as float64: what the kernels' sums stand for, exactly."""

from __future__ import annotations

import numpy as np


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
