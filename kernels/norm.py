"""RMSNorm of the float32 residual stream, for prefill. In decode it is folded into the products (kernels/linear.py).

    y[t] = x[t] / sqrt(mean(x[t]²) + ε) · gain        (Zhang and Sennrich, 2019)

    rms_norm         y in half precision
    rms_norm_digits  y as two int8 digits a number and a scale a token (kernels/digits.py), for INT8 products: straight
                     from float32, so half precision does not round in between, and nothing is read a second time

Refuses: rows that a 16-byte load does not divide (for digits: of no multiple of 16 columns, tokens not in eights).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cuda.tile as ct

from kernels.digits import LARGEST_BYTES, check_digits, row_tiles, store_digits, tiles_of
from kernels.int8_rows import largest_and_sum
from kernels.launch import check_array
from kernels.notation import HALF, ZERO, Bool, Float, Int
from kernels.specs import ArraySpec

if TYPE_CHECKING:
    from kernels.launch import Launcher
    from kernels.shapes import ModelShape


TILE = 512  # columns: 16 bytes of the stream a thread, which then has their digits to store as well


@ct.kernel
def rms_norm_kernel(x, gain, y, K: Int, EPS: Float, C: Int, NC: Int, PDL: Bool):
    """y[t] = x[t] / sqrt(Σ x[t]² / K + ε) · gain.

    x [T, K] float32, gain [1, K] half or float32, y [T, K] half. Grid: T blocks of one token, in NC tiles of C.
    float32 throughout, one rounding at the store. The last tile may hang over K: zeros in, nothing out.
    """
    t = ct.bid(0)
    if PDL:
        ct.grid_dependency_control_launch_dependents()
        ct.grid_dependency_control_wait()
    tiles = tuple(
        ct.load(x, index=(t, k), shape=(1, C), padding_mode=ZERO, allow_tma=False) for k in ct.static_iter(range(NC))
    )
    squares = ct.zeros((1, C), dtype=ct.float32)
    for k in ct.static_iter(range(NC)):
        squares = squares + tiles[k] * tiles[k]
    scale = ct.rsqrt(ct.sum(squares, axis=1, keepdims=True) * (1.0 / K) + EPS)
    for k in ct.static_iter(range(NC)):
        g = ct.load(gain, index=(0, k), shape=(1, C), padding_mode=ZERO, allow_tma=False).astype(ct.float32)
        ct.store(y, index=(t, k), tile=(tiles[k] * scale * g).astype(y.dtype), allow_tma=False)


@ct.kernel
def rms_norm_digits_kernel(x, gain, digits, scales, K: Int, EPS: Float, C: Int, NC: Int, EVEN: Bool, PDL: Bool):
    """256 digits[t'] + digits[t' + 8] = RMSNorm(x[t]) · gain / scales[t], rounded, t' = 16 (t // 8) + t % 8.

    x [T, K] float32, gain [1, K] half or float32, digits [2 T, K] int8, scales [T, 1] float32. Grid: T blocks of one
    token, in NC tiles of C, the last of which may hang over where it is not EVEN. The norm's factor goes into the
    scale: the digits are those of x · gain, and largest number and sum of squares come from one reduction. A row of
    zeros has a scale above zero.
    """
    t = ct.bid(0)
    if PDL:
        ct.grid_dependency_control_launch_dependents()
    gains = row_tiles(gain, 0, C, NC, EVEN)
    if PDL:
        ct.grid_dependency_control_wait()
    row = row_tiles(x, t, C, NC, EVEN)
    squares, top = ct.zeros((1, C), dtype=ct.float32), ct.zeros((1, C), dtype=ct.float32)
    for k in ct.static_iter(range(NC)):
        squares = squares + row[k] * row[k]
    row = tuple(row[k] * gains[k].astype(ct.float32) for k in ct.static_iter(range(NC)))
    for k in ct.static_iter(range(NC)):
        top = ct.maximum(top, ct.abs(row[k]))
    top, total = ct.reduce((top, squares), 1, largest_and_sum, (0.0, 0.0), keepdims=True)
    top = ct.maximum(top, 1e-30)
    store_digits(row, top, digits, t, NC, EVEN)
    scale = top * (1.0 / LARGEST_BYTES) * ct.rsqrt(total * (1.0 / K) + EPS)
    ct.store(scales, index=(t, 0), tile=scale, allow_tma=False, check_bounds=False)


def rms_norm(launcher: Launcher, x: Any, gain: Any, y: Any, *, eps: float) -> None:
    """y [T, K] half = RMSNorm(x [T, K] float32) with weight gain [1, K].

    Raises:
        ValueError, TypeError: an array's shape, layout, alignment or type is not what the kernel reads.
    """
    check_array("rms_norm: x", x, (None, None), "float32", align=16)
    tokens, width = x.shape
    check_array("rms_norm: y", y, (tokens, width), *HALF, align=16)
    check_array("rms_norm: gain", gain, (1, width), str(y.dtype), "float32", align=16)
    if width % 8:
        raise ValueError(f"rms_norm: rows of {width} elements, expected a multiple of 8 (16 bytes)")
    tile = min(1024, 1 << (width - 1).bit_length())
    args = (x, gain, y, width, float(eps), tile, -(-width // tile), launcher.pdl)
    launcher(rms_norm_kernel, (tokens, 1, 1), args)


def rms_norm_digits(launcher: Launcher, x: Any, gain: Any, digits: Any, scales: Any, *, eps: float) -> None:
    """digits [2 T, K] int8 and scales [T, 1] float32 of RMSNorm(x [T, K] float32) with weight gain [1, K].

    Raises:
        ValueError, TypeError: an array's shape, layout, alignment or type is not what the kernel reads.
    """
    op = "rms_norm_digits"
    check_array(f"{op}: x", x, (None, None), "float32", align=16)
    tokens, width = (int(n) for n in x.shape)
    check_array(f"{op}: gain", gain, (1, width), *HALF, "float32", align=16)
    check_digits(op, tokens, width, digits, scales)
    args = (x, gain, digits, scales, width, float(eps), *tiles_of(width, TILE), launcher.pdl)
    launcher(rms_norm_digits_kernel, (tokens, 1, 1), args)


def model_launches(launcher: Launcher, model: ModelShape, dtype: str) -> None:
    """A chunk of 512 tokens, in half precision and in digits, and the one row whose logits follow a prompt."""
    for tokens in (512, 1):
        x, y = ArraySpec((tokens, model.hidden), "float32"), ArraySpec((tokens, model.hidden), dtype)
        rms_norm(launcher, x, ArraySpec((1, model.hidden), "float32"), y, eps=model.eps)
    x, gain = ArraySpec((512, model.hidden), "float32"), ArraySpec((1, model.hidden), "float32")
    digits, scales = ArraySpec((1024, model.hidden), "int8"), ArraySpec((512, 1), "float32")
    rms_norm_digits(launcher, x, gain, digits, scales, eps=model.eps)
