"""The token times a block's INT8 rows, scaled: what the kernels of linear_int8.py do between loads and epilogue.

Two forms, chosen by shape (`Int8Config.form`):

- **rows**: bytes become floats, multiplied and added in float32. Not by a conversion instruction, whose rate (16 a
  clock and SM) would bound a 4B model at some 1,100 µs a step: w · 2¹⁵ added to the bits of 1.5 is the float 1.5 +
  w/256, exactly. So Σ (1.5 + w/256) x is summed and 1.5 Σ x taken off, in float32, before a sum leaves its thread.
- **digits**: the tensor cores multiply bytes by bytes; the token becomes two int8 digits. See kernels/int8_digits.py.

One scale a row multiplies the finished sum. With one a group of G columns, the rows form sums 16 neighbours in their
thread and scales them, which costs a fifth more instructions and barriers; the digits form scales the int32 sums of
each step, 64 columns of a row, which costs little.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import cuda.tile as ct

from kernels import configs
from kernels.int8_digits import CHUNK, MAX_COLUMNS, digit_scales, digit_token, digit_weights, digits_dot, load_columns
from kernels.int8_scales import LOAD
from kernels.linear import plain_tile, weight_tiles
from kernels.notation import Bool, Int

ROWS, DIGITS = 0, 1
FORMS = {"rows": ROWS, "digits": DIGITS}
ONE_AND_A_HALF = 0x3FC00000  # the bits of 1.5
STEP = 1 << 15  # one unit of a weight in those bits: 1/256


@dataclass(frozen=True)
class Int8Config:
    """How one block of a product is cut.

    Attributes:
        tile_n: rows of W a block owns; 4, 8, 16 or 32 in the digits form.
        tile_k: columns of one of its tiles; in the digits form CHUNK.
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


def linear_int8_config(arch: str, n: int, k: int, group: int | None = None, family: str = "linear_int8") -> Int8Config:
    """The row of configs/<arch>.json for a weight of n rows and k columns in groups of `group` (None: one a row)."""
    try:
        found = Int8Config(**configs.config(family, arch, n=n, k=k, group=group or 0))
    except KeyError:
        found = linear_int8_rule(n, k, group)
    if group is None or found.form == "digits":
        return found
    return replace(found, tile_k=max(found.tile_k, group))


def takes_digits(tile_n: int, n: int, k: int, group: int | None) -> bool:
    """Whether the digits form has blocks of so many rows for [N, K] weights in groups.

    Whole loads of whole groups, and no block of which a whole row group hangs over.
    """
    if tile_n not in (4, 8, 16, 32) or k > MAX_COLUMNS or k % load_columns(tile_n) or (tile_n > 8 and n % tile_n):
        return False
    return group is None or (group % CHUNK == 0 and load_columns(tile_n) % group == 0)


def linear_int8_rule(n: int, k: int, group: int | None = None) -> Int8Config:
    """Eight rows while they are no more than 32 KiB, in tiles of 256 columns; and blocks enough to hide their latency.

    On the H200 the occupancy mattered most: without a hint the compiler takes twice the registers (4B: 2,040 µs a step,
    1,422 µs with hints). `weights` counts the 32-bit registers of a thread that hold them.
    """
    if group is not None and k <= 4096 and takes_digits(8, n, k, group):
        return Int8Config(8, CHUNK, 4 if k <= 2560 else 3, "digits")  # where scales of groups cost next to nothing
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


def block_weights(w, i, TN: Int, TK: Int, NK: Int, FORM: Int, EVEN: Bool):
    """The block's rows in NK loads, asked for before the wait. w [N, K] for rows, [K / chunk, N, chunk] for digits."""
    if FORM == ROWS:
        return weight_tiles(w, i, 0, TN, TK, NK, EVEN)
    return digit_weights(w, i, TN, NK, EVEN)


def block_scales(scale, i, TN: Int, TK: Int, NK: Int, G: Int, FORM: Int, EVEN: Bool):
    """The scales of the block's rows, asked for before the wait.

    [1, TN] once for whole rows (G = 0); else as the sums have them: [TN, TK / 16] for each load of rows, or
    int8_digits' order.
    """
    if G == 0:
        return (plain_tile(scale, (0, i), (1, TN), EVEN),)
    if FORM == ROWS:
        return tuple(thread_scales(scale, i, k, TN, TK, G, EVEN) for k in ct.static_iter(range(NK)))
    return digit_scales(scale, i, TN, NK, G, EVEN)


def block_token(x, TN: Int, TK: Int, NK: Int, FORM: Int, EVEN: Bool):
    """The token in the tiles that the products take."""
    if FORM == ROWS:
        return tuple(plain_tile(x, (0, k), (1, TK), EVEN) for k in ct.static_iter(range(NK)))
    return digit_token(x, TN, NK)


def thread_scales(scale, i, k, TN: Int, TK: Int, G: Int, EVEN: Bool):
    """Scale of each 16 neighbours of a tile: [TN, TK / 16]."""
    tile = plain_tile(scale, (i, k), (TN, TK // G), EVEN).reshape((TN, TK // G, 1))
    return ct.broadcast_to(tile, (TN, TK // G, G // LOAD)).reshape((TN, TK // LOAD))


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


def block_dot(tiles, scales, xs, TN: Int, TK: Int, NK: Int, G: Int, FORM: Int):
    """The token times the block's rows, scaled: [1, TN] float32."""
    if FORM == ROWS:
        return rows_dot(tiles, scales, xs, TN, TK, NK, G)
    return digits_dot(tiles, scales, xs, TN, NK, G)
