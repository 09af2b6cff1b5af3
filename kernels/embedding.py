"""Embedding rows into the float32 residual stream, for decode together with what the first layer's norm needs.

    embedding          ids [T] → stream [T, H]                       (prefill)
    embedding_decode   ids [T] → stream, stream·gain, Σ stream²      (1 to 8 tokens, as a residual product ends)

A table in INT8 is multiplied by its scales on the way, exactly: 7 bits by a scale of 8 or 11.

Ids are read from device memory: the sampler's output feeds the next step without the host. An id outside the table
reads row 0 or the last row, never foreign memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cuda.tile as ct

from kernels.digit_slices import MAX_TOKENS
from kernels.int8_scales import check_int8
from kernels.launch import check_array
from kernels.linear import check_square_sums, square_slots
from kernels.notation import HALF, ZERO, Bool, Int
from kernels.specs import ArraySpec

if TYPE_CHECKING:
    from kernels.launch import Launcher
    from kernels.shapes import ModelShape


@dataclass(frozen=True)
class EmbeddingConfig:
    """Elements of a row that one block of `embedding` copies; embedding_decode takes whole rows."""

    tile: int = 1024


HALF_TABLE = -1  # in place of the columns of a scale: the table is half precision and has none


def table_tile(table, scale, row, i, C: Int, G: Int):
    """Columns i·C … of a row, float32 [1, C]. G: columns of a scale, 0 for the whole row, HALF_TABLE for no scales."""
    tile = ct.load(table, index=(row, i), shape=(1, C), padding_mode=ZERO, allow_tma=False).astype(ct.float32)
    if G == 0:
        tile = tile * ct.load(scale, index=(row, 0), shape=(1, 1), allow_tma=False)
    if G > 0:
        scales = ct.load(scale, index=(row, i), shape=(1, C // G), padding_mode=ZERO, allow_tma=False)
        tile = tile * ct.broadcast_to(scales.reshape((1, C // G, 1)), (1, C // G, G)).reshape((1, C))
    return tile


@ct.kernel
def embedding_kernel(ids, table, scale, stream, V: Int, C: Int, G: Int, PDL: Bool):
    """stream[t, j] = table[ids[t], j] (· scale[ids[t], j // G]).

    ids [T] int32, table [V, H] half or int8, scale [V, H / G] or [V, 1] float32, stream [T, H] float32. Grid (ceil(H /
    C), T): C elements of one token. Exact. A tile may hang over H: zeros in, nothing out; ids are clamped to the table.
    """
    i, t = ct.bid(0), ct.bid(1)
    if PDL:
        ct.grid_dependency_control_launch_dependents()
        ct.grid_dependency_control_wait()
    row = ct.minimum(ct.maximum(ct.load(ids, index=(t,), shape=(), check_bounds=False).item(), 0), V - 1)
    ct.store(stream, index=(t, i), tile=table_tile(table, scale, row, i, C, G), allow_tma=False)


@ct.kernel
def embedding_decode_kernel(
    ids, table, scale, gain, stream, normed, square_sums, V: Int, H: Int, NB: Int, G: Int, PDL: Bool
):
    """stream[t] = table[ids[t]]; normed[t] = stream[t]·gain; square_sums[t] = [Σ stream[t]², 0, …, 0].

    ids [T] int32, table [V, hidden] half or int8 with scale as above, gain [1, hidden] half or float32, stream
    [T, hidden] float32, normed [T, hidden] half, square_sums [T, NB] float32. Grid: T blocks of one token. H is hidden,
    up to a power of two. normed is rounded once. Rows hang over hidden: zeros in, nothing out; ids are clamped.
    """
    t = ct.bid(0)
    if PDL:
        ct.grid_dependency_control_launch_dependents()
    g = ct.load(gain, index=(0, 0), shape=(1, H), padding_mode=ZERO, allow_tma=False).astype(ct.float32)
    if PDL:
        ct.grid_dependency_control_wait()
    row = ct.minimum(ct.maximum(ct.load(ids, index=(t,), shape=(), check_bounds=False).item(), 0), V - 1)
    x = table_tile(table, scale, row, 0, H, G)
    ct.store(stream, index=(t, 0), tile=x, allow_tma=False)
    ct.store(normed, index=(t, 0), tile=(x * g).astype(normed.dtype), allow_tma=False)
    slots = ct.arange(NB, dtype=ct.int32).reshape((1, NB))
    sums = ct.where(slots == 0, ct.sum(x * x, axis=1, keepdims=True), 0.0)
    ct.store(square_sums, index=(t, 0), tile=sums, allow_tma=False, check_bounds=False)


def embedding(
    launcher: Launcher, ids: Any, table: Any, stream: Any, *, scale: Any = None, config: EmbeddingConfig | None = None
) -> None:
    """stream [T, H] float32 = table [V, H] rows named by ids [T] int32; `scale` belongs to a table in INT8.

    Raises:
        ValueError, TypeError: an array's shape, layout, alignment or type is not what the kernel reads.
    """
    config = config or EmbeddingConfig()
    vocab, hidden, group = _check_table("embedding", ids, table, scale)
    tokens = ids.shape[0]
    check_array("embedding: stream", stream, (tokens, hidden), "float32", align=16)
    grid = (-(-hidden // config.tile), tokens, 1)
    scales = table if scale is None else scale
    launcher(embedding_kernel, grid, (ids, table, scales, stream, vocab, config.tile, group, launcher.pdl))


def embedding_decode(
    launcher: Launcher, ids: Any, table: Any, gain: Any, stream: Any, normed: Any, square_sums: Any, *,
    scale: Any = None,
) -> None:  # fmt: skip
    """The start of a decode step: stream [T, H] float32, normed [T, H] = stream·gain, square_sums [T, NB].

    `gain` [1, H] is the weight of the first layer's norm. square_sums is the buffer that the down product writes later
    in the step: all NB slots are written here.

    Raises:
        ValueError, TypeError: an array's shape, layout, alignment or type is not what the kernel reads.
    """
    op = "embedding_decode"
    vocab, hidden, group = _check_table(op, ids, table, scale)
    tokens = ids.shape[0]
    if tokens > MAX_TOKENS:
        raise ValueError(f"{op}: ids has {tokens} tokens, at most {MAX_TOKENS} fit; longer inputs are for prefill")
    halves = (str(table.dtype),) if scale is None else HALF
    check_array(f"{op}: normed", normed, (tokens, hidden), *halves, align=16)
    check_array(f"{op}: gain", gain, (1, hidden), str(normed.dtype), "float32", align=16)
    check_array(f"{op}: stream", stream, (tokens, hidden), "float32", align=16)
    slots = check_square_sums(op, square_sums, tokens)
    width = 1 << (hidden - 1).bit_length()
    scales = table if scale is None else scale
    args = (ids, table, scales, gain, stream, normed, square_sums, vocab, width, slots, group, launcher.pdl)
    launcher(embedding_decode_kernel, (tokens, 1, 1), args)


def _check_table(op: str, ids: Any, table: Any, scale: Any) -> tuple[int, int, int]:
    """Rows, columns, and what the kernel calls G."""
    check_array(f"{op}: ids", ids, (None,), "int32")
    if scale is not None:
        vocab, hidden, group = check_int8(op, table, scale)
        return vocab, hidden, group or 0
    check_array(f"{op}: table", table, (None, None), *HALF, align=16)
    if table.shape[1] % 8:
        raise ValueError(f"{op}: the table has {table.shape[1]} columns, expected a multiple of 8 (16 bytes)")
    return int(table.shape[0]), int(table.shape[1]), HALF_TABLE


def model_launches(launcher: Launcher, model: ModelShape, dtype: str) -> None:
    """A chunk of 512 tokens, and the start of a decode step, of a half table and of INT8 ones."""
    row, gain = ArraySpec((1, model.hidden), dtype), ArraySpec((1, model.hidden), "float32")
    sums = ArraySpec((1, square_slots(launcher.arch, model.hidden, model.ffn)), "float32")
    bytes_table = ArraySpec((model.vocab, model.hidden), "int8")
    forms: list[tuple[ArraySpec, ArraySpec | None]] = [(ArraySpec((model.vocab, model.hidden), dtype), None)]
    forms += [(bytes_table, ArraySpec((model.vocab, groups), "float32")) for groups in (1, model.hidden // 64)]
    for table, scale in forms:
        embedding(launcher, ArraySpec(512, "int32"), table, ArraySpec((512, model.hidden), "float32"), scale=scale)
        embedding_decode(launcher, ArraySpec(1, "int32"), table, gain, gain, row, sums, scale=scale)
