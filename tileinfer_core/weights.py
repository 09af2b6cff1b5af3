"""The tensors of a model folder: found, checked, and read from the safetensors files without a copy.

    open    reads the index and the headers only, and checks every byte range against the file's real size
    check   compares with what the model declares; everything wrong is said at once, before anything is uploaded
    read    a read-only view of the mapped file in its storage dtype: no float32 copy, no memory beyond the page cache

Which files those are, weight_index.py says. Packed INT8 weights appear by the names and shapes that plain ones have
(packed_int8.py).

Format: 8 bytes header length (little endian), a JSON header {name: {dtype, shape, data_offsets}}, then the data,
covered by the tensors without gaps or overlaps (https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from tileinfer_core.dtypes import SAFETENSORS_DTYPES, dtype_name
from tileinfer_core.errors import DamagedModelError, ModelError, UnsupportedModelError
from tileinfer_core.files import regular_size
from tileinfer_core.jsonfile import FETCH_AGAIN, parse_json_object
from tileinfer_core.packed_int8 import PACKED, PACKING, SHAPE, flip
from tileinfer_core.weight_index import some, weight_files

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    Array = np.ndarray[Any, np.dtype[Any]]

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library itself
FLOAT_DTYPES = frozenset({"bfloat16", "float16", "float32"})
INT8_DTYPES = frozenset({"int8"})
WEIGHT = "weight"
_NAMES = {stored: dtype_name(dtype) for stored, dtype in SAFETENSORS_DTYPES.items()}
_BY_NAME = {dtype_name(dtype): dtype for dtype in SAFETENSORS_DTYPES.values()}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor that a model declares. `dtypes` are the storage types it accepts; `rows`: only so many are read."""

    name: str
    shape: tuple[int, ...]
    optional: bool = False
    dtypes: frozenset[str] = FLOAT_DTYPES
    rows: int | None = None

    @property
    def read_shape(self) -> tuple[int, ...]:
        """What a model has of it in memory."""
        return self.shape if self.rows is None else (self.rows, *self.shape[1:])


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies. `offset` counts from the start of the file; `dtype` is NumPy's name, such as "bfloat16".

    `packed`: int8 stored as packed_int8.py says; whoever reads the bytes flips them.
    """

    shape: tuple[int, ...]
    dtype: str
    file: Path
    bytes: int
    offset: int
    packed: bool = False


class WeightFiles:
    """The checked headers of all weight files of one folder."""

    def __init__(self, folder: Path, tensors: dict[str, TensorInfo]) -> None:
        self.folder = folder
        self._tensors = tensors
        self._maps: dict[Path, Array] = {}

    @classmethod
    def open(cls, folder: Path) -> WeightFiles:
        """Read and check every header.

        Raises:
            DamagedModelError: a file that is missing, cut off, too long or inconsistent, with bytes expected and found.
            UnsupportedModelError: a tensor type that TileInfer does not know; a folder without safetensors.
        """
        tensors: dict[str, TensorInfo] = {}
        for path, expected_names in weight_files(folder).items():
            found = read_header(path)
            absent = sorted(set(expected_names or ()) - found.keys())
            if absent:
                raise DamagedModelError(
                    f"{path}: the index places {len(absent)} tensors here that the file does not have: {some(absent)}",
                    hint=FETCH_AGAIN,
                )
            tensors.update(
                (name, info) for name, info in found.items() if expected_names is None or name in expected_names
            )
        files = cls(folder, tensors)
        files._show_packed_as_int8()
        return files

    def _show_packed_as_int8(self) -> None:
        """Packed tensors take the place of their weights. Of fewer bits than 8, they have too few columns then."""
        for name in [name for name in self._tensors if name.endswith(PACKED)]:
            info, module = self._tensors[name], name.removesuffix(PACKED)
            weight, shape = module + WEIGHT, module + SHAPE
            if info.dtype != "int32" or len(info.shape) != 2:
                continue
            if weight in self._tensors:
                raise DamagedModelError(f"{self.folder}: {weight} is there twice, once packed")
            del self._tensors[name]
            self._tensors.pop(shape, None)
            rows, words = info.shape
            self._tensors[weight] = replace(info, shape=(rows, words * PACKING), dtype="int8", packed=True)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    @property
    def total_bytes(self) -> int:
        return sum(info.bytes for info in self._tensors.values())

    def info(self, name: str) -> TensorInfo:
        """Raises ModelError for a tensor that the folder does not have."""
        try:
            return self._tensors[name]
        except KeyError:
            raise ModelError(f"{self.folder}: no tensor named {name!r}") from None

    def read(self, name: str) -> Array:
        """A read-only view of the mapped file, in the storage dtype and the stored shape. A copy where it is packed."""
        info = self.info(name)
        raw = self._mapped(info.file)[info.offset : info.offset + info.bytes]  # [bytes] uint8
        if info.packed:
            raw = np.array(raw)
            flip(raw)
        return raw.view(_BY_NAME[info.dtype]).reshape(info.shape)

    def _mapped(self, path: Path) -> Array:
        if path not in self._maps:
            try:
                self._maps[path] = np.memmap(path, dtype=np.uint8, mode="r")
            except (OSError, ValueError) as error:
                raise ModelError(f"{path}: can't be mapped into memory: {error}") from error
        return self._maps[path]

    def check(self, specs: Iterable[TensorSpec], *, ignore: Iterable[str] = ()) -> None:
        """Compare with what the model declares, and say everything that is wrong at once.

        Args:
            specs: what the model wants.
            ignore: names that may lie in the files unused (a tied lm_head, a buffer old exporters stored).

        Raises:
            ModelError: tensors that are missing, unexpected, or of another shape or dtype than declared.
        """
        wanted = {spec.name: spec for spec in specs}
        faults = list(self._faults(wanted, set(ignore)))
        if faults:
            raise ModelError(f"{self.folder}: the weights do not fit the model's config: {'; '.join(faults)}")

    def _faults(self, wanted: dict[str, TensorSpec], ignore: set[str]) -> Iterator[str]:
        missing = [name for name, spec in wanted.items() if not spec.optional and name not in self._tensors]
        unexpected = sorted(self._tensors.keys() - wanted.keys() - ignore)
        if missing:
            yield f"{len(missing)} missing: {some(missing)}"
        if unexpected:
            yield f"{len(unexpected)} unexpected: {some(unexpected)}"
        present = [(spec, self._tensors[name]) for name, spec in wanted.items() if name in self._tensors]
        shapes = [f"{s.name} has {list(i.shape)}, expected {list(s.shape)}" for s, i in present if i.shape != s.shape]
        dtypes = [
            f"{s.name} is {i.dtype}, expected {' or '.join(sorted(s.dtypes))}"
            for s, i in present
            if i.dtype not in s.dtypes
        ]
        if shapes:
            yield f"{len(shapes)} of another shape: {some(shapes)}"
        if dtypes:
            yield f"{len(dtypes)} of another type: {some(dtypes)}"


def read_into(path: Path, offset: int, raw: Array) -> None:
    """Fills `raw`, of uint8, with a file's bytes from `offset` on, past Python's buffers.

    Raises:
        DamagedModelError: the file ends before.
        ModelError: it can't be read.
    """
    view = raw.data
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(offset)
            while view:
                count = file.readinto(view)
                if not count:
                    raise DamagedModelError(f"{path}: cut off while it was read: {len(view):,} more bytes expected")
                view = view[count:]
    except OSError as error:
        raise ModelError(f"{path}: can't be read: {error.strerror}") from error


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file, every byte range checked against the file's real size.

    Raises:
        DamagedModelError: with the file, the bytes expected and the bytes found.
        UnsupportedModelError: a dtype without a NumPy counterpart.
    """
    try:
        size = regular_size(path)
        with path.open("rb") as file:
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if size < 8 or not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
                raise _damaged(path, f"the header claims {length} bytes, the file has {size} in all")
            raw = file.read(length)
    except FileNotFoundError:
        raise DamagedModelError(f"{path}: missing", hint=FETCH_AGAIN) from None
    except OSError as error:
        raise ModelError(f"{path}: can't be read: {error.strerror}") from error
    header = parse_json_object(raw, f"{path}: damaged: the header")
    header.pop("__metadata__", None)
    tensors = {name: _tensor_info(path, name, entry, 8 + length) for name, entry in header.items()}
    _check_ranges(path, tensors, 8 + length, size)
    return tensors


def _damaged(path: Path, what: str) -> DamagedModelError:
    return DamagedModelError(
        f"{path}: damaged: {what}", hint="`tileinfer verify` tests all files, `tileinfer pull` fetches them again"
    )


def _tensor_info(path: Path, name: str, entry: object, data_start: int) -> TensorInfo:
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(begin), int(end)]}:
            pass
        case _:
            raise _damaged(path, f"the header's entry for {name!r} lacks dtype, shape or data_offsets")
    if dtype not in SAFETENSORS_DTYPES:
        raise UnsupportedModelError(f"{path}: tensor {name!r} has the type {dtype!r}, which TileInfer does not know")
    if not all(type(n) is int and n >= 0 for n in shape) or not 0 <= begin <= end:
        raise _damaged(path, f"the header's entry for {name!r} has an impossible shape or range")
    expected = math.prod(shape) * SAFETENSORS_DTYPES[dtype].itemsize
    if expected != end - begin:
        raise _damaged(
            path,
            f"tensor {name!r} of shape {shape} and type {dtype} needs {expected} bytes, its range has {end - begin}",
        )
    return TensorInfo(tuple(shape), _NAMES[dtype], path, expected, data_start + begin)


def _check_ranges(path: Path, tensors: dict[str, TensorInfo], data_start: int, size: int) -> None:
    """The ranges must follow each other without gap or overlap and end where the file ends."""
    position = data_start
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].bytes)):
        if info.offset != position:
            fault = "overlaps the tensor before it" if info.offset < position else "leaves a gap before it"
            raise _damaged(path, f"tensor {name!r} {fault}: it starts at byte {info.offset}, expected {position}")
        position += info.bytes
    if position != size:
        raise _damaged(path, f"{position:,} bytes expected, {size:,} found")
