"""Element types by name: the only file that imports ml_dtypes.

NumPy has no bfloat16 of its own. Importing ml_dtypes registers one, and every other file takes it from here, so
that nothing depends on which module happened to be imported first.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

BFLOAT16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
FLOAT8_E4M3: np.dtype[Any] = np.dtype(ml_dtypes.float8_e4m3fn)
FLOAT8_E5M2: np.dtype[Any] = np.dtype(ml_dtypes.float8_e5m2)

# The names that safetensors headers use.
SAFETENSORS_DTYPES: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {
        "BOOL": np.dtype(np.bool_),
        "U8": np.dtype(np.uint8),
        "I8": np.dtype(np.int8),
        "U16": np.dtype("<u2"),
        "I16": np.dtype("<i2"),
        "U32": np.dtype("<u4"),
        "I32": np.dtype("<i4"),
        "U64": np.dtype("<u8"),
        "I64": np.dtype("<i8"),
        "F8_E4M3": FLOAT8_E4M3,
        "F8_E5M2": FLOAT8_E5M2,
        "F16": np.dtype("<f2"),
        "BF16": BFLOAT16,
        "F32": np.dtype("<f4"),
        "F64": np.dtype("<f8"),
    }
)


def dtype_name(dtype: np.dtype[Any]) -> str:
    """NumPy's name of a type, such as "bfloat16" or "float32"."""
    return str(dtype.name)


def safetensors_name(dtype: np.dtype[Any]) -> str:
    """The name a safetensors header uses for `dtype`; ValueError when it has none."""
    for name, known in SAFETENSORS_DTYPES.items():
        if known == dtype:
            return name
    raise ValueError(f"safetensors has no name for {dtype}")
