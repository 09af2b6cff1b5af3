"""A tensor read in pieces is the tensor, and what can't be read is said by name."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.checkpoints import write_checkpoint
from tileinfer_core import tensor_pieces
from tileinfer_core.dtypes import SAFETENSORS_DTYPES
from tileinfer_core.errors import DamagedModelError, ModelError
from tileinfer_core.tensor_pieces import pieces_of
from tileinfer_core.weights import WeightFiles

ARRAYS = {
    "matrix": np.random.default_rng(0).standard_normal((37, 24), np.float32),
    "vector": np.random.default_rng(1).standard_normal(100, np.float32),
    "number": np.array([3.5], np.float32),
}


@pytest.fixture
def reader():
    with ThreadPoolExecutor(1) as pool:
        yield pool


@pytest.mark.parametrize("piece", [1, 24, 100, 240, 1 << 18])
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_pieces_make_the_tensor(tmp_path, monkeypatch, reader, dtype, piece):
    monkeypatch.setattr(tensor_pieces, "PIECE", piece)
    files = WeightFiles.open(write_checkpoint(tmp_path, {}, ARRAYS, dtype))
    for name, array in ARRAYS.items():
        stored = array.astype(SAFETENSORS_DTYPES[dtype])
        for whole in (False, True):
            raws, values = zip(*pieces_of(files.info(name), reader, whole=whole), strict=True)
            assert b"".join(raw.tobytes() for raw in raws) == stored.tobytes()
            np.testing.assert_array_equal(np.concatenate(values).reshape(array.shape), stored.astype(np.float32))
            assert len(raws) == 1 or not whole


def test_what_nobody_waits_for_is_not_read(tmp_path, monkeypatch, reader):
    monkeypatch.setattr(tensor_pieces, "PIECE", 24)
    read, begin = [], threading.Event()
    real = tensor_pieces._read

    def slow(info, start, size):
        if start:
            begin.wait(10)
        read.append(start)
        return real(info, start, size)

    monkeypatch.setattr(tensor_pieces, "_read", slow)
    pieces = pieces_of(WeightFiles.open(write_checkpoint(tmp_path, {}, ARRAYS)).info("matrix"), reader)
    next(pieces)
    pieces.close()
    begin.set()
    reader.shutdown()
    assert read in ([0], [0, 24 * 4])


def test_a_file_that_shrinks_is_named(tmp_path, monkeypatch, reader):
    monkeypatch.setattr(tensor_pieces, "PIECE", 24)
    info = WeightFiles.open(write_checkpoint(tmp_path, {}, {"matrix": ARRAYS["matrix"]})).info("matrix")
    info.file.write_bytes(info.file.read_bytes()[:-50])
    with pytest.raises(DamagedModelError, match=r"model\.safetensors: cut off while it was read: 50 more bytes"):
        list(pieces_of(info, reader))


def test_an_error_of_the_disk_names_the_file_that_was_read(tmp_path, monkeypatch, reader):
    def failing(*_):
        raise OSError(5, "Input/output error")

    info = WeightFiles.open(write_checkpoint(tmp_path, {}, ARRAYS)).info("matrix")
    monkeypatch.setattr(type(info.file), "open", lambda *_, **__: Broken(failing))
    with pytest.raises(ModelError, match=r"model\.safetensors: can't be read: Input/output error"):
        list(pieces_of(info, reader))


class Broken:
    """A file whose reads fail."""

    def __init__(self, readinto):
        self.readinto = readinto

    def __enter__(self):
        return self

    def __exit__(self, *_): ...
    def seek(self, _): ...
