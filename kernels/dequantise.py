"""INT8 weights with a scale for each group of columns as half precision, into a scratch array.

Prefill multiplies such weights in half precision: widening the int32 sums of every group costs more than the product,
and widening the bytes inside the product 1.3 to 1.7 times it (docs/kernels.md), while this pass takes five bytes of
traffic a weight, most of them within the L2. scale · w is rounded to half precision, a sixth of INT8's own error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cuda.tile as ct

from kernels.int8_scales import check_int8
from kernels.launch import check_array
from kernels.notation import HALF, ZERO, Bool, Int
from kernels.specs import ArraySpec

if TYPE_CHECKING:
    from kernels.launch import Launcher
    from kernels.shapes import ModelShape


@dataclass(frozen=True)
class DequantiseConfig:
    """Rows and columns of a block."""

    tile_n: int = 8
    tile_k: int = 1024


@ct.kernel
def dequantise_kernel(w, scale, out, TN: Int, TK: Int, G: Int, PDL: Bool):
    """out[n, k] = scale[n, k // G] · w[n, k].

    w [N, K] int8, scale [N, K / G] float32, out [N, K] half. Grid (ceil(N / TN), ceil(K / TK)): a tile. float32, one
    rounding at the store. Tiles may hang over: zeros in, nothing out.
    """
    i, j = ct.bid(0), ct.bid(1)
    if PDL:
        ct.grid_dependency_control_launch_dependents()
    tile = ct.load(w, index=(i, j), shape=(TN, TK), padding_mode=ZERO, allow_tma=False).astype(ct.float32)
    scales = ct.load(scale, index=(i, j), shape=(TN, TK // G), padding_mode=ZERO, allow_tma=False)
    wide = ct.broadcast_to(scales.reshape((TN, TK // G, 1)), (TN, TK // G, G)).reshape((TN, TK))
    if PDL:
        ct.grid_dependency_control_wait()
    ct.store(out, index=(i, j), tile=(tile * wide).astype(out.dtype), allow_tma=False)


def dequantise(launcher: Launcher, w: Any, scale: Any, out: Any, *, config: DequantiseConfig | None = None) -> None:
    """out [N, K] half = scale [N, K / G] float32 · w [N, K] int8.

    Raises:
        ValueError, TypeError: an array's shape, layout, alignment or type is not what the kernel reads.
    """
    op, config = "dequantise", config or DequantiseConfig()
    n, k, group = check_int8(op, w, scale)
    if group is None or group > config.tile_k:
        raise ValueError(
            f"{op}: {int(scale.shape[1])} scales for {k} columns, expected one for at most {config.tile_k}"
        )
    check_array(f"{op}: out", out, (n, k), *HALF, align=16)
    grid = (-(-n // config.tile_n), -(-k // config.tile_k), 1)
    launcher(dequantise_kernel, grid, (w, scale, out, config.tile_n, config.tile_k, group, launcher.pdl))


def model_launches(launcher: Launcher, model: ModelShape, dtype: str) -> None:
    """The down product's weights in groups of 64 (of 32 or 16 where those do not divide)."""
    n, k = model.products["down"]
    group = next(size for size in (64, 32, 16) if k % size == 0)
    dequantise(launcher, ArraySpec((n, k), "int8"), ArraySpec((n, k // group), "float32"), ArraySpec((n, k), dtype))
