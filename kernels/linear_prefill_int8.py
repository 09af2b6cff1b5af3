"""Products of many token rows with INT8 weights: linear_prefill.py's three, W[n, k] = scale[n, k // G] · w[n, k].

    linear_prefill_int8           y = x Wᵀ (+ bias)
    linear_prefill_int8_residual  residual += x Wᵀ (+ bias)
    linear_prefill_int8_swiglu    y = silu(gate)·up on interleaved rows

The int8 tile becomes half precision on its way to the tensor cores, exactly (7 bits fit), and the sums are multiplied
by the scales: at the end where a row has one, after each group of columns where it has several. Activations stay half
precision. The weights come in half the bytes, the multiplications are those of linear_prefill.

Refuses what kernels/int8_scales.py refuses, and groups narrower than tile_k.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cuda.tile as ct

from kernels.activation import silu_times
from kernels.configs import config as table_config
from kernels.int8_scales import check_int8
from kernels.launch import check_array, with_hints
from kernels.linear_prefill import LinearPrefillConfig, load_w, load_x, result_tile
from kernels.notation import HALF, ZERO, Int
from kernels.specs import ArraySpec

if TYPE_CHECKING:
    from kernels.launch import Launcher
    from kernels.shapes import ModelShape


def group_scales(scale, n, g, TILE_N: Int):
    """The scales of TILE_N rows for group g: [1, TILE_N]. A row with one scale has group 0 only."""
    tile = ct.load(scale, index=(n, g), shape=(TILE_N, 1), padding_mode=ZERO, allow_tma=False)
    return tile.reshape((1, TILE_N))


def absorb(acc, xt, wt, scale, n, k, TILE_M: Int, TILE_N: Int, STEPS: Int):
    """acc and one step along K; STEPS of them share a scale, 0: all do, and it is left to the end."""
    if STEPS == 0:
        return ct.mma(xt, wt.astype(xt.dtype), acc)
    part = ct.mma(xt, wt.astype(xt.dtype), ct.zeros((TILE_M, TILE_N), dtype=ct.float32))
    return acc + part * group_scales(scale, n, k // STEPS, TILE_N)


def own_product(
    x, w, scale, bias, TILE_M: Int, TILE_N: Int, TILE_K: Int, GROUP: Int, LATENCY: Int, STEPS: Int, BIAS: Int
):
    """(product + bias, m, n) for this block."""
    rows = ct.num_tiles(x, axis=0, shape=(TILE_M, TILE_K))
    m, n = result_tile(rows, ct.num_tiles(w, axis=0, shape=(TILE_N, TILE_K)), GROUP)
    acc = ct.zeros((TILE_M, TILE_N), dtype=ct.float32)
    for k in range(ct.num_tiles(x, axis=1, shape=(TILE_M, TILE_K))):
        xt, wt = load_x(x, m, k, TILE_M, TILE_K, LATENCY), load_w(w, k, n, TILE_K, TILE_N, LATENCY)
        acc = absorb(acc, xt, wt, scale, n, k, TILE_M, TILE_N, STEPS)
    if STEPS == 0:
        acc = acc * group_scales(scale, n, 0, TILE_N)
    if BIAS:
        b = ct.load(bias, index=(n,), shape=(TILE_N,), padding_mode=ZERO, allow_tma=False)
        acc = acc + b.astype(ct.float32).reshape((1, TILE_N))
    return acc, m, n


@ct.kernel
def linear_prefill_int8_kernel(
    x, w, scale, bias, y, TILE_M: Int, TILE_N: Int, TILE_K: Int, GROUP: Int, LATENCY: Int, STEPS: Int, BIAS: Int,
    PDL: Int,
):  # fmt: skip
    """y = x (scale · w)ᵀ + bias.

    x [T, K] half, w [N, K] int8, scale [N, K / G] float32, bias [N], y [T, N] of x's type.
    Grid (row tiles * column tiles,): one block owns a (TILE_M, TILE_N) tile of y.
    Products of half precision, float32 sums, scaled in float32, one rounding at the store. STEPS = G / TILE_K, or 0.
    Any T, N, K: loads past an edge read 0, stores past it are dropped.
    """
    if PDL:
        ct.grid_dependency_control_launch_dependents()
        ct.grid_dependency_control_wait()
    acc, m, n = own_product(x, w, scale, bias, TILE_M, TILE_N, TILE_K, GROUP, LATENCY, STEPS, BIAS)
    ct.store(y, index=(m, n), tile=acc.astype(y.dtype))


@ct.kernel
def linear_prefill_int8_residual_kernel(
    x, w, scale, bias, residual, TILE_M: Int, TILE_N: Int, TILE_K: Int, GROUP: Int, LATENCY: Int, STEPS: Int,
    BIAS: Int, PDL: Int,
):  # fmt: skip
    """residual += x (scale · w)ᵀ + bias.

    As linear_prefill_int8_kernel; residual [T, N] float32, read and written in place, one add an element, in the L2
    where there is a TMA reduction (linear_prefill_residual_kernel).
    """
    if PDL:
        ct.grid_dependency_control_launch_dependents()
        ct.grid_dependency_control_wait()
    acc, m, n = own_product(x, w, scale, bias, TILE_M, TILE_N, TILE_K, GROUP, LATENCY, STEPS, BIAS)
    residual.tiled_view((TILE_M, TILE_N)).atomic_store_add((m, n), acc)


@ct.kernel
def linear_prefill_int8_swiglu_kernel(
    x, w, scale, bias, y, TILE_M: Int, TILE_N: Int, TILE_K: Int, GROUP: Int, LATENCY: Int, STEPS: Int, BIAS: Int,
    PDL: Int,
):  # fmt: skip
    """y = silu(gate) · up; gate and up rows of w interleaved, w[2j] = G[j], w[2j + 1] = U[j].

    As linear_prefill_int8_kernel; y [T, N / 2]. A thread's two neighbouring columns are its gate and up.
    """
    if PDL:
        ct.grid_dependency_control_launch_dependents()
        ct.grid_dependency_control_wait()
    acc, m, n = own_product(x, w, scale, bias, TILE_M, TILE_N, TILE_K, GROUP, LATENCY, STEPS, BIAS)
    pairs = acc.reshape((TILE_M, TILE_N // 2, 2))
    gate = ct.extract(pairs, (0, 0, 0), (TILE_M, TILE_N // 2, 1)).reshape((TILE_M, TILE_N // 2))
    up = ct.extract(pairs, (0, 0, 1), (TILE_M, TILE_N // 2, 1)).reshape((TILE_M, TILE_N // 2))
    ct.store(y, index=(m, n), tile=silu_times(gate, up).astype(y.dtype))


@ct.kernel
def linear_prefill_int8_split_swiglu_kernel(
    x, w, scale, bias, y, TILE_M: Int, TILE_N: Int, TILE_K: Int, GROUP: Int, LATENCY: Int, STEPS: Int, BIAS: Int,
    PDL: Int,
):  # fmt: skip
    """The same with two accumulators, for tileiras 13.4 on sm_100, which aborts on the other form's extract.

    w [F, 2K], scale [F, 2K / G], bias [F, 2] are views: row j = gate row j, then up row j. K divisible by TILE_K (the
    wrapper checks).
    """
    if PDL:
        ct.grid_dependency_control_launch_dependents()
        ct.grid_dependency_control_wait()
    steps = ct.num_tiles(x, axis=1, shape=(TILE_M, TILE_K))
    groups = steps // STEPS if STEPS else 1
    rows = ct.num_tiles(x, axis=0, shape=(TILE_M, TILE_K))
    m, n = result_tile(rows, ct.num_tiles(w, axis=0, shape=(TILE_N, TILE_K)), GROUP)
    gate = ct.zeros((TILE_M, TILE_N), dtype=ct.float32)
    up = ct.zeros((TILE_M, TILE_N), dtype=ct.float32)
    for k in range(steps):
        xt = load_x(x, m, k, TILE_M, TILE_K, LATENCY)
        gate_w, up_w = load_w(w, k, n, TILE_K, TILE_N, LATENCY), load_w(w, steps + k, n, TILE_K, TILE_N, LATENCY)
        gate = absorb(gate, xt, gate_w, scale, n, k, TILE_M, TILE_N, STEPS)
        up = absorb(up, xt, up_w, scale, n, steps + k, TILE_M, TILE_N, STEPS)
    if STEPS == 0:
        gate, up = gate * group_scales(scale, n, 0, TILE_N), up * group_scales(scale, n, groups, TILE_N)
    if BIAS:
        gate_b = ct.load(bias, index=(n, 0), shape=(TILE_N, 1), padding_mode=ZERO, allow_tma=False)
        up_b = ct.load(bias, index=(n, 1), shape=(TILE_N, 1), padding_mode=ZERO, allow_tma=False)
        gate = gate + gate_b.astype(ct.float32).reshape((1, TILE_N))
        up = up + up_b.astype(ct.float32).reshape((1, TILE_N))
    ct.store(y, index=(m, n), tile=silu_times(gate, up).astype(y.dtype))


def linear_prefill_int8(
    launcher: Launcher, x: Any, w: Any, scale: Any, y: Any, *, config: LinearPrefillConfig, bias: Any = None
) -> None:
    """y [T, N] = x [T, K] @ (scale · w)ᵀ (+ bias [N]); w int8 [N, K], scale float32 [N, K / G], the rest half.

    Raises:
        ValueError, TypeError: shape, dtype or layout.
    """
    op = "linear_prefill_int8"
    rows, columns, group = _check(op, x, w, scale, bias)
    check_array(f"{op}: y", y, (rows, columns), str(x.dtype), align=16)
    _launch(launcher, linear_prefill_int8_kernel, (x, w, scale), bias, y, config, group)


def linear_prefill_int8_residual(
    launcher: Launcher, x: Any, w: Any, scale: Any, residual: Any, *, config: LinearPrefillConfig, bias: Any = None
) -> None:
    """residual [T, N] float32 += x [T, K] @ (scale · w)ᵀ (+ bias [N]).

    Raises:
        ValueError, TypeError: shape, dtype or layout.
    """
    op = "linear_prefill_int8_residual"
    rows, columns, group = _check(op, x, w, scale, bias)
    check_array(f"{op}: residual", residual, (rows, columns), "float32", align=16)
    _launch(launcher, linear_prefill_int8_residual_kernel, (x, w, scale), bias, residual, config, group)


def linear_prefill_int8_swiglu(
    launcher: Launcher, x: Any, w: Any, scale: Any, y: Any, *, config: LinearPrefillConfig, bias: Any = None
) -> None:
    """y [T, F] = silu(gate) * up, gate and up rows of w [2F, K] (and of scale and bias) interleaved.

    Raises:
        ValueError, TypeError: shape, dtype or layout; K not divisible by tile_k where the config splits the gate.
    """
    op = "linear_prefill_int8_swiglu"
    rows, columns, group = _check(op, x, w, scale, bias)
    if columns % 2:
        raise ValueError(f"{op}: w has {columns} rows, expected gate and up rows in pairs")
    check_array(f"{op}: y", y, (rows, columns // 2), str(x.dtype), align=16)
    if not config.split_gate:
        _launch(launcher, linear_prefill_int8_swiglu_kernel, (x, w, scale), bias, y, config, group)
        return
    k = int(x.shape[1])
    if k % config.tile_k:
        raise ValueError(f"{op}: K is {k}, expected a multiple of tile_k {config.tile_k}")
    pairs = (x, w.reshape(columns // 2, 2 * k), scale.reshape(columns // 2, 2 * int(scale.shape[1])))
    pair_bias = None if bias is None else bias.reshape(columns // 2, 2)
    _launch(launcher, linear_prefill_int8_split_swiglu_kernel, pairs, pair_bias, y, config, group)


def _check(op: str, x: Any, w: Any, scale: Any, bias: Any) -> tuple[int, int, int | None]:
    """(T, N, columns of a scale) of a product whose inputs fit together."""
    check_array(f"{op}: x", x, (None, None), *HALF, align=16)
    n, k, group = check_int8(op, w, scale)
    if int(x.shape[1]) != k:
        raise ValueError(f"{op}: x has {x.shape[1]} columns, the weight expects {k}")
    if bias is not None:
        check_array(f"{op}: bias", bias, (n,), str(x.dtype), align=16)
    return int(x.shape[0]), n, group


def _launch(
    launcher: Launcher, kernel: Any, inputs: tuple[Any, Any, Any], bias: Any, output: Any,
    c: LinearPrefillConfig, group: int | None,
) -> None:  # fmt: skip
    """One launch; without a bias the scales stand in for it, unread."""
    x, w, scale = inputs
    tile_k = c.tile_k if group is None else min(c.tile_k, group)
    grid = -(-int(x.shape[0]) // c.tile_m) * -(-int(w.shape[0]) // c.tile_n)
    steps = 0 if group is None else group // tile_k
    constants = (c.tile_m, c.tile_n, tile_k, c.group, c.latency, steps, int(bias is not None), int(launcher.pdl))
    args = (x, w, scale, scale if bias is None else bias, output, *constants)
    launcher(with_hints(kernel, **c.hints), (grid, 1, 1), args)


def model_launches(launcher: Launcher, model: ModelShape, dtype: str) -> None:
    """A layer's products at the lengths where configurations change, with one scale a row; groups at one length."""
    for tokens in (64, 128, 256, 512, 1024, 2048, 4096):
        _model_products(launcher, model, dtype, tokens, None)
    _model_products(launcher, model, dtype, 512, 64)


def _model_products(launcher: Launcher, model: ModelShape, dtype: str, tokens: int, group: int | None) -> None:
    o_bias = ArraySpec(model.hidden, dtype) if model.o_bias else None
    qkv_bias = ArraySpec(model.qkv_rows, dtype) if model.qkv_bias else None
    act, normed = ArraySpec((tokens, model.ffn), dtype), ArraySpec((tokens, model.hidden), dtype)
    attended, stream = ArraySpec((tokens, model.attention_width), dtype), ArraySpec(normed.shape, "float32")

    def inputs(form: str, name: str, x: ArraySpec) -> tuple[ArraySpec, ArraySpec, ArraySpec, LinearPrefillConfig]:
        n, k = model.products[name]
        found = LinearPrefillConfig(**table_config(form, launcher.arch, tokens=tokens, n=n, k=k))
        return x, ArraySpec((n, k), "int8"), ArraySpec((n, k // (group or k)), "float32"), found

    *given, config = inputs("linear_prefill_int8", "qkv", normed)
    linear_prefill_int8(launcher, *given, ArraySpec((tokens, model.qkv_rows), dtype), config=config, bias=qkv_bias)
    *given, config = inputs("linear_prefill_int8_residual", "o", attended)
    linear_prefill_int8_residual(launcher, *given, stream, config=config, bias=o_bias)
    if model.activation == "swiglu":
        *given, config = inputs("linear_prefill_int8_swiglu", "up", normed)
        linear_prefill_int8_swiglu(launcher, *given, act, config=config)
    *given, config = inputs("linear_prefill_int8_residual", "down", act)
    linear_prefill_int8_residual(launcher, *given, stream, config=config)
