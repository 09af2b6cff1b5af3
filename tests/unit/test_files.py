"""Small files are read whole only if they are files, and small: a pipe would block, a device never ends."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import threading
import time
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.interrupts import interrupted
from tileinfer_core import files
from tileinfer_core.chat_template import ChatTemplate
from tileinfer_core.config import ModelConfig
from tileinfer_core.errors import ModelError, TileinferError, UsageError
from tileinfer_core.files import FileTooLargeError, publish, read_small, regular_size, write_atomic
from tileinfer_core.gguf_import.container import GgufFile
from tileinfer_core.hub_cache import snapshot
from tileinfer_core.manifest import Manifest
from tileinfer_core.pull_plan import exclusive
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


# Giving a finished folder its name


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def made(path: Path, content: str) -> Path:
    path.mkdir()
    (path / "file").write_text(content)
    return path


@pytest.mark.parametrize("at_once", [True, False])
def test_a_folder_takes_the_place_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, at_once: bool) -> None:
    if not at_once:
        monkeypatch.setattr(files, "_exchange", lambda *_: False)
    target = tmp_path / "target"
    for content in ("first", "second"):
        publish(made(tmp_path / "target.partial", content), target)
        assert (target / "file").read_text() == content
        assert names(tmp_path) == ["target"]


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("there", [True, False])
def test_a_link_in_the_place_of_a_folder_goes_and_what_it_names_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, at_once: bool, there: bool
) -> None:
    """A model that was moved to another disk, which may not be mounted now."""
    if not at_once:
        monkeypatch.setattr(files, "_exchange", lambda *_: False)
    elsewhere = tmp_path / "elsewhere"
    if there:
        made(elsewhere, "old")
    target = tmp_path / "target"
    target.symlink_to(elsewhere)
    publish(made(tmp_path / "target.partial", "new"), target)
    assert not target.is_symlink()
    assert (target / "file").read_text() == "new"
    assert names(tmp_path) == (["elsewhere", "target"] if there else ["target"])
    assert not there or (elsewhere / "file").read_text() == "old"


@pytest.mark.parametrize("at_once", [True, False])
def test_an_interrupt_at_any_instruction_leaves_the_old_folder_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, at_once: bool
) -> None:
    if not at_once:
        monkeypatch.setattr(files, "_exchange", lambda *_: False)
    target, partial = tmp_path / "target", tmp_path / "target.partial"
    for steps in count():
        for path in tmp_path.iterdir():
            shutil.rmtree(path)
        made(target, "old")
        made(partial, "new")
        came = interrupted(lambda: publish(partial, target), steps, inside=("files.py",))
        assert (target / "file").read_text() in ("old", "new"), f"after {steps} instructions"
        if not came:
            break
    assert (target / "file").read_text() == "new"
    assert steps > 100


# Small files


def test_a_file_keeps_its_mode_and_a_link_stays_a_link(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.write_text("old")
    real.chmod(0o600)
    link.symlink_to(real)
    write_atomic(link, "new")
    assert link.is_symlink()
    assert real.read_text() == "new"
    assert real.stat().st_mode & 0o777 == 0o600
    assert names(tmp_path) == ["link", "real"]


def test_two_that_write_the_same_file_do_not_mix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second begins while the first is at work: what the first publishes is its own."""
    path, real = tmp_path / "file", os.fsync

    def between(handle: int) -> None:
        monkeypatch.setattr(os, "fsync", real)
        monkeypatch.setattr(os, "getpid", lambda: 1)
        write_atomic(path, "second")
        assert path.read_text() == "second"
        real(handle)

    monkeypatch.setattr(os, "fsync", between)
    write_atomic(path, "first")
    assert path.read_text() == "first"
    assert names(tmp_path) == ["file"]


# Locks


def test_a_lock_whose_file_was_removed_is_no_lock(tmp_path: Path) -> None:
    """Who waited for the one that removed it must not share the place with who came after."""
    target, order = tmp_path / "model", []
    inside, leave = threading.Event(), threading.Event()

    def first() -> None:
        with exclusive(target, "model"):
            inside.set()
            leave.wait(5)
            order.append("first")

    def waits() -> None:
        with exclusive(target, "model", wait=True):
            order.append("waits")
            with pytest.raises(TileinferError, match="another process"), exclusive(target, "model"):
                order.append("too much")

    threads = [threading.Thread(target=work) for work in (first, waits)]
    threads[0].start()
    inside.wait(5)
    threads[1].start()
    time.sleep(0.05)
    leave.set()
    for thread in threads:
        thread.join()
    assert order == ["first", "waits"]
    assert names(tmp_path) == []


def test_a_file_system_without_locks_is_worked_on_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fcntl = pytest.importorskip("fcntl")

    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    with exclusive(tmp_path / "model", "model"):
        pass
