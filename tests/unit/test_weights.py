"""Weight files: whole ones are read as they are, damaged ones are refused with file, bytes expected and bytes found."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tileinfer_core.dtypes import BFLOAT16
from tileinfer_core.errors import DamagedModelError, ModelError, UnsupportedModelError
from tileinfer_core.weight_index import INDEX_NAME, SINGLE_NAME
from tileinfer_core.weights import TensorSpec, WeightFiles, read_header

if TYPE_CHECKING:
    from pathlib import Path


def write_raw(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    """A safetensors file with any header, true or not."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + data)
    return path


def entry(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Two shards with an index, in the layout the Hub uses."""
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    save_file({"a": np.arange(6, dtype=np.float32).reshape(2, 3)}, tmp_path / names[0])
    save_file({"b": np.ones(5, dtype=np.float16), "c": np.zeros((2, 2), np.float32)}, tmp_path / names[1])
    index = {"metadata": {}, "weight_map": {"a": names[0], "b": names[1], "c": names[1]}}
    (tmp_path / INDEX_NAME).write_text(json.dumps(index))
    return tmp_path


def test_bfloat16_is_a_view_of_the_file(tmp_path: Path) -> None:
    values = np.linspace(-3, 3, 12).astype(BFLOAT16).reshape(3, 4)
    save_file({"w": values}, tmp_path / SINGLE_NAME)
    files = WeightFiles.open(tmp_path)
    read = files.read("w")
    assert read.dtype == BFLOAT16
    assert np.array_equal(read, values)
    assert not read.flags.owndata
    assert not read.flags.writeable
    assert files.info("w").dtype == "bfloat16"
    assert files.info("w").bytes == files.total_bytes == 24


def test_every_known_dtype_round_trips(tmp_path: Path) -> None:
    arrays = {
        t: np.ones(3, dtype=t) for t in ("bool", "u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8")
    }
    save_file(arrays, tmp_path / SINGLE_NAME)
    files = WeightFiles.open(tmp_path)
    for name, array in arrays.items():
        assert files.read(name).dtype == array.dtype
        assert np.array_equal(files.read(name), array)


def test_scalars_and_empty_tensors(tmp_path: Path) -> None:
    save_file({"s": np.array(2.5, np.float32), "e": np.zeros((0, 4), np.float32)}, tmp_path / SINGLE_NAME)
    files = WeightFiles.open(tmp_path)
    assert files.read("s").shape == ()
    assert files.read("e").shape == (0, 4)


def test_shards_are_read_through_the_index(shards: Path) -> None:
    files = WeightFiles.open(shards)
    assert files.names == {"a", "b", "c"}
    assert files.read("a")[1, 2] == 5


def test_a_stray_single_file_beside_shards_is_not_read(shards: Path) -> None:
    save_file({"stray": np.ones(1, np.float32), "a": np.zeros(9, np.float32)}, shards / SINGLE_NAME)
    files = WeightFiles.open(shards)
    assert files.names == {"a", "b", "c"}
    assert files.info("a").shape == (2, 3)


def test_a_missing_shard_is_listed(shards: Path) -> None:
    (shards / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(DamagedModelError, match=r"1 of 2 weight files; no model-00002-of-00002\.safetensors") as caught:
        WeightFiles.open(shards)
    assert "pull" in (caught.value.hint or "")


def test_a_tensor_the_index_promises_must_be_there(shards: Path) -> None:
    index = json.loads((shards / INDEX_NAME).read_text())
    index["weight_map"]["ghost"] = "model-00001-of-00002.safetensors"
    (shards / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(DamagedModelError, match="ghost"):
        WeightFiles.open(shards)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"weight_map": {}}',
        '{"weight_map": 3}',
        '{"weight_map": {"a": "../../etc/passwd"}}',
        '{"weight_map": {"a": "model.bin"}}',
        "[" * 100_000,
        "\udcff",
    ],
)
def test_a_broken_index_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX_NAME).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(DamagedModelError, match=INDEX_NAME):
        WeightFiles.open(tmp_path)


@pytest.mark.parametrize("cut", [1, 7, 4096])
def test_a_file_cut_off_names_both_sizes(tmp_path: Path, cut: int) -> None:
    path = tmp_path / SINGLE_NAME
    save_file({"w": np.ones((64, 64), np.float32)}, path)
    whole = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(whole - cut)
    with pytest.raises(DamagedModelError, match=f"{whole:,} bytes expected, {whole - cut:,} found") as caught:
        WeightFiles.open(tmp_path)
    assert str(path) in str(caught.value)


def test_one_byte_appended(tmp_path: Path) -> None:
    path = tmp_path / SINGLE_NAME
    save_file({"w": np.ones(4, np.float32)}, path)
    whole = path.stat().st_size
    with path.open("ab") as file:
        file.write(b"\0")
    with pytest.raises(DamagedModelError, match=f"{whole:,} bytes expected, {whole + 1:,} found"):
        WeightFiles.open(tmp_path)


@pytest.mark.parametrize("length", [0, 1, 2**16, 2**40, 2**64 - 1])
def test_header_lengths_that_lie(tmp_path: Path, length: int) -> None:
    path = write_raw(tmp_path / SINGLE_NAME, {"w": entry([1], 0, 4)}, b"\0" * 4, length=length)
    with pytest.raises(DamagedModelError, match=f"header claims {length} bytes, the file has {path.stat().st_size}"):
        WeightFiles.open(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\x08", b"\0" * 8, b"\2\0\0\0\0\0\0\0"])
def test_files_of_a_few_bytes(tmp_path: Path, content: bytes) -> None:
    (tmp_path / SINGLE_NAME).write_bytes(content)
    with pytest.raises(DamagedModelError):
        WeightFiles.open(tmp_path)


@pytest.mark.parametrize(
    ("header", "data", "says"),
    [
        (b"{not json", 0, "not JSON"),
        (b"[" * 5000, 0, "nested too deeply"),
        (b"\xff\xfe{}", 0, "not JSON"),
        (b"[1]", 0, "expected a JSON object"),
        (b'{"a": 1, "a": 2}', 0, "'a' is there twice"),
        ({"w": 3}, 0, "lacks dtype"),
        ({"w": {"dtype": "F32"}}, 0, "lacks dtype"),
        ({"w": entry([-1], 0, 4)}, 4, "impossible"),
        ({"w": entry([1.5], 0, 4)}, 4, "impossible"),  # type: ignore[list-item]
        ({"w": entry([1], 4, 0)}, 4, "impossible"),
        ({"w": entry([2**40, 2**40], 0, 4)}, 4, "needs"),
        ({"w": entry([2], 0, 4)}, 4, "needs 8 bytes, its range has 4"),
        ({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, 12, "overlaps"),
        ({"a": entry([1], 0, 4), "b": entry([1], 8, 12)}, 12, "gap"),
        ({"a": entry([1], 4, 8)}, 8, "gap"),
    ],
)
def test_headers_that_lie(tmp_path: Path, header: Any, data: int, says: str) -> None:
    path = write_raw(tmp_path / SINGLE_NAME, header, b"\0" * data)
    with pytest.raises(DamagedModelError, match=says) as caught:
        read_header(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_dtype_is_refused_by_name(tmp_path: Path) -> None:
    path = write_raw(tmp_path / SINGLE_NAME, {"w": entry([1], 0, 1, "F4_E2M1")}, b"\0")
    with pytest.raises(UnsupportedModelError, match="'w' has the type 'F4_E2M1'"):
        read_header(path)


def test_pickled_weights_are_never_read(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(UnsupportedModelError, match=r"pytorch_model\.bin"):
        WeightFiles.open(tmp_path)


def test_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(DamagedModelError, match="no weights"):
        WeightFiles.open(tmp_path)


def test_several_files_without_an_index_are_ambiguous(shards: Path) -> None:
    (shards / INDEX_NAME).unlink()
    with pytest.raises(DamagedModelError, match="2 safetensors files but no"):
        WeightFiles.open(shards)


def test_check_says_everything_at_once(shards: Path) -> None:
    specs = [
        TensorSpec("a", (3, 2)),
        TensorSpec("b", (5,), dtypes=frozenset({"bfloat16"})),
        TensorSpec("missing", (1,)),
        TensorSpec("optional", (1,), optional=True),
    ]
    with pytest.raises(ModelError) as caught:
        WeightFiles.open(shards).check(specs)
    text = str(caught.value)
    assert "1 missing: missing" in text
    assert "1 unexpected: c" in text
    assert "a has [2, 3], expected [3, 2]" in text
    assert "b is float16, expected bfloat16" in text
    assert "optional" not in text


def test_check_is_quiet_when_all_fits(shards: Path) -> None:
    WeightFiles.open(shards).check([TensorSpec("a", (2, 3)), TensorSpec("b", (5,))], ignore=["c"])


def test_an_unknown_tensor_is_named(shards: Path) -> None:
    with pytest.raises(ModelError, match="'nothing'"):
        WeightFiles.open(shards).read("nothing")


def test_flipped_header_bytes_are_read_or_refused(tmp_path: Path) -> None:
    """Any byte of the header may be wrong: the answer is tensors or a ModelError, never another exception."""
    path = tmp_path / SINGLE_NAME
    save_file({"w": np.ones((8, 8), np.float32), "v": np.zeros(5, np.float16)}, path)
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    rng = random.Random(11)
    refused = 0
    for _ in range(200):
        content = bytearray(whole)
        content[rng.randrange(header)] = rng.randrange(256)
        path.write_bytes(content)
        try:
            files = WeightFiles.open(tmp_path)
            for name in files.names:
                files.read(name)
        except ModelError:
            refused += 1
    assert refused > 100
