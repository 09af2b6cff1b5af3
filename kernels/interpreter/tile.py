"""A tile of the interpreter: a NumPy array and a mask of undetermined elements. Its operators are in `arithmetic`.

`bad` holds one byte an element, of two flags. They travel with the arithmetic and raise only where the value would
matter: in a store, an atomic, an index or a branch. So a kernel may load a ragged edge, as long as it masks it
(ct.where) or stores it out of bounds, exactly as on a GPU.

    UNKNOWN   undetermined padding, memory nothing wrote, a float that its integer type cannot hold, a shift by more
              bits than there are: any bits, so 0 times it may be NaN
    RACING    read while another block of the launch writes it: the old value or the new one. Both are numbers, so 0
              times it is 0, and a kernel may multiply it by an exact zero, in a product too
"""

from __future__ import annotations

import operator
from typing import Any

import cuda.tile as ct
import numpy as np

from kernels.interpreter.dtypes import BOOL, TO_TILE, constant, constant_dtype, integer_range, kind, numpy_dtype
from kernels.interpreter.errors import InterpreterError

_CHECKED: set[tuple[int, ...]] = {()}
Mask = Any  # np.ndarray of flags with the tile's shape, or None
UNKNOWN, RACING = np.uint8(1), np.uint8(2)


def check_shape(shape: Any, what: str = "tile") -> tuple[int, ...]:
    """The shape as a tuple; every side must be a constant power of two."""
    if isinstance(shape, int):
        shape = (shape,)
    try:
        if shape in _CHECKED:
            return shape
    except TypeError:
        raise InterpreterError(f"{what} shape {shape!r} is not made of compile-time constants") from None
    shape = tuple(shape)
    for side in shape:
        if isinstance(side, bool) or not isinstance(side, int):
            raise InterpreterError(f"{what} shape {shape} is not made of compile-time constants")
        if side <= 0 or side & (side - 1):
            raise InterpreterError(f"{what} shape {shape}: side {side} is no power of two")
    _CHECKED.add(shape)
    return shape


def index_of(item: Any) -> int:
    """A number or 0-d integer tile as a Python int; `operator.index`, with a short way for the usual case."""
    if type(item) is int:
        return item
    if type(item) is Tile and item.bad is None and not item.a.shape and item.a.dtype.kind in "iu":
        return int(item.a)
    return operator.index(item)


def touched(bad: Mask, live: np.ndarray) -> bool:
    """Whether an element that takes part is flagged."""
    return bad is not None and bool(np.broadcast_to(bad, live.shape)[live].any())


def flags(tile: Tile) -> np.ndarray:
    """The tile's mask, zeros where it has none."""
    return np.zeros(tile.a.shape, np.uint8) if tile.bad is None else tile.bad


class Tile(ct.Tile):
    """An immutable value. `a` is the data, `bad` the flags of its elements (None: every element is sound)."""

    __slots__ = ("a", "bad")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, a: Any, bad: Mask = None) -> None:
        self.a = a
        self.bad = bad

    @property
    def dtype(self) -> Any:
        return TO_TILE[self.a.dtype]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.a.shape

    @property
    def ndim(self) -> int:
        return self.a.ndim

    def __repr__(self) -> str:
        return f"Tile[{self.a.dtype}, {self.a.shape}]({self.a})"

    # -- leaving tile code: every one of these is a point where an undetermined value would decide something

    def scalar(self, what: str) -> Any:
        if self.a.shape != ():
            raise InterpreterError(f"{what} needs a 0-d tile, got shape {self.a.shape}")
        if self.bad is not None and self.bad.any():
            if self.bad & UNKNOWN:
                raise InterpreterError(f"{what} reads an undetermined value")
            raise InterpreterError(f"{what} reads a value that races with another block's store")
        return self.a

    def __bool__(self) -> bool:
        return bool(self.scalar("a branch"))

    def __index__(self) -> int:
        if kind(self.a.dtype) != 1:
            raise InterpreterError(f"an index needs an integer, got {self.a.dtype}")
        return int(self.scalar("an index"))

    def __int__(self) -> int:
        return int(self.scalar("int()"))

    def __float__(self) -> float:
        return float(self.scalar("float()"))

    # -- shape

    def item(self) -> Tile:
        return self.reshape(())

    def reshape(self, shape: Any) -> Tile:
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        if -1 not in shape:
            shape = check_shape(shape, "reshape")
        try:
            return Tile(self.a.reshape(shape), None if self.bad is None else self.bad.reshape(shape))
        except ValueError:
            raise InterpreterError(f"cannot reshape {self.a.shape} to {shape}") from None

    def permute(self, axes: Any) -> Tile:
        axes = tuple(axes)
        if sorted(axis % self.a.ndim for axis in axes) != list(range(self.a.ndim)):
            raise InterpreterError(f"permute: axes {axes} do not name each of {self.a.ndim} dimensions once")
        return Tile(self.a.transpose(axes), None if self.bad is None else self.bad.transpose(axes))

    def transpose(self, axis0: int | None = None, axis1: int | None = None) -> Tile:
        rank = self.a.ndim
        if axis0 is None and axis1 is None:
            if rank != 2:
                raise InterpreterError(f"transpose needs its axes for a tile of rank {rank}")
            axis0, axis1 = 1, 0
        if axis0 is None or axis1 is None:
            raise InterpreterError(f"transpose needs both axes or none, got {axis0} and {axis1}")
        axes = list(range(rank))
        axes[axis0], axes[axis1] = axes[axis1], axes[axis0]
        return self.permute(axes)

    def extract(self, index: Any, shape: Any) -> Tile:
        where, shape = self._subtile(index, check_shape(shape, "extract"), "extract")
        return Tile(self.a[where].reshape(shape), None if self.bad is None else self.bad[where].reshape(shape))

    def insert(self, index: Any, value: Tile) -> Tile:
        if value.a.dtype != self.a.dtype:
            raise InterpreterError(f"insert of {value.a.dtype} into a tile of {self.a.dtype}")
        shape = value.a.shape or (1,) * self.a.ndim
        where, _ = self._subtile(index, shape, "insert")
        out = self.a.copy()
        out[where] = value.a.reshape(shape)
        if self.bad is None and value.bad is None:
            return Tile(out)
        bad = flags(self).copy()
        bad[where] = flags(value).reshape(shape)
        return Tile(out, bad)

    def _subtile(self, index: Any, shape: tuple[int, ...], what: str) -> tuple[tuple[slice, ...], tuple[int, ...]]:
        sides = shape or (1,) * self.a.ndim
        index = index if isinstance(index, tuple) else (index,)
        if not len(index) == len(sides) == self.a.ndim:
            raise InterpreterError(f"{what}: index {index} and shape {shape} do not fit a tile of {self.a.shape}")
        where = []
        for item, side, have in zip(index, sides, self.a.shape, strict=True):
            at = index_of(item)
            if have % side or not 0 <= at < have // side:
                raise InterpreterError(f"{what}: index {at} of {side} elements lies outside a side of {have}")
            where.append(slice(at * side, at * side + side))
        return tuple(where), shape

    def expand_dims(self, axis: int) -> Tile:
        return Tile(np.expand_dims(self.a, axis), None if self.bad is None else np.expand_dims(self.bad, axis))

    def __getitem__(self, index: Any) -> Tile:
        items = index if isinstance(index, tuple) else (index,)
        if any(item is not None and item is not Ellipsis and item != slice(None) for item in items):
            raise InterpreterError(f"a tile can be indexed only by None, ':' and '...', got {index!r}")
        return Tile(self.a[index], None if self.bad is None else self.bad[index])

    def astype(self, dtype: Any, *, rounding_mode: Any = None) -> Tile:
        if rounding_mode not in (None, ct.RoundingMode.RN):
            raise InterpreterError(f"astype: rounding mode {rounding_mode} is not interpreted")
        return self.cast(numpy_dtype(dtype))

    def cast(self, dtype: np.dtype) -> Tile:
        if self.a.dtype == dtype:
            return self
        bad = self.bad
        if kind(dtype) == 1 and kind(self.a.dtype) == 2:
            low, high = integer_range(dtype)
            whole = np.trunc(self.a)
            lost = (~((whole >= low) & (whole < high))).view(np.uint8)
            if lost.any():
                bad = lost if bad is None else bad | lost
        return Tile(self.a.astype(dtype), bad)

    def __neg__(self) -> Any:
        if self.a.dtype == BOOL:
            return Tile(np.negative(self.a.astype(np.int32)), self.bad)
        return Tile(np.negative(self.a), self.bad)

    def __pos__(self) -> Any:
        return self

    def __abs__(self) -> Any:
        return Tile(np.abs(self.a), self.bad)

    def __invert__(self) -> Any:
        if kind(self.a.dtype) == 2:
            raise InterpreterError(f"'~' of a {self.a.dtype} tile")
        return Tile(np.invert(self.a), self.bad)


def as_tile(x: Any) -> Tile:
    """A Python number as the 0-d tile it becomes where a tile is needed."""
    if isinstance(x, Tile):
        return x
    if isinstance(x, (bool, int, float)):
        return Tile(constant(x, constant_dtype(x)))
    raise InterpreterError(f"expected a tile or a number, got {type(x).__name__}")
