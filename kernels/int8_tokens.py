"""What a block of linear_int8_tokens.py does, in the product and in the kernel that ends it: tiles, sums, cuts.

Columns of the product are digits: 2t is token t's high digit, 2t + 1 its low one, so that both sums lie in one thread.
"""

from __future__ import annotations

from dataclasses import dataclass

import cuda.tile as ct

from kernels import configs
from kernels.activation import silu_times, xielu_of
from kernels.digit_slices import SLICE, slices
from kernels.linear import SWIGLU, XIELU, plain_tile
from kernels.notation import ZERO, Bool, Int

NARROWEST = 32  # columns of a product of bytes
EXACT = 1 << 24  # whole numbers that float32 holds; below it, int32 never overflows either
LARGEST_PRODUCT = 128 * 127  # of a weight, -128 … 127, and a digit, -127 … 127


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
    try:
        return Int8TokensConfig(**configs.config("linear_int8_tokens", arch, n=n, k=k, group=group or 0))
    except KeyError:
        return Int8TokensConfig()


def part_floats(arch: str, tokens: int, n: int, k: int, group: int | None = None) -> int:
    """Length of the workspace `parts` for a product."""
    return slices(k) // linear_int8_tokens_config(arch, n, k, group).steps * tokens * n


def tokens_square_slots(n: int) -> int:
    """Entries a token of the `square_sums` that linear_int8_tokens_residual writes."""
    return max(4, 1 << (slices(n) - 1).bit_length())


def check_cut(op: str, c: Int8TokensConfig, k: int, group: int | None) -> int:
    """Columns of a tile: within a group, within the slice over which int32 sums stay whole numbers of float32."""
    if group is not None and group < NARROWEST:
        raise ValueError(f"{op}: scales of {group} columns, expected {NARROWEST} or more")
    if c.tile_n not in (64, 128) or c.tile_k not in (32, 64, 128, 256, SLICE) or slices(k) % c.steps:
        raise ValueError(
            f"{op}: blocks of {c.tile_n} rows, {c.tile_k} columns, {c.steps} of {slices(k)} slices, expected 64 or 128 "
            f"rows, a power of two from {NARROWEST} to {SLICE} columns, and equal shares"
        )
    exact = min(SLICE, group or SLICE)
    if exact * LARGEST_PRODUCT > EXACT:
        raise ValueError(f"{op}: sums of {exact} columns, exact up to {EXACT // LARGEST_PRODUCT}")
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


def run_scales(scale, i, s, TN: Int, G: Int):
    """The rows' scales of slice s, [TN, 1] for each run of columns that shares one (the whole slice where G = 0)."""
    if G == 0:
        return (ct.load(scale, index=(i, 0), shape=(TN, 1), padding_mode=ZERO, allow_tma=False),)
    RUN = ct.static_eval(min(G, SLICE))
    return tuple(
        ct.load(
            scale, index=(i, ct.minimum((s * SLICE + r * RUN) // G, scale.shape[1] - 1)), shape=(TN, 1),
            padding_mode=ZERO, allow_tma=False,
        )
        for r in ct.static_iter(range(SLICE // RUN))
    )  # fmt: skip


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


def token_scales(x_scale, s, T: Int):
    """The tokens' scales of slice s, [1, T]."""
    return ct.load(x_scale, index=(0, s), shape=(T, 1), padding_mode=ZERO, allow_tma=False).reshape((1, T))


def joined(sums, of_token, TN: Int, T: Int):
    """128 hi + lo, times the token's scale: [TN, T]."""
    pairs = sums.reshape((TN, T, 2))
    hi = ct.extract(pairs, (0, 0, 0), (TN, T, 1)).reshape((TN, T))
    lo = ct.extract(pairs, (0, 0, 1), (TN, T, 1)).reshape((TN, T))
    return (hi * 128.0 + lo) * of_token


def sum_of_parts(parts, t, i, S: Int, JN: Int, EVEN: Bool):
    """The shares of JN rows of token t added up in order, [1, JN]; all loads are issued before one is used."""
    shares = tuple(plain_tile(parts, (p, t, i), (1, 1, JN), EVEN) for p in ct.static_iter(range(S)))
    total = ct.zeros((1, 1, JN), dtype=ct.float32)
    for p in ct.static_iter(range(S)):
        total = total + shares[p]
    return total.reshape((1, JN))


def floats(array, t, i, JN: Int, EVEN: Bool):
    """JN entries of row t in float32."""
    return plain_tile(array, (t, i), (1, JN), EVEN).astype(ct.float32)


def alphas(extra, ACT: Int):
    """xIELU's two numbers, which nothing in a step writes; () for other activations."""
    if ACT == XIELU:
        return tuple(ct.load(extra, index=(j,), shape=(1,), check_bounds=False) for j in ct.static_iter(range(2)))
    return ()


def activated(out, numbers, ACT: Int, JN: Int):
    """act(out [1, JN]); SwiGLU joins rows 2j and 2j + 1 into [1, JN / 2]."""
    if ACT == XIELU:
        return xielu_of(out, numbers[0], numbers[1])
    if ACT == SWIGLU:
        pairs = out.reshape((JN // 2, 2))
        gate = ct.extract(pairs, (0, 0), (JN // 2, 1))
        up = ct.extract(pairs, (0, 1), (JN // 2, 1))
        return silu_times(gate, up).reshape((1, JN // 2))
    return out
