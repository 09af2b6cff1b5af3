"""Up to 8 tokens as two int8 digits a number, for the INT8 products of a verify step (kernels/linear_int8_tokens.py).

    x[t, k] ≈ scales[t, k // 512] · (128 hi + lo),   scales[t, s] = max |x[t]| over slice s of 512 columns / 16,256

A scale for each slice, not for the whole token: so the block that makes 512 columns of a token can make their digits
too, without a look at the rest of the row, and a block of the product needs one scale a token. Row 2t of `digits` is
hi, row 2t + 1 lo: in the product's sums they are neighbours, which one thread holds.

The arrays are made for 4 or 8 tokens (`columns`); rows past the tokens are read and never used.

Refuses: more than 8 tokens, rows that a 16-byte load does not divide.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cuda.tile as ct

from kernels.digits import LARGEST, two_digits
from kernels.launch import check_array
from kernels.notation import HALF, ZERO, Bool
from kernels.specs import ArraySpec

if TYPE_CHECKING:
    from kernels.launch import Launcher
    from kernels.shapes import ModelShape

    Digits = tuple[Any, Any]  # digits [columns, K] int8, scales [T, slices] float32

SLICE = 512  # columns that share a scale
MAX_TOKENS = 8


def columns(tokens: int) -> int:
    """Rows of `digits`, columns of the product: two for each of 4 or 8 tokens."""
    return 8 if tokens <= MAX_TOKENS // 2 else 2 * MAX_TOKENS


def slices(k: int) -> int:
    """Scales of a token of k columns."""
    return -(-k // SLICE)


def digit_shapes(tokens: int, k: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Shapes of the digits (int8) and their scales (float32)."""
    return (columns(tokens), k), (tokens, slices(k))


def store_digits(x, digits, scales, t, s, EVEN: Bool):
    """The digits of slice s of token t, whose columns are x [1, SLICE] float32; EVEN: slices divide the row."""
    top = ct.maximum(ct.max(ct.abs(x), axis=1, keepdims=True), 1e-30)
    hi, lo = two_digits(x * (LARGEST / top))
    ct.store(digits, index=(2 * t, s), tile=hi.astype(ct.int8), allow_tma=False, check_bounds=not EVEN)
    ct.store(digits, index=(2 * t + 1, s), tile=lo.astype(ct.int8), allow_tma=False, check_bounds=not EVEN)
    ct.store(scales, index=(t, s), tile=top * (1.0 / LARGEST), allow_tma=False, check_bounds=False)


@ct.kernel
def digit_slices_kernel(x, digits, scales, PDL: Bool):
    """digits[2t] = hi, digits[2t + 1] = lo of x[t] / scales[t].

    x [T, K] half, digits [columns, K] int8, scales [T, ceil(K / 512)] float32. Grid (ceil(K / 512), T): a slice of one
    token. float32, rounded to the nearest digit pair; a slice of zeros has a scale above zero. The last slice may hang
    over: zeros in, nothing out.
    """
    s, t = ct.bid(0), ct.bid(1)
    if PDL:
        ct.grid_dependency_control_launch_dependents()
        ct.grid_dependency_control_wait()
    tile = ct.load(x, index=(t, s), shape=(1, SLICE), padding_mode=ZERO, allow_tma=False)
    store_digits(tile.astype(ct.float32), digits, scales, t, s, False)


def digit_slices(launcher: Launcher, x: Any, digits: Digits) -> None:
    """digits of x [T, K] half, of the shapes that `digit_shapes` gives.

    Raises:
        ValueError, TypeError: an array's shape, layout, alignment or type is not what the kernel reads.
    """
    op = "digit_slices"
    check_array(f"{op}: x", x, (None, None), *HALF, align=16)
    tokens, k = (int(side) for side in x.shape)
    check_digits(op, digits, tokens, k)
    launcher(digit_slices_kernel, (slices(k), tokens, 1), (x, *digits, launcher.pdl))


def check_digits(op: str, digits: Digits, tokens: int, k: int) -> None:
    """Raises ValueError, TypeError: not what `digit_shapes` says, or tokens and columns that do not fit."""
    if tokens > MAX_TOKENS or k % 16:
        raise ValueError(f"{op}: {tokens} tokens of {k} columns, expected at most {MAX_TOKENS} of a multiple of 16")
    values, scales = digit_shapes(tokens, k)
    check_array(f"{op}: digits", digits[0], values, "int8", align=16)
    check_array(f"{op}: scales of digits", digits[1], scales, "float32", align=16)


def model_launches(launcher: Launcher, model: ModelShape, dtype: str) -> None:
    """What attention leaves, and the embedding."""
    for tokens in (MAX_TOKENS // 2, MAX_TOKENS):
        for k in {model.hidden, model.attention_width}:
            values, scales = digit_shapes(tokens, k)
            digit_slices(
                launcher, ArraySpec((tokens, k), dtype), (ArraySpec(values, "int8"), ArraySpec(scales, "float32"))
            )
