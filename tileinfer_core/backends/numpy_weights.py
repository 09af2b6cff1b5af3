"""Reads stored tensors into float32 arrays for the NumPy backend: joined as the model says, never held twice.

All arrays lie in one allocation, which the kernel can back with huge pages. The files are read in blocks that stay in
a core's cache while they are widened, on a few threads (NumPy and file reads release the GIL). Nothing is mapped, so
the process grows by the float32 weights alone.

Widening, measured on two cores of an AMD EPYC (Zen 5, AVX-512, NumPy 2.4), GB/s of stored bytes, 1 and 2 threads:
    float16   copyto 1.7 / 3.1   table look-up 2.5 / 4.6   bits 4.2 / 5.7
    bfloat16  shift 5.7 / 8.5
"""

from __future__ import annotations

import os
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tileinfer_core.errors import DamagedModelError, ModelError, OutOfMemoryError
from tileinfer_core.models.xielu import read_xielu
from tileinfer_core.progress import ProgressEvent

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from io import RawIOBase
    from pathlib import Path

    from tileinfer_core.models.structure import Parameter
    from tileinfer_core.progress import OnProgress
    from tileinfer_core.weights import WeightFiles

    Float32Array = np.ndarray[Any, np.dtype[np.float32]]
    ByteArray = np.ndarray[Any, np.dtype[np.uint8]]

BLOCK = 1 << 17  # elements widened at once: 256 KiB in, 512 KiB out, within a core's L2
JOB = 1 << 20  # elements a thread takes at once
ALIGN = 16  # elements: every array starts on a cache line
MAX_THREADS = 4
_ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class _Job:
    """Elements of one stored tensor and the place in memory where they go."""

    file: Path
    offset: int
    dtype: str
    out: Float32Array


def load_arrays(
    parameters: tuple[Parameter, ...], files: WeightFiles, on_progress: OnProgress
) -> dict[str, Float32Array]:
    """Every parameter as a float32 array, by its name.

    Raises:
        OutOfMemoryError: with the bytes needed and available.
        ModelError: a file that can't be read or has shrunk since its header was checked.
    """
    sizes = [_padded(parameter) for parameter in parameters]
    arena = _allocate(sum(sizes))
    arrays: dict[str, Float32Array] = {}
    jobs: list[_Job] = []
    start = 0
    for parameter, size in zip(parameters, sizes, strict=True):
        array = arena[start : start + int(np.prod(parameter.shape))].reshape(parameter.shape)
        arrays[parameter.name] = array
        if parameter.form == "xielu":
            array[:] = read_xielu(parameter, files)
        else:
            jobs += _jobs(parameter, files, array)
        start += size
    _run(jobs, on_progress)
    return arrays


def _padded(parameter: Parameter) -> int:
    return -(-int(np.prod(parameter.shape)) // ALIGN) * ALIGN


def _allocate(elements: int) -> Float32Array:
    needed, available = elements * 4, available_bytes()
    hint = "a smaller model needs less; on the CPU every weight takes 4 bytes"
    if available is not None and needed > available:
        raise OutOfMemoryError(
            f"the weights need {needed / 2**30:.1f} GiB as float32, {available / 2**30:.1f} GiB are available",
            hint=hint,
        )
    try:
        return np.empty(elements, np.float32)
    except MemoryError:
        raise OutOfMemoryError(f"no memory for {needed / 2**30:.1f} GiB of float32 weights", hint=hint) from None


def available_bytes(meminfo: str = "/proc/meminfo") -> int | None:
    """Memory and swap that Linux says can be had now; None where it doesn't say."""
    try:
        with open(meminfo, encoding="ascii") as file:  # noqa: PTH123 - a pseudo file
            fields: Mapping[str, str] = dict(line.split(":", 1) for line in file)
        return sum(int(fields[name].split()[0]) * 1024 for name in ("MemAvailable", "SwapFree"))
    except (OSError, ValueError, KeyError, IndexError):
        return None


def _jobs(parameter: Parameter, files: WeightFiles, array: Float32Array) -> Iterator[_Job]:
    flat = array.reshape(-1)
    start = 0
    for part in parameter.parts:
        info = files.info(part.name)
        count = int(np.prod(part.read_shape))
        for first in range(0, count, JOB):
            last = min(first + JOB, count)
            yield _Job(
                info.file,
                info.offset + first * _ITEM_BYTES[info.dtype],
                info.dtype,
                flat[start + first : start + last],
            )
        start += count


def _run(jobs: list[_Job], on_progress: OnProgress) -> None:
    """All jobs on a few threads; an error or Ctrl-C in this thread stops the others within a job."""
    total = sum(job.out.size * _ITEM_BYTES[job.dtype] for job in jobs)
    done = 0
    pool = ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), thread_name_prefix="load-weights")
    try:
        waiting = {pool.submit(_widen, job) for job in jobs}
        while waiting:
            finished, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            done += sum(future.result() for future in finished)
            on_progress(ProgressEvent("load weights", done, total, "bytes"))
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _widen(job: _Job) -> int:
    """Read and widen one job; returns the bytes read."""
    item = _ITEM_BYTES[job.dtype]
    buffer = np.empty(BLOCK * item, np.uint8)
    try:
        with job.file.open("rb", buffering=0) as file:
            file.seek(job.offset)
            for first in range(0, job.out.size, BLOCK):
                out = job.out[first : first + BLOCK]
                raw = out.view(np.uint8) if job.dtype == "float32" else buffer[: out.size * item]
                _fill(file, raw, job)
                if job.dtype == "float16":
                    widen_float16(raw.view(np.int16), out)
                elif job.dtype == "bfloat16":
                    widen_bfloat16(raw.view(np.uint16), out)
    except OSError as error:
        raise ModelError(f"{job.file}: can't be read: {error.strerror}") from error
    return int(job.out.size * item)


def _fill(file: RawIOBase, raw: ByteArray, job: _Job) -> None:
    view = raw.data
    while view:
        count = file.readinto(view)
        if not count:
            raise DamagedModelError(f"{job.file}: cut off while it was read: {len(view)} more bytes expected")
        view = view[count:]


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
