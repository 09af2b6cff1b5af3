"""Symmetric INT8 rounding of a weight matrix: the definition that files, backends and kernels share.

    scale = largest |w| of the group / 127, rounded up to BF16, so that no quotient passes 127; at least 2^-126; a group
            of zeros has the scale 1
    q     = w / scale in float32, rounded half to even; -127 … 127, so that -q exists for every q
    w'    = scale · q, exact in float32 (8 bits by 7)

A group is a row, or `group_size` neighbouring columns of one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np

from tileinfer_core.dtypes import BFLOAT16

if TYPE_CHECKING:
    Float32Array = np.ndarray[Any, np.dtype[np.float32]]
    Int8Array = np.ndarray[Any, np.dtype[np.int8]]
    Array = np.ndarray[Any, np.dtype[Any]]

LARGEST = 127
SMALLEST_SCALE = np.float32(2.0**-126)  # BF16's smallest normal number


def grouped(weight: Array, group_size: int | None) -> Array:
    """A view of weight [N, K] as [N, groups, columns of a group]."""
    rows, columns = weight.shape
    return weight.reshape(rows, -1, group_size or columns)


def scales_of(weight: Float32Array, group_size: int | None) -> Array:
    """The scales of weight [N, K]: BF16 [N, groups]. Not finite where one of their weights is not."""
    largest = _largest(weight, group_size or weight.shape[1])
    scales = np.maximum(largest / np.float32(LARGEST), SMALLEST_SCALE)
    scales[largest == 0] = 1
    return _bfloat16_up(scales)


def _largest(weight: Float32Array, size: int) -> Float32Array:
    """Largest |w| of each group: [N, groups]. Not finite where one of its numbers is not.

    Without their signs, floats are ordered as their bits are. Groups are halved until they have one number: NumPy's
    maximum over short rows takes 1 ns a number, this 0.4.
    """
    bits = weight.view(np.uint32) & np.uint32(0x7FFFFFFF)  # [N, K]
    if size == weight.shape[1] or size & (size - 1):
        return cast("Float32Array", grouped(bits, size).max(axis=-1).view(np.float32))
    flat = bits.reshape(-1)
    while size > 1:
        flat = np.maximum(flat[::2], flat[1::2])
        size //= 2
    return flat.view(np.float32).reshape(weight.shape[0], -1)


def _bfloat16_up(values: Float32Array) -> Array:
    """Positive float32 to the nearest BF16 that is not below: BF16 is the upper half of the bits."""
    bits = values.view(np.uint32) + np.uint32(0xFFFF)
    return cast("Array", (bits >> np.uint32(16)).astype(np.uint16).view(BFLOAT16))


def to_int8(weight: Float32Array, scales: Array) -> Int8Array:
    """weight [N, K] in units of its scales [N, groups], rounded: int8 [N, K]."""
    quotients = grouped(weight, weight.shape[1] // scales.shape[1]) / scales.astype(np.float32)[..., None]
    np.rint(quotients, out=quotients)
    np.clip(quotients, -LARGEST, LARGEST, out=quotients)
    return quotients.astype(np.int8).reshape(weight.shape)


def from_int8(q: Int8Array, scales: Array) -> Float32Array:
    """scale · q: float32 [N, K]."""
    groups = grouped(q, q.shape[1] // scales.shape[1]).astype(np.float32)
    groups *= scales.astype(np.float32)[..., None]
    return groups.reshape(q.shape)


def relative_error(weight: Float32Array, restored: Float32Array) -> float:
    """Root of the mean square error over the root of the mean square; 0 for a matrix of zeros."""
    size = float(np.vdot(weight, weight))
    difference = weight - restored
    return float(np.sqrt(np.vdot(difference, difference) / size)) if size else 0.0
