"""Head norm and rotation as functions on tiles, shared by the kernels that need them in registers."""

from __future__ import annotations

from typing import TypeAlias

import cuda.tile as ct

Int: TypeAlias = ct.Constant[int]
Bool: TypeAlias = ct.Constant[bool]
Float: TypeAlias = ct.Constant[float]


def gain_halves(gain, D: Int, NORM: Bool):
    """The head norm's weight [1, D] as two float32 halves; 1 without a norm."""
    if NORM:
        return (
            ct.load(gain, index=(0, 0), shape=(1, D // 2), allow_tma=False, check_bounds=False).astype(ct.float32),
            ct.load(gain, index=(0, 1), shape=(1, D // 2), allow_tma=False, check_bounds=False).astype(ct.float32),
        )
    return ct.ones((1, D // 2), dtype=ct.float32), ct.ones((1, D // 2), dtype=ct.float32)


def rotated(x0, x1, g0, g1, cos, sin, D: Int, EPS: Float, NORM: Bool):
    """Both halves [R, D/2] of R heads, normed and rotated, float32. cos and sin are [1 or R, D/2]."""
    a, b = x0.astype(ct.float32), x1.astype(ct.float32)
    if NORM:
        scale = ct.rsqrt(ct.sum(a * a + b * b, axis=1, keepdims=True) * (1.0 / D) + EPS)
        a, b = a * g0 * scale, b * g1 * scale
    return a * cos - b * sin, b * cos + a * sin
