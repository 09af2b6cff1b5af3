"""Global memory as a kernel sees it: arrays with bounds, initialisation, aliasing and race checks.

Every array argument is a view of one allocation (its root). Maps over the root's bytes hold, per launch, which block
wrote an element, and, for arrays made by `uninitialised`, which elements were ever written. Maps look at the first byte
of an element, so two views of one allocation with different element sizes are told apart only where those bytes meet.

Allocations made elsewhere count as initialised.
"""

from __future__ import annotations

import operator
import weakref
from typing import TYPE_CHECKING, Any

import cuda.tile as ct
import numpy as np

from kernels.interpreter.dtypes import TO_TILE, constant, constant_type, kind, storable
from kernels.interpreter.errors import InterpreterError
from kernels.interpreter.tile import UNKNOWN, Tile, as_tile, check_shape, flags, index_of, touched

if TYPE_CHECKING:
    from kernels.interpreter.races import Launch

_UNWRITTEN: dict[int, tuple[weakref.ref, np.ndarray]] = {}  # id of a root -> the root, True where nothing was written
PAD, WEAK, RELAXED = ct.PaddingMode, ct.MemoryOrder.WEAK, ct.MemoryOrder.RELAXED
PAD_VALUES = {PAD.ZERO: 0.0, PAD.NEG_ZERO: -0.0, PAD.NAN: np.nan, PAD.POS_INF: np.inf, PAD.NEG_INF: -np.inf}
_ROW_MAJOR: dict[int, tuple[int, ...]] = {rank: tuple(range(rank)) for rank in range(9)}


def root_of(array: np.ndarray) -> np.ndarray:
    """The allocation an array looks into."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def garbage(dtype: np.dtype) -> Any:
    """What undetermined memory is made to hold: NaN, True, or an integer that no computation here would produce."""
    if kind(dtype) == 2:
        return np.array(np.nan).astype(dtype)
    return np.array(0x5A5A5A5A5A5A5A5A).astype(np.int64).astype(dtype)


def uninitialised(shape: int | tuple[int, ...], dtype: Any) -> np.ndarray:
    """An array whose elements count as never written: a kernel that lets one decide anything is stopped.

    Write to it from the host through `initialise`; plain NumPy assignment is not seen.
    """
    array = np.empty(shape, np.dtype(dtype))
    array[...] = garbage(array.dtype)
    key = id(array)
    _UNWRITTEN[key] = (weakref.ref(array, lambda _: _UNWRITTEN.pop(key, None)), np.ones(array.nbytes, bool))
    return array


def initialise(view: np.ndarray, values: Any) -> None:
    """`view[...] = values`, remembered as written. `view` may be any part of an uninitialised array."""
    view[...] = values
    root = root_of(view)
    if id(root) in _UNWRITTEN:
        map_view(_UNWRITTEN[id(root)][1], view, root)[...] = False


def unwritten(view: np.ndarray) -> np.ndarray:
    """True where nothing was written, in the shape of `view`."""
    root = root_of(view)
    if id(root) not in _UNWRITTEN:
        return np.zeros(view.shape, bool)
    return map_view(_UNWRITTEN[id(root)][1], view, root).copy()


def map_view(bytemap: np.ndarray, view: np.ndarray, root: np.ndarray) -> np.ndarray:
    """The entries of a per-byte map at the first byte of each element of `view`."""
    size = bytemap.itemsize
    offset = (address(view) - address(root)) * size
    return np.ndarray(view.shape, bytemap.dtype, bytemap, offset, [stride * size for stride in view.strides])


class Array(ct.Array):
    """An array argument of the launch in progress (or a slice of one)."""

    __slots__ = ("_maps", "_shape", "a", "launch", "name", "root", "static", "unwritten")

    def __init__(self, a: np.ndarray, name: str, launch: Launch, static: tuple[Any, Any] = ((), ())) -> None:
        self.a = a
        self.name = name
        self.launch = launch
        self.static = static
        self.root = root_of(a)
        record = _UNWRITTEN.get(id(self.root))
        self.unwritten = None if record is None else map_view(record[1], a, self.root)
        self._shape: Any = None
        self._maps: dict[int, np.ndarray] = {}

    @property
    def dtype(self) -> Any:
        return TO_TILE[self.a.dtype]

    @property
    def ndim(self) -> int:
        return self.a.ndim

    @property
    def shape(self) -> tuple[Any, ...]:
        """Run-time int32 values, as on the GPU; plain numbers where the annotation makes a side a constant."""
        if self._shape is None:
            static = {axis % self.a.ndim for axis in self.static[0]}
            self._shape = tuple(n if i in static else Tile(np.int32(n)) for i, n in enumerate(self.a.shape))
        return self._shape

    @property
    def strides(self) -> tuple[Any, ...]:
        size = self.a.itemsize
        return tuple(Tile(np.int32(stride // size)) for stride in self.a.strides)

    def __repr__(self) -> str:
        return f"{self.name}{self.a.shape}"

    def cut(self, axis: int, start: Any, stop: Any) -> Array:
        lo, hi, side = operator.index(start), operator.index(stop), self.a.shape[axis]
        if not (0 <= lo <= hi <= side):
            raise InterpreterError(f"slice of {self!r}, axis {axis}: {lo}:{hi} lies outside 0:{side}")
        part = [slice(None)] * self.a.ndim
        part[axis] = slice(lo, hi)
        return Array(self.a[tuple(part)], f"{self.name}[{axis}: {lo}:{hi}]", self.launch)

    def over(self, bytemap: np.ndarray) -> np.ndarray:
        """This array's elements in a per-byte map of its root."""
        key = id(bytemap)
        found = self._maps.get(key)
        if found is None:
            found = self._maps[key] = map_view(bytemap, self.a, self.root)
        return found

    # -- whole tiles

    def window(
        self, what: str, index: Any, sides: tuple[int, ...], order: tuple[int, ...], steps: Any = None
    ) -> tuple[tuple[slice, ...], bool]:
        """The part of the array (axes in `order`) that a tile covers, and whether the tile lies wholly inside."""
        index = index if isinstance(index, tuple) else (index,)
        shape = self.a.shape
        if len(index) != len(shape) or len(sides) != len(shape):
            raise InterpreterError(f"{what} of {self!r}: index {index} and tile {sides} do not have its rank")
        whole, part = True, []
        for position, (item, side) in enumerate(zip(index, sides, strict=True)):
            have = shape[order[position]]
            lo = index_of(item) * (side if steps is None else steps[position])
            hi = lo + side
            if lo < 0 or lo >= have:
                at = tuple(operator.index(i) for i in index)
                raise InterpreterError(f"{what} of {self!r}: tile {at} of shape {sides} lies wholly outside")
            if hi > have:
                whole, hi = False, have
            part.append(slice(lo, hi))
        return tuple(part), whole

    def load_tile(
        self,
        index: Any,
        shape: Any,
        *,
        order: Any = "C",
        padding: Any = PAD.UNDETERMINED,
        check_bounds: bool = True,
        steps: Any = None,
        ordering: Any = WEAK,
    ) -> Tile:
        shape = check_shape(shape, "load")
        if not check_bounds and padding is not PAD.UNDETERMINED:
            raise InterpreterError(f"load of {self!r}: tileiras 13.4 fails on {padding} beside check_bounds=False")
        order = axes_of(order, self.a.ndim)
        sides = shape or (1,) * self.a.ndim
        part, whole = self.window("load", index, sides, order, steps)
        row_major = order == _ROW_MAJOR[self.a.ndim]
        source = self.a if row_major else self.a.transpose(order)
        launch = self.launch
        bad = None
        if launch.checks:
            if ordering is not WEAK and ordering is not RELAXED:
                launch.orders(self, self.positions(order, part), ordering)
            launch.reads(self, order, part, atomic=ordering is not WEAK)
            if self.unwritten is not None:
                holes = (self.unwritten if row_major else self.unwritten.transpose(order))[part]
                bad = holes.astype(np.uint8) if holes.any() else None
            if launch.racing:
                bad = launch.add_racing(bad, self, order, part, atomic=ordering is not WEAK)
        if whole:
            data = source[part].copy()
        else:
            if not check_bounds:
                raise InterpreterError(
                    f"load of {self!r}: check_bounds=False, but the tile {sides} overhangs {_text(part)}"
                )
            data, bad = self._padded(source[part], bad, sides, padding)
        if bad is not None:
            launch.suspects.add(f"load of {self!r} at {_text(part)}")
        if not shape:
            data, bad = data.reshape(()), None if bad is None else bad.reshape(())
        return Tile(data, bad)

    def _padded(self, inside: np.ndarray, bad: Any, sides: Any, padding: Any) -> tuple[np.ndarray, Any]:
        """A tile whose first elements are `inside`, and the rest what the padding mode says."""
        core = tuple(slice(0, n) for n in inside.shape)
        undetermined = padding is PAD.UNDETERMINED
        if not undetermined and padding is not PAD.ZERO and kind(self.a.dtype) != 2:
            raise InterpreterError(f"load of {self!r}: {padding} needs a float array, this one is {self.a.dtype}")
        data = np.empty(sides, self.a.dtype)
        data[...] = garbage(self.a.dtype) if undetermined else np.array(PAD_VALUES[padding]).astype(self.a.dtype)
        data[core] = inside
        if bad is None and not (undetermined and self.launch.checks):
            return data, None
        mask = np.full(sides, UNKNOWN if undetermined else 0, np.uint8)
        mask[core] = 0 if bad is None else bad
        return data, mask

    def store_tile(
        self,
        index: Any,
        tile: Any,
        *,
        order: Any = "C",
        check_bounds: bool = True,
        steps: Any = None,
        ordering: Any = WEAK,
    ) -> None:
        tile = self.castable("store", tile)
        order = axes_of(order, self.a.ndim)
        sides = tile.a.shape or (1,) * self.a.ndim
        part, whole = self.window("store", index, sides, order, steps)
        if not whole and not check_bounds:
            raise InterpreterError(
                f"store to {self!r}: check_bounds=False, but the tile {sides} overhangs {_text(part)}"
            )
        target = self.a if order == _ROW_MAJOR[self.a.ndim] else self.a.transpose(order)
        data, bad = tile.a, tile.bad
        if data.shape != sides:
            data, bad = data.reshape(sides), None if bad is None else bad.reshape(sides)
        if not whole:
            core = tuple(slice(0, p.stop - p.start) for p in part)
            data, bad = data[core], None if bad is None else bad[core]
        if bad is not None and bad.any():
            raise InterpreterError(f"store to {self!r} at {_text(part)} writes {self.launch.blame(bad)}")
        if self.launch.checks:
            if ordering is not WEAK and ordering is not RELAXED:
                self.launch.orders(self, self.positions(order, part), ordering)
            self.launch.writes(self, order, part, atomic=ordering is not WEAK)
            if self.unwritten is not None:
                (self.unwritten if target is self.a else self.unwritten.transpose(order))[part] = False
        target[part] = data

    def positions(self, order: tuple[int, ...], part: Any) -> tuple[np.ndarray, ...]:
        """Element indices, in the array's own axes, of a window given in `order`."""
        grid = np.meshgrid(*(np.arange(p.start, p.stop) for p in part), indexing="ij")
        return tuple(grid[order.index(axis)].reshape(-1) for axis in range(self.a.ndim))

    def castable(self, what: str, value: Any) -> Tile:
        """The value in the array's type, if the compiler would cast it by itself."""
        if isinstance(value, (bool, int, float)):
            if constant_type(self.a.dtype, value, False) != self.a.dtype:
                raise InterpreterError(f"{what} to {self!r}: constant {value} does not fit {self.a.dtype}")
            return Tile(constant(value, self.a.dtype))
        tile = as_tile(value)
        if tile.a.dtype is self.a.dtype or tile.a.dtype == self.a.dtype:
            return tile
        if not storable(tile.a.dtype, self.a.dtype):
            raise InterpreterError(f"{what} to {self!r} of {self.a.dtype}: a {tile.a.dtype} tile needs an astype")
        return tile.cast(self.a.dtype)

    # -- single elements

    def elements(
        self, what: str, indices: Any, mask: Any, check_bounds: bool
    ) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
        """Index arrays broadcast to one shape, and which of their elements take part."""
        items = indices if isinstance(indices, tuple) else (indices,)
        if len(items) != self.a.ndim:
            raise InterpreterError(f"{what} of {self!r}: {len(items)} indices for rank {self.a.ndim}")
        tiles = [as_tile(item) for item in items]
        use = None if mask is None else as_tile(mask)
        if use is not None and use.bad is not None and use.bad.any():
            raise InterpreterError(f"{what} of {self!r}: its mask is {self.launch.blame(use.bad)}")
        where = np.broadcast_arrays(*(tile.a for tile in tiles))
        live = np.ones(where[0].shape, bool) if use is None else np.broadcast_to(use.a, where[0].shape)
        inside = np.ones(where[0].shape, bool)
        for tile, position, side in zip(tiles, where, self.a.shape, strict=True):
            if touched(tile.bad, live):
                raise InterpreterError(f"{what} of {self!r}: an index is {self.launch.blame(tile.bad)}")
            if kind(position.dtype) != 1:
                raise InterpreterError(f"{what} of {self!r}: an index of type {position.dtype}")
            inside &= (position >= 0) & (position < side)
        if not check_bounds and (live & ~inside).any():
            first = tuple(int(p[live & ~inside].flat[0]) for p in where)
            raise InterpreterError(f"{what} of {self!r}: check_bounds=False, but index {first} lies outside")
        live = live & inside
        return tuple(np.where(live, position, 0) for position in where), live

    def gather(self, indices: Any, mask: Any, padding_value: Any, check_bounds: bool) -> Tile:
        where, live = self.elements("gather", indices, mask, check_bounds)
        pad = self.castable("gather padding", padding_value)
        taken = tuple(position[live] for position in where)
        data = np.empty(live.shape, self.a.dtype)
        data[...] = pad.a
        data[live] = self.a[taken]
        bad = None
        if self.launch.checks:
            bad = self._gathered_flags(taken, live, pad)
            if bad is not None and bad.any():
                self.launch.suspects.add(f"gather of {self!r}")
        return Tile(data, bad)

    def _gathered_flags(self, taken: Any, live: np.ndarray, pad: Tile) -> Any:
        self.launch.reads(self, None, taken)
        inside = None if self.unwritten is None else self.unwritten[taken].astype(np.uint8)
        if self.launch.racing:
            inside = self.launch.add_racing(inside, self, None, taken)
        if inside is None and pad.bad is None:
            return None
        bad = np.where(live, 0, np.broadcast_to(flags(pad), live.shape)).astype(np.uint8)
        bad[live] = 0 if inside is None else inside
        return bad

    def scatter(self, indices: Any, value: Any, mask: Any, check_bounds: bool) -> None:
        where, live = self.elements("scatter", indices, mask, check_bounds)
        tile = self.castable("scatter", value)
        taken = tuple(position[live] for position in where)
        if touched(tile.bad, live):
            raise InterpreterError(f"scatter to {self!r} writes {self.launch.blame(tile.bad)}")
        if self.launch.checks:
            flat = np.ravel_multi_index(taken, self.a.shape) if taken else np.zeros(1, int)
            if len(np.unique(flat)) != len(flat):
                raise InterpreterError(f"scatter to {self!r} writes one element more than once")
            self.launch.writes(self, None, taken)
            if self.unwritten is not None:
                self.unwritten[taken] = False
        self.a[taken] = np.broadcast_to(tile.a, live.shape)[live]


def axes_of(order: Any, rank: int) -> tuple[int, ...]:
    """The axis order of load and store: 'C', 'F' or a permutation."""
    if order == "C":
        return _ROW_MAJOR[rank]
    if order == "F":
        return _ROW_MAJOR[rank][::-1]
    axes = tuple(axis % rank for axis in order)
    if sorted(axes) != list(range(rank)):
        raise InterpreterError(f"order {order} does not name each of {rank} axes once")
    return axes


def _text(part: Any) -> str:
    return "[" + ", ".join(f"{p.start}:{p.stop}" for p in part) + "]"
