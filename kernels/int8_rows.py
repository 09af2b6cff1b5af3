"""Rows as int8 with a float32 scale each, on tiles: keys and values of an INT8 cache; and int8 widened again.

scale = max |row| / 127, at least 2^-100;   q = row · (1 / scale) in float32, rounded half to even
"""

from __future__ import annotations

import cuda.tile as ct

LEAST = 2.0**-100  # a smaller scale's reciprocal would leave float32, as would a sum of weights over it
ROUND = 12582912.0  # 1.5 · 2²³: added to a float, it leaves the nearest integer in the low bits
ROUND_BITS = 0x4B400000
# Of a tile: 8 bytes a thread, whose half precision is the 16 bytes that it stores. Nothing changes threads.
WIDENED = 1024


def nearest(x):
    """The whole number nearest to each float (half to even, within ±2²²), int32."""
    return ct.bitcast(x + ROUND, ct.int32) - ROUND_BITS


def from_int8(q, scale, dtype):
    """scale · q in `dtype`, one rounding. int8 to float by its bits: q + 1.5 · 2²³ is a float whose low bits are q."""
    return ((ct.bitcast(q.astype(ct.int32) + ROUND_BITS, ct.float32) - ROUND) * scale).astype(dtype)


def largest_and_sum(top, total, other_top, other_total):
    """For one `ct.reduce` of (largest number, sum)."""
    return ct.maximum(top, other_top), total + other_total


def scale_of(top):
    """The scale of rows whose largest magnitude is `top`."""
    return ct.maximum(top / 127.0, LEAST)


def as_int8(x, scale):
    """Float rows in steps of their scales, int32. One division a row: a division of each number is ten instructions."""
    return nearest(x * (1.0 / scale))
