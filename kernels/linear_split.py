"""One-token products with K split over the grid, for rows too long to stay in registers.

    linear_split           y = x Wᵀ (+ bias)
    linear_split_residual  stream += x Wᵀ (+ bias), and what the next RMSNorm needs, as linear_residual

Two launches. Blocks (i, s) own the rows of tile i and share s of the columns; as in kernels/linear.py a block asks for
its weights before it waits for its predecessor. A second kernel adds the shares, in order, so that results do not
depend on which block came first.

Where a row fits the registers, whole rows are faster, because somebody must read the shares again. On an H200, the
chain of a decode step reached 30 to 41 % of the roofline with the shares added by the last block through an atomic
counter, 69 to 90 % with whole rows (docs/kernels.md). So no configuration splits; but one row of more than 28,672
columns spills (102 at 32,768, for sm_90), and then this form remains.

Refuses: several tokens (tensor cores do those), columns that a 16-byte load or the splits do not divide.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cuda.tile as ct

from kernels.launch import Together, check_array
from kernels.linear import check_product, check_square_sums, dot, weight_tiles
from kernels.notation import ZERO, Bool, Int
from kernels.specs import ArraySpec

if TYPE_CHECKING:
    from kernels.launch import Launcher
    from kernels.shapes import ModelShape


@dataclass(frozen=True)
class LinearSplitConfig:
    """How a product is cut. All are powers of two.

    Attributes:
        splits: shares of K, equally many tiles each, all in registers.
        tile_n, tile_k: rows and columns of a tile.
        join_n: rows of a block that adds the shares.
    """

    splits: int = 4
    tile_n: int = 4
    tile_k: int = 512
    join_n: int = 256


def linear_split_rule(k: int) -> LinearSplitConfig:
    """Four shares, or two, of the widest tiles that come out even. Not measured."""
    for splits in (4, 2, 1):
        for tile_k in (1024, 512, 256, 128, 64):
            if -(-k // tile_k) % splits == 0:
                break
        else:
            continue
        break
    rows = max(1, min(8, 1 << (16384 * splits // -(-k // tile_k) // tile_k).bit_length() - 1))
    return LinearSplitConfig(splits, rows, tile_k)


@ct.kernel
def linear_split_kernel(w, x, parts, TN: Int, TK: Int, STEPS: Int, EVEN: Bool, PDL: Bool):
    """parts[s, n] = Σ_k W[n, k] x[k] over the s-th share of the columns.

    w [N, K], x [1, K] half; parts [splits, N] float32. Grid (ceil(N / TN), splits): TN rows, STEPS tiles of columns.
    Products and sums in float32, nothing is rounded.
    EVEN: tiles divide N and K, nothing is checked; else edges read 0 and stores past N are dropped.
    """
    i, s = ct.bid(0), ct.bid(1)
    if PDL:
        ct.grid_dependency_control_launch_dependents()
    tiles = weight_tiles(w, i, s * STEPS, TN, TK, STEPS, EVEN)
    if PDL:
        ct.grid_dependency_control_wait()
    out = dot(tiles, x, s * STEPS, TN, TK, STEPS, EVEN)
    ct.store(parts, index=(s, i), tile=out, allow_tma=False, check_bounds=not EVEN)


def _sum_of_parts(parts, i, S: Int, TN: Int):
    """The shares of TN rows added up, [1, TN]."""
    tile = ct.load(parts, index=(0, i), shape=(S, TN), padding_mode=ZERO, allow_tma=False)
    return ct.sum(tile, axis=0, keepdims=True)


def _row(array, i, TN: Int):
    """TN entries of a [1, N] array in float32, 0 past its end."""
    return ct.load(array, index=(0, i), shape=(1, TN), padding_mode=ZERO, allow_tma=False).astype(ct.float32)


@ct.kernel
def linear_join_kernel(parts, bias, y, S: Int, TN: Int, BIAS: Bool, PDL: Bool):
    """y[n] = Σ_s parts[s, n] + bias[n].

    parts [S, N] float32, bias [1, N] half or float32, y [1, N] half or float32. Grid: ceil(N / TN) blocks of TN rows.
    float32, one rounding at the store.
    Tiles may hang over N: zeros in, nothing out.
    """
    i = ct.bid(0)
    if PDL:
        ct.grid_dependency_control_launch_dependents()
        ct.grid_dependency_control_wait()
    out = _sum_of_parts(parts, i, S, TN)
    if BIAS:
        out = out + _row(bias, i, TN)
    ct.store(y, index=(0, i), tile=out.astype(y.dtype), allow_tma=False)


@ct.kernel
def linear_join_residual_kernel(parts, bias, stream, gain, normed, square_sums, S: Int, TN: Int, BIAS: Bool, PDL: Bool):
    """stream[n] += Σ_s parts[s, n] + bias[n]; normed = stream·gain; square_sums[block] = Σ_n stream².

    parts [S, N] float32, bias and gain [1, N] half or float32, stream [1, N] float32, read and written; normed [1, N]
    half; square_sums [1, ≥ blocks] float32. Grid: ceil(N / TN) blocks of TN rows.
    float32, only normed is rounded.
    Tiles may hang over N: zeros in, nothing out.
    """
    i = ct.bid(0)
    if PDL:
        ct.grid_dependency_control_launch_dependents()
    g = _row(gain, i, TN)
    if PDL:
        ct.grid_dependency_control_wait()
    out = _sum_of_parts(parts, i, S, TN) + _row(stream, i, TN)
    if BIAS:
        out = out + _row(bias, i, TN)
    ct.store(stream, index=(0, i), tile=out, allow_tma=False)
    ct.store(normed, index=(0, i), tile=(out * g).astype(normed.dtype), allow_tma=False)
    squares = ct.sum(out * out, axis=1, keepdims=True)
    ct.store(square_sums, index=(0, i), tile=squares, allow_tma=False, check_bounds=False)


def linear_split(
    launcher: Launcher, x: Any, w: Any, parts: Any, y: Any, *, bias: Any = None, config: LinearSplitConfig
) -> None:
    """y [1, N] half or float32 = x [1, K] · w [N, K]ᵀ (+ bias [1, N]); parts [splits, N] float32 is workspace.

    Raises:
        ValueError, TypeError: an array's shape, layout, alignment or type is not what the kernels read.
    """
    op = "linear_split"
    n = _check(op, x, w, parts, bias, config)
    check_array(f"{op}: y", y, (1, n), "float32", str(w.dtype), align=16)
    together = Together(launcher)
    _launch_parts(together, x, w, parts, config)
    args = (parts, parts if bias is None else bias, y, config.splits, config.join_n, bias is not None, launcher.pdl)
    together(linear_join_kernel, (-(-n // config.join_n), 1, 1), args)
    together.launch()


def linear_split_residual(
    launcher: Launcher, x: Any, w: Any, parts: Any, stream: Any, gain: Any, normed: Any, square_sums: Any, *,
    bias: Any = None, config: LinearSplitConfig,
) -> None:  # fmt: skip
    """stream [1, N] float32 += x [1, K] · w [N, K]ᵀ (+ bias), then normed and square_sums as linear_residual does.

    parts [splits, N] float32 is workspace. square_sums [1, NB]: NB a power of two, at least ceil(N / join_n).

    Raises:
        ValueError, TypeError: an array's shape, layout, alignment or type is not what the kernels read.
    """
    op = "linear_split_residual"
    n = _check(op, x, w, parts, bias, config)
    half = str(w.dtype)
    check_array(f"{op}: stream", stream, (1, n), "float32", align=16)
    check_array(f"{op}: gain", gain, (1, n), half, "float32", align=16)
    check_array(f"{op}: normed", normed, (1, n), half, align=16)
    slots, blocks = check_square_sums(op, square_sums, 1), -(-n // config.join_n)
    if slots < blocks:
        raise ValueError(f"{op}: square_sums has {slots} entries, expected at least its {blocks} blocks")
    together = Together(launcher)
    _launch_parts(together, x, w, parts, config)
    arrays = (parts, parts if bias is None else bias, stream, gain, normed, square_sums)
    constants = (config.splits, config.join_n, bias is not None, launcher.pdl)
    together(linear_join_residual_kernel, (blocks, 1, 1), (*arrays, *constants))
    together.launch()


def _check(op: str, x: Any, w: Any, parts: Any, bias: Any, config: LinearSplitConfig) -> int:
    """Rows of the weight."""
    n, k = check_product(op, x, w, bias)
    tiles = -(-k // config.tile_k)
    if tiles % config.splits:
        raise ValueError(
            f"{op}: {k} columns are {tiles} tiles of {config.tile_k}, expected {config.splits} equal shares"
        )
    check_array(f"{op}: parts", parts, (config.splits, n), "float32", align=16)
    return n


def _launch_parts(launcher: Launcher, x: Any, w: Any, parts: Any, config: LinearSplitConfig) -> None:
    n, k = w.shape
    steps = -(-k // config.tile_k) // config.splits
    even = n % config.tile_n == 0 and k % config.tile_k == 0
    args = (w, x, parts, config.tile_n, config.tile_k, steps, even, launcher.pdl)
    launcher(linear_split_kernel, (-(-n // config.tile_n), config.splits, 1), args)


def model_launches(launcher: Launcher, model: ModelShape, dtype: str) -> None:
    """The products with the longest rows and the shortest: down and QKV."""

    def array(*shape: int, of: str = dtype) -> ArraySpec:
        return ArraySpec(shape, of)

    n, k = model.products["down"]
    config = linear_split_rule(k)
    parts, row, gain = array(config.splits, n, of="float32"), array(1, n), array(1, n, of="float32")
    sums = array(1, max(4, 1 << (-(-n // config.join_n) - 1).bit_length()), of="float32")
    linear_split_residual(launcher, array(1, k), array(n, k), parts, gain, gain, row, sums, config=config)
    n, k = model.products["qkv"]
    config = linear_split_rule(k)
    parts, bias = array(config.splits, n, of="float32"), array(1, n) if model.qkv_bias else None
    linear_split(launcher, array(1, k), array(n, k), parts, array(1, n), bias=bias, config=config)
