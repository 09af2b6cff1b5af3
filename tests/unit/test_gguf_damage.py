"""Damaged and hostile GGUF files: one line that says what is wrong; never a traceback, a hang or a large allocation."""

from __future__ import annotations

import random
import struct
import time
import tracemalloc
from typing import TYPE_CHECKING

import pytest

from tests.gguf_files import TinyModel
from tileinfer_core.errors import DamagedModelError, ModelError, UnsupportedModelError
from tileinfer_core.gguf_import import convert
from tileinfer_core.gguf_import.container import GgufFile
from tileinfer_core.progress import silent

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return TinyModel(layers=1).write(tmp_path_factory.mktemp("gguf") / "tiny.gguf").read_bytes()


def key_value(key: str, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", kind) + value


def tensor(name: str, dims: list[int], kind: int = 0, offset: int = 0, count: int | None = None) -> bytes:
    head = struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", len(dims) if count is None else count)
    return head + struct.pack(f"<{len(dims)}QIQ", *dims, kind, offset)


def file_of(body: bytes, tensors: int = 0, keys: int = 0, version: int = 3, data: int = 0) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + body
    return head + bytes(-len(head) % 32 + data)


def refusal(tmp_path: Path, content: bytes) -> str:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError) as caught:
        GgufFile.open(path)
    text = str(caught.value)
    assert str(path) in text
    assert "\n" not in text
    return text


TERA = 2**40


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "letters GGUF"),
        (b"GG", "letters GGUF"),
        (b"PK\x03\x04" + bytes(60), "letters GGUF"),
        (b"GGUF", "needs 4 bytes at byte 4, the file has 4"),
        (file_of(b"", version=7), "version 7"),
        (file_of(b"", version=1), "version 1"),
        (file_of(b"", version=0), "version 0"),
        (file_of(b"", version=3 << 24), "big-endian"),
        (file_of(b"", keys=TERA), f"claims {TERA} metadata keys"),
        (file_of(b"", tensors=TERA), f"claims {TERA} tensors"),
        (file_of(b"", keys=2**64 - 1), "claims 18446744073709551615 metadata keys"),
        (file_of(struct.pack("<Q", TERA) + bytes(40), keys=1), f"needs {TERA} bytes"),
        (file_of(key_value("k", 8, struct.pack("<Q", 2**63)), keys=1, data=64), "k needs 9223372036854775808 bytes"),
        (file_of(key_value("k", 9, struct.pack("<IQ", 8, TERA)), keys=1, data=64), f"claims {TERA} entries of k"),
        (file_of(key_value("k", 9, struct.pack("<IQ", 4, TERA)), keys=1, data=64), f"claims {TERA} entries of k"),
        (file_of(key_value("k", 9, struct.pack("<IQ", 9, 1)), keys=1, data=64), "array of the type 9"),
        (file_of(key_value("k", 99, bytes(8)), keys=1), "unknown type 99"),
        (file_of(key_value("k", 8, struct.pack("<Q", 2) + b"\xff\xfe"), keys=1), "not UTF-8"),
        (file_of(key_value("k", 4, bytes(4)) * 2, keys=2), "'k' appears twice"),
        (file_of(key_value("general.alignment", 4, struct.pack("<I", 3)), keys=1), "general.alignment is 3"),
        (file_of(key_value("general.alignment", 4, bytes(4)), keys=1), "general.alignment is 0"),
        (file_of(key_value("general.alignment", 4, struct.pack("<I", 2**31)), keys=1), "alignment is 2147483648"),
        (file_of(key_value("general.alignment", 8, struct.pack("<Q", 1) + b"x"), keys=1), "general.alignment is 'x'"),
        (file_of(tensor("t", [4], count=2**31), tensors=1), "2147483648 dimensions"),
        (file_of(tensor("t", []), tensors=1, data=64), "0 dimensions"),
        (file_of(tensor("t", [0]), tensors=1, data=64), "can't hold blocks"),
        (file_of(tensor("t", [33], kind=8), tensors=1, data=64), "can't hold blocks of 32"),
        (file_of(tensor("t", [TERA, TERA]), tensors=1, data=64), "ends at byte"),
        (file_of(tensor("t", [8], offset=2**63), tensors=1, data=64), "ends at byte"),
        (file_of(tensor("t", [8], offset=4), tensors=1, data=64), "multiple of 32"),
        (file_of(tensor("t", [8], kind=77), tensors=1, data=64), "the type 77"),
        (file_of(tensor("t", [8]) + tensor("t", [8], offset=32), tensors=2, data=64), "'t' appears twice"),
        (file_of(tensor("t", [16]) + tensor("u", [8], offset=32), tensors=2, data=64), "'u' overlaps"),
        (file_of(tensor("t", [8]), tensors=1, data=31), "the file has"),
        (file_of(tensor("t", [8]), tensors=1, data=33), "32 bytes expected|expected, "),
    ],
)
def test_lies_are_named(tmp_path: Path, content: bytes, says: str) -> None:
    assert any(part in refusal(tmp_path, content) for part in says.split("|"))


def test_a_good_small_file_passes_the_same_builder(tmp_path: Path) -> None:
    """So that the refusals above are for their reason, not for a mistake of the builder."""
    body = key_value("k", 4, struct.pack("<I", 7)) + tensor("t", [4, 2]) + tensor("u", [8], offset=32)
    (tmp_path / "good.gguf").write_bytes(file_of(body, tensors=2, keys=1, data=64))
    file = GgufFile.open(tmp_path / "good.gguf")
    assert file.metadata == {"k": 7}
    assert file.tensors["t"].shape == (2, 4)
    assert file.tensors["u"].bytes == 32


def test_cut_off_anywhere(tmp_path: Path, whole: bytes) -> None:
    cuts = [*range(0, 200, 7), *range(200, len(whole), 4999), len(whole) - 4096, len(whole) - 1]
    for cut in cuts:
        refusal(tmp_path, whole[:cut])


def test_one_block_appended(tmp_path: Path, whole: bytes) -> None:
    assert f"{len(whole):,} bytes expected, {len(whole) + 1:,} found" in refusal(tmp_path, whole + b"\0")


def test_flipped_bytes_convert_or_are_refused(tmp_path: Path, whole: bytes) -> None:
    """Any byte of the tables may be wrong: the answer is a model or a ModelError, never another exception."""
    rng = random.Random(5)
    path = tmp_path / "flipped.gguf"
    refused = 0
    for _ in range(80):
        content = bytearray(whole)
        for _ in range(rng.choice([1, 1, 3])):
            content[rng.randrange(9000)] = rng.randrange(256)
        path.write_bytes(content)
        try:
            convert(path, tmp_path / "out", silent)
        except ModelError:
            refused += 1
    assert refused > 15  # the flips do reach what is checked


def test_a_folder_or_nothing_instead_of_a_file(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent.gguf"):
        with pytest.raises(ModelError, match="can't be read"):
            GgufFile.open(path)


def test_classes_of_refusal(tmp_path: Path, whole: bytes) -> None:
    (tmp_path / "a.gguf").write_bytes(whole[:-5])
    with pytest.raises(DamagedModelError):
        GgufFile.open(tmp_path / "a.gguf")
    (tmp_path / "b.gguf").write_bytes(file_of(b"", version=1))
    with pytest.raises(UnsupportedModelError):
        GgufFile.open(tmp_path / "b.gguf")


@pytest.mark.parametrize("kind", [0, 4, 8, 10])
@pytest.mark.parametrize("count", [2**20, TERA, 2**63, 2**64 - 1])
def test_absurd_counts_cost_no_memory_and_no_time(tmp_path: Path, kind: int, count: int) -> None:
    """The count is compared with the file's size before anything is made of it."""
    array = key_value("k", 9, struct.pack("<IQ", kind, count))
    bodies = [
        file_of(array, keys=1, data=4096),
        file_of(b"", keys=count, data=4096),
        file_of(b"", tensors=count, data=4096),
    ]
    for content in bodies:
        (tmp_path / "bad.gguf").write_bytes(content)
        tracemalloc.start()
        start = time.process_time()
        with pytest.raises(DamagedModelError):
            GgufFile.open(tmp_path / "bad.gguf")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1 << 20
        assert time.process_time() - start < 1
