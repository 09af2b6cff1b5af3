"""A stored tensor in float32, some rows at a time, the next ones read by a thread meanwhile. Nothing is mapped."""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from tileinfer_core.backends.numpy_weights import widen_bfloat16, widen_float16
from tileinfer_core.weights import read_into

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Executor, Future

    from tileinfer_core.weights import TensorInfo

    ByteArray = np.ndarray[Any, np.dtype[np.uint8]]
    Float32Array = np.ndarray[Any, np.dtype[np.float32]]

# Elements at a time. Rounding to INT8 with its error takes 1.3 ns an element where a core's L2 holds the float32 and
# the temporaries, 1.8 with four or eight times as many.
PIECE = 1 << 18
WAITING = 8  # pieces that are read before they are wanted


def pieces_of(info: TensorInfo, reader: Executor, *, whole: bool = False) -> Iterator[tuple[ByteArray, Float32Array]]:
    """(stored bytes, float32 rows) of a tensor in order, or all of it at once. A vector is one row after the other.

    The first piece is read here, the next ones by `reader`: on a busy machine a thread may be late, and most tensors
    of a small model are one piece or two.

    Raises:
        ModelError: the file can't be read, or ends before the tensor does.
    """
    rows = info.shape[0] if info.shape else 1
    columns = max(1, int(np.prod(info.shape)) // max(1, rows))
    step = rows if whole else max(1, PIECE // columns)
    size = step * (info.bytes // rows)
    starts = range(0, info.bytes, size)
    rest = iter(starts[1:])
    coming: deque[Future[ByteArray]] = deque()
    try:
        for start in starts:
            for ahead in islice(rest, WAITING - len(coming)):
                coming.append(reader.submit(_read, info, ahead, min(size, info.bytes - ahead)))
            raw = coming.popleft().result() if start else _read(info, start, min(size, info.bytes))
            yield raw, _float32(raw, info.dtype).reshape(-1, columns)
    finally:
        for piece in coming:
            piece.cancel()


def _read(info: TensorInfo, start: int, size: int) -> ByteArray:
    raw = np.empty(size, np.uint8)
    read_into(info.file, info.offset + start, raw)
    return raw


def _float32(raw: ByteArray, dtype: str) -> Float32Array:
    if dtype == "float32":
        return raw.view(np.float32)
    out = np.empty(len(raw) // 2, np.float32)
    if dtype == "bfloat16":
        widen_bfloat16(raw.view(np.uint16), out)
    else:
        widen_float16(raw.view(np.int16), out)
    return out
