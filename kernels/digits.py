"""Rows of activations as two int8 digits each, for the INT8 products of a prefill chunk.

    x[t] ≈ s[t] · (128 hi[t] + lo[t]),   s[t] = max |x[t]| / 16,256

15 bits of the largest number of a token, where half precision has 8 or 11 of each. Digits lie as the rows of the tensor
cores want them, so that a token's two sums meet in one thread: eight rows of hi, then the eight rows of lo of the same
tokens.

Refuses: rows that a 16-byte load does not divide, tokens that are no multiple of 8.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cuda.tile as ct

from kernels.int8_rows import nearest
from kernels.launch import check_array
from kernels.notation import HALF, ZERO, Bool, Int
from kernels.specs import ArraySpec

if TYPE_CHECKING:
    from kernels.launch import Launcher
    from kernels.shapes import ModelShape

TOGETHER = 8  # tokens whose digits alternate
LARGEST = 16256.0  # 127 · 128: the largest token in digits, (127, 0)
TILE = 2048  # columns that a block takes at once


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


def store_digits(row, top, digits, t, C: Int, NC: Int):
    """The digits of token t, whose numbers are at most `top`."""
    unit = LARGEST / top
    group, place = t // TOGETHER, t % TOGETHER
    for j in ct.static_iter(range(NC)):
        hi, lo = two_digits(row[j].astype(ct.float32) * unit)
        ct.store(digits, index=(group, 0, place, j), tile=hi.astype(ct.int8).reshape((1, 1, 1, C)), allow_tma=False)
        ct.store(digits, index=(group, 1, place, j), tile=lo.astype(ct.int8).reshape((1, 1, 1, C)), allow_tma=False)


@ct.kernel
def digits_kernel(x, digits, scales, C: Int, NC: Int, PDL: Bool):
    """digits[t // 8, 0, t % 8] = hi, digits[t // 8, 1, t % 8] = lo of x[t] / scales[t].

    x [T, columns] half, digits [T / 8, 2, 8, columns] int8, scales [T, 1] float32. Grid: T blocks, one token each,
    whose NC tiles of C columns stay in registers. float32, rounded to the nearest digit pair; a row of zeros has a
    scale above zero. The last tile may hang over: zeros in, nothing out.
    """
    t = ct.bid(0)
    if PDL:
        ct.grid_dependency_control_launch_dependents()
        ct.grid_dependency_control_wait()
    row = tuple(
        ct.load(x, index=(t, j), shape=(1, C), padding_mode=ZERO, allow_tma=False) for j in ct.static_iter(range(NC))
    )
    top = largest_of(row, C, NC)
    store_digits(row, top, digits, t, C, NC)
    ct.store(scales, index=(t, 0), tile=top * (1.0 / LARGEST), allow_tma=False, check_bounds=False)


def token_digits(launcher: Launcher, x: Any, digits: Any, scales: Any) -> None:
    """digits [2 T, K] int8 and scales [T, 1] float32 of x [T, K] half; T a multiple of 8.

    Raises:
        ValueError, TypeError: an array's shape, layout, alignment or type is not what the kernel reads.
    """
    op = "token_digits"
    check_array(f"{op}: x", x, (None, None), *HALF, align=16)
    tokens, k = (int(n) for n in x.shape)
    rows = digit_rows(op, tokens, k, digits, scales)
    tile = min(TILE, 1 << (k - 1).bit_length())
    launcher(digits_kernel, (tokens, 1, 1), (x, rows, scales, tile, -(-k // tile), launcher.pdl))


def digit_rows(op: str, tokens: int, k: int, digits: Any, scales: Any) -> Any:
    """`digits` as the kernels store them, [T / 8, 2, 8, K].

    Raises:
        ValueError, TypeError: tokens or columns that do not come in eights and sixteens, or arrays that do not fit.
    """
    if tokens % TOGETHER or k % 16:
        raise ValueError(f"{op}: x has {tokens} tokens of {k} columns, expected multiples of {TOGETHER} and 16")
    check_array(f"{op}: digits", digits, (2 * tokens, k), "int8", align=16)
    check_array(f"{op}: scales", scales, (tokens, 1), "float32", align=16)
    return digits.reshape(tokens // TOGETHER, 2, TOGETHER, k)


def model_launches(launcher: Launcher, model: ModelShape, dtype: str) -> None:
    """What a chunk's products take from the attention and from the activation; kernels/norm.py makes the others'."""
    for k in {model.attention_width, model.ffn}:
        token_digits(launcher, ArraySpec((512, k), dtype), ArraySpec((1024, k), "int8"), ArraySpec((512, 1), "float32"))
