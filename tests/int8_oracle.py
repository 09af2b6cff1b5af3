"""INT8 quantisation written out number by number: slow, obvious, and what the real code is held to bit for bit.

scale = largest |w| of the group / 127, rounded up to BF16 (so that no quotient passes 127), at least 2^-126, BF16's
        smallest normal number; 1 for a group of zeros
q     = w / scale in float32, rounded half to even, -127 … 127
"""

from __future__ import annotations

import math
import struct

import numpy as np


def bfloat16_up(value: float) -> float:
    """The smallest BF16 number that is not below a positive float32."""
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    return struct.unpack("<f", struct.pack("<I", (bits + 0xFFFF) & 0xFFFF0000))[0]


def half_even(value: float) -> int:
    below = math.floor(value)
    rest = value - below
    if rest != 0.5:
        return below + (rest > 0.5)
    return below + below % 2


def quantise(weight: np.ndarray, group_size: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """weight [N, K] float32 -> int8 [N, K], scales float32 [N, groups]."""
    rows, columns = weight.shape
    size = group_size or columns
    q = np.zeros(weight.shape, np.int8)
    scales = np.ones((rows, columns // size), np.float32)
    for n in range(rows):
        for g in range(columns // size):
            group = [float(value) for value in weight[n, g * size : (g + 1) * size]]
            largest = max(abs(value) for value in group)
            if largest > 0:
                scales[n, g] = max(2.0**-126, bfloat16_up(float(np.float32(largest) / np.float32(127))))
            for k, value in enumerate(group):
                quotient = float(np.float32(value) / scales[n, g])
                q[n, g * size + k] = max(-127, min(127, half_even(quotient)))
    return q, scales


def dequantise(q: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """int8 [N, K], scales [N, groups] -> float32 [N, K], element by element."""
    rows, columns = q.shape
    size = columns // scales.shape[1]
    out = np.zeros(q.shape, np.float32)
    for n in range(rows):
        for k in range(columns):
            out[n, k] = np.float32(float(q[n, k]) * float(scales[n, k // size]))
    return out
