"""Reproducible inputs: the same numbers for the same seed, rounded to the type that the kernel reads."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

DTYPES: dict[str, Any] = {
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "float32": np.float32,
    "int8": np.int8,
    "int32": np.int32,
}


def normal(shape: int | tuple[int, ...], dtype: str, *, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    """Normal numbers with the standard deviation `scale`."""
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32).astype(DTYPES[dtype])


def integers(shape: int | tuple[int, ...], low: int, high: int, dtype: str = "int32", *, seed: int = 0) -> np.ndarray:
    """Whole numbers from `low` up to but without `high`."""
    return np.random.default_rng(seed).integers(low, high, shape).astype(DTYPES[dtype])
