"""cuda.tile data types and their NumPy twins, and the compiler's promotion rules.

tfloat32, float4 and the unsigned-exponent float8 types have no NumPy twin here and are refused by name.
"""

from __future__ import annotations

import functools
from typing import Any

import cuda.tile as ct
import ml_dtypes
import numpy as np
from cuda.tile._datatype import IntegerInfo, is_boolean, is_integral, promote_dtypes
from cuda.tile._exception import TileTypeError

from kernels.interpreter.errors import InterpreterError

_TWINS: dict[Any, Any] = {
    ct.bool_: np.bool_,
    ct.uint8: np.uint8,
    ct.uint16: np.uint16,
    ct.uint32: np.uint32,
    ct.uint64: np.uint64,
    ct.int8: np.int8,
    ct.int16: np.int16,
    ct.int32: np.int32,
    ct.int64: np.int64,
    ct.float16: np.float16,
    ct.bfloat16: ml_dtypes.bfloat16,
    ct.float32: np.float32,
    ct.float64: np.float64,
    ct.float8_e4m3fn: ml_dtypes.float8_e4m3fn,
    ct.float8_e5m2: ml_dtypes.float8_e5m2,
}
TO_NUMPY: dict[Any, np.dtype] = {tile: np.dtype(twin) for tile, twin in _TWINS.items()}
TO_TILE: dict[np.dtype, Any] = {twin: tile for tile, twin in TO_NUMPY.items()}

FLOAT32, INT32, BOOL = np.dtype(np.float32), np.dtype(np.int32), np.dtype(np.bool_)
Number = bool | int | float


def numpy_dtype(dtype: Any) -> np.dtype:
    try:
        return TO_NUMPY[dtype]
    except (KeyError, TypeError):
        raise InterpreterError(f"data type {dtype} is not interpreted") from None


@functools.cache
def kind(dtype: np.dtype) -> int:
    """The compiler's category: 0 boolean, 1 integer, 2 float. The stronger one wins against a Python constant."""
    tile = TO_TILE[dtype]
    return 0 if is_boolean(tile) else 1 if is_integral(tile) else 2


@functools.cache
def promote(x: np.dtype, y: np.dtype, force_float: bool = False) -> np.dtype:
    """The common type of two tiles; the compiler refuses some pairs (float16 with bfloat16)."""
    try:
        return TO_NUMPY[promote_dtypes(TO_TILE[x], TO_TILE[y], force_float)]
    except TileTypeError as error:
        raise InterpreterError(str(error)) from None


def constant_dtype(value: Number) -> np.dtype:
    """The type a Python number takes where nothing else decides."""
    if isinstance(value, bool):
        return BOOL
    if isinstance(value, float):
        return FLOAT32
    if -(2**31) <= value < 2**31:
        return INT32
    return np.dtype(np.int64) if -(2**63) <= value < 2**63 else np.dtype(np.uint64)


def promote_constant(dtype: np.dtype, value: Number, force_float: bool = False) -> np.dtype:
    """The common type of a tile and a Python constant: the tile's, unless the constant's category is stronger."""
    strength = 0 if isinstance(value, bool) else 1 if isinstance(value, int) else 2
    have = kind(dtype)
    if strength == have == 1 and not force_float:
        info = IntegerInfo(TO_TILE[dtype])
        if not info.min <= value <= info.max:
            raise InterpreterError(f"integer constant {value} is out of range of {dtype}")
    result = constant_dtype(value) if strength > have else dtype
    return FLOAT32 if force_float and kind(result) != 2 else result


def _rounded(value: Number, dtype: np.dtype) -> np.ndarray:
    array = np.array(value).astype(dtype)
    array.flags.writeable = False
    return array


_cached_constant = functools.lru_cache(maxsize=4096, typed=True)(_rounded)


def constant(value: Number, dtype: np.dtype) -> np.ndarray:
    """A 0-d array of `value` rounded to `dtype` once, as the compiler does before it uses a constant."""
    return _rounded(value, dtype) if value == 0 else _cached_constant(value, dtype)  # 0.0 and -0.0 are one key


@functools.lru_cache(maxsize=4096, typed=True)
def constant_type(dtype: np.dtype, value: Number, force_float: bool) -> np.dtype:
    """`promote_constant`, remembered: it runs for every 'tile + 1'."""
    return promote_constant(dtype, value, force_float)


@functools.cache
def storable(source: np.dtype, target: np.dtype) -> bool:
    """Whether a store casts by itself: only when nothing can be lost (float32 into bfloat16 needs an astype)."""
    try:
        return promote(source, target) == target
    except InterpreterError:
        return False


@functools.cache
def integer_range(dtype: np.dtype) -> tuple[int, int]:
    """The least value, and one above the greatest: both are exact in every float type."""
    info = IntegerInfo(TO_TILE[dtype])
    return info.min, info.max + 1
