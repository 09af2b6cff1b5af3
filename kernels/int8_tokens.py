"""What a block of linear_int8_tokens.py does, in the product and in the kernel that ends it: tiles, sums, cuts.

Columns of the product are digits: 2t is token t's high digit, 2t + 1 its low one, so that both sums lie in one thread.
"""

from __future__ import annotations

from dataclasses import dataclass

import cuda.tile as ct

from kernels.configs import configured
from kernels.digit_slices import SLICE, slices
from kernels.linear import plain_tile
from kernels.notation import ZERO, Bool, Int

NARROWEST = 32  # columns of a product of bytes
LARGEST_PRODUCT = 128 * 127  # of a weight, -128 … 127, and a digit, -127 … 127
MAX_COLUMNS = (1 << 24) // LARGEST_PRODUCT  # whose sums are whole numbers of float32, and of int32, whatever the values


@dataclass(frozen=True)
class Int8TokensConfig:
    """How one block of a product is cut.

    Attributes:
        tile_n: rows of W a block owns, 64 or 128.
        tile_k: columns of one load and product, 32 to 512.
        steps: slices of 512 columns a block owns; all are loaded before the wait.
        occupancy: blocks per SM the compiler should make room for; None leaves the registers alone.
    """

    tile_n: int = 64
    tile_k: int = 128
    steps: int = 1
    occupancy: int | None = None


def linear_int8_tokens_config(arch: str, n: int, k: int, group: int | None = None) -> Int8TokensConfig:
    """The row of configs/<arch>.json for a weight of n rows and k columns, or the rule. `group`: columns of a scale."""
    return configured(Int8TokensConfig, "linear_int8_tokens", arch, n=n, k=k, group=group or 0)


def part_floats(arch: str, tokens: int, n: int, k: int, group: int | None = None) -> int:
    """Length of the workspace `parts` for a product."""
    return slices(k) // linear_int8_tokens_config(arch, n, k, group).steps * tokens * n


def check_cut(op: str, c: Int8TokensConfig, k: int, group: int | None) -> int:
    """Columns of a tile, which lies within a group and within a slice."""
    if group is not None and group < NARROWEST:
        raise ValueError(f"{op}: scales of {group} columns, expected {NARROWEST} or more")
    if c.tile_n not in (64, 128) or c.tile_k not in (32, 64, 128, 256, SLICE) or c.steps < 1 or slices(k) % c.steps:
        raise ValueError(
            f"{op}: blocks of {c.tile_n} rows, {c.tile_k} columns, {c.steps} of {slices(k)} slices, expected 64 or 128 "
            f"rows, a power of two from {NARROWEST} to {SLICE} columns, and equal shares"
        )
    summed = min(SLICE, group or SLICE)
    if summed > MAX_COLUMNS:
        raise ValueError(f"{op}: {summed} columns a sum, which is a whole number of float32 up to {MAX_COLUMNS}")
    return min(c.tile_k, group or SLICE)


def last_tile(w, j, MK: Int):
    """j, or the last column tile where the last slice has fewer: digit_tile is 0 then."""
    return ct.minimum(j, (w.shape[1] - 1) // MK)


def early_tile(w, i, j, TN: Int, MK: Int, EVEN: Bool):
    """A tile of weights by plain loads, which are issued at once."""
    return plain_tile(w, (i, j if EVEN else last_tile(w, j, MK)), (TN, MK), EVEN)


def digit_tile(digits, j, MK: Int, COLUMNS: Int, EVEN: Bool):
    """Columns j · MK … of the tokens, [MK, COLUMNS]; 0 past the row."""
    if EVEN:
        return ct.load(digits, index=(j, 0), shape=(MK, COLUMNS), order=(1, 0), allow_tma=False, check_bounds=False)
    last = last_tile(digits, j, MK)
    tile = ct.load(digits, index=(last, 0), shape=(MK, COLUMNS), order=(1, 0), allow_tma=False, padding_mode=ZERO)
    return ct.where(j == last, tile, 0)


def run_scales(scale, i, s, TN: Int, G: Int, EVEN: Bool):
    """The rows' scales of slice s, [TN, 1] for each run of columns that shares one (the whole slice where G = 0)."""
    if G == 0:
        return (plain_tile(scale, (i, 0), (TN, 1), EVEN),)
    if G >= SLICE:
        return (group_scales(scale, i, s // ct.static_eval(G // SLICE), TN, EVEN),)
    RUNS = ct.static_eval(SLICE // G)
    return tuple(group_scales(scale, i, s * RUNS + r, TN, EVEN) for r in ct.static_iter(range(RUNS)))


def group_scales(scale, i, g, TN: Int, EVEN: Bool):
    """The rows' scales of group g, [TN, 1]; where the last slice has fewer groups, any: digit_tile is 0 then."""
    return plain_tile(scale, (i, g if EVEN else ct.minimum(g, scale.shape[1] - 1)), (TN, 1), EVEN)


def slice_sums(tiles, digit_tiles, scales, first, PER: Int, TN: Int, COLUMNS: Int):
    """Scaled sums of one slice for each column of digits, [TN, COLUMNS] float32; its PER tiles come from `first` on."""
    RUN = ct.static_eval(PER // len(scales))
    total = ct.zeros((TN, COLUMNS), dtype=ct.float32)
    for r in ct.static_iter(range(len(scales))):
        exact = ct.zeros((TN, COLUMNS), dtype=ct.int32)
        for j in ct.static_iter(range(RUN)):
            exact = ct.mma(tiles[first + r * RUN + j], digit_tiles[first + r * RUN + j], exact)
        total = total + exact.astype(ct.float32) * scales[r]
    return total


def joined(sums, TN: Int, T: Int):
    """128 hi + lo of each token, [TN, T]. In float32: tileiras 13.4 aborts on int32 pairs of a product for sm_100."""
    pairs = sums.reshape((TN, T, 2))
    hi = ct.extract(pairs, (0, 0, 0), (TN, T, 1)).reshape((TN, T))
    return hi * 128.0 + ct.extract(pairs, (0, 0, 1), (TN, T, 1)).reshape((TN, T))


def token_scales(x_scale, s, T: Int):
    """The tokens' scales of slice s, [1, T]."""
    return ct.load(x_scale, index=(0, s), shape=(T, 1), padding_mode=ZERO, allow_tma=False).reshape((1, T))
