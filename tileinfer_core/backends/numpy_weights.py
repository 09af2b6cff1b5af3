"""Reads stored tensors into float32 arrays for the NumPy backend: joined as the model says, never held twice.

All arrays lie in one allocation, which the kernel can back with huge pages. A few threads read the files in blocks and
widen them (NumPy and file reads release the GIL) while the caller reads the tokenizer, say. Nothing is mapped, so the
process grows by the float32 weights alone. INT8 weights become scale · int8, which float32 holds exactly where the
scale is BF16 or FP16 (8 or 11 bits by 7): on a CPU that is also the fastest form, BLAS having no product with int8.

Widening, measured on two cores of an AMD EPYC (Zen 5, AVX-512, NumPy 2.4), GB/s of stored bytes, 1 and 2 threads:
    float16   copyto 1.7 / 3.1   table look-up 2.5 / 4.6   bits 4.2 / 5.7
    bfloat16  shift 5.7 / 8.5
With the reading and the first touch of the memory, 269 MB of bfloat16 take 0.11 s, with two threads or one.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np

from tileinfer_core.errors import OutOfMemoryError
from tileinfer_core.models.structure import scale_name
from tileinfer_core.models.xielu import read_xielu
from tileinfer_core.packed_int8 import flip
from tileinfer_core.progress import ProgressEvent
from tileinfer_core.units import bytes_text
from tileinfer_core.weights import read_into

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from tileinfer_core.models.structure import Parameter
    from tileinfer_core.progress import OnProgress
    from tileinfer_core.weights import WeightFiles

    Float32Array = np.ndarray[Any, np.dtype[np.float32]]
    ByteArray = np.ndarray[Any, np.dtype[np.uint8]]

# Elements read and widened at once. Smaller blocks stay in a core's L2 and are no faster for it, but each asks for the
# GIL twice, and waits for it while the caller runs Python.
BLOCK = 1 << 20
ALIGN = 16  # elements: every array starts on a cache line
MAX_THREADS = 4
_ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "int8": 1}


@dataclass(frozen=True, slots=True)
class _Block:
    """Elements of one stored tensor and the place in memory where they go.

    INT8 elements are whole rows, and `scales` [rows, groups] are theirs.
    """

    file: Path
    offset: int
    dtype: str
    out: Float32Array
    scales: Float32Array | None = None
    packed: bool = False

    @property
    def bytes(self) -> int:
        return self.out.size * _ITEM_BYTES[self.dtype]


class WeightLoad:
    """Every parameter as a float32 array, INT8 ones without their scales. Threads begin to fill them at once."""

    def __init__(self, parameters: tuple[Parameter, ...], files: WeightFiles) -> None:
        """Raises OutOfMemoryError with the bytes needed and available."""
        parameters = tuple(parameter for parameter in parameters if not parameter.is_scale)
        sizes = [_padded(parameter) for parameter in parameters]
        arena = _allocate(sum(sizes))
        self._arrays: dict[str, Float32Array] = {}
        blocks: list[_Block] = []
        start = 0
        for parameter, size in zip(parameters, sizes, strict=True):
            array = arena[start : start + int(np.prod(parameter.shape))].reshape(parameter.shape)
            self._arrays[parameter.name] = array
            if parameter.form == "xielu":
                array[:] = read_xielu(parameter, files)
            else:
                blocks += _blocks(parameter, files, array)
            start += size
        self._total = sum(block.bytes for block in blocks)
        self._blocks = iter(blocks)  # each thread takes the next one: `next` of a list's iterator is atomic
        self._results: SimpleQueue[int | BaseException] = SimpleQueue()
        self._cancelled = False
        cores = os.cpu_count() or 1
        self._start_threads(min(MAX_THREADS, max(1, cores - 1)))  # one core is the caller's, until it waits

    def _start_threads(self, count: int) -> None:
        for _ in range(count):
            threading.Thread(target=self._work, name="load-weights", daemon=True).start()

    def finish(self, on_progress: OnProgress) -> dict[str, Float32Array]:
        """The arrays by their parameters' names, once they are filled.

        Raises:
            ModelError: a file that can't be read or has shrunk since its header was checked.
        """
        done = 0
        self._start_threads(1)
        try:
            while done < self._total:
                done += self._next_result()
                on_progress(ProgressEvent("load weights", done, self._total, "bytes"))
        except BaseException:
            self.cancel()
            raise
        return self._arrays

    def _next_result(self) -> int:
        result = self._results.get()
        if isinstance(result, BaseException):
            raise result
        return result

    def cancel(self) -> None:
        """The threads stop after the block that they are at. Nobody waits for them: Ctrl-C must end at once."""
        self._cancelled = True

    def _work(self) -> None:
        try:
            buffer = np.empty(2 * BLOCK, np.uint8)
            for block in self._blocks:
                if self._cancelled:
                    return
                _fill_and_widen(block, buffer)
                self._results.put(block.bytes)
        except BaseException as error:  # raised where `finish` is called
            self._results.put(error)


def load_arrays(
    parameters: tuple[Parameter, ...], files: WeightFiles, on_progress: OnProgress
) -> dict[str, Float32Array]:
    """All of WeightLoad in one call; see there for errors."""
    return WeightLoad(parameters, files).finish(on_progress)


def _padded(parameter: Parameter) -> int:
    return -(-int(np.prod(parameter.shape)) // ALIGN) * ALIGN


def _allocate(elements: int) -> Float32Array:
    needed, available = elements * 4, available_bytes()
    hint = "a smaller model needs less; on the CPU every weight takes 4 bytes"
    if available is not None and needed > available:
        raise OutOfMemoryError(
            f"the weights need {bytes_text(needed)} as float32, {bytes_text(available)} are available",
            hint=hint,
        )
    try:
        return np.empty(elements, np.float32)
    except MemoryError:
        raise OutOfMemoryError(f"no memory for {bytes_text(needed)} of float32 weights", hint=hint) from None


def available_bytes(meminfo: str = "/proc/meminfo") -> int | None:
    """Memory and swap that Linux says can be had now; None where it doesn't say."""
    try:
        with open(meminfo, encoding="ascii") as file:  # noqa: PTH123 - a pseudo file
            fields: Mapping[str, str] = dict(line.split(":", 1) for line in file)
        return sum(int(fields[name].split()[0]) * 1024 for name in ("MemAvailable", "SwapFree"))
    except (OSError, ValueError, KeyError, IndexError):
        return None


def _blocks(parameter: Parameter, files: WeightFiles, array: Float32Array) -> Iterator[_Block]:
    flat = array.reshape(-1)
    start = 0
    for part in parameter.parts:
        info = files.info(part.name)
        count = int(np.prod(part.read_shape))
        columns = info.shape[-1] if info.shape else 1
        scales = read_scales(files, part.name) if parameter.int8 else None  # [rows, groups]
        step = BLOCK if scales is None else max(1, BLOCK // columns) * columns
        for first in range(0, count, step):
            last = min(first + step, count)
            offset = info.offset + first * _ITEM_BYTES[info.dtype]
            mine = None if scales is None else scales[first // columns : last // columns]
            yield _Block(info.file, offset, info.dtype, flat[start + first : start + last], mine, info.packed)
        start += count


def read_scales(files: WeightFiles, weight: str) -> Float32Array:
    """The scales of an INT8 weight: float32 [rows, groups]."""
    return files.read(scale_name(weight)).astype(np.float32)


def _fill_and_widen(block: _Block, buffer: ByteArray) -> None:
    raw = block.out.view(np.uint8) if block.dtype == "float32" else buffer[: block.bytes]
    read_into(block.file, block.offset, raw)
    if block.dtype == "float16":
        widen_float16(raw.view(np.int16), block.out)
    elif block.dtype == "bfloat16":
        widen_bfloat16(raw.view(np.uint16), block.out)
    elif block.scales is not None:
        if block.packed:
            flip(raw)
        groups = block.out.reshape(*block.scales.shape, -1)  # [rows, groups, columns of a group]
        np.copyto(groups, raw.view(np.int8).reshape(groups.shape))
        groups *= block.scales[:, :, None]


def widen_bfloat16(bits: np.ndarray[Any, np.dtype[np.uint16]], out: Float32Array) -> None:
    """bfloat16 is the upper half of a float32."""
    np.left_shift(bits, 16, out=out.view(np.uint32), dtype=np.uint32)


def widen_float16(bits: np.ndarray[Any, np.dtype[np.int16]], out: Float32Array) -> None:
    """Exact, subnormals with it: sign and payload moved into place, then the exponent's bias by a multiplication.

    Infinities and NaNs would come out as numbers of 65,536 and more, which float16 can't hold; a block with one is
    widened by NumPy instead.
    """
    moved = out.view(np.int32)
    np.left_shift(bits, 13, out=moved, dtype=np.int32)  # the sign bit is copied down to bit 28 on the way
    np.bitwise_and(moved, np.int32(-0x70002000), out=moved)
    np.multiply(out, np.float32(2.0**112), out=out)
    if max(out.max(), -out.min()) >= 65536:
        out[:] = bits.view(np.float16)
