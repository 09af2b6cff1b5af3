"""Attention of one token, as functions on tiles: what its kernels over a half-precision and an INT8 cache share.

A split of the context leaves an unscaled sum Σ 2^(s - m) v, the number m that its weights are relative to, and
Σ 2^(s - m); the merge needs no more. m is the largest score or near it, so that nothing overflows.
"""

from __future__ import annotations

import cuda.tile as ct

from kernels.notation import LOG2E, PAGE, ZERO, Bool, Float, Int
from kernels.rope_tiles import gain_halves, rotated

COLUMNS = 8  # query heads of a KV head, at most: columns of a product over a page
NEVER = -1.0e30  # a masked score; finite, so that a split without positions merges with weight 0


def own_position(length, cos, sin, q_gain, D: Int, NORM: Bool):
    """The new token's position, its cosines and sines [1, D/2], and the query norm's gain in halves."""
    pos = ct.load(length, index=(0,), shape=(), check_bounds=False).item() - 1
    c = ct.load(cos, index=(pos, 0), shape=(1, D // 2), allow_tma=False, check_bounds=False)
    s = ct.load(sin, index=(pos, 0), shape=(1, D // 2), allow_tma=False, check_bounds=False)
    g0, g1 = gain_halves(q_gain, D, NORM)
    return pos, c, s, g0, g1


def head_halves(q, h, W: Int, D: Int):
    """Halves [W, D/2] of the query heads of KV head h; rows past the group are zero."""
    x0 = ct.load(q, index=(h, 0, 0), shape=(1, W, D // 2), padding_mode=ZERO, allow_tma=False)
    x1 = ct.load(q, index=(h, 0, 1), shape=(1, W, D // 2), padding_mode=ZERO, allow_tma=False)
    return x0.reshape((W, D // 2)), x1.reshape((W, D // 2))


def queries(q, h, g0, g1, c, s, D: Int, EPS: Float, NORM: Bool):
    """The head group's queries, rotated and scaled, as two halves [8, D/2] float32."""
    x0, x1 = head_halves(q, h, COLUMNS, D)
    a, b = rotated(x0, x1, g0, g1, c, s, D, EPS, NORM)
    return a * (LOG2E / D**0.5), b * (LOG2E / D**0.5)


def columns(a, b, dtype):
    """Both halves side by side and transposed: [D, 8], the N side of the product."""
    return ct.transpose(ct.cat((a.astype(dtype), b.astype(dtype)), 1))


def store_split(out, stats, h, s, acc, m, l, W: Int, D: Int):
    """One split's unscaled sum [D, W], maximum and sum of weights [1, W]. `out` drops columns past the group."""
    ct.store(out, index=(h, s, 0, 0), tile=acc.reshape((1, 1, D, W)), order=(0, 1, 3, 2), allow_tma=False)
    ct.store(stats, index=(h, s, 0, 0), tile=m.reshape((1, 1, 1, W)), allow_tma=False, check_bounds=False)
    ct.store(stats, index=(h, s, 1, 0), tile=l.reshape((1, 1, 1, W)), allow_tma=False, check_bounds=False)


def store_lone(stats, h, s, score):
    """The split of one position: its score [8] is the maximum, and it weighs 1."""
    ct.store(stats, index=(h, s, 0, 0), tile=score.reshape((1, 1, 1, COLUMNS)), allow_tma=False, check_bounds=False)
    one = ct.ones((1, 1, 1, COLUMNS), dtype=ct.float32)
    ct.store(stats, index=(h, s, 1, 0), tile=one, allow_tma=False, check_bounds=False)


def new_token(
    q, k, v, k_gain, k_pool, v_pool, table, out, stats, h, pos, g0, g1, c, s, HKV: Int, S: Int, D: Int, EPS: Float,
    NORM: Bool, PDL: Bool,
):  # fmt: skip
    """The split of one position: this token's. Also writes its key and value into the cache."""
    page = ct.load(table, index=(pos // PAGE,), shape=(), check_bounds=False).item() * HKV + h
    k0, k1 = gain_halves(k_gain, D, NORM)
    if PDL:
        ct.grid_dependency_control_wait()
    a, b = queries(q, h, g0, g1, c, s, D, EPS, NORM)
    x0 = ct.load(k, index=(h, 0), shape=(1, D // 2), allow_tma=False, check_bounds=False)
    x1 = ct.load(k, index=(h, 1), shape=(1, D // 2), allow_tma=False, check_bounds=False)
    ka, kb = rotated(x0, x1, k0, k1, c, s, D, EPS, NORM)
    value = ct.load(v, index=(h, 0), shape=(1, D), allow_tma=False, check_bounds=False)
    slot = pos % PAGE
    qa, qb = ka.astype(k_pool.dtype), kb.astype(k_pool.dtype)
    score = ct.sum(a * qa.astype(ct.float32) + b * qb.astype(ct.float32), axis=1)
    same = ct.broadcast_to(value.astype(ct.float32).reshape((1, 1, 1, D)), (1, 1, COLUMNS, D))
    ct.store(out, index=(h, S, 0, 0), tile=same, allow_tma=False)
    store_lone(stats, h, S, score)
    ct.store(k_pool, index=(page * PAGE + slot, 0), tile=qa, allow_tma=False, check_bounds=False)
    ct.store(k_pool, index=(page * PAGE + slot, 1), tile=qb, allow_tma=False, check_bounds=False)
    ct.store(v_pool, index=(page, slot), tile=value.reshape((D, 1)), allow_tma=False, check_bounds=False)
