"""Files written by a thread: whole, hashed, and every error of it where the caller is."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from tileinfer_core.manifest import record_of
from tileinfer_core.safetensors_writer import ShardWriter, Target
from tileinfer_core.weights import WeightFiles

TARGETS = [Target(f"t{i}", "float32", (10, 8)) for i in range(7)]
ARRAYS = [np.random.default_rng(i).standard_normal((10, 8), np.float32) for i in range(7)]


def write(folder, shard_bytes):
    with ShardWriter(folder, TARGETS, shard_bytes) as writer:
        for array in ARRAYS:
            writer.write(array[:3])
            writer.write(array[3:])
    return writer.records


@pytest.mark.parametrize(("shard_bytes", "count"), [(1 << 20, 1), (700, 4), (1, 7)])
def test_what_is_read_is_what_was_written(tmp_path, shard_bytes, count):
    records = write(tmp_path, shard_bytes)
    files = WeightFiles.open(tmp_path)
    for target, array in zip(TARGETS, ARRAYS, strict=True):
        np.testing.assert_array_equal(files.read(target.name), array)
    assert records == {path.name: record_of(path) for path in tmp_path.glob("*.safetensors")}
    assert len(records) == count


@pytest.mark.parametrize("after", [0, 1, 5, 13])
def test_an_error_of_the_thread_reaches_the_caller(tmp_path, monkeypatch, after):
    """The 14 pieces' and the one header's: whichever fails, and whether it is noticed early or at the end."""
    put, calls = ShardWriter._put, []

    def failing(self, view):
        calls.append(view)
        if len(calls) > after:
            raise OSError(28, "No space left on device")
        put(self, view)

    monkeypatch.setattr(ShardWriter, "_put", failing)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path, 1 << 20)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("write-shards")]


def test_an_error_of_the_caller_ends_the_thread_and_closes_the_file(tmp_path):
    writer = ShardWriter(tmp_path, TARGETS)

    def interrupted():
        with writer:
            writer.write(ARRAYS[0])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert writer._file is None or writer._file.closed
    assert not writer.records
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("write-shards")]
