"""Attention of one token over an INT8 cache without widening it: int8 pages meet int8 digits on the matrix unit.

Queries and soft-max weights become two digits each, whole numbers 128 hi + lo in steps of their own, and stand in
columns of the product: hi and lo of up to four query heads fill the narrowest eight, five to eight heads take sixteen.
The int32 sums are exact, so only the steps cost accuracy:

- queries: max |q| / 16,256 of the head, 15 bits. The scales of the keys multiply the scores;
- weights: 1/16,383 of about the largest weight · value scale of the pages of a step, 14 bits: page by page, so that
  many small weights count. The scales of the values multiply the weights before these become digits.

A step's weights are relative to the largest score + log2(scale of its value), rounded up by at most 0.09, so that no
weight · scale is above 1. A weight alone is at most 1 / its scale, so at most 2^100 (kernels/int8_rows.py): sums of
weights stay within float32.

Bounds of the int32 sums: |score| ≤ 128 · 16,256 · 128 = 2.7e8, |value| ≤ 128 · 16,383 · 64 = 1.3e8 a page; both below
2³¹ up to MAX_PAGES pages a step.

attention_decode (kernels/attention_decode.py) checks the arrays and launches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import cuda.tile as ct

from kernels.attention_tiles import COLUMNS, NEVER, head_halves, own_position, store_lone, store_split
from kernels.digits import LARGEST, two_digits
from kernels.int8_rows import largest_and_sum, nearest, scale_of
from kernels.notation import LOG2E, PAGE, Bool, Float, Int
from kernels.paged_cache import scale_specs
from kernels.rope_tiles import gain_halves, rotated

if TYPE_CHECKING:
    from kernels.launch import Launcher
    from kernels.shapes import ModelShape

WEIGHT = 16383.0  # 127 · 128 + 127: a weight of 1 in digits
MAX_PAGES = ((1 << 31) - 1) // (128 * 16383 * PAGE)  # of a step


def log2_bound(x):
    """log2 of a positive float or up to 0.09 more: its bits, taken for a whole number, are near 2²³ (log2 + 127)."""
    return ct.bitcast(x, ct.int32).astype(ct.float32) * (1.0 / (1 << 23)) - 126.9139


def side_by_side(hi, lo, R: Int, W: Int, APART: Bool):
    """Digits [R, W] as the N side of products: one tile [R, 2 W], columns hi and lo in turn, or a tile each."""
    if APART:
        return hi.astype(ct.int8), lo.astype(ct.int8)
    pair = hi.astype(ct.int8).reshape((R, W, 1)), lo.astype(ct.int8).reshape((R, W, 1))
    return (ct.cat(pair, 2).reshape((R, 2 * W)),)


def unnormed(x0, x1, g0, g1, c, s, D: Int):
    """Halves of heads, times the head norm's gain and rotated, without the norm's factor; and Σ x² of each column."""
    x0, x1 = x0.astype(ct.float32), x1.astype(ct.float32)
    a, b = rotated(x0 * g0, x1 * g1, g0, g1, c, s, D, 0.0, False)
    return a, b, x0 * x0 + x1 * x1


def norm_factor(squares, D: Int, EPS: Float, NORM: Bool):
    """What a head norm multiplies a head by whose Σ x² is given; 1 without a norm."""
    if NORM:
        return ct.rsqrt(squares * (1.0 / D) + EPS)
    return 1.0


def two_largest_and_sum(x, y, z, other_x, other_y, other_z):
    return ct.maximum(x, other_x), ct.maximum(y, other_y), z + other_z


def two_sums(x, y, other_x, other_y):
    return x + other_x, y + other_y


def query_digits(q, h, g0, g1, c, s, W: Int, D: Int, EPS: Float, NORM: Bool, APART: Bool):
    """The queries as digits over [D, W], and their steps [1, W].

    A head norm's factor goes into the step: digits need not wait for it, and one reduction serves both.
    """
    x0, x1 = head_halves(q, h, W, D)
    a, b, squares = unnormed(x0, x1, g0, g1, c, s, D)
    both = ct.maximum(ct.abs(a), ct.abs(b)), squares
    top, squares = ct.reduce(both, 1, largest_and_sum, (0.0, 0.0), keepdims=True)
    top = ct.maximum(top, 1e-30)
    unit = LARGEST / top
    step = top * norm_factor(squares, D, EPS, NORM) * (LOG2E / D**0.5 / LARGEST)
    (ah, al), (bh, bl) = two_digits(a * unit), two_digits(b * unit)
    hi = ct.cat((ah.astype(ct.int8), bh.astype(ct.int8)), 1)
    lo = ct.cat((al.astype(ct.int8), bl.astype(ct.int8)), 1)
    if APART:
        return (ct.transpose(hi), ct.transpose(lo)), step.reshape((1, W))
    both = ct.cat((hi.reshape((W, 1, D)), lo.reshape((W, 1, D))), 1).reshape((2 * W, D))
    return (ct.transpose(both),), step.reshape((1, W))


def weight_digits(p, W: Int, APART: Bool):
    """Weights [64, W] from 0 to WEIGHT as digits of 7 bits."""
    n = nearest(p)
    return side_by_side(n >> 7, n & 127, PAGE, W, APART)


def no_sums(R: Int, W: Int, APART: Bool):
    """What a product with digits starts from."""
    if APART:
        return ct.zeros((R, W), dtype=ct.int32), ct.zeros((R, W), dtype=ct.int32)
    return (ct.zeros((R, 2 * W), dtype=ct.int32),)


def multiplied(x, digits, sums):
    """sums + x · digits, tile by tile."""
    return tuple(ct.mma(x, digits[i], sums[i]) for i in ct.static_iter(range(len(digits))))


def joined(sums, R: Int, W: Int, APART: Bool):
    """128 hi + lo of the digits' sums, [R, W] float32."""
    if APART:
        return (sums[0] * 128 + sums[1]).astype(ct.float32)
    pairs = sums[0].reshape((R, W, 2))
    hi = ct.extract(pairs, (0, 0, 0), (R, W, 1)).reshape((R, W))
    lo = ct.extract(pairs, (0, 0, 1), (R, W, 1)).reshape((R, W))
    return (hi * 128 + lo).astype(ct.float32)


def new_token_int8(
    q, k, v, k_gain, k_pool, v_pool, k_scales, v_scales, table, out, stats, h, pos, g0, g1, c, s, HKV: Int, S: Int,
    D: Int, EPS: Float, NORM: Bool, PDL: Bool,
):  # fmt: skip
    """The split of one position: this token's. Also writes its key and value into the cache, with their scales."""
    page = ct.load(table, index=(pos // PAGE,), shape=(), check_bounds=False).item() * HKV + h
    k0, k1 = gain_halves(k_gain, D, NORM)
    if PDL:
        ct.grid_dependency_control_wait()
    x0, x1 = head_halves(q, h, COLUMNS, D)
    a, b, q_squares = unnormed(x0, x1, g0, g1, c, s, D)
    ka, kb, k_squares = unnormed(half_row(k, h, 0, D), half_row(k, h, 1, D), k0, k1, c, s, D)
    va, vb = half_row(v, h, 0, D).astype(ct.float32), half_row(v, h, 1, D).astype(ct.float32)
    k_top, v_top, k_squares = ct.reduce(
        (ct.maximum(ct.abs(ka), ct.abs(kb)), ct.maximum(ct.abs(va), ct.abs(vb)), k_squares),
        1, two_largest_and_sum, (0.0, 0.0, 0.0), keepdims=True,
    )  # fmt: skip
    factor = norm_factor(k_squares, D, EPS, NORM)
    ks, vs = scale_of(k_top * factor), scale_of(v_top)
    k_unit, v_unit = factor / ks, 1.0 / vs
    ka, kb, va, vb = nearest(ka * k_unit), nearest(kb * k_unit), nearest(va * v_unit), nearest(vb * v_unit)
    score, q_squares = ct.reduce(
        (a * ka.astype(ct.float32) + b * kb.astype(ct.float32), q_squares), 1, two_sums, (0.0, 0.0), keepdims=True
    )
    score = score * norm_factor(q_squares, D, EPS, NORM) * (ks * (LOG2E / D**0.5))
    store_same(out, h, S, 0, va.astype(ct.float32) * vs, D)
    store_same(out, h, S, 1, vb.astype(ct.float32) * vs, D)
    store_lone(stats, h, S, score)
    slot = pos % PAGE
    ct.store(k_pool, index=(page * PAGE + slot, 0), tile=ka.astype(ct.int8), allow_tma=False, check_bounds=False)
    ct.store(k_pool, index=(page * PAGE + slot, 1), tile=kb.astype(ct.int8), allow_tma=False, check_bounds=False)
    va, vb = va.astype(ct.int8).reshape((D // 2, 1)), vb.astype(ct.int8).reshape((D // 2, 1))
    ct.store(v_pool, index=(page * 2, slot), tile=va, allow_tma=False, check_bounds=False)
    ct.store(v_pool, index=(page * 2 + 1, slot), tile=vb, allow_tma=False, check_bounds=False)
    ct.store(k_scales, index=(page, slot), tile=ks, allow_tma=False, check_bounds=False)
    ct.store(v_scales, index=(page, slot), tile=vs, allow_tma=False, check_bounds=False)


def half_row(x, i, half, D: Int):
    return ct.load(x, index=(i, half), shape=(1, D // 2), allow_tma=False, check_bounds=False)


def store_same(out, h, s, half, row, D: Int):
    """Half a row [1, D/2] for every query head."""
    same = ct.broadcast_to(row.reshape((1, 1, 1, D // 2)), (1, 1, COLUMNS, D // 2))
    ct.store(out, index=(h, s, 0, half), tile=same, allow_tma=False)


def page_scores(keys, digits, step, ks, inside, W: Int, APART: Bool):
    """Scores [64, W] of a page's keys with scales ks [64, 1]; NEVER outside."""
    sums = multiplied(keys, digits, no_sums(PAGE, W, APART))
    return ct.where(inside, joined(sums, PAGE, W, APART) * ks * step, NEVER)


def attended(keys, values, ks, vs, at, pos, digits, step, W: Int, D: Int, APART: Bool, EMPTY: Bool):
    """Some pages' value sum [D, W], what it is relative to [1, W], and weights [64, W].

    `at` is their first position. EMPTY: perhaps none of them is cached, and none would weigh NEVER - NEVER = 0, so 1.
    """
    N = ct.static_eval(len(keys))
    slot = at + ct.arange(PAGE, dtype=ct.int32).reshape((PAGE, 1))
    inside = tuple(slot + j * PAGE < pos for j in ct.static_iter(range(N)))
    scores = tuple(page_scores(keys[j], digits, step, ks[j], inside[j], W, APART) for j in ct.static_iter(range(N)))
    weighed = ct.full((PAGE, W), NEVER, dtype=ct.float32)
    for j in ct.static_iter(range(N)):
        weighed = ct.maximum(weighed, scores[j] + ct.where(inside[j], log2_bound(vs[j]), 0.0))
    top = ct.max(weighed, axis=0, keepdims=True)
    sums = no_sums(D, W, APART)
    total = ct.zeros((PAGE, W), dtype=ct.float32)
    for j in ct.static_iter(range(N)):
        p = ct.exp2(scores[j] - top, flush_to_zero=True)
        p = ct.where(inside[j], p, 0.0) if EMPTY else p
        sums = multiplied(values[j], weight_digits(p * (vs[j] * WEIGHT), W, APART), sums)
        total = total + p
    return joined(sums, D, W, APART) * (1.0 / WEIGHT), top, total


def page_tile(array, at, R: Int, C: Int):
    return ct.load(array, index=(at, 0), shape=(R, C), allow_tma=False, check_bounds=False)


def scale_column(scales, at):
    """A page's scales, [64, 1]."""
    return page_tile(scales, at, 1, PAGE).reshape((PAGE, 1))


def ring_tile(array, at, R: Int, C: Int, LATENCY: Int):
    return ct.load(array, index=(at, 0), shape=(R, C), check_bounds=False, latency=LATENCY)


@ct.kernel
def attention_int8_kernel(
    q, k, v, q_gain, k_gain, cos, sin, k_pool, v_pool, k_scales, v_scales, table, length, out, stats, HKV: Int, S: Int,
    LOOP: Bool, N: Int, LATENCY: Int, W: Int, APART: Bool, D: Int, EPS: Float, NORM: Bool, PDL: Bool,
):  # fmt: skip
    """Split s < S: its even share of the pages, N a step, running soft-max. Split S: the new token.

    Arrays as in attention_page_kernel, but pools int8 with k_scales, v_scales [pages HKV, 64] float32. W query heads at
    most, 4 or 8. The first step's pages come by plain loads before the PDL wait, the others (LOOP) through a TMA ring.
    Masked slots are read and multiplied by 0: scales must be finite everywhere.
    """
    h, s = ct.bid(0), ct.bid(1)
    if PDL:
        ct.grid_dependency_control_launch_dependents()
    pos, c, sn, g0, g1 = own_position(length, cos, sin, q_gain, D, NORM)
    if s < S:
        pages = ct.cdiv(pos, PAGE)
        steps = ct.cdiv(pages, N)
        share = ct.cdiv(steps, S) if LOOP else 1
        first = s * share
        at = tuple(page_row(table, first * N + j, pages, h, HKV) for j in ct.static_iter(range(N)))
        ks = tuple(scale_column(k_scales, at[j]) for j in ct.static_iter(range(N)))
        vs = tuple(scale_column(v_scales, at[j]) for j in ct.static_iter(range(N)))
        keys = tuple(page_tile(k_pool, at[j], PAGE, D) for j in ct.static_iter(range(N)))
        values = tuple(page_tile(v_pool, at[j], D, PAGE) for j in ct.static_iter(range(N)))
        if PDL:
            ct.grid_dependency_control_wait()
        digits, step = query_digits(q, h, g0, g1, c, sn, W, D, EPS, NORM, APART)
        acc, m, l = attended(keys, values, ks, vs, first * N * PAGE, pos, digits, step, W, D, APART, True)
        if LOOP:
            for i in range(first + 1, ct.minimum(first + share, steps)):
                at = tuple(page_row(table, i * N + j, pages, h, HKV) for j in ct.static_iter(range(N)))
                keys = tuple(ring_tile(k_pool, at[j], PAGE, D, LATENCY) for j in ct.static_iter(range(N)))
                ks = tuple(ring_tile(k_scales, at[j], 1, PAGE, LATENCY) for j in ct.static_iter(range(N)))
                vs = tuple(ring_tile(v_scales, at[j], 1, PAGE, LATENCY) for j in ct.static_iter(range(N)))
                values = tuple(ring_tile(v_pool, at[j], D, PAGE, LATENCY) for j in ct.static_iter(range(N)))
                ks = tuple(ks[j].reshape((PAGE, 1)) for j in ct.static_iter(range(N)))
                vs = tuple(vs[j].reshape((PAGE, 1)) for j in ct.static_iter(range(N)))
                part, top, total = attended(keys, values, ks, vs, i * N * PAGE, pos, digits, step, W, D, APART, False)
                higher = ct.maximum(m, top)
                old, new = ct.exp2(m - higher, flush_to_zero=True), ct.exp2(top - higher, flush_to_zero=True)
                acc, l, m = acc * old + part * new, l * old + total * new, higher
        store_split(out, stats, h, s, acc, m, ct.sum(l, axis=0, keepdims=True), W, D)
    else:
        new_token_int8(
            q, k, v, k_gain, k_pool, v_pool, k_scales, v_scales, table, out, stats, h, pos, g0, g1, c, sn, HKV, S, D,
            EPS, NORM, PDL,
        )  # fmt: skip


def page_row(table, i, pages, h, HKV: Int):
    """Where page i of the sequence is in the pools, of head h; past the last page, the last."""
    i = ct.maximum(ct.minimum(i, pages - 1), 0)
    return ct.load(table, index=(i,), shape=(), check_bounds=False).item() * HKV + h


def model_launches(launcher: Launcher, model: ModelShape, dtype: str) -> None:
    """One token in each context bucket, over an INT8 cache."""
    from kernels.attention_decode import launch_each_bucket  # which launches these kernels

    launch_each_bucket(model, dtype, scale_specs(model), launcher)
