"""residual += x Wᵀ of several rows, W[n, k] = scale[n, k // G] · w[n, k] in INT8, x in half precision.

The output product of an evaluation: its weights are too many to be widened into a scratch array first, and only 64 rows
meet them at a time. The int8 tile becomes half precision on its way to the tensor cores, exactly (7 bits fit), and the
sums are multiplied by the scales: at the end where a row has one, after each group of columns where it has several.
Layers' products have faster ways: kernels/linear_prefill_digits.py, kernels/dequantise.py.

Refuses what kernels/int8_scales.py refuses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cuda.tile as ct

from kernels.configs import config as table_config
from kernels.int8_scales import check_int8
from kernels.launch import check_array, with_hints
from kernels.linear_prefill import LinearPrefillConfig, load_w, load_x, result_tile, tile_counts
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
    rows, columns = tile_counts(x, w, TILE_M, TILE_N, TILE_K)
    m, n = result_tile(ct.bid(0), rows, columns, GROUP)
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
def linear_prefill_int8_residual_kernel(
    x, w, scale, bias, residual, TILE_M: Int, TILE_N: Int, TILE_K: Int, GROUP: Int, LATENCY: Int, STEPS: Int,
    BIAS: Int, PDL: Int,
):  # fmt: skip
    """residual += x (scale · w)ᵀ + bias.

    x [T, K] half, w [N, K] int8, scale [N, K / G] float32, bias [N]; residual [T, N] float32, read and written in
    place, one add an element, in the L2 where there is a TMA reduction (linear_prefill_residual_kernel).
    Grid (row tiles * column tiles,): one block owns a (TILE_M, TILE_N) tile of residual.
    Products of half precision, float32 sums, scaled in float32. STEPS = G / TILE_K, or 0 for one scale a row.
    Any T, N, K: loads past an edge read 0, stores past it are dropped.
    """
    if PDL:
        ct.grid_dependency_control_launch_dependents()
        ct.grid_dependency_control_wait()
    acc, m, n = own_product(x, w, scale, bias, TILE_M, TILE_N, TILE_K, GROUP, LATENCY, STEPS, BIAS)
    residual.tiled_view((TILE_M, TILE_N)).atomic_store_add((m, n), acc)


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
    """The output product of 64 rows, with one scale a row and in groups."""
    n, k = model.products["lm_head"]
    x, w, logits = ArraySpec((64, k), dtype), ArraySpec((n, k), "int8"), ArraySpec((64, n), "float32")
    config = LinearPrefillConfig(**table_config("linear_prefill_int8_residual", launcher.arch, tokens=64, n=n, k=k))
    for groups in (1, k // 64):
        linear_prefill_int8_residual(launcher, x, w, ArraySpec((n, groups), "float32"), logits, config=config)
