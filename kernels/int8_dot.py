"""The token times a block's INT8 rows, scaled: what the kernels of linear_int8.py do between loads and epilogue.

Two forms, chosen by shape (`Int8Config.form`):

- **rows**: bytes become floats, multiplied and added in float32. Not by a conversion instruction, whose rate (16 a
  clock and SM) would bound a 4B model at some 1,100 µs a step: w · 2¹⁵ added to the bits of 1.5 is the float 1.5 +
  w/256, exactly. So Σ (1.5 + w/256) x is summed and 1.5 Σ x taken off, in float32, before a sum leaves its thread.
- **digits**: the tensor cores multiply bytes by bytes. The token becomes two int8 digits, x ≈ s (128 hi + lo) with
  s = max |x| / 16,256: 15 bits. The narrowest product has 16 rows of weights and 8 columns. Blocks of fewer rows
  fill them with slices of K: rows of slice i meet the digits of slice j in column pair j, and only i = j is kept. Each
  of four warps has a quarter of every 4 · slices · tile_k columns. int32 sums are exact while 128 · 127 · K < 2³¹.

One scale a row multiplies the finished sum. With one a group of G columns, the rows form sums 16 neighbours in their
thread and scales them, which costs a fifth more instructions and barriers; the digits form scales the int32 sums of
each step, which costs next to nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import cuda.tile as ct

from kernels import configs
from kernels.int8_rows import nearest
from kernels.int8_scales import LOAD
from kernels.linear import plain_tile
from kernels.notation import Bool, Int

MAX_COLUMNS = ((1 << 31) - 1) // (127 * 128)  # whose products with digits fit int32 whatever their values
ROWS, DIGITS = 0, 1
FORMS = {"rows": ROWS, "digits": DIGITS}
WARPS, MMA_ROWS, MMA_COLUMNS = 4, 16, 8  # of the digits form's product
LARGEST = 16256.0  # 127 · 128: the largest token in digits, (127, 0)
ONE_AND_A_HALF = 0x3FC00000  # the bits of 1.5
STEP = 1 << 15  # one unit of a weight in those bits: 1/256


@dataclass(frozen=True)
class Int8Config:
    """How one block of a product is cut.

    Attributes:
        tile_n: rows of W a block owns; 4, 8 or 16 in the digits form.
        tile_k: columns of one of its tiles. In the digits form those of one warp and slice of K, from 32 up; a step
            takes 4 · 16 / tile_n of them, and whole steps must make up K.
        occupancy: blocks per SM the compiler should make room for; None leaves the registers alone.
        form: "rows" or "digits", see above.
    """

    tile_n: int
    tile_k: int
    occupancy: int | None = None
    form: str = "rows"

    @property
    def step(self) -> int:
        """Columns of W that one load takes."""
        return self.tile_k if self.form == "rows" else WARPS * MMA_ROWS // self.tile_n * self.tile_k


def linear_int8_config(arch: str, n: int, k: int, group: int | None = None, family: str = "linear_int8") -> Int8Config:
    """The row of configs/<arch>.json for a weight of n rows and k columns in groups of `group` (None: one a row)."""
    try:
        found = Int8Config(**configs.config(family, arch, n=n, k=k, group=group or 0))
    except KeyError:
        found = linear_int8_rule(n, k, group)
    if group is None:
        return found
    if found.form == "digits":
        return replace(found, tile_k=min(found.tile_k, group))
    return replace(found, tile_k=max(found.tile_k, group))


def linear_int8_rule(n: int, k: int, group: int | None = None) -> Int8Config:
    """Eight rows while they are no more than 32 KiB, in tiles of 256 columns; and blocks enough to hide their latency.

    On the H200 the occupancy mattered most: without a hint the compiler takes twice the registers (4B: 2,040 µs a step,
    1,422 µs with hints). `weights` counts the 32-bit registers of a thread that hold them.
    """
    if group is not None and k <= 4096 and k % 512 == 0:
        return Int8Config(8, 64, 4 if k <= 2560 else 3, "digits")  # where scales of groups cost next to nothing
    tile_k = next((t for t in (256, 128, 64) if k % t == 0), 256)
    rows = 16 if tile_k <= 128 else 8
    if k > 4096:
        four = 14336 if group is None else 12288  # 14,336 columns and their scales spill 8 bytes on sm_86 and sm_89
        tile_k, rows = next((t for t in (512, 256) if k % t == 0), 512), 4 if k <= four else 2 if k <= 28672 else 1
    weights = rows * -(-k // tile_k) * tile_k // 512
    occupancy = next((blocks for blocks, most in ((5, 24), (4, 40), (3, 80), (2, 128)) if weights <= most), None)
    if group is not None and occupancy is not None:
        occupancy = max(2, occupancy - 1)  # the scales take registers too
    return Int8Config(min(rows, 1 << (n - 1).bit_length()), tile_k, occupancy)


def scale_tiles(scale, i, TN: Int, TK: Int, NK: Int, G: Int, FORM: Int, EVEN: Bool):
    """The scales of the block's rows, asked for before the wait.

    [1, TN] once for whole rows (G = 0); else a tile for each load of weights, as the sums have them: [TN, TK / 16], or
    [WARPS, MMA_ROWS, 1] for digits.
    """
    if G == 0:
        return (plain_tile(scale, (0, i), (1, TN), EVEN),)
    if FORM == ROWS:
        return tuple(thread_scales(scale, i, k, TN, TK, G, EVEN) for k in ct.static_iter(range(NK)))
    return tuple(warp_scales(scale, i, k, TN, TK, G, EVEN) for k in ct.static_iter(range(NK)))


def thread_scales(scale, i, k, TN: Int, TK: Int, G: Int, EVEN: Bool):
    """Scale of each 16 neighbours of a tile: [TN, TK / 16]."""
    tile = plain_tile(scale, (i, k), (TN, TK // G), EVEN).reshape((TN, TK // G, 1))
    return ct.broadcast_to(tile, (TN, TK // G, G // LOAD)).reshape((TN, TK // LOAD))


def warp_scales(scale, i, k, TN: Int, TK: Int, G: Int, EVEN: Bool):
    """Scale of each warp and row of a digits step: [WARPS, MMA_ROWS, 1]; G is TK or several of it."""
    S = ct.static_eval(MMA_ROWS // TN)
    GROUPS = ct.static_eval(MMA_ROWS // TN * WARPS * TK // G)
    tile = plain_tile(scale, (i, k), (TN, GROUPS), EVEN).reshape((TN, GROUPS, 1))
    wide = ct.broadcast_to(tile, (TN, GROUPS, G // TK)).reshape((TN, S, WARPS))
    return ct.permute(wide, (2, 1, 0)).reshape((WARPS, MMA_ROWS, 1))


def as_floats(w):
    """1.5 + w/256 of an int8 tile, exactly."""
    return ct.bitcast(w.astype(ct.int32) * STEP + ONE_AND_A_HALF, ct.float32)


def rows_dot(tiles, scales, xs, TN: Int, TK: Int, NK: Int, G: Int):
    """The token, in tiles xs [1, TK], times the block's rows, scaled: [1, TN] float32."""
    if G == 0:
        total = ct.zeros((TN, TK), dtype=ct.float32)
        offset = ct.zeros((1, TK), dtype=ct.float32)
        for k in ct.static_iter(range(NK)):
            xt = xs[k].astype(ct.float32)
            total = total + as_floats(tiles[k]) * xt
            offset = offset + xt
        rows = ct.sum(total - 1.5 * offset, axis=1).reshape((1, TN))
        return rows * (scales[0] * 256.0)
    parts = ct.zeros((TN, TK // LOAD), dtype=ct.float32)
    for k in ct.static_iter(range(NK)):
        xt = xs[k].astype(ct.float32)
        part = ct.sum((as_floats(tiles[k]) * xt).reshape((TN, TK // LOAD, LOAD)), axis=2)
        offsets = ct.sum(xt.reshape((1, TK // LOAD, LOAD)), axis=2)
        parts = parts + (part - 1.5 * offsets) * scales[k]
    return ct.sum(parts, axis=1).reshape((1, TN)) * 256.0


def two_digits(x):
    """Integers hi and lo, |lo| ≤ 64, of the whole number nearest to a float within ±LARGEST: 128 hi + lo."""
    q = nearest(x)
    hi = (q + 64) >> 7
    return hi, q - hi * 128


def largest_of(xs, STEP: Int, NK: Int):
    """max |x| over all tiles, never 0: [1, 1]."""
    top = ct.zeros((1, STEP), dtype=ct.float32)
    for k in ct.static_iter(range(NK)):
        top = ct.maximum(top, ct.abs(xs[k].astype(ct.float32)))
    return ct.maximum(ct.max(top, axis=1, keepdims=True), 1e-30)


def digit_columns(x, unit, S: Int, TK: Int):
    """The digits of a step of the token, [WARPS, TK, MMA_COLUMNS]: column 2 s + d is digit d of slice s, repeated."""
    hi, lo = two_digits(x.astype(ct.float32) * unit)
    d = ct.cat((hi.astype(ct.int8), lo.astype(ct.int8)), 0).reshape((2, S, WARPS, TK))
    d = ct.permute(d, (2, 1, 0, 3)).reshape((WARPS, 1, 2 * S, TK))
    d = ct.broadcast_to(d, (WARPS, MMA_COLUMNS // (2 * S), 2 * S, TK)).reshape((WARPS, MMA_COLUMNS, TK))
    return ct.permute(d, (0, 2, 1))


def digits_dot(tiles, scales, xs, TN: Int, TK: Int, NK: Int, G: Int):
    """rows_dot through the tensor cores; TK columns a warp and slice."""
    S = ct.static_eval(MMA_ROWS // TN)
    top = largest_of(xs, ct.static_eval(WARPS * MMA_ROWS // TN * TK), NK)
    unit = LARGEST / top
    exact = ct.zeros((WARPS, MMA_ROWS, MMA_COLUMNS), dtype=ct.int32)
    total = ct.zeros((WARPS, MMA_ROWS, MMA_COLUMNS), dtype=ct.float32)
    for k in ct.static_iter(range(NK)):
        d = digit_columns(xs[k], unit, S, TK)
        w = ct.permute(tiles[k].reshape((TN, S, WARPS, TK)), (2, 1, 0, 3)).reshape((WARPS, MMA_ROWS, TK))
        exact = ct.mma(w, d, exact)
        if G > 0:
            total = total + exact.astype(ct.float32) * scales[k]
            exact = ct.zeros((WARPS, MMA_ROWS, MMA_COLUMNS), dtype=ct.int32)
    parts = ct.sum(exact, axis=0).astype(ct.float32) if G == 0 else ct.sum(total, axis=0)
    slice_of_row = ct.arange(MMA_ROWS, dtype=ct.int32).reshape((MMA_ROWS, 1)) // TN
    column = ct.arange(MMA_COLUMNS, dtype=ct.int32).reshape((1, MMA_COLUMNS))
    parts = parts * ct.where(column % 2 == 0, 128.0, 1.0)
    rows = ct.sum(ct.where(slice_of_row == column // 2, parts, 0.0), axis=1)  # its own slice's two digits
    rows = ct.sum(rows.reshape((S, TN)), axis=0).reshape((1, TN)) * (top * (1.0 / LARGEST))
    return rows * scales[0] if G == 0 else rows


def step_columns(TN: Int, TK: Int, FORM: Int):
    """Columns of W that one load takes."""
    return ct.static_eval(TK if FORM == ROWS else WARPS * MMA_ROWS // TN * TK)


def block_dot(tiles, scales, xs, TN: Int, TK: Int, NK: Int, G: Int, FORM: Int):
    """The token in tiles xs [1, columns of a load] times the block's rows, scaled: [1, TN] float32."""
    if FORM == ROWS:
        return rows_dot(tiles, scales, xs, TN, TK, NK, G)
    return digits_dot(tiles, scales, xs, TN, TK, NK, G)
