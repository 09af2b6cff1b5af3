"""Weights from the files to the device through two pinned buffers: one is read into while the other is copied.

A parameter's parts lie in one device array, joined along the rows, or row by row in turn where the kernels want gate
and up rows interleaved. Host memory is two buffers of at most 64 MiB, whatever the model's size. Files are read on
a few threads, without the page faults of a mapping.
"""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from tileinfer_core.dtypes import BFLOAT16
from tileinfer_core.errors import UnsupportedModelError
from tileinfer_core.models.structure import scale_name
from tileinfer_core.models.xielu import AS_TRAINED, BETA, EPSILON, read_xielu
from tileinfer_core.packed_int8 import flip
from tileinfer_core.progress import ProgressEvent
from tileinfer_core.weights import read_into

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tileinfer_core.backends.cuda.device import Array, Device, Event, HostArray
    from tileinfer_core.models.decoder import ModelDefinition
    from tileinfer_core.models.structure import Parameter
    from tileinfer_core.progress import OnProgress
    from tileinfer_core.weights import TensorInfo, WeightFiles

STAGE_BYTES = 64 << 20
READERS = 4
READ_BYTES = 16 << 20  # what one thread reads at once: few turns at Python's lock while kernels compile beside it
INTERLEAVED = ("gate_up_proj.weight", "gate_up_proj.weight_scale", "gate_up_proj.bias")
TASK = "load weights"
INT8_WIDTH = 32  # steps that a standard deviation of a trained weight has, in noise


def storage_dtype(files: WeightFiles) -> str:
    """The half-precision type that holds most of the weights' bytes; bfloat16 for float32 files. INT8 has no say."""
    share: dict[str, int] = {}
    for name in files.names:
        info = files.info(name)
        if not name.endswith(scale_name("weight")):
            share[info.dtype] = share.get(info.dtype, 0) + info.bytes
    return "float16" if share.get("float16", 0) > share.get("bfloat16", 0) + share.get("float32", 0) else "bfloat16"


def target_dtype(parameter: Parameter, dtype: str) -> str:
    """Matrices and biases are read in half precision or INT8, norm weights and scales in float32: they cost nothing."""
    if parameter.int8 is not None:
        return "int8"
    if parameter.is_scale:
        return "float32"
    is_norm = len(parameter.shape) == 1 and not parameter.name.endswith(".bias")
    return "float32" if is_norm else dtype


def is_interleaved(parameter: Parameter) -> bool:
    return parameter.name.endswith(INTERLEAVED)


def allocate(model: ModelDefinition, device: Device, dtype: str) -> dict[str, Array]:
    """Every parameter's array, without contents. Raises OutOfMemoryError."""
    return {p.name: device.empty(p.shape, target_dtype(p, dtype)) for p in model.parameters}


def allocate_copies(model: ModelDefinition, device: Device, half: str, products: Sequence[str]) -> dict[str, Array]:
    """By the parameter's name, arrays in half precision for all layers' INT8 weights of these products, without
    contents. Raises OutOfMemoryError.
    """
    return {p.name: device.empty(p.shape, half) for p in model.int8_weights(products)}


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows of one stored tensor, and the rows of a device array where they go."""

    info: TensorInfo
    first: int
    count: int
    target: Array


def load_weights(
    model: ModelDefinition, files: WeightFiles, arrays: Mapping[str, Array], device: Device, on_progress: OnProgress
) -> None:
    """Fill `arrays` (of `allocate`). Returns when the device has everything.

    Raises:
        ModelError, DamagedModelError: a file that can't be read, or has shrunk since its header was checked.
        UnsupportedModelError: an activation's constants that the kernels don't have; before a matrix is read.
    """
    joined = [p for p in model.parameters if p.form == "joined"]
    for parameter in model.parameters:
        if parameter.form == "xielu":
            device.copy_in(arrays[parameter.name], _xielu_numbers(parameter, files))
    pieces = [piece for p in joined for piece in _pieces(p, files, arrays[p.name])]
    total = sum(_stored_bytes(piece) for piece in pieces)
    largest = max(_stage_bytes(piece) for piece in pieces)
    done = 0
    with _Stages(device, largest) as stages:
        for piece in pieces:
            stages.send(piece)
            done += _stored_bytes(piece)
            on_progress(ProgressEvent(TASK, done, total, "bytes"))
    device.synchronize()


def _xielu_numbers(parameter: Parameter, files: WeightFiles) -> HostArray:
    """The kernels have β and ε as constants: an ε that differs by less than 1e-5 moves no output by more."""
    numbers = read_xielu(parameter, files)
    beta, epsilon = map(float, numbers[2:])
    if beta != BETA or abs(epsilon - EPSILON) > 1e-5:
        raise UnsupportedModelError(
            f"the CUDA kernels do not take xIELU with beta {beta:g} and eps {epsilon:g} ({parameter.parts[0].name}); "
            f"supported: {BETA:g} and {EPSILON:g}",
            hint="run this model with --backend cpu",
        )
    return numbers


def _pieces(parameter: Parameter, files: WeightFiles, array: Array) -> Iterator[_Piece]:
    """A parameter in pieces of at most STAGE_BYTES, in the order of the files' bytes."""
    step = len(parameter.parts) if is_interleaved(parameter) else 1
    start = 0
    for index, part in enumerate(parameter.parts):
        info = files.info(part.name)
        rows = part.read_shape[0]
        target = array[index::step] if step > 1 else array[start : start + rows]
        at_once = max(1, STAGE_BYTES // max(info.bytes // info.shape[0], _row_bytes(target)))
        for first in range(0, rows, at_once):
            count = min(at_once, rows - first)
            yield _Piece(info, first, count, target[first : first + count])
        start += rows


def _row_bytes(array: Array) -> int:
    return int(array.dtype.itemsize * math.prod(array.shape[1:]))


def _stored_bytes(piece: _Piece) -> int:
    return piece.info.bytes // piece.info.shape[0] * piece.count


def _stage_bytes(piece: _Piece) -> int:
    return max(_stored_bytes(piece), _row_bytes(piece.target) * piece.count)


class _Stages:
    """Two pinned buffers, used in turn, and the threads that fill them."""

    def __init__(self, device: Device, size: int) -> None:
        self._device = device
        self._buffers = [device.pinned((size,), "uint8") for _ in range(2)]
        self._busy: list[Event | None] = [None, None]
        self._turn = 0
        self._pool = ThreadPoolExecutor(min(READERS, os.cpu_count() or 1), thread_name_prefix="load-weights")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._device.synchronize()

    def send(self, piece: _Piece) -> None:
        turn, self._turn = self._turn, 1 - self._turn
        busy = self._busy[turn]
        if busy is not None:
            busy.wait()
        values = self._read(piece, self._buffers[turn])
        self._device.copy_in(piece.target, values)
        self._busy[turn] = self._device.event()

    def _read(self, piece: _Piece, buffer: HostArray) -> HostArray:
        """The piece's values in the target's type, lying in `buffer`."""
        stored, size = _numpy_dtype(piece.info.dtype), _stored_bytes(piece)
        shape = piece.target.shape
        if str(piece.target.dtype) == piece.info.dtype:
            self._fill(piece, buffer[:size])
            return buffer[:size].view(stored).reshape(shape)
        raw = np.empty(size, np.uint8)
        self._fill(piece, raw)
        values = buffer[: _row_bytes(piece.target) * piece.count].view(_numpy_dtype(str(piece.target.dtype)))
        np.copyto(values, raw.view(stored), casting="unsafe")  # float32 to half: rounded
        return values.reshape(shape)

    def _fill(self, piece: _Piece, raw: HostArray) -> None:
        start = piece.info.offset + piece.info.bytes // piece.info.shape[0] * piece.first
        reads = [
            self._pool.submit(_read, piece.info, raw[at : at + READ_BYTES], start + at)
            for at in range(0, len(raw), READ_BYTES)
        ]
        for read in reads:
            read.result()


def _read(info: TensorInfo, raw: HostArray, offset: int) -> None:
    read_into(info.file, offset, raw)
    if info.packed:
        flip(raw)


def _numpy_dtype(name: str) -> np.dtype[Any]:
    return BFLOAT16 if name == "bfloat16" else np.dtype(name)


def random_weights(model: ModelDefinition, arrays: Mapping[str, Array], device: Device, seed: int = 0) -> None:
    """Fill `arrays` with noise as wide as a trained model's weights; norm weights are about 1.

    The noise repeats every few million elements: enough for timing, where only the bytes count.
    """
    rng = np.random.default_rng(seed)
    noise = rng.standard_normal(4 << 20, np.float32)
    stages: dict[str, HostArray] = {}
    for parameter in model.parameters:
        array = arrays[parameter.name]
        if parameter.form == "xielu":
            device.copy_in(array, np.array(AS_TRAINED, np.float32))
            continue
        kind = str(array.dtype)
        if kind == "float32":
            width = 0.02 / INT8_WIDTH if parameter.is_scale else 1.0
            device.copy_in(array, (width * (1 + 0.1 * rng.standard_normal(array.shape))).astype(np.float32))
            continue
        if kind not in stages:
            stages[kind] = device.pinned((noise.size,), kind)
            stages[kind][:] = _noise_as(noise, kind)
        flat = array.reshape(-1)
        for at in range(0, flat.size, noise.size):
            part = flat[at : at + noise.size]
            device.copy_in(part, stages[kind][: part.size])
    device.synchronize()


def _noise_as(noise: HostArray, kind: str) -> HostArray:
    """As wide as weights are: 0.02, or INT8_WIDTH steps of INT8."""
    values: HostArray = noise * 0.02
    if kind == "int8":
        values = np.clip(np.rint(noise * INT8_WIDTH), -127, 127)
    return values.astype(_numpy_dtype(kind))
