"""Writes safetensors files tensor after tensor, in pieces, in shards whose sizes are known before a byte is written."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, Self

from tileinfer_core.dtypes import SAFETENSORS_DTYPES, dtype_name
from tileinfer_core.manifest import FileRecord
from tileinfer_core.weight_index import INDEX_NAME, SINGLE_NAME

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future
    from pathlib import Path

SHARD_BYTES = 5_000_000_000  # as Transformers cuts
WAITING = 8  # pieces that may wait to be written: quantize's have 256 KiB

_STORED = {dtype_name(dtype): (name, dtype.itemsize) for name, dtype in SAFETENSORS_DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Target:
    """A tensor to write; `dtype` is NumPy's name."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * _STORED[self.dtype][1]


class ShardWriter:
    """Takes the bytes of `targets` in their order. Leaving the `with` block normally needs all of them written.

    A thread writes and hashes them while the caller makes the next ones; what it can't write is raised by the next call
    or at the end. `records`: the manifest's entries for the files, then.
    """

    def __init__(self, folder: Path, targets: Sequence[Target], shard_bytes: int = SHARD_BYTES) -> None:
        self._folder = folder
        self._shards = _cut(targets, shard_bytes)
        count = len(self._shards)
        self._names = [
            SINGLE_NAME if count == 1 else f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)
        ]
        self.records: dict[str, FileRecord] = {}
        self._next = 0
        self._left = 0
        self._thread = ThreadPoolExecutor(1, "write-shards")
        self._waiting: deque[Future[None]] = deque()
        self._file: IO[bytes] | None = None  # this and the digest are the thread's
        self._digest = hashlib.sha256()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                assert self._left == 0 and self._next == len(self._shards)  # noqa: S101, PT018 - our own bug
                self._queue(self._finish)
                self._wait(0)
                self._write_index()
        finally:
            self._thread.shutdown(cancel_futures=True)
            if self._file is not None:  # what is in it counts no more
                with contextlib.suppress(OSError):
                    self._file.close()

    def write(self, data: Any) -> None:
        """The next bytes: a C-contiguous array or bytes, not to be changed after. Never over the end of a tensor."""
        view = memoryview(data).cast("B") if isinstance(data, bytes) else data.reshape(-1).view("u1").data
        if self._left == 0:
            self._queue(self._finish)
            self._queue(self._open, self._next)
            self._left = sum(target.bytes for target in self._shards[self._next])
            self._next += 1
        assert view.nbytes <= self._left  # noqa: S101 - our own bug
        self._left -= view.nbytes
        self._queue(self._put, view)

    def _queue(self, step: Callable[..., None], *arguments: Any) -> None:
        self._wait(WAITING)
        self._waiting.append(self._thread.submit(step, *arguments))

    def _wait(self, most: int) -> None:
        """Until no more than so many steps wait for the thread. Raises what one has raised."""
        while len(self._waiting) > most:
            self._waiting.popleft().result()

    def _open(self, number: int) -> None:
        self._file = (self._folder / self._names[number]).open("wb")
        self._digest = hashlib.sha256()
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for target in self._shards[number]:
            end = offset + target.bytes
            dtype = _STORED[target.dtype][0]
            entries[target.name] = {"dtype": dtype, "shape": list(target.shape), "data_offsets": [offset, end]}
            offset = end
        header = json.dumps(entries, separators=(",", ":")).encode()
        header = header.ljust(-(-len(header) // 8) * 8)  # so that the data start at a multiple of 8
        self._put(memoryview(len(header).to_bytes(8, "little") + header))

    def _put(self, view: memoryview) -> None:
        assert self._file is not None  # noqa: S101 - our own bug
        self._file.write(view)
        self._digest.update(view)

    def _finish(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            size = self._file.tell()
            self._file.close()
            self._file = None
            self.records[self._names[len(self.records)]] = FileRecord(size, self._digest.hexdigest())

    def _write_index(self) -> None:
        if len(self._shards) == 1:
            return
        total = sum(target.bytes for shard in self._shards for target in shard)
        placed = {t.name: name for name, shard in zip(self._names, self._shards, strict=True) for t in shard}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(placed.items()))}
        (self._folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _cut(targets: Sequence[Target], shard_bytes: int) -> list[list[Target]]:
    shards: list[list[Target]] = [[]]
    size = 0
    for target in targets:
        if shards[-1] and size + target.bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(target)
        size += target.bytes
    return shards
