"""The token times a block's INT8 rows, scaled: what the kernels of linear_int8.py do between loads and epilogue.

Two forms, chosen by shape (`Int8Config.form`):

- **rows**: bytes become floats, multiplied and added in float32. Not by a conversion instruction, whose rate (16 a
  clock and SM) would bound a 4B model at some 1,100 µs a step: w · 2¹⁵ added to the bits of 1.5 is the float 1.5 +
  w/256, exactly. So Σ (1.5 + w/256) x is summed and 1.5 Σ x taken off, in float32, before a sum leaves its thread.
  A tile is 1,024 bytes, 8 a thread, and the token is read through a view whose rows are all the same memory, so that
  each thread loads just the 8 numbers that its bytes meet: nothing passes through shared memory. Up to four tiles of
  rows share them.
- **digits**: the tensor cores multiply bytes by bytes; the token becomes two int8 digits. See kernels/int8_digits.py.

One scale a row multiplies the finished sum. With one a group of G columns, the rows form scales the token for each
row, an instruction a weight; the digits form scales the int32 sums of each step, 64 columns of a row, which costs
little.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import cuda.tile as ct

from kernels import configs
from kernels.int8_digits import (
    CHUNK,
    MAX_COLUMNS,
    digit_scales,
    digit_token,
    digit_weights,
    digits_dot,
    load_columns,
    side_by_side,
)
from kernels.linear import plain_tile
from kernels.notation import Bool, Int

ROWS, DIGITS = 0, 1
FORMS = {"rows": ROWS, "digits": DIGITS}
ONE_AND_A_HALF = 0x3FC00000  # the bits of 1.5
TILE = 1024  # bytes of one tile of the rows form: 8 a thread, as the token's half-precision numbers come
STEP = 1 << 15  # one unit of a weight in those bits: 1/256


@dataclass(frozen=True)
class Int8Config:
    """How one block of a product is cut.

    Attributes:
        tile_n: rows of W a block owns; 4, 8, 16 or 32 in the digits form, 1, 2 or 4 tiles of `together` in the other.
        tile_k: columns of one of its tiles, a power of two up to 1,024; in the digits form CHUNK.
        occupancy: blocks per SM the compiler should make room for; None leaves the registers alone.
        form: "rows" or "digits", see above.
    """

    tile_n: int
    tile_k: int
    occupancy: int | None = None
    form: str = "rows"

    @property
    def load(self) -> int:
        """Columns of W that one load takes."""
        return self.tile_k if self.form == "rows" else load_columns(self.tile_n)

    @property
    def together(self) -> int:
        """Rows of one tile of the rows form."""
        return TILE // self.tile_k

    def fitted(self, n: int) -> Int8Config:
        """The same for n rows: as many tiles of rows a block as divide them."""
        if self.form == "digits":
            return self
        tiles = max(1, min(4, self.tile_n // self.together))
        return replace(self, tile_n=self.together * math.gcd(tiles, n))


def linear_int8_config(arch: str, n: int, k: int, group: int | None = None, family: str = "linear_int8") -> Int8Config:
    """The row of configs/<arch>.json for a weight of n rows and k columns in groups of `group` (None: one a row)."""
    try:
        found = Int8Config(**configs.config(family, arch, n=n, k=k, group=group or 0))
    except KeyError:
        return linear_int8_rule(n, k, group).fitted(n)
    if found.form == "digits" and not takes_digits(found.tile_n, n, k, group):
        return linear_int8_rule(n, k, group).fitted(n)
    return found.fitted(n)


def takes_digits(tile_n: int, n: int, k: int, group: int | None) -> bool:
    """Whether the digits form has blocks of so many rows for [N, K] weights in groups.

    Whole loads of whole groups, and no block of which a whole row group hangs over.
    """
    if tile_n not in (4, 8, 16, 32) or k > MAX_COLUMNS or k % load_columns(tile_n) or (tile_n > 8 and n % tile_n):
        return False
    return group is None or (group % CHUNK == 0 and load_columns(tile_n) % group == 0)


def linear_int8_rule(n: int, k: int, group: int | None = None) -> Int8Config:
    """Digits where they fit, in as many rows as leave room for three or four blocks on an SM; else rows.

    On the H200 digits won for every product of Qwen3-0.6B and 4B. `weights` counts the 32-bit registers of a thread
    that hold the block.
    """
    for rows, most, blocks in ((16, 2560, 4), (8, 2560, 4), (8, 4096, 4), (4, 9728, 3), (4, 14336, None)):
        if k <= most and takes_digits(rows, n, k, group):
            # the scales of groups take registers too: 16 rows of 2,560 and theirs spill at four blocks on sm_86
            return Int8Config(rows, CHUNK, None if blocks is None else blocks - (group is not None), "digits")
    tile_k = next((t for t in (256, 128, 64) if k % t == 0), 256)
    rows = 16 if k <= 1536 else 8 if k <= 4096 else 4 if k <= 12288 else 2 if k <= 24576 else 1
    tile_k = max(tile_k, TILE // rows)
    weights = rows * -(-k // tile_k) * tile_k // 512
    occupancy = next((blocks for blocks, most in ((5, 24), (4, 40), (3, 80), (2, 128)) if weights <= most), None)
    if group is not None and occupancy is not None:
        occupancy = max(2, occupancy - 1)  # the scales take registers too
    return Int8Config(rows, tile_k, occupancy)


def block_weights(w, i, TN: Int, TK: Int, NK: Int, FORM: Int, EVEN: Bool):
    """The block's rows in NK loads, asked for before the wait.

    w [N / R, R, K] for R tiles of rows, row t · R + r being row t of tile r; [K / chunk, N, chunk] for digits.
    """
    if FORM == DIGITS:
        return digit_weights(w, i, TN, NK, EVEN)
    T, R = ct.static_eval(TILE // TK), ct.static_eval(TN * TK // TILE)
    return tuple(
        tuple(plain_tile(w, (i, r, k), (T, 1, TK), EVEN).reshape((T, TK)) for k in ct.static_iter(range(NK)))
        for r in ct.static_iter(range(R))
    )


def block_scales(scale, i, TN: Int, TK: Int, NK: Int, G: Int, FORM: Int, EVEN: Bool):
    """The scales of the block's rows, asked for before the wait.

    [1, TN] once for whole rows (G = 0, scale [1, N]); else as the weights lie: [T, TK] (scale [N / R, R, K / G]).
    int8_digits has its own order (scale [N, K / G], [N, 1] for rows).
    """
    if FORM == DIGITS:
        return digit_scales(scale, i, TN, NK, G, EVEN)
    if G == 0:
        return (plain_tile(scale, (0, i), (1, TN), EVEN),)
    R = ct.static_eval(TN * TK // TILE)
    return tuple(
        tuple(tile_scales(scale, i, r, k, TK, G, EVEN) for k in ct.static_iter(range(NK)))
        for r in ct.static_iter(range(R))
    )


def tile_scales(scale, i, r, k, TK: Int, G: Int, EVEN: Bool):
    """The scale of each weight of a tile: [T, TK]."""
    T = ct.static_eval(TILE // TK)
    if G >= TK:
        return ct.broadcast_to(plain_tile(scale, (i, r, k * TK // G), (T, 1, 1), EVEN).reshape((T, 1)), (T, TK))
    tile = plain_tile(scale, (i, r, k), (T, 1, TK // G), EVEN).reshape((T, TK // G, 1))
    return ct.broadcast_to(tile, (T, TK // G, G)).reshape((T, TK))


def block_token(x, TN: Int, TK: Int, NK: Int, G: Int, FORM: Int, EVEN: Bool):
    """The token in the tiles that the products take. x [T, K] for rows, all of them the token; [1, K] for digits."""
    if FORM == DIGITS:
        return digit_token(x, TN, NK, G)
    T = ct.static_eval(TILE // TK)
    return tuple(plain_tile(x, (0, k), (T, TK), EVEN) for k in ct.static_iter(range(NK)))


def as_floats(w):
    """1.5 + w/256 of an int8 tile, exactly."""
    return ct.bitcast(w.astype(ct.int32) * STEP + ONE_AND_A_HALF, ct.float32)


def tile_dot(tiles, scales, xs, offset, TK: Int, NK: Int, G: Int):
    """The token times one tile of rows, [T, 1] float32; offset is 1.5 Σ x of each thread's columns, where G = 0."""
    T = ct.static_eval(TILE // TK)
    total = ct.zeros((T, TK), dtype=ct.float32)
    for k in ct.static_iter(range(NK)):
        xt = xs[k].astype(ct.float32)
        if G > 0:
            xt = xt * scales[k]
            offset = offset + 1.5 * xt
        total = total + as_floats(tiles[k]) * xt
    return ct.sum(total - offset, axis=1, keepdims=True)


def rows_dot(tiles, scales, xs, TN: Int, TK: Int, NK: Int, G: Int):
    """The token, in tiles xs [T, TK] of equal rows, times the block's rows, scaled: [1, TN] float32."""
    T, R = ct.static_eval(TILE // TK), ct.static_eval(TN * TK // TILE)
    offset = ct.zeros((T, TK), dtype=ct.float32)
    if G == 0:
        for k in ct.static_iter(range(NK)):
            offset = offset + xs[k].astype(ct.float32)
    offset = offset * 1.5
    rows = tuple(
        tile_dot(tiles[r], scales[r] if G > 0 else scales, xs, offset, TK, NK, G) for r in ct.static_iter(range(R))
    )
    out = side_by_side(rows, R).reshape((1, TN)) * 256.0
    return out * scales[0] if G == 0 else out


def block_dot(tiles, scales, x, xs, square_sums, TN: Int, TK: Int, NK: Int, NB: Int, G: Int, FORM: Int):
    """The token x, in tiles xs, times the block's rows, scaled, [1, TN] float32; and Σ square_sums, 0 where NB = 0."""
    if FORM == DIGITS:
        return digits_dot(tiles, scales, x, xs, square_sums, TN, NK, NB, G)
    squares = 0.0
    if NB:
        squares = ct.sum(plain_tile(square_sums, (0, 0), (1, NB), True), axis=1, keepdims=True)
    return rows_dot(tiles, scales, xs, TN, TK, NK, G), squares
