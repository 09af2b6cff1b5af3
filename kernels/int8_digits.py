"""A block's INT8 rows times the token by the matrix unit, bytes by bytes: the "digits" form of kernels/int8_dot.py.

    x ≈ s (256 hi + lo),   s a power of two, |256 hi + lo| ≤ 2¹⁴

The narrowest product that reaches the tensor cores has 16 rows of weights and 8 columns (of four in a batch, one a
warp). Eight rows of W fill the 16 with two slices of K, four rows with four: rows of slice i meet the digits of slice j
in column pair j, and only i = j is kept. Making the digits costs more than multiplying by them, so up to 32 rows share
them, 8 at a time.

Nothing of the weights passes through shared memory, nor from one register to another. A lane reads 16 bytes, four lanes
a chunk of 64 columns, and a product of 16 × 32 takes the four words of a lane as its four operands: the first two words
are one column group of slices 0 and 1, the last two another. So the bytes of a load lie where the matrix unit reads
them, and the token's digits are put in the same order.

int32 sums are exact while 128 · 127 · K < 2³¹ (MAX_COLUMNS), whatever the values.
"""

from __future__ import annotations

import cuda.tile as ct

from kernels.int8_rows import ROUND, largest_and_sum
from kernels.linear import plain_tile
from kernels.notation import ZERO, Bool, Int

MAX_COLUMNS = ((1 << 31) - 1) // (127 * 128)
WARPS, MMA_ROWS, MMA_COLUMNS, MMA_DEPTH = 4, 16, 8, 32
CHUNK = 64  # columns of a row that four lanes read
TOGETHER = MMA_ROWS // 2  # rows, or rows and chunks of them, in one load of a warp
BITS = 13  # of the digits below the largest number's leading one
KEPT = 4096  # columns of the token that stay in registers from its maximum on; a longer one is read again, from L1
LEAST = 14  # exponent field of the smallest scale that is a normal number
WIDE = 512  # columns of the token whose maximum is taken together, and sums of squares beside them


def rows_together(TN: int) -> int:
    """Rows of W in one load of a warp."""
    return min(TOGETHER, TN)


def chunks_together(TN: int) -> int:
    """Neighbouring chunks of each of them."""
    return TOGETHER // rows_together(TN)


def row_groups(TN: int) -> int:
    """Loads of a warp, one below the other, that make up the block's rows."""
    return max(1, TN // TOGETHER)


def load_columns(TN: int) -> int:
    """Columns of W that one load of a block of TN rows takes: a chunk of each row for each warp, or two."""
    return WARPS * chunk_columns(TN)


def chunk_columns(TN: int) -> int:
    """Neighbouring columns of a row in one load of a warp."""
    return CHUNK * chunks_together(TN)


def load_weights(w, k, i, TN: Int, EVEN: Bool):
    """Load k of row group i as the matrix unit has it, [WARPS, 16, 32]; w [K / chunk, N, chunk]."""
    T, C = ct.static_eval(rows_together(TN)), ct.static_eval(chunk_columns(TN))
    tile = plain_tile(w, (k, i, 0), (WARPS, T, C), EVEN).reshape((WARPS, TOGETHER, 4, 2, 2, 4))
    return ct.permute(tile, (0, 4, 1, 3, 2, 5)).reshape((WARPS, MMA_ROWS, MMA_DEPTH))


def digit_weights(w, i, TN: Int, NK: Int, EVEN: Bool):
    """All NK loads of all row groups of the block."""
    R = ct.static_eval(row_groups(TN))
    return tuple(
        tuple(load_weights(w, k, i * R + r, TN, EVEN) for k in ct.static_iter(range(NK)))
        for r in ct.static_iter(range(R))
    )


def load_scales(scale, k, i, TN: Int, G: Int, EVEN: Bool):
    """Scale of each warp and row of load k of row group i: [WARPS, 16, 1]; scale [N, K / G], G chunks or several."""
    T, H = ct.static_eval(rows_together(TN)), ct.static_eval(chunks_together(TN))
    GROUPS = ct.static_eval(load_columns(TN) // G)
    tile = plain_tile(scale, (i, k), (T, GROUPS), EVEN).reshape((T, GROUPS, 1))
    wide = ct.broadcast_to(tile, (T, GROUPS, G // CHUNK)).reshape((T, WARPS, H))
    wide = ct.permute(wide, (1, 0, 2)).reshape((WARPS, 1, TOGETHER))
    return ct.broadcast_to(wide, (WARPS, 2, TOGETHER)).reshape((WARPS, MMA_ROWS, 1))


def row_scales(scale, i, TN: Int, EVEN: Bool):
    """One scale for each row of row group i: [1, 16, 1]; scale [N, 1].

    In the sums' layout: as one row [1, TN] of a block, the load would be issued where it is used, last.
    """
    T, H = ct.static_eval(rows_together(TN)), ct.static_eval(chunks_together(TN))
    tile = plain_tile(scale, (i, 0), (T, 1), EVEN).reshape((1, T, 1))
    return ct.broadcast_to(tile, (2, T, H)).reshape((1, MMA_ROWS, 1))


def digit_scales(scale, i, TN: Int, NK: Int, G: Int, EVEN: Bool):
    """The scales of rows (G = 0), or of groups of G columns laid out as digit_weights."""
    R = ct.static_eval(row_groups(TN))
    if G == 0:
        return tuple(row_scales(scale, i * R + r, TN, EVEN) for r in ct.static_iter(range(R)))
    return tuple(
        tuple(load_scales(scale, k, i * R + r, TN, G, EVEN) for k in ct.static_iter(range(NK)))
        for r in ct.static_iter(range(R))
    )


def token_columns(TN: int, NK: int, G: int) -> int:
    """Columns of the token that become digits together: one load's, or two's if they need not be told apart."""
    L = load_columns(TN)
    return 2 * L if L == 256 and NK % 2 == 0 and G == 0 else L


def digit_token(x, TN: Int, NK: Int, G: Int):
    """The token in the tiles that digits are made of, [1, token_columns]."""
    C = ct.static_eval(token_columns(TN, NK, G))
    COUNT = ct.static_eval(NK * load_columns(TN) // token_columns(TN, NK, G))
    return tuple(plain_tile(x, (0, k), (1, C), True) for k in ct.static_iter(range(COUNT)))


def kept_maximum(xs, COUNT: Int):
    """max |x| of the tiles, element by element, in their own type."""
    top = ct.abs(xs[0])
    for k in ct.static_iter(range(1, COUNT)):
        top = ct.maximum(top, ct.abs(xs[k]))
    return top


def long_maximum(x, NK: Int):
    """The same of a long token, [1, WIDE]. In tiles of other sizes than the digits': equal loads would become one."""
    top = ct.zeros((1, 2 * WIDE), dtype=x.dtype)
    for k in ct.static_iter(range(NK // 2)):
        top = ct.maximum(top, ct.abs(plain_tile(x, (0, k), (1, 2 * WIDE), True)))
    halves = ct.maximum(ct.extract(top, (0, 0), (1, WIDE)), ct.extract(top, (0, 1), (1, WIDE)))
    if NK % 2:
        halves = ct.maximum(halves, ct.abs(plain_tile(x, (0, NK - 1), (1, WIDE), True)))
    return halves


def sums_tile(square_sums, NB: Int, C: Int):
    """Partial sums [1, NB] added up into a tile [1, C]."""
    if NB < C:
        return ct.load(square_sums, index=(0, 0), shape=(1, C), padding_mode=ZERO, allow_tma=False)
    total = plain_tile(square_sums, (0, 0), (1, C), True)
    for k in ct.static_iter(range(1, NB // C)):
        total = total + plain_tile(square_sums, (0, k), (1, C), True)
    return total


def power_of_two(top):
    """The factor that makes digits of the token, and the one that undoes it, [1, 1]; not finite where x is infinite."""
    e = ct.maximum(ct.bitcast(top, ct.int32) >> 23, LEAST)
    unit = ct.bitcast((254 + BITS - e) << 23, ct.float32)
    return unit, ct.bitcast((e - BITS) << 23, ct.float32) + top * 0.0


def tile_digits(x, unit, TN: Int, LOADS: Int, LONG: Bool):
    """The digits of a tile of one or two loads, [WARPS, 32 · loads, 8].

    Column 2 s + d is digit d of slice s, all of them repeated to fill 8. Of a LONG token they are made in fewer
    instructions: the 128 is in the constant that rounds, and lo's top bit is turned, four bytes at a time. Short ones
    gain nothing (docs/kernels.md).
    """
    H = ct.static_eval(chunks_together(TN))
    if LONG:
        bits = ct.bitcast(x.astype(ct.float32) * unit + (ROUND + 128.0), ct.int32)
        lo, hi = bits.astype(ct.int8) ^ ct.full((1, 1), -128, dtype=ct.int8), (bits >> 8).astype(ct.int8)
    else:
        bits = ct.bitcast(x.astype(ct.float32) * unit + ROUND, ct.int32)  # the nearest whole number in the low bytes
        lo, hi = bits.astype(ct.int8), ((bits + 128) >> 8).astype(ct.int8)
    d = ct.cat((hi, lo), 0).reshape((2, LOADS, WARPS, H, 4, 2, 2, 4))
    d = ct.permute(d, (2, 3, 6, 0, 1, 5, 4, 7)).reshape((WARPS, 1, 4 * H, MMA_DEPTH * LOADS))
    d = ct.broadcast_to(d, (WARPS, MMA_COLUMNS // (4 * H), 4 * H, MMA_DEPTH * LOADS))
    return ct.permute(d.reshape((WARPS, MMA_COLUMNS, MMA_DEPTH * LOADS)), (0, 2, 1))


def own_digits(TN: Int):
    """What a sum in row m and column c of the product counts: 256 or 1 where the slices agree, else 0. [1, 16, 8]."""
    H = ct.static_eval(chunks_together(TN))
    row = ct.arange(MMA_ROWS, dtype=ct.int32).reshape((1, MMA_ROWS, 1))
    column = ct.arange(MMA_COLUMNS, dtype=ct.int32).reshape((1, 1, MMA_COLUMNS))
    slices = row % H * 2 + row // TOGETHER
    return ct.where(slices == column // 2, ct.where(column % 2 == 0, 256.0, 1.0), 0.0)


def whole_rows(tiles, digits, COUNT: Int, LOADS: Int):
    """A row group's sums in steps of the token's unit, added up in int32, exactly: [WARPS, 16, 8] float32."""
    exact = ct.zeros((WARPS, MMA_ROWS, MMA_COLUMNS), dtype=ct.int32)
    for s in ct.static_iter(range(COUNT)):
        w = tiles[s] if LOADS == 1 else ct.cat((tiles[2 * s], tiles[2 * s + 1]), 2)
        exact = ct.mma(w, digits[s], exact)
    return exact.astype(ct.float32)


def scaled_rows(tiles, scales, digits, COUNT: Int):
    """The same with a scale for each load's rows: [WARPS, 16, 8] float32."""
    total = ct.zeros((WARPS, MMA_ROWS, MMA_COLUMNS), dtype=ct.float32)
    for k in ct.static_iter(range(COUNT)):
        zero = ct.zeros((WARPS, MMA_ROWS, MMA_COLUMNS), dtype=ct.int32)
        total = total + ct.mma(tiles[k], digits[k], zero).astype(ct.float32) * scales[k]
    return total


def digits_dot(tiles, scales, x, xs, square_sums, TN: Int, NK: Int, NB: Int, G: Int):
    """The token x, in tiles xs, times the block's rows, scaled: [1, TN] float32; and Σ square_sums, 0 where NB = 0."""
    R = ct.static_eval(row_groups(TN))
    LOADS = ct.static_eval(token_columns(TN, NK, G) // load_columns(TN))
    COUNT = ct.static_eval(NK * load_columns(TN) // token_columns(TN, NK, G))
    LONG = ct.static_eval(NK * load_columns(TN) > KEPT)
    if LONG:
        top = long_maximum(x, ct.static_eval(NK * load_columns(TN) // WIDE))
        xs = digit_token(x, TN, NK, G)
    else:
        top = kept_maximum(xs, COUNT)
    squares = 0.0
    if NB:
        both = top.astype(ct.float32), sums_tile(square_sums, NB, top.shape[1])
        top, squares = ct.reduce(both, 1, largest_and_sum, (0.0, 0.0), keepdims=True)
    else:
        top = ct.max(top.astype(ct.float32), axis=1, keepdims=True)
    unit, back = power_of_two(top)
    digits = tuple(tile_digits(xs[s], unit, TN, LOADS, LONG) for s in ct.static_iter(range(COUNT)))
    counts = own_digits(TN)
    if G == 0:
        sums = tuple(whole_rows(tiles[r], digits, COUNT, LOADS) for r in ct.static_iter(range(R)))
        sums = tuple(sums[r] * scales[r] for r in ct.static_iter(range(R)))
    else:
        sums = tuple(scaled_rows(tiles[r], scales[r], digits, COUNT) for r in ct.static_iter(range(R)))
    parts = tuple(ct.sum(sums[r] * counts, axis=2) for r in ct.static_iter(range(R)))
    return over_warps(side_by_side(parts, R), TN, R) * back, squares


def over_warps(parts, TN: Int, R: Int):
    """Sums [WARPS, 16 R] of row groups as the block's rows, [1, TN]."""
    T, H = ct.static_eval(rows_together(TN)), ct.static_eval(chunks_together(TN))
    parts = ct.permute(parts.reshape((WARPS, R, 2, T, H)), (0, 2, 4, 1, 3)).reshape((WARPS * 2 * H, TN))
    return ct.sum(parts, axis=0).reshape((1, TN))


def side_by_side(rows, R: Int):
    """1, 2 or 4 tiles as one, along their second axis."""
    if R == 1:
        return rows[0]
    if R == 2:
        return ct.cat((rows[0], rows[1]), 1)
    return ct.cat((ct.cat((rows[0], rows[1]), 1), ct.cat((rows[2], rows[3]), 1)), 1)
