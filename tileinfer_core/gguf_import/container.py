"""The GGUF container: metadata and tensor table, read with every count and range checked against the file's size.

The reader of the `gguf` package trusts the file: a count of 2**40 makes it loop, a cut-off string makes it read
nonsense. So the table is read here and only whole, in-range tensors go on to that package's dequantisation.

Layout (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), all little endian:
magic "GGUF", version u32, tensor count u64, key count u64, then the keys (string, type u32, value), then the tensors
(name, number of dimensions u32, dimensions u64 with the fastest first, type u32, offset u64), then padding to
general.alignment, then the data, which the offsets count from.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from tileinfer_core.errors import DamagedModelError, ModelError, UnsupportedModelError
from tileinfer_core.files import regular_size

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_MIN_KEY_BYTES = 8 + 4 + 1  # an empty name, a type, a one-byte value
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8
MAX_DIMENSIONS = 4  # of ggml itself


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """`shape` is in NumPy's order (rows first); `offset` counts from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    bytes: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    @classmethod
    def open(cls, path: Path) -> GgufFile:
        """Read the tables of `path`, no tensor data.

        Raises:
            DamagedModelError: not a GGUF file, cut off, or inconsistent, with what was expected and found.
            UnsupportedModelError: a version, byte order or tensor type that is not known.
        """
        try:
            regular_size(path)
            with path.open("rb") as file:
                if file.read(4) != b"GGUF":
                    raise _damaged(path, "it does not start with the letters GGUF")
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                    return _Reader(path, data).read()
        except OSError as error:
            raise ModelError(f"{path}: can't be read: {error.strerror or error}") from error


def _damaged(path: Path, what: str) -> DamagedModelError:
    return DamagedModelError(f"{path}: not a whole GGUF file: {what}", hint="copy or download the file again")


class _Reader:
    """A cursor over the mapped file that refuses to step past its end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.position = 4  # behind the magic

    def read(self) -> GgufFile:
        self._check_version()
        tensor_count: int = self.scalar("<Q")
        key_count: int = self.scalar("<Q")
        self.check_count("metadata keys", key_count, _MIN_KEY_BYTES)
        metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = self.string("a metadata key")
            if key in metadata:
                raise self.damaged(f"the metadata key {key!r} appears twice")
            metadata[key] = self.value(self.scalar("<I"), key)
        tensors = self._tensor_table(tensor_count, metadata)
        return GgufFile(self.path, metadata, tensors)

    def _check_version(self) -> None:
        version: int = self.scalar("<I")
        if version & 0xFFFF == 0 and version:
            raise UnsupportedModelError(f"{self.path}: a big-endian GGUF file; TileInfer reads little-endian ones")
        if version == 1:
            raise UnsupportedModelError(f"{self.path}: GGUF version 1, from 2023; versions 2 and 3 are read")
        if version not in (2, 3):
            raise self.damaged(f"it claims version {version}, known are 2 and 3")

    def damaged(self, what: str) -> DamagedModelError:
        return _damaged(self.path, what)

    def take(self, count: int, what: str) -> int:
        """Step over `count` bytes and return where they start."""
        start = self.position
        if count > self.size - start:
            raise self.damaged(f"{what} needs {count} bytes at byte {start}, the file has {self.size} in all")
        self.position = start + count
        return start

    def scalar(self, form: str, what: str = "a number") -> Any:
        return struct.unpack_from(form, self.data, self.take(struct.calcsize(form), what))[0]

    def check_count(self, what: str, count: int, least_bytes: int) -> None:
        rest = self.size - self.position
        if count > rest // least_bytes:
            raise self.damaged(f"it claims {count} {what}, for which its remaining {rest} bytes are too few")

    def string(self, what: str) -> str:
        length: int = self.scalar("<Q", what)
        start = self.take(length, what)
        raw = self.data[start : start + length]
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self.damaged(f"{what} at byte {start} is not UTF-8 text") from None

    def value(self, kind: int, key: str) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind], key)
        if kind == _STRING:
            return self.string(key)
        if kind == _ARRAY:
            return self._array(key)
        raise self.damaged(f"{key} has the unknown type {kind}")

    def _array(self, key: str) -> list[Any]:
        kind: int = self.scalar("<I", key)
        count: int = self.scalar("<Q", key)
        if kind == _STRING:
            self.check_count(f"entries of {key}", count, 8)
            return [self.string(key) for _ in range(count)]
        if kind not in _SCALARS:
            raise self.damaged(f"{key} is an array of the type {kind}")
        form = _SCALARS[kind]
        width = struct.calcsize(form)
        self.check_count(f"entries of {key}", count, width)
        start = self.take(count * width, key)
        return [item for (item,) in struct.iter_unpack(form, self.data[start : start + count * width])]

    def _tensor_table(self, count: int, metadata: dict[str, Any]) -> dict[str, GgufTensor]:
        self.check_count("tensors", count, _MIN_TENSOR_BYTES)
        rows = [self._tensor_row() for _ in range(count)]
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1) or alignment > 1 << 20:
            raise self.damaged(f"general.alignment is {alignment!r}, expected a power of two")
        data_start = -(-self.position // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in rows:
            if name in tensors:
                raise self.damaged(f"the tensor {name!r} appears twice")
            if offset % alignment:
                raise self.damaged(f"the tensor {name!r} starts at {offset}, not at a multiple of {alignment}")
            tensors[name] = GgufTensor(name, shape, kind, data_start + offset, self._byte_count(name, shape, kind))
        self._check_ranges(list(tensors.values()), data_start, alignment)
        return tensors

    def _tensor_row(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name = self.string("a tensor's name")
        dimensions: int = self.scalar("<I")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise self.damaged(
                f"the tensor {name!r} has {dimensions} dimensions, at most {MAX_DIMENSIONS} are possible"
            )
        shape = tuple(self.scalar("<Q") for _ in range(dimensions))[::-1]
        kind: int = self.scalar("<I")
        try:
            known = GGMLQuantizationType(kind)
        except ValueError:
            raise UnsupportedModelError(
                f"{self.path}: the tensor {name!r} has the type {kind}, which the installed gguf package does not know",
                hint="a newer version may: pip install --upgrade gguf",
            ) from None
        return name, shape, known, self.scalar("<Q")

    def _byte_count(self, name: str, shape: tuple[int, ...], kind: GGMLQuantizationType) -> int:
        block, width = GGML_QUANT_SIZES[kind]
        if 0 in shape or shape[-1] % block:
            raise self.damaged(f"the tensor {name!r} of shape {list(shape)} can't hold blocks of {block} ({kind.name})")
        return math.prod(shape) // block * width

    def _check_ranges(self, tensors: list[GgufTensor], data_start: int, alignment: int) -> None:
        """No tensor may overlap another, and the file ends where the last one does (or at the next multiple)."""
        end = data_start
        for tensor in sorted(tensors, key=lambda t: t.offset):
            if tensor.offset < end:
                raise self.damaged(f"the tensor {tensor.name!r} overlaps the one before it")
            end = tensor.offset + tensor.bytes
            if end > self.size:
                raise self.damaged(f"the tensor {tensor.name!r} ends at byte {end}, the file has {self.size}")
        if tensors and self.size not in (end, -(-end // alignment) * alignment):
            raise self.damaged(f"{end:,} bytes expected, {self.size:,} found")
