"""Rows of activations as two int8 digits each, for the INT8 products of a prefill chunk.

    x[t] ≈ s[t] · (256 hi[t] + lo[t]),   s[t] = max |x[t]| / 32,512

16 bits of the largest number of a token, where half precision has 8 or 11 of each. The digits are the bytes of a whole
number. They lie as the rows of the tensor cores want them, so that a token's two sums meet in one thread: eight rows of
hi, then the eight rows of lo of the same tokens.

Refuses: rows that a 16-byte load does not divide, tokens that are no multiple of 8.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cuda.tile as ct

from kernels.int8_rows import ROUND, nearest
from kernels.launch import check_array
from kernels.linear import plain_tile
from kernels.notation import HALF, Bool, Int
from kernels.specs import ArraySpec

if TYPE_CHECKING:
    from kernels.launch import Launcher
    from kernels.shapes import ModelShape

TOGETHER = 8  # tokens whose digits alternate
LARGEST = 16256.0  # 127 · 128: the largest number in digits of 7 bits, (127, 0)
LARGEST_BYTES = 32512.0  # 127 · 256: the largest token in bytes, (127, 0)
TILE = 1024  # columns: 16 bytes of half precision a thread, which then has their digits to store as well
EVEN_TILES = 10  # at most; rows that need more have larger tiles, of which the last hangs over


def two_digits(x):
    """Integers hi and lo, |lo| ≤ 64, of the whole number nearest to a float within ±LARGEST: 128 hi + lo."""
    q = nearest(x)
    hi = (q + 64) >> 7
    return hi, q - hi * 128


def two_bytes(x):
    """int8 hi and lo of the whole number nearest to a float within ±LARGEST_BYTES: 256 hi + lo."""
    bits = ct.bitcast(x + ROUND, ct.int32)
    return ((bits + 128) >> 8).astype(ct.int8), bits.astype(ct.int8)


def largest_of(xs, STEP: Int, NK: Int):
    """max |x| over all tiles, never 0: [1, 1]."""
    top = ct.zeros((1, STEP), dtype=ct.float32)
    for k in ct.static_iter(range(NK)):
        top = ct.maximum(top, ct.abs(xs[k].astype(ct.float32)))
    return ct.maximum(ct.max(top, axis=1, keepdims=True), 1e-30)


def row_tiles(x, t, C: Int, NC: Int, EVEN: Bool):
    """Row t in NC tiles of C; zeros behind its end, if it has one within the last tile."""
    return tuple(plain_tile(x, (t, j), (1, C), EVEN) for j in ct.static_iter(range(NC)))


def store_digits(row, top, digits, t, NC: Int, EVEN: Bool):
    """The digits of token t, whose numbers are at most `top`."""
    unit = LARGEST_BYTES / top
    place = t // TOGETHER * (2 * TOGETHER) + t % TOGETHER
    for j in ct.static_iter(range(NC)):
        hi, lo = two_bytes(row[j].astype(ct.float32) * unit)
        ct.store(digits, index=(place, j), tile=hi, allow_tma=False, check_bounds=not EVEN)
        ct.store(digits, index=(place + TOGETHER, j), tile=lo, allow_tma=False, check_bounds=not EVEN)


@ct.kernel
def digits_kernel(x, digits, scales, C: Int, NC: Int, EVEN: Bool, PDL: Bool):
    """digits[t'] = hi, digits[t' + 8] = lo of x[t] / scales[t], t' = 16 (t // 8) + t % 8.

    x [T, columns] half, digits [2 T, columns] int8, scales [T, 1] float32. Grid: T blocks, one token each,
    whose NC tiles of C columns stay in registers. float32, rounded to the nearest digit pair; a row of zeros has a
    scale above zero. The last tile may hang over where it is not EVEN: zeros in, nothing out.
    """
    t = ct.bid(0)
    if PDL:
        ct.grid_dependency_control_launch_dependents()
        ct.grid_dependency_control_wait()
    row = row_tiles(x, t, C, NC, EVEN)
    top = largest_of(row, C, NC)
    store_digits(row, top, digits, t, NC, EVEN)
    ct.store(scales, index=(t, 0), tile=top * (1.0 / LARGEST_BYTES), allow_tma=False, check_bounds=False)


def token_digits(launcher: Launcher, x: Any, digits: Any, scales: Any) -> None:
    """digits [2 T, K] int8 and scales [T, 1] float32 of x [T, K] half; T a multiple of 8.

    Raises:
        ValueError, TypeError: an array's shape, layout, alignment or type is not what the kernel reads.
    """
    op = "token_digits"
    check_array(f"{op}: x", x, (None, None), *HALF, align=16)
    tokens, k = (int(n) for n in x.shape)
    check_digits(op, tokens, k, digits, scales)
    launcher(digits_kernel, (tokens, 1, 1), (x, digits, scales, *tiles_of(k, TILE), launcher.pdl))


def tiles_of(k: int, most: int) -> tuple[int, int, bool]:
    """Columns of a tile, tiles of a row, and whether the last one ends where the row does: no bounds checks then."""
    even = min(most, k & -k)
    if 2 * even >= most and k // even <= EVEN_TILES:
        return even, k // even, True
    tile = min(most, 1 << (k - 1).bit_length())
    return tile, -(-k // tile), k % tile == 0


def check_digits(op: str, tokens: int, k: int, digits: Any, scales: Any) -> None:
    """Raises ValueError or TypeError: tokens or columns not in eights and sixteens, or arrays that do not fit them."""
    if tokens % TOGETHER or k % 16:
        raise ValueError(f"{op}: x has {tokens} tokens of {k} columns, expected multiples of {TOGETHER} and 16")
    check_array(f"{op}: digits", digits, (2 * tokens, k), "int8", align=16)
    check_array(f"{op}: scales", scales, (tokens, 1), "float32", align=16)


def model_launches(launcher: Launcher, model: ModelShape, dtype: str) -> None:
    """What a chunk's products take from the attention and from the activation; kernels/norm.py makes the others'."""
    for k in {model.attention_width, model.ffn}:
        token_digits(launcher, ArraySpec((512, k), dtype), ArraySpec((1024, k), "int8"), ArraySpec((512, 1), "float32"))
