"""Reductions and scans. A custom function combines neighbours pairwise, so it must be associative, as on a GPU.

The order of a float sum is the interpreter's own (NumPy's pairwise one); a GPU's tree gives other last bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kernels.interpreter.dtypes import BOOL, kind
from kernels.interpreter.errors import InterpreterError
from kernels.interpreter.tile import Tile, as_tile, check_shape, flags

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


_ANY: Any = np.bitwise_or.reduce  # flags of a reduced element: those of all it was made of


def _axes(axis: Any, rank: int) -> tuple[int, ...]:
    axes = tuple(range(rank)) if axis is None else (axis,) if isinstance(axis, int) else tuple(axis)
    if any(not -rank <= one < rank for one in axes) or len({one % rank for one in axes}) != len(axes):
        raise InterpreterError(f"reduction axes {axis} do not fit a tile of rank {rank}")
    return tuple(one % rank for one in axes)


def _simple(name: str, function: Callable[..., Any], nan_function: Callable[..., Any] | None = None) -> Any:
    def operation(
        x: Tile,
        /,
        axis: Any = None,
        *,
        keepdims: bool = False,
        rounding_mode: Any = None,
        flush_to_zero: bool = False,
        propagate_nan: bool = False,
    ) -> Tile:
        del rounding_mode, flush_to_zero
        if not isinstance(x, Tile):
            raise InterpreterError(f"{name} needs a tile, got {type(x).__name__}")
        data = x.a.astype(np.int32) if x.a.dtype == BOOL else x.a
        axes = axis if type(axis) is int and 0 <= axis < data.ndim else _axes(axis, data.ndim)
        combine = nan_function if propagate_nan and nan_function is not None else function
        extra = {"dtype": data.dtype} if combine in (np.add.reduce, np.multiply.reduce) else {}
        out = combine(data, axis=axes, keepdims=keepdims, **extra)
        return Tile(out, None if x.bad is None else _ANY(x.bad, axis=axes, keepdims=keepdims))

    return operation


def _arg(name: str, sign: int) -> Any:
    def operation(x: Tile, /, axis: int | None = None, *, keepdims: bool = False, propagate_nan: bool = False) -> Tile:
        data, bad = (
            (x.a, x.bad) if axis is not None else (x.a.reshape(-1), None if x.bad is None else x.bad.reshape(-1))
        )
        along = 0 if axis is None else _axes(axis, data.ndim)[0]
        if data.dtype == BOOL:
            data = data.astype(np.int32)
        position = _first(data, along, sign, propagate_nan).astype(np.int32)
        lost = None if bad is None else _ANY(bad, axis=along)
        if keepdims:
            shape = (1,) * x.a.ndim if axis is None else (*data.shape[:along], 1, *data.shape[along + 1 :])
            return Tile(position.reshape(shape), None if lost is None else lost.reshape(shape))
        return Tile(position, lost)

    operation.__name__ = name
    return operation


def _first(data: np.ndarray, axis: int, sign: int, propagate_nan: bool) -> np.ndarray:
    """The smallest position of the extreme; NaN is the worst value, or the best when it propagates."""
    best = np.maximum if sign > 0 else np.minimum
    if kind(data.dtype) == 2:
        ignore = np.fmax if sign > 0 else np.fmin
        extreme = (best if propagate_nan else ignore).reduce(data, axis=axis, keepdims=True)
        hit = (data == extreme) | (np.isnan(data) & np.isnan(extreme))
    else:
        hit = data == best.reduce(data, axis=axis, keepdims=True)
    return np.asarray(np.argmax(hit, axis=axis))


def _cumulative(function: Callable[..., Any]) -> Any:
    def operation(
        x: Tile, /, axis: int = 0, *, reverse: bool = False, rounding_mode: Any = None, flush_to_zero: bool = False
    ) -> Tile:
        del rounding_mode, flush_to_zero
        data = x.a.astype(np.int32) if x.a.dtype == BOOL else x.a
        (along,) = _axes(axis, data.ndim)
        bad = x.bad
        if reverse:
            data, bad = np.flip(data, along), None if bad is None else np.flip(bad, along)
        out = function(data, axis=along, dtype=data.dtype)
        bad = None if bad is None else np.bitwise_or.accumulate(bad, axis=along)
        return Tile(np.flip(out, along), None if bad is None else np.flip(bad, along)) if reverse else Tile(out, bad)

    return operation


def _operands(x: Any) -> tuple[bool, list[Tile]]:
    several = isinstance(x, tuple)
    tiles = [as_tile(item) for item in (x if several else (x,))]
    shape = check_shape(np.broadcast_shapes(*(tile.a.shape for tile in tiles)), "reduce")
    spread = [
        Tile(np.broadcast_to(t.a, shape), None if t.bad is None else np.broadcast_to(t.bad, shape)) for t in tiles
    ]
    return several, spread


def _combine(func: Any, several: bool, left: list[Tile], right: list[Tile]) -> list[Tile]:
    result = func(*left, *right)
    results = list(result) if several else [result]
    if len(results) != len(left):
        raise InterpreterError(f"the combining function returned {len(results)} values for {len(left)}")
    return [as_tile(out).cast(mine.a.dtype) for out, mine in zip(results, left, strict=True)]


def _part(tile: Tile, axis: int, what: slice) -> Tile:
    where = (slice(None),) * axis + (what,)
    return Tile(tile.a[where], None if tile.bad is None else tile.bad[where])


def reduce(x: Any, /, axis: int, func: Any, identity: Any, *, keepdims: bool = False) -> Any:
    several, tiles = _operands(x)
    if several and len(identity) != len(tiles):
        raise InterpreterError(f"reduce: {len(tiles)} tiles, {len(identity)} identities")
    (along,) = _axes(axis, tiles[0].a.ndim)
    while tiles[0].a.shape[along] > 1:
        left = [_part(tile, along, slice(0, None, 2)) for tile in tiles]
        right = [_part(tile, along, slice(1, None, 2)) for tile in tiles]
        tiles = _combine(func, several, left, right)
    _check_identity(func, several, tiles, identity if several else (identity,))
    if not keepdims:
        shape = tiles[0].a.shape[:along] + tiles[0].a.shape[along + 1 :]
        tiles = [tile.reshape(shape) for tile in tiles]
    return tuple(tiles) if several else tiles[0]


def _check_identity(func: Any, several: bool, tiles: list[Tile], identity: Sequence[Any]) -> None:
    """Compiled code may start from the identity or not: it must make no difference."""
    start = [Tile(np.full_like(tile.a, value)) for tile, value in zip(tiles, identity, strict=True)]
    for tile, found in zip(tiles, _combine(func, several, start, tiles), strict=True):
        known = tile.a if tile.bad is None else tile.a[tile.bad == 0]
        other = found.a if tile.bad is None else found.a[tile.bad == 0]
        if not np.array_equal(known, other, equal_nan=known.dtype.kind == "f"):
            raise InterpreterError(f"reduce: the identity {tuple(identity)} changes the result")


def scan(x: Any, /, axis: int, func: Any, identity: Any, *, reverse: bool = False) -> Any:
    del identity  # an inclusive scan starts from the first element
    several, tiles = _operands(x)
    (along,) = _axes(axis, tiles[0].a.ndim)
    flip = slice(None, None, -1)
    tiles = [_part(tile, along, flip) for tile in tiles] if reverse else tiles
    step = 1
    while step < tiles[0].a.shape[along]:
        left = [_part(tile, along, slice(0, -step)) for tile in tiles]
        right = [_part(tile, along, slice(step, None)) for tile in tiles]
        tails = _combine(func, several, left, right)
        tiles = [_joined(_part(t, along, slice(0, step)), tail, along) for t, tail in zip(tiles, tails, strict=True)]
        step *= 2
    tiles = [_part(tile, along, flip) for tile in tiles] if reverse else tiles
    return tuple(tiles) if several else tiles[0]


def _joined(head: Tile, tail: Tile, axis: int) -> Tile:
    bad = None
    if head.bad is not None or tail.bad is not None:
        bad = np.concatenate((flags(head), flags(tail)), axis)
    return Tile(np.concatenate((head.a, tail.a), axis), bad)


TABLE: dict[str, Any] = {
    "sum": _simple("sum", np.add.reduce),
    "prod": _simple("prod", np.multiply.reduce),
    "max": _simple("max", np.fmax.reduce, np.maximum.reduce),
    "min": _simple("min", np.fmin.reduce, np.minimum.reduce),
    "argmax": _arg("argmax", 1),
    "argmin": _arg("argmin", -1),
    "cumsum": _cumulative(np.cumsum),
    "cumprod": _cumulative(np.cumprod),
    "reduce": reduce,
    "scan": scan,
}
