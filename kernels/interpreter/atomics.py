"""Atomic operations: element by element, in an order that no kernel may rely on, with acquire and release."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import cuda.tile as ct
import numpy as np

from kernels.interpreter.errors import InterpreterError
from kernels.interpreter.tile import Tile, as_tile, touched

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernels.interpreter.memory import Array

_WIDE_INTS = ("int32", "int64", "uint32", "uint64")
_WIDE = (*_WIDE_INTS, "float32", "float64")
_UPDATES: dict[str, tuple[Callable[[Any, Any], Any], tuple[str, ...]]] = {
    "xchg": (lambda _, new: new, _WIDE),
    "add": (np.add, (*_WIDE, "float16", "bfloat16")),
    "max": (np.maximum, _WIDE_INTS),
    "min": (np.minimum, _WIDE_INTS),
    "and": (np.bitwise_and, _WIDE_INTS),
    "or": (np.bitwise_or, _WIDE_INTS),
    "xor": (np.bitwise_xor, _WIDE_INTS),
}


def _values(array: Array, what: str, value: Any, live: np.ndarray) -> np.ndarray:
    tile = array.castable(what, value)
    if touched(tile.bad, live):
        raise InterpreterError(f"{what} of {array!r} uses {array.launch.blame(tile.bad)}")
    return np.broadcast_to(tile.a, live.shape)


def _prepare(array: Array, what: str, where: Any, live: np.ndarray, order: Any) -> None:
    """Ordering, race and initialisation checks of the elements touched."""
    launch = array.launch
    if not launch.checks:
        return
    taken = tuple(position[live] for position in where)
    if array.unwritten is not None and array.unwritten[taken].any():
        raise InterpreterError(f"{what} of {array!r} reads memory nothing wrote")
    launch.orders(array, taken, order)
    launch.writes(array, None, taken, atomic=True)


def _update(name: str) -> Any:
    function, allowed = _UPDATES[name]
    what = f"atomic_{name}"

    def operation(
        array: Array,
        indices: Any,
        update: Any,
        /,
        *,
        check_bounds: bool = True,
        memory_order: Any = ct.MemoryOrder.ACQ_REL,
        memory_scope: Any = ct.MemoryScope.DEVICE,
    ) -> Tile:
        del memory_scope
        if str(array.a.dtype) not in allowed:
            raise InterpreterError(f"{what} of {array!r} does not take {array.a.dtype}")
        where, live = array.elements(what, indices, None, check_bounds)
        new = _values(array, what, update, live)
        _prepare(array, what, where, live, memory_order)
        old = np.zeros(live.shape, array.a.dtype)
        for at in np.ndindex(live.shape):
            if live[at]:
                element = tuple(int(position[at]) for position in where)
                old[at] = array.a[element]
                array.a[element] = function(old[at], new[at])
        return Tile(old)

    return operation


def atomic_cas(
    array: Array,
    indices: Any,
    expected: Any,
    desired: Any,
    /,
    *,
    check_bounds: bool = True,
    memory_order: Any = ct.MemoryOrder.ACQ_REL,
    memory_scope: Any = ct.MemoryScope.DEVICE,
) -> Tile:
    del memory_scope
    if str(array.a.dtype) not in _WIDE:
        raise InterpreterError(f"atomic_cas of {array!r} does not take {array.a.dtype}")
    where, live = array.elements("atomic_cas", indices, None, check_bounds)
    want, new = _values(array, "atomic_cas", expected, live), _values(array, "atomic_cas", desired, live)
    _prepare(array, "atomic_cas", where, live, memory_order)
    old = want.copy()
    for at in np.ndindex(live.shape):
        if live[at]:
            element = tuple(int(position[at]) for position in where)
            old[at] = array.a[element]
            if old[at] == want[at]:
                array.a[element] = new[at]
    return Tile(old)


def _store(name: str) -> Any:
    """atomic_store_* of a tiled view: the tile's elements, those out of bounds left out."""
    update = _update(name)

    def operation(view: Any, index: Any, tile: Any, /) -> None:
        array, sides = view.array, view.tile_shape or (1,) * view.array.a.ndim
        index = index if isinstance(index, tuple) else (index,)
        array.window(f"atomic_store_{name}", index, sides, tuple(range(array.a.ndim)), view.traversal_steps)
        items = []
        for axis, (item, side, step) in enumerate(zip(index, sides, view.traversal_steps, strict=True)):
            shape = tuple(-1 if other == axis else 1 for other in range(len(sides)))
            items.append(Tile((operator.index(item) * step + np.arange(side)).reshape(shape)))
        value = as_tile(tile)
        spread = Tile(np.broadcast_to(value.a, sides), value.bad)
        update(array, tuple(items), spread, memory_order=ct.MemoryOrder.RELAXED)

    return operation


TABLE: dict[str, Any] = {f"atomic_{name}": _update(name) for name in _UPDATES}
TABLE["atomic_cas"] = atomic_cas
STORES: dict[str, Any] = {f"atomic_store_{name}": _store(name) for name in _UPDATES if name != "xchg"}
