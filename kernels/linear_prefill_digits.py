"""Products of many token rows with INT8 weights, bytes by bytes: W[n, k] = scale[n] · w[n, k], x in digits.

    linear_prefill_digits           y = x Wᵀ (+ bias)
    linear_prefill_digits_residual  residual += x Wᵀ (+ bias)
    linear_prefill_digits_swiglu    y = silu(gate)·up on interleaved rows
    linear_prefill_digits_xielu     y = xIELU(x Wᵀ)

x comes from kernels/digits.py: two int8 digits a number, so twice the rows at twice the rate of half precision, and
half the bytes of weights. The int32 sums are exact; a token's two are joined at the end, 256 hi + lo.

Each waits before it starts its dependents, the other kernels the other way round: so once the next launch runs, all
before this one have ended, and kernels/dequantise.py may fill an array that nobody reads any more.

Refuses: groups of columns with scales of their own (their sums would have to be widened at every step, which costs more
than the product: kernels/linear_prefill_int8.py takes them), rows of more than 132,104 columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cuda.tile as ct

from kernels.activation import xielu_of
from kernels.configs import config as table_config
from kernels.digits import TOGETHER
from kernels.int8_digits import MAX_COLUMNS
from kernels.int8_scales import check_int8
from kernels.launch import check_array, with_hints
from kernels.linear_prefill import (
    LinearPrefillConfig,
    each_tile,
    load_w,
    load_x,
    pairs_swiglu,
    result_tile,
    tile_counts,
)
from kernels.notation import HALF, ZERO, Int
from kernels.specs import ArraySpec

if TYPE_CHECKING:
    from kernels.launch import Launcher
    from kernels.shapes import ModelShape


def tile_product(i, x, x_scale, w, scale, bias, constants):
    """(product + bias of TILE_M / 2 tokens, m, n) of tile i."""
    TILE_M, TILE_N, TILE_K, GROUP, LATENCY, BIAS = constants
    T = TILE_M // 2
    rows, columns = tile_counts(x, w, TILE_M, TILE_N, TILE_K)
    m, n = result_tile(i, rows, columns, GROUP)
    acc = ct.zeros((TILE_M, TILE_N), dtype=ct.int32)
    for k in range(ct.num_tiles(x, axis=1, shape=(TILE_M, TILE_K))):
        acc = ct.mma(load_x(x, m, k, TILE_M, TILE_K, LATENCY), load_w(w, k, n, TILE_K, TILE_N, LATENCY), acc)
    pairs = acc.astype(ct.float32).reshape((TILE_M // 16, 2, 8, TILE_N))
    hi = ct.extract(pairs, (0, 0, 0, 0), (TILE_M // 16, 1, 8, TILE_N)).reshape((T, TILE_N))
    lo = ct.extract(pairs, (0, 1, 0, 0), (TILE_M // 16, 1, 8, TILE_N)).reshape((T, TILE_N))
    of_token = ct.load(x_scale, index=(m, 0), shape=(T, 1), padding_mode=ZERO, allow_tma=False)
    of_row = ct.load(scale, index=(0, n), shape=(1, TILE_N), padding_mode=ZERO, allow_tma=False)
    out = (hi * 256.0 + lo) * of_token * of_row
    if BIAS:
        b = ct.load(bias, index=(n,), shape=(TILE_N,), padding_mode=ZERO, allow_tma=False)
        out = out + b.astype(ct.float32).reshape((1, TILE_N))
    return out, m, n


def plain_tile(i, x, x_scale, w, scale, bias, y, constants):
    """Tile i of y."""
    out, m, n = tile_product(i, x, x_scale, w, scale, bias, constants)
    ct.store(y, index=(m, n), tile=out.astype(y.dtype))


@ct.kernel
def linear_prefill_digits_kernel(
    x, x_scale, w, scale, bias, y, TILE_M: Int, TILE_N: Int, TILE_K: Int, GROUP: Int, LATENCY: Int, BIAS: Int,
    LOOP: Int, PDL: Int,
):  # fmt: skip
    """y = x (scale · w)ᵀ + bias.

    x [2T, K] int8 digits, x_scale [T, 1] float32, w [N, K] int8, scale [1, N] float32, bias [N], y [T, N] half.
    Grid: a block for each (TILE_M / 2, TILE_N) tile of y, or fewer, each in a LOOP over tiles.
    int32 sums, exact; joined and scaled in float32, one rounding at the store.
    T a multiple of 8, any N and K: loads past an edge read 0, stores past it are dropped.
    """
    if PDL:
        ct.grid_dependency_control_wait()
        ct.grid_dependency_control_launch_dependents()
    constants = (TILE_M, TILE_N, TILE_K, GROUP, LATENCY, BIAS)
    each_tile(plain_tile, (x, x_scale, w, scale, bias, y), tile_counts(x, w, TILE_M, TILE_N, TILE_K), constants, LOOP)


def residual_tile(i, x, x_scale, w, scale, bias, residual, constants):
    """Tile i of the residual stream."""
    out, m, n = tile_product(i, x, x_scale, w, scale, bias, constants)
    residual.tiled_view(out.shape).atomic_store_add((m, n), out)


@ct.kernel
def linear_prefill_digits_residual_kernel(
    x, x_scale, w, scale, bias, residual, TILE_M: Int, TILE_N: Int, TILE_K: Int, GROUP: Int, LATENCY: Int, BIAS: Int,
    LOOP: Int, PDL: Int,
):  # fmt: skip
    """residual += x (scale · w)ᵀ + bias.

    As linear_prefill_digits_kernel; residual [T, N] float32, read and written in place, one add an element, in the L2
    where there is a TMA reduction.
    """
    if PDL:
        ct.grid_dependency_control_wait()
        ct.grid_dependency_control_launch_dependents()
    constants = (TILE_M, TILE_N, TILE_K, GROUP, LATENCY, BIAS)
    each_tile(
        residual_tile,
        (x, x_scale, w, scale, bias, residual),
        tile_counts(x, w, TILE_M, TILE_N, TILE_K),
        constants,
        LOOP,
    )


def swiglu_tile(i, x, x_scale, w, scale, bias, y, constants):
    """Tile i of the products, half as wide in y."""
    out, m, n = tile_product(i, x, x_scale, w, scale, bias, constants)
    ct.store(y, index=(m, n), tile=pairs_swiglu(out).astype(y.dtype))


@ct.kernel
def linear_prefill_digits_swiglu_kernel(
    x, x_scale, w, scale, bias, y, TILE_M: Int, TILE_N: Int, TILE_K: Int, GROUP: Int, LATENCY: Int, BIAS: Int,
    LOOP: Int, PDL: Int,
):  # fmt: skip
    """y = silu(gate) · up; gate and up rows of w interleaved, w[2j] = G[j], w[2j + 1] = U[j].

    As linear_prefill_digits_kernel; y [T, N / 2].
    """
    if PDL:
        ct.grid_dependency_control_wait()
        ct.grid_dependency_control_launch_dependents()
    constants = (TILE_M, TILE_N, TILE_K, GROUP, LATENCY, BIAS)
    each_tile(swiglu_tile, (x, x_scale, w, scale, bias, y), tile_counts(x, w, TILE_M, TILE_N, TILE_K), constants, LOOP)


def xielu_tile(i, x, x_scale, w, scale, bias, alphas, y, constants):
    """Tile i of y."""
    out, m, n = tile_product(i, x, x_scale, w, scale, bias, constants)
    positive = ct.load(alphas, index=(0,), shape=(), allow_tma=False)
    negative = ct.load(alphas, index=(1,), shape=(), allow_tma=False)
    ct.store(y, index=(m, n), tile=xielu_of(out, positive, negative).astype(y.dtype))


@ct.kernel
def linear_prefill_digits_xielu_kernel(
    x, x_scale, w, scale, bias, alphas, y, TILE_M: Int, TILE_N: Int, TILE_K: Int, GROUP: Int, LATENCY: Int, BIAS: Int,
    LOOP: Int, PDL: Int,
):  # fmt: skip
    """y = xIELU(x (scale · w)ᵀ + bias), by kernels/activation.py.

    As linear_prefill_digits_kernel; alphas [2] float32.
    """
    if PDL:
        ct.grid_dependency_control_wait()
        ct.grid_dependency_control_launch_dependents()
    constants = (TILE_M, TILE_N, TILE_K, GROUP, LATENCY, BIAS)
    each_tile(
        xielu_tile, (x, x_scale, w, scale, bias, alphas, y), tile_counts(x, w, TILE_M, TILE_N, TILE_K), constants, LOOP
    )


def linear_prefill_digits(
    launcher: Launcher, x: Any, x_scale: Any, w: Any, scale: Any, y: Any, *, config: LinearPrefillConfig,
    bias: Any = None,
) -> None:  # fmt: skip
    """y [T, N] half = x @ (scale · w)ᵀ (+ bias [N]); x [2T, K], x_scale [T, 1] from token_digits, scale [N, 1].

    Raises:
        ValueError, TypeError: shape, dtype or layout.
    """
    op = "linear_prefill_digits"
    check_array(f"{op}: y", y, (None, None), *HALF, align=16)
    tokens, columns = _check(op, x, x_scale, w, scale, bias, str(y.dtype))
    check_array(f"{op}: y", y, (tokens, columns), *HALF, align=16)
    _launch(launcher, linear_prefill_digits_kernel, (x, x_scale, w, scale, bias), y, config)


def linear_prefill_digits_residual(
    launcher: Launcher, x: Any, x_scale: Any, w: Any, scale: Any, residual: Any, *, config: LinearPrefillConfig,
    bias: Any = None,
) -> None:  # fmt: skip
    """residual [T, N] float32 += x @ (scale · w)ᵀ (+ bias [N]).

    Raises:
        ValueError, TypeError: shape, dtype or layout.
    """
    op = "linear_prefill_digits_residual"
    tokens, columns = _check(op, x, x_scale, w, scale, bias, None)
    check_array(f"{op}: residual", residual, (tokens, columns), "float32", align=16)
    _launch(launcher, linear_prefill_digits_residual_kernel, (x, x_scale, w, scale, bias), residual, config)


def linear_prefill_digits_swiglu(
    launcher: Launcher, x: Any, x_scale: Any, w: Any, scale: Any, y: Any, *, config: LinearPrefillConfig,
    bias: Any = None,
) -> None:  # fmt: skip
    """y [T, F] half = silu(gate) * up, gate and up rows of w [2F, K] (and of scale and bias) interleaved.

    Raises:
        ValueError, TypeError: shape, dtype or layout.
    """
    op = "linear_prefill_digits_swiglu"
    check_array(f"{op}: y", y, (None, None), *HALF, align=16)
    tokens, columns = _check(op, x, x_scale, w, scale, bias, str(y.dtype))
    if columns % 2:
        raise ValueError(f"{op}: w has {columns} rows, expected gate and up rows in pairs")
    check_array(f"{op}: y", y, (tokens, columns // 2), *HALF, align=16)
    _launch(launcher, linear_prefill_digits_swiglu_kernel, (x, x_scale, w, scale, bias), y, config)


def linear_prefill_digits_xielu(
    launcher: Launcher, x: Any, x_scale: Any, w: Any, scale: Any, alphas: Any, y: Any, *, config: LinearPrefillConfig,
    bias: Any = None,
) -> None:  # fmt: skip
    """y [T, N] half = xIELU(x @ (scale · w)ᵀ + bias). alphas: float32 [2], see kernels.activation.

    Raises:
        ValueError, TypeError: shape, dtype or layout.
    """
    op = "linear_prefill_digits_xielu"
    check_array(f"{op}: y", y, (None, None), *HALF, align=16)
    tokens, columns = _check(op, x, x_scale, w, scale, bias, str(y.dtype))
    check_array(f"{op}: alphas", alphas, (2,), "float32")
    check_array(f"{op}: y", y, (tokens, columns), *HALF, align=16)
    _launch(launcher, linear_prefill_digits_xielu_kernel, (x, x_scale, w, scale, bias), alphas, config, y)


def _check(op: str, x: Any, x_scale: Any, w: Any, scale: Any, bias: Any, half: str | None) -> tuple[int, int]:
    """(T, N) of a product whose inputs fit together."""
    check_array(f"{op}: x", x, (None, None), "int8", align=16)
    n, k, group = check_int8(op, w, scale)
    if group is not None:
        raise ValueError(f"{op}: {int(scale.shape[1])} scales a row, expected one")
    if int(x.shape[1]) != k:
        raise ValueError(f"{op}: x has {x.shape[1]} columns, the weight expects {k}")
    if k > MAX_COLUMNS:
        raise ValueError(f"{op}: {k} columns, the int32 sums are exact up to {MAX_COLUMNS}, as expected of digits")
    tokens = int(x.shape[0]) // 2
    if tokens % TOGETHER or int(x.shape[0]) % 2:
        raise ValueError(f"{op}: x has {int(x.shape[0])} rows of digits, expected a multiple of {2 * TOGETHER}")
    check_array(f"{op}: x_scale", x_scale, (tokens, 1), "float32", align=16)
    if bias is not None:
        check_array(f"{op}: bias", bias, (n,), *(HALF if half is None else (half,)), align=16)
    return tokens, n


def _launch(
    launcher: Launcher,
    kernel: Any,
    inputs: tuple[Any, Any, Any, Any, Any],
    output: Any,
    c: LinearPrefillConfig,
    *more: Any,
) -> None:
    """One launch; without a bias the scales stand in for it, unread. tile_m counts rows of digits."""
    x, x_scale, w, scale, bias = inputs
    constants = (c.tile_m, c.tile_n, c.tile_k, c.group, c.latency, int(bias is not None))
    args = (x, x_scale, w, scale.reshape(1, -1), x_scale if bias is None else bias, output, *more, *constants)
    args += int(c.loops(launcher)), int(launcher.pdl)
    launcher(with_hints(kernel, **c.hints), (c.blocks(x, w, launcher), 1, 1), args)


Specs = tuple[ArraySpec, ArraySpec, ArraySpec, ArraySpec]  # digits, their scales, weights, their scales


def model_launches(launcher: Launcher, model: ModelShape, dtype: str) -> None:
    """A layer's products at the lengths where configurations change."""
    o_bias = ArraySpec(model.hidden, dtype) if model.o_bias else None
    qkv_bias = ArraySpec(model.qkv_rows, dtype) if model.qkv_bias else None
    for tokens in (64, 512, 2048):

        def inputs(form: str, name: str, tokens: int = tokens) -> tuple[Specs, LinearPrefillConfig]:
            n, k = model.products[name]
            found = LinearPrefillConfig(**table_config(form, launcher.arch, tokens=tokens, n=n, k=k))
            x, x_scale = ArraySpec((2 * tokens, k), "int8"), ArraySpec((tokens, 1), "float32")
            return (x, x_scale, ArraySpec((n, k), "int8"), ArraySpec((n, 1), "float32")), found

        stream = ArraySpec((tokens, model.hidden), "float32")
        given, config = inputs("linear_prefill_digits", "qkv")
        qkv = ArraySpec((tokens, model.qkv_rows), dtype)
        linear_prefill_digits(launcher, *given, qkv, config=config, bias=qkv_bias)
        given, config = inputs("linear_prefill_digits_residual", "o")
        linear_prefill_digits_residual(launcher, *given, stream, config=config, bias=o_bias)
        if model.activation == "swiglu":
            given, config = inputs("linear_prefill_digits_swiglu", "up")
            linear_prefill_digits_swiglu(launcher, *given, ArraySpec((tokens, model.ffn), dtype), config=config)
        else:
            given, config = inputs("linear_prefill_digits_xielu", "up")
            act = ArraySpec((tokens, model.ffn), dtype)
            linear_prefill_digits_xielu(launcher, *given, ArraySpec(2, "float32"), act, config=config)
        given, config = inputs("linear_prefill_digits_residual", "down")
        linear_prefill_digits_residual(launcher, *given, stream, config=config)
