"""A block's INT8 rows times the token by the matrix unit, bytes by bytes: the "digits" form of kernels/int8_dot.py.

    x ≈ s (256 hi + lo),   s a power of two, |256 hi + lo| ≤ 2¹⁴

The narrowest product that reaches the tensor cores has 16 rows of weights and 8 columns (of four in a batch, one a
warp: each warp has a quarter of every step's columns). Eight rows of W fill the 16 with two slices of K, four rows with
four: rows of slice i meet the digits of slice j in column pair j, and only i = j is kept. Making the digits costs more
than multiplying by them, so up to 32 rows share them, 8 at a time.

Nothing of the weights passes through shared memory: a lane reads 16 bytes, four lanes a chunk of 64 columns, and the
four words of a lane are called columns of four different quarters of its chunk. So they lie where the matrix unit reads
them, and the token's digits are put in the same order.

int32 sums are exact while 128 · 127 · K < 2³¹ (MAX_COLUMNS), whatever the values.
"""

from __future__ import annotations

import cuda.tile as ct

from kernels.int8_rows import ROUND
from kernels.linear import plain_tile
from kernels.notation import Bool, Int

MAX_COLUMNS = ((1 << 31) - 1) // (127 * 128)
WARPS, MMA_ROWS, MMA_COLUMNS = 4, 16, 8
CHUNK = 64  # columns of a row that four lanes read
TOGETHER = MMA_ROWS // 2  # rows that one load of a warp holds, slices of K counted as rows
BITS = 13  # of the digits below the largest number's leading one
KEPT = 4096  # columns of the token that stay in registers from its maximum on; a longer one is read again, from L1
LEAST = 14  # exponent field of the smallest scale that is a normal number


def rows_together(TN: Int):
    """Rows of W that go through the matrix unit at once: 8, or 4."""
    return min(TOGETHER, TN)


def chunk_columns(TN: Int):
    """Neighbouring columns of a row in one load of a warp."""
    return CHUNK * (TOGETHER // rows_together(TN))


def load_columns(TN: Int):
    """Columns of W that one load of the block takes; a step of the product is two."""
    return WARPS * chunk_columns(TN)


def half_step(w, k, i, TN: Int, EVEN: Bool):
    """Load k of row group i, [WARPS, 8, 64]; w [K / chunk, N, chunk]."""
    T, C = ct.static_eval(min(TOGETHER, TN)), ct.static_eval(CHUNK * TOGETHER // min(TOGETHER, TN))
    return plain_tile(w, (k, i, 0), (WARPS, T, C), EVEN).reshape((WARPS, TOGETHER, CHUNK))


def step_weights(w, k, i, TN: Int, NK: Int, EVEN: Bool):
    """The step of loads k and k + 1, the second zeros past the end: [WARPS, 16, 64]."""
    first = half_step(w, k, i, TN, EVEN)
    if k + 1 < NK:
        return ct.cat((first, half_step(w, k + 1, i, TN, EVEN)), 1)
    return ct.cat((first, ct.zeros((WARPS, TOGETHER, CHUNK), dtype=ct.int8)), 1)


def digit_weights(w, i, TN: Int, NK: Int, EVEN: Bool):
    """All steps of all row groups of the block, in NK loads of each group."""
    R = ct.static_eval(max(1, TN // TOGETHER))
    return tuple(
        tuple(step_weights(w, 2 * s, i * R + r, TN, NK, EVEN) for s in ct.static_iter(range((NK + 1) // 2)))
        for r in ct.static_iter(range(R))
    )


def step_scales(scale, s, i, TN: Int, NK: Int, G: Int, EVEN: Bool):
    """Scale of each warp and row of step s of row group i: [WARPS, 16, 1]; scale [N, K / G], G chunks or several."""
    T = ct.static_eval(min(TOGETHER, TN))
    H = ct.static_eval(TOGETHER // min(TOGETHER, TN))
    HALF = ct.static_eval(WARPS * CHUNK * TOGETHER // min(TOGETHER, TN) // G)
    if 2 * s + 1 < NK:
        tile = plain_tile(scale, (i, s), (T, 2 * HALF), EVEN)
    else:
        tile = ct.cat((plain_tile(scale, (i, 2 * s), (T, HALF), EVEN), ct.zeros((T, HALF), dtype=ct.float32)), 1)
    wide = ct.broadcast_to(tile.reshape((T, 2 * HALF, 1)), (T, 2 * HALF, G // CHUNK)).reshape((T, 2, WARPS, H))
    return ct.permute(wide, (2, 1, 0, 3)).reshape((WARPS, MMA_ROWS, 1))


def digit_scales(scale, i, TN: Int, NK: Int, G: Int, EVEN: Bool):
    """The scales of groups of G columns, laid out as digit_weights."""
    R = ct.static_eval(max(1, TN // TOGETHER))
    return tuple(
        tuple(step_scales(scale, s, i * R + r, TN, NK, G, EVEN) for s in ct.static_iter(range((NK + 1) // 2)))
        for r in ct.static_iter(range(R))
    )


def step_token(x, s, TN: Int, NK: Int):
    """The token's columns of step s, [1, 2 loads], zeros past the end."""
    L = ct.static_eval(WARPS * CHUNK * TOGETHER // min(TOGETHER, TN))
    if 2 * s + 1 < NK:
        return plain_tile(x, (0, s), (1, 2 * L), True)
    return ct.cat((plain_tile(x, (0, 2 * s), (1, L), True), ct.zeros((1, L), dtype=x.dtype)), 1)


def first_token(x, TN: Int, NK: Int):
    """The token in the tiles whose maximum is taken. Those of a long one are no steps: equal loads would be one."""
    L = ct.static_eval(WARPS * CHUNK * TOGETHER // min(TOGETHER, TN))
    if L * NK > KEPT:
        return tuple(plain_tile(x, (0, k), (1, L), True) for k in ct.static_iter(range(NK)))
    return digit_token(x, TN, NK)


def digit_token(x, TN: Int, NK: Int):
    return tuple(step_token(x, s, TN, NK) for s in ct.static_iter(range((NK + 1) // 2)))


def power_of_two(xs, NS: Int):
    """The factor that makes digits of the token, and the one that undoes it, [1, 1]; not finite where x is infinite."""
    top = ct.abs(xs[0])
    for s in ct.static_iter(range(1, NS)):
        top = ct.maximum(top, ct.abs(xs[s]))
    top = ct.max(top.astype(ct.float32), axis=1, keepdims=True)
    e = ct.maximum(ct.bitcast(top, ct.int32) >> 23, LEAST)
    unit = ct.bitcast((254 + BITS - e) << 23, ct.float32)
    return unit, ct.bitcast((e - BITS) << 23, ct.float32) + top * 0.0


def step_digits(x, unit, TN: Int):
    """The digits of a step, [WARPS, 64, 8]: column 2 s + d is digit d of slice s, all of them repeated to fill 8."""
    H = ct.static_eval(TOGETHER // min(TOGETHER, TN))
    bits = ct.bitcast(x.astype(ct.float32) * unit + ROUND, ct.int32)  # the nearest whole number in the low bytes
    lo, hi = bits.astype(ct.int8), ((bits + 128) >> 8).astype(ct.int8)
    d = ct.cat((hi, lo), 0).reshape((2, 2, WARPS, H, 4, 4, 4))
    d = ct.permute(d, (2, 1, 3, 0, 5, 4, 6)).reshape((WARPS, 1, 4 * H, CHUNK))
    d = ct.broadcast_to(d, (WARPS, MMA_COLUMNS // (4 * H), 4 * H, CHUNK)).reshape((WARPS, MMA_COLUMNS, CHUNK))
    return ct.permute(d, (0, 2, 1))


def as_columns(w):
    """A step's weights in the digits' order: the words of 16 neighbouring bytes in four quarters of the chunk."""
    parts = ct.permute(w.reshape((WARPS, MMA_ROWS, 4, 4, 4)), (0, 1, 3, 2, 4))
    return parts.reshape((WARPS, MMA_ROWS, CHUNK))


def own_digits(TN: Int):
    """What a sum in row m and column c of the product counts: 256 or 1 where the slices agree, else 0. [1, 16, 8]."""
    H = ct.static_eval(TOGETHER // min(TOGETHER, TN))
    row = ct.arange(MMA_ROWS, dtype=ct.int32).reshape((1, MMA_ROWS, 1))
    column = ct.arange(MMA_COLUMNS, dtype=ct.int32).reshape((1, 1, MMA_COLUMNS))
    slices = row // TOGETHER * H + row % H
    return ct.where(slices == column // 2, ct.where(column % 2 == 0, 256.0, 1.0), 0.0)


def group_dot(tiles, scales, digits, counts, TN: Int, NS: Int, G: Int):
    """One row group's sums in steps of the token's unit, [1, T] float32; scaled where G > 0."""
    T, H = ct.static_eval(min(TOGETHER, TN)), ct.static_eval(TOGETHER // min(TOGETHER, TN))
    exact = ct.zeros((WARPS, MMA_ROWS, MMA_COLUMNS), dtype=ct.int32)
    total = ct.zeros((WARPS, MMA_ROWS, MMA_COLUMNS), dtype=ct.float32)
    for s in ct.static_iter(range(NS)):
        exact = ct.mma(as_columns(tiles[s]), digits[s], exact)
        if G > 0:
            total = total + exact.astype(ct.float32) * scales[s]
            exact = ct.zeros((WARPS, MMA_ROWS, MMA_COLUMNS), dtype=ct.int32)
    parts = (exact.astype(ct.float32) if G == 0 else total) * counts
    parts = ct.sum(parts, axis=2).reshape((2 * WARPS, T, H))
    return ct.sum(ct.sum(parts, axis=2), axis=0).reshape((1, T))


def digits_dot(tiles, scales, x, xs, TN: Int, NK: Int, G: Int):
    """The token x, in tiles xs, times the block's rows, scaled: [1, TN] float32."""
    NS, R = ct.static_eval((NK + 1) // 2), ct.static_eval(max(1, TN // TOGETHER))
    if ct.static_eval(NK * WARPS * CHUNK * TOGETHER // min(TOGETHER, TN) > KEPT):
        unit, back = power_of_two(xs, NK)
        xs = digit_token(x, TN, NK)
    else:
        unit, back = power_of_two(xs, NS)
    digits = tuple(step_digits(xs[s], unit, TN) for s in ct.static_iter(range(NS)))
    counts = own_digits(TN)
    rows = tuple(
        group_dot(tiles[r], scales[r] if G > 0 else scales, digits, counts, TN, NS, G) for r in ct.static_iter(range(R))
    )
    out = side_by_side(rows, R) * back
    return out * scales[0] if G == 0 else out


def side_by_side(rows, R: Int):
    """1, 2 or 4 tiles of one row as one."""
    if R == 1:
        return rows[0]
    if R == 2:
        return ct.cat((rows[0], rows[1]), 1)
    return ct.cat((ct.cat((rows[0], rows[1]), 1), ct.cat((rows[2], rows[3]), 1)), 1)
