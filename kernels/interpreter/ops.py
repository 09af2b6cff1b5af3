"""The operations of cuda.tile that need no block: creation, mathematics, shape, reductions and matrix products.

Float32 functions are computed in float32; BF16 and FP16 round after every operation, as the compiler's types do. An
mma of BF16, FP16 or float32 accumulates in float32, one of int8 exactly in int32. Rounding modes and flush-to-zero are
hints about speed here: `approx` results differ from a GPU's by their last bits.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from kernels.interpreter.arithmetic import BINARY, binary
from kernels.interpreter.dtypes import BOOL, FLOAT32, constant, constant_type, kind, numpy_dtype, promote
from kernels.interpreter.errors import InterpreterError
from kernels.interpreter.tile import RACING, UNKNOWN, Tile, as_tile, check_shape, flags

if TYPE_CHECKING:
    from collections.abc import Callable

_F8 = ("float8_e4m3fn", "float8_e5m2")
_MMA = {"float16": ("float16", "float32"), "bfloat16": ("float32",), "float32": ("float32",), "float64": ("float64",)}
_MMA |= {"int8": ("int32",), "uint8": ("int32",)} | dict.fromkeys(_F8, ("float16", "float32"))


def full(shape: Any, fill_value: Any, dtype: Any) -> Tile:
    shape, want = check_shape(shape, "full"), numpy_dtype(dtype)
    if isinstance(fill_value, Tile):
        value, bad = fill_value.cast(want).a, fill_value.bad
        return Tile(np.broadcast_to(value, shape), None if bad is None else np.broadcast_to(bad, shape))
    return Tile(np.full(shape, constant(fill_value, want), want))


def zeros(shape: Any, dtype: Any) -> Tile:
    return Tile(np.zeros(check_shape(shape, "zeros"), numpy_dtype(dtype)))


def ones(shape: Any, dtype: Any) -> Tile:
    return Tile(np.ones(check_shape(shape, "ones"), numpy_dtype(dtype)))


def arange(size: int, /, *, dtype: Any, start: Any = 0, step: Any = 1) -> Tile:
    (size,) = check_shape(size, "arange")
    out: Any = Tile(np.arange(size).astype(numpy_dtype(dtype)))
    if not (isinstance(step, int) and step == 1):
        out = out * (step.astype(dtype) if isinstance(step, Tile) else step)
    if not (isinstance(start, int) and start == 0):
        out = out + (start.astype(dtype) if isinstance(start, Tile) else start)
    return out


def astile(value: Any, /, *, dtype: Any) -> Tile:
    want = numpy_dtype(dtype)
    if not isinstance(value, tuple):
        return as_tile(value).cast(want)
    parts = [astile(item, dtype=dtype) for item in value]
    check_shape((len(parts),), "astile")
    known = all(part.bad is None for part in parts)
    return Tile(np.stack([part.a for part in parts]), None if known else np.stack([flags(part) for part in parts]))


def astype(x: Any, dtype: Any, /, *, rounding_mode: Any = None) -> Tile:
    return as_tile(x).astype(dtype, rounding_mode=rounding_mode)


def bitcast(x: Any, /, dtype: Any) -> Tile:
    tile, want = as_tile(x), numpy_dtype(dtype)
    if BOOL in (tile.a.dtype, want) or tile.a.dtype.itemsize != want.itemsize:
        raise InterpreterError(f"bitcast from {tile.a.dtype} to {want}")
    return Tile(np.ascontiguousarray(tile.a).view(want).reshape(tile.a.shape), tile.bad)


# -- mathematics


def _unary(function: Callable[[Any], Any], python: Callable[[Any], Any], *, needs_float: bool = True) -> Any:
    def operation(x: Any, /, *, rounding_mode: Any = None, flush_to_zero: bool = False) -> Any:
        del rounding_mode, flush_to_zero
        if not isinstance(x, Tile):
            return python(x)
        data = x.a
        if needs_float and kind(data.dtype) != 2:
            data = data.astype(np.float32)
        return Tile(function(data), x.bad)

    return operation


def _rsqrt(x: np.ndarray) -> np.ndarray:
    if x.dtype == FLOAT32:
        return np.reciprocal(np.sqrt(x))
    return np.reciprocal(np.sqrt(x.astype(np.float32))).astype(x.dtype)


def _strict(function: Callable[[Any], Any], python: Callable[[Any], Any], name: str) -> Any:
    def operation(x: Any, /) -> Any:
        if not isinstance(x, Tile):
            return python(x)
        if kind(x.a.dtype) != 2:
            raise InterpreterError(f"{name} does not take {x.a.dtype}")
        return Tile(function(x.a), x.bad)

    return operation


def negative(x: Any, /) -> Any:
    return -x


def bitwise_not(x: Any, /) -> Any:
    return (not x) if isinstance(x, bool) else ~x


def isnan(x: Any, /) -> Any:
    return Tile(np.isnan(x.a), x.bad) if isinstance(x, Tile) else math.isnan(x)


def where(cond: Any, x: Any, y: Any, /) -> Tile:
    """Takes an element's soundness from the side that was chosen."""
    cond = as_tile(cond)
    pick = cond.a if cond.a.dtype == BOOL else cond.a != 0
    xa, ya = _pair(x, y)
    try:
        out = np.where(pick, xa, ya)
    except ValueError:
        raise InterpreterError(f"where: shapes {pick.shape}, {xa.shape}, {ya.shape} are not broadcastable") from None
    xb, yb = (side.bad if isinstance(side, Tile) else None for side in (x, y))
    if cond.bad is None and xb is None and yb is None:
        return Tile(out)
    bad = np.where(pick, np.uint8(0) if xb is None else xb, np.uint8(0) if yb is None else yb)
    if cond.bad is not None:
        bad = bad | cond.bad
    return Tile(out, np.broadcast_to(bad, out.shape))


def _pair(x: Any, y: Any) -> tuple[np.ndarray, np.ndarray]:
    """Both operands in their common type."""
    if isinstance(x, Tile) and isinstance(y, Tile):
        want = promote(x.a.dtype, y.a.dtype)
        return x.cast(want).a, y.cast(want).a
    if isinstance(x, Tile):
        want = constant_type(x.a.dtype, y, False)
        return x.cast(want).a, constant(y, want)
    if isinstance(y, Tile):
        want = constant_type(y.a.dtype, x, False)
        return constant(x, want), y.cast(want).a
    a, b = as_tile(x), as_tile(y)
    want = promote(a.a.dtype, b.a.dtype)
    return a.cast(want).a, b.cast(want).a


def _elementwise(name: str) -> Any:
    def operation(x: Any, y: Any, /, *, rounding_mode: Any = None, flush_to_zero: bool = False) -> Any:
        del rounding_mode, flush_to_zero
        return binary(name, x, y)

    return operation


def _extreme(name: str) -> Any:
    def operation(x: Any, y: Any, /, *, flush_to_zero: bool = False, propagate_nan: bool = False) -> Any:
        del flush_to_zero
        return binary(f"{name}_nan" if propagate_nan else name, x, y)

    return operation


# -- shape


def cat(tiles: Any, /, axis: int) -> Tile:
    if len(tiles) == 1:
        return tiles[0]
    if len(tiles) != 2:
        raise InterpreterError(f"cat takes at most two tiles, got {len(tiles)}")
    x, y = tiles
    if x.a.dtype != y.a.dtype:
        raise InterpreterError(f"cat of {x.a.dtype} and {y.a.dtype}")
    try:
        out = np.concatenate((x.a, y.a), axis)
    except ValueError as error:
        raise InterpreterError(f"cat of {x.a.shape} and {y.a.shape} along {axis}: {error}") from None
    check_shape(out.shape, "cat")
    if x.bad is None and y.bad is None:
        return Tile(out)
    return Tile(out, np.concatenate((flags(x), flags(y)), axis))


def broadcast_to(x: Any, /, shape: Any) -> Tile:
    tile, shape = as_tile(x), check_shape(shape, "broadcast_to")
    try:
        return Tile(np.broadcast_to(tile.a, shape), None if tile.bad is None else np.broadcast_to(tile.bad, shape))
    except ValueError:
        raise InterpreterError(f"broadcast_to: {tile.a.shape} is not broadcastable to {shape}") from None


# -- products


def mma(x: Tile, y: Tile, /, acc: Tile, *, use_fast_acc: bool = False) -> Tile:
    del use_fast_acc
    xa, ya = x.a, y.a
    allowed = _MMA.get(str(xa.dtype), ())
    if xa.dtype != ya.dtype and not {str(xa.dtype), str(ya.dtype)} <= {"int8", "uint8"}:
        raise InterpreterError(f"mma of {xa.dtype} and {ya.dtype}")
    if str(acc.a.dtype) not in allowed:
        raise InterpreterError(
            f"mma of {xa.dtype} accumulates in {' or '.join(allowed) or 'nothing'}, not {acc.a.dtype}"
        )
    if xa.ndim < 2 or ya.ndim < 2 or xa.shape[-1] != ya.shape[-2]:
        raise InterpreterError(f"mma of {xa.shape} and {ya.shape}")
    product = _product(xa, ya, acc.a.dtype)
    if product.shape != acc.a.shape:
        raise InterpreterError(
            f"mma of {xa.shape} and {ya.shape} makes {product.shape}, the accumulator is {acc.a.shape}"
        )
    bad = _product_bad(x, y, product.shape)
    if acc.bad is not None:
        bad = acc.bad if bad is None else bad | acc.bad
    return Tile(np.add(product, acc.a), bad)


def _product(xa: np.ndarray, ya: np.ndarray, dtype: np.dtype) -> np.ndarray:
    if kind(xa.dtype) == 1:  # sums of int8 products are exact in float64, which has a BLAS
        return np.matmul(xa.astype(np.float64), ya.astype(np.float64)).astype(np.int64).astype(np.int32)
    wide = np.float64 if xa.dtype == np.float64 else np.float32
    return np.matmul(xa.astype(wide, copy=False), ya.astype(wide, copy=False)).astype(dtype, copy=False)


def _product_bad(x: Tile, y: Tile, shape: tuple[int, ...]) -> Any:
    if x.bad is None and y.bad is None:
        return None
    xb: Any = flags(x)
    yb: Any = flags(y)
    unknown = (xb & UNKNOWN).any(-1)[..., :, None] | (yb & UNKNOWN).any(-2)[..., None, :]
    # a racing element counts where it does not meet a known zero
    meets = np.matmul((xb & RACING).astype(np.float32), ((y.a != 0) | (yb != 0)).astype(np.float32))
    meets += np.matmul(((x.a != 0) | (xb != 0)).astype(np.float32), (yb & RACING).astype(np.float32))
    return np.broadcast_to(unknown * UNKNOWN | (meets > 0) * RACING, shape)


def matmul(x: Tile, y: Tile, /) -> Tile:
    want = promote(x.a.dtype, y.a.dtype)
    a, b = x.cast(want), y.cast(want)
    flat_x, flat_y = a.a.ndim == 1, b.a.ndim == 1
    a = a.expand_dims(0) if flat_x else a
    b = b.expand_dims(1) if flat_y else b
    accumulate = np.dtype(_MMA.get(str(want), ("float32",))[0])
    batch = np.broadcast_shapes(a.a.shape[:-2], b.a.shape[:-2])
    acc = Tile(np.zeros((*batch, a.a.shape[-2], b.a.shape[-1]), accumulate))
    out = mma(a, b, acc).cast(want)
    if flat_x:
        out = out.reshape((*out.a.shape[:-2], out.a.shape[-1]))
    return out.reshape(out.a.shape[:-1]) if flat_y else out


def _print(*args: Any, sep: str = " ", end: str = "\n") -> None:
    sys.stdout.write(sep.join(str(a.a if isinstance(a, Tile) else a) for a in args) + end)


def assert_(cond: Any, /, message: str | None = None) -> None:
    tile = as_tile(cond)
    if tile.bad is not None and tile.bad.any():
        raise InterpreterError("an assertion reads an undetermined or racing value")
    if not np.all(tile.a):
        raise InterpreterError(f"assertion failed{': ' + message if message else ''}")


def static_assert(condition: Any, message: Any = None, /) -> None:
    if not condition:
        raise InterpreterError(f"static assertion failed{': ' + str(message) if message is not None else ''}")


def ensure_constant(value: Any, /) -> Any:
    if isinstance(value, Tile):
        raise InterpreterError("ensure_constant: a tile is not a compile-time constant")
    return value


def assume_divisible_by(x: Any, divisor: int) -> Any:
    value = int(x)
    if value % divisor:
        raise InterpreterError(f"assume_divisible_by: {value} is not divisible by {divisor}")
    return x


TABLE: dict[str, Any] = {name: _elementwise(name) for name in BINARY if not name.startswith(("minimum", "maximum"))}
TABLE |= {"minimum": _extreme("minimum"), "maximum": _extreme("maximum")}
TABLE |= {
    "full": full,
    "zeros": zeros,
    "ones": ones,
    "arange": arange,
    "astile": astile,
    "astype": astype,
    "bitcast": bitcast,
    "exp": _unary(np.exp, math.exp),
    "exp2": _unary(np.exp2, lambda x: 2**x),
    "log": _unary(np.log, math.log),
    "log2": _unary(np.log2, math.log2),
    "sqrt": _unary(np.sqrt, math.sqrt),
    "rsqrt": _unary(_rsqrt, lambda x: x**-0.5),
    "sin": _unary(np.sin, math.sin),
    "cos": _unary(np.cos, math.cos),
    "tan": _unary(np.tan, math.tan),
    "sinh": _unary(np.sinh, math.sinh),
    "cosh": _unary(np.cosh, math.cosh),
    "tanh": _unary(np.tanh, math.tanh),
    "abs": _unary(np.abs, abs, needs_float=False),
    "floor": _strict(np.floor, math.floor, "floor"),
    "ceil": _strict(np.ceil, math.ceil, "ceil"),
    "negative": negative,
    "bitwise_not": bitwise_not,
    "isnan": isnan,
    "where": where,
    "divmod": lambda x, y, /: (binary("floordiv", x, y), binary("mod", x, y)),
    "expand_dims": lambda x, /, axis: as_tile(x).expand_dims(axis),
    "cat": cat,
    "broadcast_to": broadcast_to,
    "reshape": lambda x, /, shape: as_tile(x).reshape(shape),
    "permute": lambda x, /, axes: x.permute(axes),
    "transpose": lambda x, /, axis0=None, axis1=None: x.transpose(axis0, axis1),
    "extract": lambda x, /, index, shape: as_tile(x).extract(index, shape),
    "insert": lambda x, /, index, value: x.insert(index, value),
    "mma": mma,
    "matmul": matmul,
    "print": _print,
    "assert_": assert_,
    "static_assert": static_assert,
    "static_eval": lambda expr, /: expr,
    "ensure_constant": ensure_constant,
    "assume_divisible_by": assume_divisible_by,
}
