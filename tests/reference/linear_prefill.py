"""Float64 oracle of kernels/linear_prefill.py: one product and what follows it."""

from __future__ import annotations

import numpy as np


def product(x: np.ndarray, w: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    """x [T, K] @ w [N, K]^T (+ bias [N]) in float64."""
    y = x.astype(np.float64) @ w.astype(np.float64).T
    return y if bias is None else y + bias.astype(np.float64)


def swiglu(x: np.ndarray, w: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    """silu(gate) * up, gate and up in even and odd rows of w: [T, F] float64."""
    h = product(x, w, bias)
    gate, up = h[:, 0::2], h[:, 1::2]
    return gate / (1 + np.exp(-gate)) * up


def xielu(h: np.ndarray, alphas: np.ndarray) -> np.ndarray:
    """xIELU with beta 0.5 and eps -1e-6, as Apertus has it; alphas: both slopes, beta in the second."""
    positive, negative = alphas.astype(np.float64)
    return np.where(h > 0, positive * h * h, (np.expm1(np.minimum(h, -1e-6)) - h) * negative) + 0.5 * h
