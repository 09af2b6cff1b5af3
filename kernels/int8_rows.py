"""Rows of activations as int8 with a float32 scale each, on tiles: keys and values of an INT8 cache.

scale = max |row| / 127, 1 for a row of zeros;   q = row / scale, rounded half to even
"""

from __future__ import annotations

import cuda.tile as ct

from kernels.notation import PAGE, Int

THROUGH_FLOAT = 2  # as a kernel's constant INT8; 1 is straight to half precision, 0 no INT8 cache
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


def widened(tile, half, INT8: Int):
    """An int8 tile in half precision."""
    return tile.astype(ct.float32).astype(half) if INT8 == THROUGH_FLOAT else tile.astype(half)


def page_scales(k_scales, v_scales, page):
    """Scales of a page's keys and values, [64, 1] each."""
    ks = ct.load(k_scales, index=(page, 0), shape=(1, PAGE), allow_tma=False, check_bounds=False)
    vs = ct.load(v_scales, index=(page, 0), shape=(1, PAGE), allow_tma=False, check_bounds=False)
    return ks.reshape((PAGE, 1)), vs.reshape((PAGE, 1))


def cached_int8(ka, kb, value, k_scales, v_scales, page, slot):
    """The new token's key (two halves) and value as int8; their scales are stored, and returned with them."""
    ks = scale_of(ct.maximum(ct.max(ct.abs(ka), axis=1, keepdims=True), ct.max(ct.abs(kb), axis=1, keepdims=True)))
    vs = scale_of(ct.max(ct.abs(value), axis=1, keepdims=True))
    ct.store(k_scales, index=(page, slot), tile=ks, allow_tma=False, check_bounds=False)
    ct.store(v_scales, index=(page, slot), tile=vs, allow_tma=False, check_bounds=False)
    return as_int8(ka, ks), as_int8(kb, ks), as_int8(value, vs), ks, vs
