"""INT8 weights as half precision: copies that stay, made when a model is loaded, or a scratch array for each chunk.

Prefill multiplies weights with scales for groups in half precision: widening the int32 sums of every group costs more
than the product, and widening the bytes inside the product 1.3 to 1.7 times it (docs/kernels.md), while this pass takes
five bytes of traffic a weight, most of them within the L2. scale · w is rounded to half precision, a sixth of INT8's
own error.

Nothing here depends on the tokens. Where the launch before is one that starts its dependents only once it has waited
itself, all launches before that one have ended, and with `early` this one stores while that one still runs: in the SMs
that its last wave leaves idle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cuda.tile as ct

from kernels.int8_rows import WIDENED, from_int8
from kernels.int8_scales import check_int8
from kernels.launch import check_array
from kernels.linear import plain_tile
from kernels.notation import HALF, Bool, Int
from kernels.specs import ArraySpec

if TYPE_CHECKING:
    from kernels.launch import Launcher
    from kernels.shapes import ModelShape


@dataclass(frozen=True)
class DequantiseConfig:
    """Weights of a block, a power of two from a tile's up."""

    weights: int = 8192


@ct.kernel
def dequantise_kernel(w, scale, out, R: Int, N: Int, C: Int, EVEN: Bool, EARLY: Bool, PDL: Bool):
    """out[g, k] = scale[g] · w[g, k].

    w [groups, G] int8, scale [groups, 1] float32, out [groups, G] half: a group is a row, so that a row of a tile has
    one scale. Grid: blocks of N tiles of R groups, and G / C pieces of C columns; EVEN: the groups fill the last tile,
    else zeros in, nothing out past the end. float32, one rounding at the store.
    With EARLY only the first block waits: a grid ends with its last block, so the next launch, which waits for this
    one, finds the one before ended too.
    """
    i, piece = ct.bid(0), ct.bid(1)
    if PDL:
        ct.grid_dependency_control_launch_dependents()
    tiles = tuple(plain_tile(w, (i * N + j, piece), (R, C), EVEN) for j in ct.static_iter(range(N)))
    scales = tuple(plain_tile(scale, (i * N + j, 0), (R, 1), EVEN) for j in ct.static_iter(range(N)))
    if PDL and not EARLY:
        ct.grid_dependency_control_wait()
    for j in ct.static_iter(range(N)):
        wide = from_int8(tiles[j], scales[j], out.dtype)
        ct.store(out, index=(i * N + j, piece), tile=wide, allow_tma=False, check_bounds=not EVEN)
    if PDL and EARLY:  # noqa: SIM102 - the constants choose the code, the block's number is a value
        if i == 0:
            ct.grid_dependency_control_wait()


def dequantise(
    launcher: Launcher, w: Any, scale: Any, out: Any, *, early: bool = False, config: DequantiseConfig | None = None
) -> None:
    """out [N, K] half = scale [N, K / G] float32 · w [N, K] int8.

    `early`: under dependent launch, store before the launch before has ended. That one must start its dependents after
    its own wait, and neither read nor write `out`.

    Raises:
        ValueError, TypeError: an array's shape, layout, alignment or type is not what the kernel reads.
    """
    op, config = "dequantise", config or DequantiseConfig()
    n, k, found = check_int8(op, w, scale)
    check_array(f"{op}: out", out, (n, k), *HALF, align=16)
    group = found or k
    columns = min(WIDENED, group & -group)  # a power of two that divides it
    groups, rows = n * k // group, WIDENED // columns
    count = -(-groups // rows)
    tiles = min(max(1, config.weights // WIDENED), count & -count)  # whole blocks of tiles
    arrays = w.reshape(groups, group), scale.reshape(groups, 1), out.reshape(groups, group)
    constants = (rows, tiles, columns, groups % rows == 0, early and launcher.pdl, launcher.pdl)
    launcher(dequantise_kernel, (count // tiles, group // columns, 1), (*arrays, *constants))


def model_launches(launcher: Launcher, model: ModelShape, dtype: str) -> None:
    """All products' weights by rows; down's in groups of 64 too (of 32 or 16 where those do not divide)."""
    for product in ("qkv", "o", "up", "down"):
        n, k = model.products[product]
        dequantise(launcher, ArraySpec((n, k), "int8"), ArraySpec((n, 1), "float32"), ArraySpec((n, k), dtype))
    n, k = model.products["down"]
    group = next(size for size in (64, 32, 16) if k % size == 0)
    arrays = ArraySpec((n, k), "int8"), ArraySpec((n, k // group), "float32"), ArraySpec((n, k), dtype)
    for early in (False, True) if launcher.pdl else (False,):
        dequantise(launcher, *arrays, early=early)
