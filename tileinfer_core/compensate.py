"""Error-compensating rounding: each column's rounding error is made up for by the columns that are not rounded yet.

For a product y = W·x, what counts is the error of y on the inputs that really come, not the error of W. With H = Σ x·xᵀ
over calibration inputs, rounding column i of W with error e changes y least if the columns after it move by
-e · U[i, i+1:] / U[i, i], where U is the upper Cholesky factor of H's inverse (Frantar et al., "GPTQ", 2022,
https://arxiv.org/abs/2210.17323). The scales are those of the unchanged weights (int8.py), so the file is as any other.

Columns go in the order of falling H[i, i]: the loudest inputs are rounded first, while there are most columns left to
make up for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tileinfer_core.int8 import LARGEST

if TYPE_CHECKING:
    Float32Array = np.ndarray[Any, np.dtype[np.float32]]
    Float64Array = np.ndarray[Any, np.dtype[np.float64]]
    Int8Array = np.ndarray[Any, np.dtype[np.int8]]
    Array = np.ndarray[Any, np.dtype[Any]]

BLOCK = 128  # columns whose effect on the rest is applied in one product
DAMPING = 0.01  # of the mean diagonal: keeps H invertible where fewer inputs than columns came


def compensation(hessian: Float64Array) -> tuple[Float32Array, Array]:
    """(U, order): the factor for columns in `order`, from H [K, K]."""
    diagonal = np.diagonal(hessian)
    order = np.argsort(-diagonal, kind="stable")
    damped = hessian[np.ix_(order, order)]
    mean = float(diagonal.mean()) or 1.0
    damped[np.diag_indices_from(damped)] += DAMPING * mean
    # The upper factor U of H⁻¹ = Uᵀ·U, through the lower factor of H with its columns reversed: one factorisation and
    # one triangular inverse in place of an inverse and a factorisation of it.
    lower = np.linalg.cholesky(damped[::-1, ::-1])
    upper = _lower_inverse(lower)[::-1, ::-1]
    return upper.astype(np.float32), order


def _lower_inverse(lower: Array) -> Array:
    """The inverse of a lower triangular matrix by halves: products, and a sixth of the arithmetic of a general one."""
    size = len(lower)
    if size <= BLOCK:
        inverse: Array = np.linalg.inv(lower)
        return inverse
    half = size // 2
    inverse = np.zeros_like(lower)
    inverse[:half, :half] = _lower_inverse(lower[:half, :half])
    inverse[half:, half:] = _lower_inverse(lower[half:, half:])
    inverse[half:, :half] = -inverse[half:, half:] @ (lower[half:, :half] @ inverse[:half, :half])
    return inverse


def round_compensated(weight: Float32Array, scales: Array, factor: tuple[Float32Array, Array]) -> Int8Array:
    """weight [N, K] -> int8 [N, K] in units of `scales` [N, groups]."""
    upper, order = factor
    columns = weight.shape[1]
    left = np.ascontiguousarray(weight.T[order])  # [K, N]: columns in their order, each contiguous
    scale_of = scales.astype(np.float32).T[order * scales.shape[1] // columns]  # [K, N]
    q = np.empty((columns, len(weight)), np.int8)
    for first in range(0, columns, BLOCK):
        last = min(first + BLOCK, columns)
        errors = np.empty((last - first, len(weight)), np.float32)
        for i in range(first, last):
            rounded = np.clip(np.rint(left[i] / scale_of[i]), -LARGEST, LARGEST)
            q[i] = rounded
            error = (left[i] - rounded * scale_of[i]) / upper[i, i]
            errors[i - first] = error
            left[i + 1 : last] -= upper[i, i + 1 : last, None] * error
        left[last:] -= upper[first:last, last:].T @ errors
    restored = np.empty_like(q)
    restored[order] = q
    return np.ascontiguousarray(restored.T)
