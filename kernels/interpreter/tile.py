"""A tile of the interpreter: a NumPy array with the compiler's typing rules, and a mask of undetermined elements.

`bad` marks elements that came from undetermined padding or from memory nothing wrote. It travels with the arithmetic
and raises only where the value would matter: in a store, an atomic, an index or a branch. So a kernel may load a ragged
edge, as long as it masks it (ct.where) or stores it out of bounds, exactly as on a GPU.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import cuda.tile as ct
import numpy as np

from kernels.interpreter.dtypes import (
    BOOL,
    TO_TILE,
    constant,
    constant_dtype,
    constant_type,
    kind,
    numpy_dtype,
    promote,
)
from kernels.interpreter.errors import InterpreterError

if TYPE_CHECKING:
    from collections.abc import Callable

_CHECKED: set[tuple[int, ...]] = {()}
Mask = Any  # np.ndarray of bool with the tile's shape, or None


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


class Tile(ct.Tile):
    """An immutable value. `a` is the data, `bad` the mask of undetermined elements (None: every element is sound)."""

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
            raise InterpreterError(f"{what} reads an undetermined value")
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
        bad = np.zeros(out.shape, bool) if self.bad is None else self.bad.copy()
        bad[where] = False if value.bad is None else value.bad.reshape(shape)
        return Tile(out, bad)

    def _subtile(self, index: Any, shape: tuple[int, ...], what: str) -> tuple[tuple[slice, ...], tuple[int, ...]]:
        sides = shape or (1,) * self.a.ndim
        index = index if isinstance(index, tuple) else (index,)
        if not len(index) == len(sides) == self.a.ndim:
            raise InterpreterError(f"{what}: index {index} and shape {shape} do not fit a tile of {self.a.shape}")
        where = []
        for item, side, have in zip(index, sides, self.a.shape, strict=True):
            at = operator.index(item)
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
        return self if self.a.dtype == dtype else Tile(self.a.astype(dtype), self.bad)

    # -- arithmetic

    def __add__(self, other: Any) -> Any:
        return binary("add", self, other)

    def __radd__(self, other: Any) -> Any:
        return binary("add", other, self)

    def __sub__(self, other: Any) -> Any:
        return binary("sub", self, other)

    def __rsub__(self, other: Any) -> Any:
        return binary("sub", other, self)

    def __mul__(self, other: Any) -> Any:
        return binary("mul", self, other)

    def __rmul__(self, other: Any) -> Any:
        return binary("mul", other, self)

    def __truediv__(self, other: Any) -> Any:
        return binary("truediv", self, other)

    def __rtruediv__(self, other: Any) -> Any:
        return binary("truediv", other, self)

    def __floordiv__(self, other: Any) -> Any:
        return binary("floordiv", self, other)

    def __rfloordiv__(self, other: Any) -> Any:
        return binary("floordiv", other, self)

    def __mod__(self, other: Any) -> Any:
        return binary("mod", self, other)

    def __rmod__(self, other: Any) -> Any:
        return binary("mod", other, self)

    def __pow__(self, other: Any) -> Any:
        return binary("pow", self, other)

    def __rpow__(self, other: Any) -> Any:
        return binary("pow", other, self)

    def __divmod__(self, other: Any) -> Any:
        return binary("floordiv", self, other), binary("mod", self, other)

    def __rdivmod__(self, other: Any) -> Any:
        return binary("floordiv", other, self), binary("mod", other, self)

    def __and__(self, other: Any) -> Any:
        return binary("bitwise_and", self, other)

    def __rand__(self, other: Any) -> Any:
        return binary("bitwise_and", other, self)

    def __or__(self, other: Any) -> Any:
        return binary("bitwise_or", self, other)

    def __ror__(self, other: Any) -> Any:
        return binary("bitwise_or", other, self)

    def __xor__(self, other: Any) -> Any:
        return binary("bitwise_xor", self, other)

    def __rxor__(self, other: Any) -> Any:
        return binary("bitwise_xor", other, self)

    def __lshift__(self, other: Any) -> Any:
        return binary("bitwise_lshift", self, other)

    def __rlshift__(self, other: Any) -> Any:
        return binary("bitwise_lshift", other, self)

    def __rshift__(self, other: Any) -> Any:
        return binary("bitwise_rshift", self, other)

    def __rrshift__(self, other: Any) -> Any:
        return binary("bitwise_rshift", other, self)

    def __lt__(self, other: Any) -> Any:
        return binary("less", self, other)

    def __le__(self, other: Any) -> Any:
        return binary("less_equal", self, other)

    def __gt__(self, other: Any) -> Any:
        return binary("greater", self, other)

    def __ge__(self, other: Any) -> Any:
        return binary("greater_equal", self, other)

    def __eq__(self, other: object) -> Any:
        return binary("equal", self, other)

    def __ne__(self, other: object) -> Any:
        return binary("not_equal", self, other)

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


def _floordiv(x: Any, y: Any) -> Any:
    if kind(x.dtype) == 2:
        return np.floor(np.divide(x, y))
    return np.floor_divide(x, y)


# name -> NumPy function, Python function for two constants, and the class of operation:
# a arithmetic, f arithmetic in float, c comparison, b bitwise, s shift, d division (by zero is undefined for integers)
BINARY: dict[str, tuple[Callable[..., Any], Callable[..., Any], str]] = {
    "add": (np.add, operator.add, "a"),
    "sub": (np.subtract, operator.sub, "a"),
    "mul": (np.multiply, operator.mul, "a"),
    "truediv": (np.divide, operator.truediv, "f"),
    "floordiv": (_floordiv, operator.floordiv, "d"),
    "mod": (np.mod, operator.mod, "d"),
    "pow": (np.power, operator.pow, "a"),
    "atan2": (np.arctan2, lambda x, y: float(np.arctan2(x, y)), "f"),
    "minimum": (np.fmin, min, "a"),
    "maximum": (np.fmax, max, "a"),
    "minimum_nan": (np.minimum, min, "a"),
    "maximum_nan": (np.maximum, max, "a"),
    "bitwise_and": (np.bitwise_and, operator.and_, "b"),
    "bitwise_or": (np.bitwise_or, operator.or_, "b"),
    "bitwise_xor": (np.bitwise_xor, operator.xor, "b"),
    "bitwise_lshift": (np.left_shift, operator.lshift, "s"),
    "bitwise_rshift": (np.right_shift, operator.rshift, "s"),
    "less": (np.less, operator.lt, "c"),
    "less_equal": (np.less_equal, operator.le, "c"),
    "greater": (np.greater, operator.gt, "c"),
    "greater_equal": (np.greater_equal, operator.ge, "c"),
    "equal": (np.equal, operator.eq, "c"),
    "not_equal": (np.not_equal, operator.ne, "c"),
}


def binary(name: str, x: Any, y: Any) -> Any:
    """One elementwise operation on two tiles, or on a tile and a Python number, which has no type of its own."""
    function, python, group = BINARY[name]
    x_is_tile, y_is_tile = isinstance(x, Tile), isinstance(y, Tile)
    if x_is_tile and y_is_tile:
        xa, ya, bad = x.a, y.a, None
        if xa.dtype is not ya.dtype or group != "a" or xa.dtype is BOOL:
            xa, ya = _common(name, group, xa, ya)
        if x.bad is not None or y.bad is not None:
            bad = _merge(name, x, y)
    elif x_is_tile or y_is_tile:
        known, value = (x, y) if x_is_tile else (y, x)
        if not isinstance(value, (bool, int, float)):
            raise InterpreterError(f"{name} of a tile and a {type(value).__name__}")
        have, bad = known.a.dtype, known.bad
        want = constant_type(have, value, group == "f")
        _check_operands(name, group, want)
        other = constant(value, want)
        mine = known.a if want == have else known.a.astype(want)
        xa, ya = (mine, other) if x_is_tile else (other, mine)
    else:
        return python(x, y)
    if group == "d" and kind(ya.dtype) == 1 and not np.all(ya):
        raise InterpreterError(f"{name}: integer division by zero")
    try:
        out = function(xa, ya)
    except ValueError:
        raise InterpreterError(f"{name}: shapes {xa.shape} and {ya.shape} are not broadcastable") from None
    if bad is not None and bad.shape != out.shape:
        bad = np.broadcast_to(bad, out.shape)
    return Tile(out, bad)


def _common(name: str, group: str, xa: Any, ya: Any) -> tuple[Any, Any]:
    if group == "b" and xa.dtype != ya.dtype:
        raise InterpreterError(f"{name}: operands must have one type, got {xa.dtype} and {ya.dtype}")
    want = promote(xa.dtype, ya.dtype, group == "f")
    _check_operands(name, group, want)
    return xa if xa.dtype == want else xa.astype(want), ya if ya.dtype == want else ya.astype(want)


def _check_operands(name: str, group: str, dtype: np.dtype) -> None:
    category = kind(dtype)
    if (group in "bs" and category == 2) or (group == "s" and category == 0):
        raise InterpreterError(f"{name} does not take {dtype}")
    if group in "ad" and category == 0:
        raise InterpreterError(f"{name} does not take bool: cast it to an integer")


def _merge(name: str, x: Tile, y: Tile) -> Mask:
    """Undetermined elements of the result; a known False decides an 'and', a known True an 'or'."""
    none = np.False_
    xb, yb = none if x.bad is None else x.bad, none if y.bad is None else y.bad
    if name == "bitwise_and" and x.a.dtype == BOOL:
        return (xb & (y.a | yb)) | (yb & (x.a | xb))
    if name == "bitwise_or" and x.a.dtype == BOOL:
        return (xb & (~y.a | yb)) | (yb & (~x.a | xb))
    return xb | yb


def as_tile(x: Any) -> Tile:
    """A Python number as the 0-d tile it becomes where a tile is needed."""
    if isinstance(x, Tile):
        return x
    if isinstance(x, (bool, int, float)):
        return Tile(constant(x, constant_dtype(x)))
    raise InterpreterError(f"expected a tile or a number, got {type(x).__name__}")
