"""The second launch of a product of several tokens: adds the shares of K, ends the product, hands on what comes next.

    y[t] = act(Σ shares / rms_t + bias), or stream[t] += Σ shares + bias and what the next RMSNorm needs

A block takes 512 entries of one token (1,024 rows where SwiGLU joins pairs), and can make their digits too, for a
product that reads its tokens in digits (kernels/digit_slices.py). Shares are added in order, so that results do not
depend on which block came first.

kernels/linear_tokens.py and kernels/linear_int8_tokens.py check the arrays and launch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cuda.tile as ct

from kernels.digit_slices import SLICE, check_digits, slices, store_digits
from kernels.launch import Together, check_array
from kernels.linear import PLAIN, SWIGLU, XIELU, activated, alphas, check_square_sums, plain_tile
from kernels.notation import HALF, Bool, Float, Int

if TYPE_CHECKING:
    from kernels.digit_slices import Digits
    from kernels.launch import Launcher
    from kernels.shapes import ModelShape

    Launch = tuple[Any, tuple[int, int, int], tuple[Any, ...]]


def tokens_square_slots(n: int) -> int:
    """Entries a token of the `square_sums` that join_residual_tokens_kernel writes."""
    return max(4, 1 << (slices(n) - 1).bit_length())


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


@ct.kernel
def join_tokens_kernel(
    parts, square_sums, extra, y, digits, x_scale, K: Int, NB: Int, EPS: Float, S: Int, JN: Int, NORM: Bool, BIAS: Bool,
    ACT: Int, DIGITS: Bool, EVEN: Bool, PDL: Bool,
):  # fmt: skip
    """y[t, n] = act(Σ_p parts[p, t, n] / rms_t + bias[n]), rms² = Σ square_sums / K + ε; with DIGITS also y in digits.

    parts [S, T, N] float32; square_sums [T, NB] float32 (NORM); extra: bias [1, N] (BIAS) or xIELU's two numbers [2]
    float32 (ACT = XIELU), else unused; y [T, N or N/2] half or float32; digits [columns, N or N/2] int8, x_scale
    [T, slices] float32 (DIGITS). Grid (ceil(N / JN), T): JN rows of one token, a slice of y where there are digits.
    float32, one rounding at the store; digits are made of what is not rounded yet. EVEN: JN divides N, nothing is
    checked; else edges read 0 and stores past N are dropped.
    """
    i, t = ct.bid(0), ct.bid(1)
    if PDL:
        ct.grid_dependency_control_launch_dependents()
    if BIAS:
        bias = floats(extra, 0, i, JN, EVEN)
    numbers = alphas(extra, ACT)
    if PDL:
        ct.grid_dependency_control_wait()
    if NORM:
        sums = ct.load(square_sums, index=(t, 0), shape=(1, NB), allow_tma=False, check_bounds=False)
    out = sum_of_parts(parts, t, i, S, JN, EVEN)
    if NORM:
        out = out * ct.rsqrt(ct.sum(sums, axis=1, keepdims=True) * (1.0 / K) + EPS)
    if BIAS:
        out = out + bias
    out = activated(out, numbers, ACT, JN)
    ct.store(y, index=(t, i), tile=out.astype(y.dtype), allow_tma=False, check_bounds=not EVEN)
    if DIGITS:
        store_digits(out, digits, x_scale, t, i, EVEN)


@ct.kernel
def join_residual_tokens_kernel(
    parts, extra, stream, gain, normed, square_sums, digits, x_scale, S: Int, BIAS: Bool, DIGITS: Bool, EVEN: Bool,
    PDL: Bool,
):  # fmt: skip
    """stream[t, n] += Σ_p parts[p, t, n] + bias[n]; normed = stream·gain; square_sums = Σ stream²; with DIGITS also
    normed in digits.

    parts [S, T, N] float32; extra: bias [1, N] (BIAS), else unused; stream [T, N] float32, read and written; gain
    [1, N] half or float32; normed [T, N] half; square_sums [T, ≥ blocks] float32; digits [columns, N] int8, x_scale
    [T, slices] float32 (DIGITS). Grid (ceil(N / 512), T): a slice of one token. float32; normed is rounded, and digits
    are made of what is not rounded. EVEN: slices divide N, nothing is checked; else edges read 0 and stores past N are
    dropped.
    """
    i, t = ct.bid(0), ct.bid(1)
    if PDL:
        ct.grid_dependency_control_launch_dependents()
    g = floats(gain, 0, i, SLICE, EVEN)
    if BIAS:
        bias = floats(extra, 0, i, SLICE, EVEN)
    if PDL:
        ct.grid_dependency_control_wait()
    old = floats(stream, t, i, SLICE, EVEN)
    out = sum_of_parts(parts, t, i, S, SLICE, EVEN) + old
    if BIAS:
        out = out + bias
    ct.store(stream, index=(t, i), tile=out, allow_tma=False, check_bounds=not EVEN)
    scaled = out * g
    ct.store(normed, index=(t, i), tile=scaled.astype(normed.dtype), allow_tma=False, check_bounds=not EVEN)
    squares = ct.sum(out * out, axis=1, keepdims=True)
    ct.store(square_sums, index=(t, i), tile=squares, allow_tma=False, check_bounds=False)
    if DIGITS:
        store_digits(scaled, digits, x_scale, t, i, EVEN)


# -- host


def shares_in(op: str, parts: Any, shares: int, tokens: int, n: int) -> Any:
    """The shares [S, T, N] of a product in the workspace `parts`. Raises ValueError, TypeError."""
    check_array(f"{op}: parts", parts, (None,), "float32", align=16)
    if int(parts.shape[0]) < shares * tokens * n:
        raise ValueError(
            f"{op}: parts has {parts.shape[0]} entries, expected {shares * tokens * n}: {shares} shares of {tokens} "
            f"tokens and {n} rows"
        )
    return parts[: shares * tokens * n].reshape(shares, tokens, n)


def both(launcher: Launcher, product: Launch, end: Launch) -> None:
    """A product's launches; neither happens where one of them fails a check."""
    together = Together(launcher)
    together(*product)
    together(*end)
    together.launch()


def join(
    launcher: Launcher, op: str, shares: Any, square_sums: Any, y: Any, extra: Any, act: int, k: int, eps: float,
    digits: Digits | None = None,
) -> Launch:  # fmt: skip
    """What ends y [T, N or N / 2]; `shares` [S, T, N]. Raises ValueError, TypeError."""
    count, tokens, n = map(int, shares.shape)
    if act == SWIGLU and n % 2:
        raise ValueError(f"{op}: w has {n} rows, expected gate and up rows in pairs")
    made = n // 2 if act == SWIGLU else n
    check_array(f"{op}: y", y, (tokens, made), *(("float32", *HALF) if act == PLAIN else HALF), align=16)
    slots = 1 if square_sums is None else check_square_sums(op, square_sums, tokens)
    if digits is not None:
        check_digits(op, digits, tokens, made)
    width = 2 * SLICE if act == SWIGLU else SLICE
    norm, bias = square_sums is not None, extra is not None and act != XIELU
    arrays = (shares, square_sums if norm else shares, shares if extra is None else extra, y)
    constants = (k, slots, float(eps), count, width, norm, bias, act, digits is not None, n % width == 0, launcher.pdl)
    args = (*arrays, *(digits or (shares, shares)), *constants)
    return join_tokens_kernel, (-(-n // width), tokens, 1), args


def join_residual(
    launcher: Launcher, op: str, shares: Any, stream: Any, gain: Any, normed: Any, square_sums: Any, bias: Any,
    digits: Digits | None = None,
) -> Launch:  # fmt: skip
    """What adds `shares` [S, T, N] to stream [T, N]. Raises ValueError, TypeError."""
    count, tokens, n = map(int, shares.shape)
    check_array(f"{op}: stream", stream, (tokens, n), "float32", align=16)
    check_array(f"{op}: gain", gain, (1, n), *HALF, "float32", align=16)
    check_array(f"{op}: normed", normed, (tokens, n), *HALF, align=16)
    if digits is not None:
        check_digits(op, digits, tokens, n)
    slots, blocks = check_square_sums(op, square_sums, tokens), slices(n)
    if slots < blocks:
        raise ValueError(f"{op}: square_sums has {slots} entries a token, its {blocks} blocks need as many")
    arrays = (shares, shares if bias is None else bias, stream, gain, normed, square_sums)
    constants = (count, bias is not None, digits is not None, n % SLICE == 0, launcher.pdl)
    return join_residual_tokens_kernel, (blocks, tokens, 1), (*arrays, *(digits or (shares, shares)), *constants)


def model_launches(launcher: Launcher, model: ModelShape, dtype: str) -> None:
    """Both formats' products, which decide how many shares their second launches have."""
    from kernels import linear_int8_tokens, linear_tokens

    for family in (linear_tokens, linear_int8_tokens):
        family.model_launches(launcher, model, dtype)
