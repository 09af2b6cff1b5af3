"""Tiled views, advanced indexing and raw memory of an array: other ways to name the same elements."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import numpy as np

from kernels.interpreter.dtypes import kind
from kernels.interpreter.errors import InterpreterError
from kernels.interpreter.memory import PAD, PAD_VALUES, Array, garbage
from kernels.interpreter.tile import Tile, check_shape, flags

if TYPE_CHECKING:
    import cuda.tile as ct


class TiledView:
    """An array cut into equal tiles, `steps` elements apart."""

    def __init__(self, array: Array, tile_shape: tuple[int, ...], padding_mode: Any, steps: Any) -> None:
        self.array = array
        self.tile_shape = tile_shape
        self.padding_mode = padding_mode
        sides = tile_shape or (1,) * array.a.ndim
        self.traversal_steps = sides if steps is None else (steps,) if isinstance(steps, int) else tuple(steps)

    @property
    def dtype(self) -> ct.DType:
        return self.array.dtype

    def num_tiles(self, axis: int) -> Tile:
        return Tile(np.int32(-(-self.array.a.shape[axis] // self.traversal_steps[axis])))

    def load(self, index: Any, *, check_bounds: bool = True, latency: Any = None, allow_tma: Any = None) -> Tile:
        del latency, allow_tma  # hints change the speed, not the result
        return self.array.load_tile(
            index,
            self.tile_shape,
            padding=self.padding_mode,
            check_bounds=check_bounds,
            steps=self.traversal_steps,
        )

    def store(
        self, index: Any, tile: Any, *, check_bounds: bool = True, latency: Any = None, allow_tma: Any = None
    ) -> None:
        del latency, allow_tma
        whole = self.array.castable("store", tile)
        data = np.broadcast_to(whole.a, self.tile_shape)
        bad = None if whole.bad is None else np.broadcast_to(whole.bad, self.tile_shape)
        self.array.store_tile(index, Tile(data, bad), check_bounds=check_bounds, steps=self.traversal_steps)


def fill_slice(self: Any, start: Any, length: int) -> None:
    """ct.Slice(start, length), the dense part of an advanced index."""
    self.start = operator.index(start)
    self.length = check_shape(length, "Slice")[0]


class RawMemory:
    """An array's elements by their offset from its first one."""

    def __init__(self, array: Array) -> None:
        if not array.a.flags.c_contiguous:
            raise InterpreterError(f"raw memory of {array!r}, which is not contiguous, is not interpreted")
        self.dtype = array.dtype
        self.flat = Array(array.a.reshape(-1), array.name, array.launch)

    def load_offset(self, offset: Any, /, *, mask: Any = None, padding_value: Any = 0, latency: Any = None) -> Tile:
        del latency
        return self.flat.gather(offset, mask, padding_value, False)

    def store_offset(self, offset: Any, value: Any, /, *, mask: Any = None, latency: Any = None) -> None:
        del latency
        self.flat.scatter(offset, value, mask, False)


def _advanced(array: Array, indices: Any) -> tuple[tuple[Tile, ...], tuple[int, ...]]:
    """Element indices, shaped to broadcast to the tile, and the tile's shape."""
    rank = array.a.ndim
    if rank < 2 or len(indices) != rank or sum(isinstance(item, Tile) for item in indices) != 1:
        raise InterpreterError(f"advanced indexing of {array!r} needs one 1-D index tile and Slices, got {indices}")
    items, sides = [], []
    for axis, item in enumerate(indices):
        if isinstance(item, Tile):
            if item.a.ndim != 1 or kind(item.a.dtype) != 1:
                raise InterpreterError(f"advanced indexing of {array!r}: the index tile must be 1-D and integer")
            flat = item
        else:
            flat = Tile(np.arange(item.start, item.start + item.length, dtype=np.int64))
        shape = tuple(-1 if other == axis else 1 for other in range(rank))
        items.append(flat.reshape(shape))
        sides.append(flat.a.shape[0])
    return tuple(items), check_shape(tuple(sides), "advanced indexing")


def load_advanced(array: Array, indices: Any, padding_mode: Any) -> Tile:
    items, _ = _advanced(array, indices)
    pad = 0 if padding_mode in (PAD.ZERO, PAD.UNDETERMINED) else PAD_VALUES[padding_mode]
    if pad != 0 and kind(array.a.dtype) != 2:
        raise InterpreterError(f"advanced load of {array!r}: {padding_mode} needs a float array")
    tile = array.gather(items, None, pad, True)
    _, inside = array.elements("advanced load", items, None, True)
    if not inside.any():
        raise InterpreterError(f"advanced load of {array!r}: the tile lies wholly outside")
    if padding_mode is PAD.UNDETERMINED and not inside.all() and array.launch.checks:
        array.launch.suspects.add(f"advanced load of {array!r}")
        tile.a[~inside] = garbage(array.a.dtype)
        return Tile(tile.a, flags(tile) | (~inside).view(np.uint8))
    return tile


def store_advanced(array: Array, indices: Any, tile: Any) -> None:
    items, sides = _advanced(array, indices)
    value = array.castable("advanced store", tile)
    if value.a.shape != sides:
        raise InterpreterError(f"advanced store to {array!r}: tile {value.a.shape}, but the indices make {sides}")
    array.scatter(items, value, None, True)
