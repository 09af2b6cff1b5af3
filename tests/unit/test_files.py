"""Small files are read whole only if they are files, and small: a pipe would block, a device never ends."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tileinfer_core.chat_template import ChatTemplate
from tileinfer_core.config import ModelConfig
from tileinfer_core.errors import ModelError, TileinferError, UsageError
from tileinfer_core.files import FileTooLargeError, read_small, regular_size
from tileinfer_core.gguf_import.container import GgufFile
from tileinfer_core.hub_cache import snapshot
from tileinfer_core.manifest import Manifest
from tileinfer_core.settings import Settings
from tileinfer_core.store import Store
from tileinfer_core.tokenizer_files import load_backend
from tileinfer_core.weights import WeightFiles, read_header

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(autouse=True)
def _no_test_waits_for_a_writer() -> Iterator[None]:
    """Opening a pipe for reading blocks; an alarm turns that into a failure."""

    def fail(*_: object) -> None:
        raise AssertionError("blocked")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(5)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345678")
    assert read_small(path, 8) == b"12345678"
    assert regular_size(path) == 8
    with pytest.raises(FileTooLargeError) as caught:
        read_small(path, 7)
    assert caught.value.size == 8


def test_a_file_whose_size_is_not_what_the_system_says() -> None:
    assert Path("/proc/self/status").stat().st_size == 0
    assert b"Name:" in read_small(Path("/proc/self/status"), 1 << 20)
    with pytest.raises(FileTooLargeError):
        read_small(Path("/proc/self/status"), 16)


def pipe(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


READERS: dict[str, Callable[[Path], object]] = {
    "config.json": ModelConfig.load,
    "tileinfer.json": Manifest.load,
    "chat_template.jinja": ChatTemplate.load,
    "tokenizer_config.json": ChatTemplate.load,
    "tokenizer.json": load_backend,
    "model.safetensors": WeightFiles.open,
    "shard.safetensors": lambda folder: read_header(folder / "shard.safetensors"),
    "model.safetensors.index.json": WeightFiles.open,
    "model.gguf": lambda folder: GgufFile.open(folder / "model.gguf"),
    "./x.gguf": lambda folder: Store(folder / "store").resolve(str(folder / "x.gguf")),
}


@pytest.mark.parametrize("make", [pipe, device])
@pytest.mark.parametrize("name", READERS)
def test_a_pipe_or_a_device_in_a_model_folder_is_damage(name: str, make: Callable[[Path], None], tmp_path) -> None:
    make(tmp_path / name)
    with pytest.raises(ModelError, match=r"not a regular file|missing|no .*safetensors"):
        READERS[name](tmp_path)


@pytest.mark.parametrize("make", [pipe, device])
def test_what_is_no_config_file_is_said(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / "config.toml")
    with pytest.raises(UsageError, match="config file can't be read: not a regular file"):
        Settings.load({}, tmp_path / "config.toml")


@pytest.mark.parametrize("make", [pipe, device])
def test_the_list_goes_on_beside_them(make: Callable[[Path], None], tmp_path: Path) -> None:
    (tmp_path / "store" / "odd").mkdir(parents=True)
    make(tmp_path / "store" / "odd" / "config.json")
    (refs := tmp_path / "cache" / "models--a--b" / "refs").mkdir(parents=True)
    make(refs / "main")
    assert [model.complete for model in Store(tmp_path / "store", cache=tmp_path / "cache").list()] == [False]
    assert snapshot(tmp_path / "cache", "a/b") is None


def test_no_error_of_a_hostile_config_file_is_a_fault(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    for content in (b"a = " + b"[" * 100_000, b"#" * (2 << 20), b'models_dir = "\\u0000"', b'state_dir = "a\\u0000"'):
        path.write_bytes(content)
        with pytest.raises(TileinferError):
            Settings.load({}, path)
    path.write_bytes(b"\xef\xbb\xbfmax_tokens = 2\n")
    assert Settings.load({}, path).max_tokens.value == 2
