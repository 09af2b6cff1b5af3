"""Elementwise operations on two operands, with the compiler's typing rules, and the operators of Tile.

Two tiles take their promoted type; a Python number has no type of its own and takes the tile's, unless its category
(boolean, integer, float) is the stronger one.
"""

from __future__ import annotations

import functools
import operator
from typing import TYPE_CHECKING, Any

import numpy as np

from kernels.interpreter.dtypes import BOOL, constant, constant_type, kind, promote
from kernels.interpreter.errors import InterpreterError
from kernels.interpreter.tile import UNKNOWN, Mask, Tile, flags

if TYPE_CHECKING:
    from collections.abc import Callable


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
        bad = known.bad if name != "mul" or known.bad is None or value != 0 else known.bad & UNKNOWN
        other = _operand(name, group, known.a.dtype, value)
        mine = known.a if other.dtype is known.a.dtype else known.a.astype(other.dtype)
        xa, ya = (mine, other) if x_is_tile else (other, mine)
    else:
        return python(x, y)
    if group == "d" and kind(ya.dtype) == 1 and not np.all(ya):
        raise InterpreterError(f"{name}: integer division by zero")
    try:
        out = function(xa, ya)
    except ValueError:
        raise InterpreterError(f"{name}: shapes {xa.shape} and {ya.shape} are not broadcastable") from None
    if group == "s":
        lost = np.asarray((ya < 0) | (ya >= ya.dtype.itemsize * 8)).view(np.uint8)
        bad = (lost if bad is None else bad | lost) if lost.any() else bad
    if bad is not None and bad.shape != out.shape:
        bad = np.broadcast_to(bad, out.shape)
    return Tile(out, bad)


def _rounded_operand(name: str, group: str, have: np.dtype, value: Any) -> np.ndarray:
    want = constant_type(have, value, group == "f")
    _check_operands(name, group, want)
    return constant(value, want)


_remembered_operand = functools.lru_cache(maxsize=8192, typed=True)(_rounded_operand)


def _operand(name: str, group: str, have: np.dtype, value: Any) -> np.ndarray:
    """A Python number in the type that it takes beside a tile of type `have`."""
    if not isinstance(value, (bool, int, float)):
        raise InterpreterError(f"{name} of a tile and a {type(value).__name__}")
    if value == 0:  # 0.0 and -0.0 would share one entry
        return _rounded_operand(name, group, have, value)
    return _remembered_operand(name, group, have, value)


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
    """Flags of the result. A known False decides an 'and', a known True an 'or', a known 0 a product with RACING."""
    xb, yb = flags(x), flags(y)
    if name == "bitwise_and" and x.a.dtype == BOOL:
        return np.where(y.a | (yb != 0), xb, 0) | np.where(x.a | (xb != 0), yb, 0)
    if name == "bitwise_or" and x.a.dtype == BOOL:
        return np.where(~y.a | (yb != 0), xb, 0) | np.where(~x.a | (xb != 0), yb, 0)
    if name == "mul":
        zero_x, zero_y = (x.a == 0) & (xb == 0), (y.a == 0) & (yb == 0)
        return np.where(zero_y, xb & UNKNOWN, xb) | np.where(zero_x, yb & UNKNOWN, yb)
    return xb | yb


def _operator(name: str) -> Callable[[Tile, Any], Any]:
    return lambda self, other: binary(name, self, other)


def _reflected(name: str) -> Callable[[Tile, Any], Any]:
    return lambda self, other: binary(name, other, self)


for _symbol, _name in {
    "add": "add",
    "sub": "sub",
    "mul": "mul",
    "truediv": "truediv",
    "floordiv": "floordiv",
    "mod": "mod",
    "pow": "pow",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
    "lshift": "bitwise_lshift",
    "rshift": "bitwise_rshift",
}.items():
    setattr(Tile, f"__{_symbol}__", _operator(_name))
    setattr(Tile, f"__r{_symbol}__", _reflected(_name))
for _symbol, _name in {
    "lt": "less",
    "le": "less_equal",
    "gt": "greater",
    "ge": "greater_equal",
    "eq": "equal",
    "ne": "not_equal",
}.items():
    setattr(Tile, f"__{_symbol}__", _operator(_name))
