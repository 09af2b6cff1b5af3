"""Rows of activations as int8 with a float32 scale each, on tiles: keys and values on their way into an INT8 cache.

scale = max |row| / 127, 1 for a row of zeros;   q = row / scale, rounded half to even
"""

from __future__ import annotations

import cuda.tile as ct

ROUND = 12582912.0  # 1.5 · 2²³: added to a float, it leaves the nearest integer in the low bits
ROUND_BITS = 0x4B400000


def nearest(x):
    """The whole number nearest to each float (half to even, within ±2²²), int32."""
    return ct.bitcast(x + ROUND, ct.int32) - ROUND_BITS


def scale_of(top):
    """The scale of rows whose largest magnitude is `top`."""
    return ct.where(top > 0.0, top / 127.0, 1.0)


def as_int8(x, scale):
    """Float rows in steps of their scales."""
    return nearest(x / scale).astype(ct.int8)
