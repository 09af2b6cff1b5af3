"""The cache of compiled kernels: two stores of one folder, listed, trimmed and cleared together."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("cuda.tile")

from cutile_cache._cache import MetadataV1, cache_lookup, cache_store

from kernels import cache
from kernels.cubin_store import CubinStore, _folder_digest
from kernels.norm import rms_norm_kernel
from tileinfer_core import kernel_cache
from tileinfer_core.compiler_settings import NAMES, compiler_settings
from tileinfer_core.errors import DiskError, UsageError
from tileinfer_core.settings import Setting

if TYPE_CHECKING:
    from pathlib import Path


def cubin(arch: int = 90, size: int = 1000) -> bytes:
    """Enough of an ELF header to name a target."""
    head = bytearray(64)
    head[:4] = b"\x7fELF"
    head[0x30:0x34] = (0x0B000004 | arch << 8).to_bytes(4, "little")
    return bytes(head).ljust(size, b"\0")


def theirs(folder: Path, name: str, *, arch: int = 90, size: int = 1000, age: float = 0) -> str:
    """An entry as cuda-tile makes it, last used `age` seconds before the newest."""
    import sqlite3

    about = MetadataV1(kernel_names=[f"{name}_Kt1_A1f32"], compiler_version="tileiras\nrelease 13.4, V13.4.92\n")
    cache_store(str(folder), name, cubin(arch, size), about.to_dict())
    with sqlite3.connect(folder / "cache.db") as connection:
        connection.execute("UPDATE cache SET atime = ? WHERE key = ?", (1e9 - age, name))
    connection.close()
    return name


def ours(folder: Path, symbol: str, *, size: int = 1000, age: float = 0) -> Path:
    store = CubinStore(folder / "tileinfer", "sm_90")
    store.keep(rms_norm_kernel, symbol, cubin(90, size))
    path = store.path(rms_norm_kernel, symbol)
    os.utime(path, (1e9 - age, 1e9 - age))
    return path


def settings(folder: Path, limit: int = 1 << 31):
    chosen = {"cache_dir": Setting(str(folder), "--cache-dir"), "cache_size_bytes": Setting(limit, "--limit")}
    return compiler_settings({}, {name: Setting(None, "default") for name in NAMES} | chosen)


def test_entries_of_both_stores_what_was_used_last_first(tmp_path: Path) -> None:
    theirs(tmp_path, "a_kernel", arch=80, age=2)
    ours(tmp_path, "rms_norm_kernel_Kt1_x", age=1)
    theirs(tmp_path, "b_kernel", arch=121, age=0, size=500)
    report = kernel_cache.report(settings(tmp_path))
    assert [(entry.kernel, entry.target, entry.store) for entry in report.entries] == [
        ("b_kernel", "sm_121", "cuda-tile"),
        ("rms_norm_kernel", "sm_90", "tileinfer"),
        ("a_kernel", "sm_80", "cuda-tile"),
    ]
    assert report.entries[0].compiler == "tileiras 13.4.92"
    assert report.entries[1].compiler is not None
    assert report.entries[1].compiler.startswith("tileiras ")
    assert report.entries[2].last_use == "2001-09-09T01:46:38+00:00"
    assert 2500 < report.size < 2800  # ours has a line of text before the code
    document = report.as_dict()
    assert document["settings"]["cache_dir"] == {"value": str(tmp_path), "origin": "--cache-dir"}
    assert [entry["size"] for entry in document["entries"]] == [500, report.entries[1].size, 1000]


def test_use_is_noted(tmp_path: Path) -> None:
    path = ours(tmp_path, "s", age=1e6)
    theirs(tmp_path, "t", age=10)
    assert [entry.kernel for entry in cache.entries(tmp_path)] == ["t", "s"]
    found = CubinStore(tmp_path / "tileinfer", "sm_90").find(rms_norm_kernel, "s")
    assert found == (cubin(), "s", None)
    assert [entry.kernel for entry in cache.entries(tmp_path)] == ["s", "t"]
    path.write_bytes(b"not a line of JSON\n\x7fELF")
    assert CubinStore(tmp_path / "tileinfer", "sm_90").find(rms_norm_kernel, "s") is None


def test_a_damaged_entry_is_no_entry(tmp_path: Path) -> None:
    """A flipped bit, or a file cut short: it is compiled again, and takes the damaged one's place."""
    path = ours(tmp_path, "s")
    whole = path.read_bytes()
    store = CubinStore(tmp_path / "tileinfer", "sm_90")
    for damaged in (whole[:-1], whole[:-1] + b"\1", whole.replace(b"sha256", b"sha255"), b"[1]\n", b"{}", b""):
        path.write_bytes(damaged)
        assert store.find(rms_norm_kernel, "s") is None
        assert store.keep(rms_norm_kernel, "s", cubin()) is None
        assert path.read_bytes() == whole


def test_what_can_not_be_kept_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tileinfer").write_text("a file in its place")
    refused = CubinStore(tmp_path / "tileinfer", "sm_90").keep(rms_norm_kernel, "s", cubin())
    assert isinstance(refused, OSError)
    assert refused.strerror in ("File exists", "Not a directory")

    def full(_self: Path, _content: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    refused = CubinStore(tmp_path / "other", "sm_90").keep(rms_norm_kernel, "s", cubin())
    assert refused is not None
    assert refused.errno == errno.ENOSPC
    assert list((tmp_path / "other").iterdir()) == []
    assert CubinStore(None, "sm_90").keep(rms_norm_kernel, "s", cubin()) is None


def test_folders_and_links_among_the_entries(tmp_path: Path) -> None:
    """Nobody's entries: they are not listed, don't count, and stay."""
    own = ours(tmp_path, "s").parent
    (own / "a.cubin").mkdir()
    (own / "b.cubin").symlink_to(tmp_path / "nowhere")
    (own / "c.cubin").write_bytes(b'{"symbol": {"a": 1}, "arch": [1]}\n')
    found = cache.entries(tmp_path)
    assert {entry.key for entry in found} == {*(path.name for path in own.iterdir())} - {"a.cubin", "b.cubin"}
    assert cache.size(tmp_path) == sum(entry.size for entry in found)
    assert kernel_cache.clear(settings(tmp_path))[0] == 2
    assert {path.name for path in own.iterdir()} == {"a.cubin", "b.cubin"}


def test_a_database_that_can_not_be_changed_goes_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without room on the disk no entry can be deleted from it: that needs a journal."""
    theirs(tmp_path, "a")
    (tmp_path / "cache.db-journal").write_bytes(b"half a journal")
    path = ours(tmp_path, "b")
    real = cache.remove

    def full(folder: Path, chosen: Any) -> None:
        if (folder / "cache.db").exists():
            raise cache.UnreadableCacheError("database or disk is full")
        real(folder, chosen)

    monkeypatch.setattr(cache, "remove", full)
    assert kernel_cache.clear(settings(tmp_path))[0] == 2
    assert [*tmp_path.glob("cache.db*")] == []
    assert not path.exists()


def test_the_oldest_go_until_the_limit_holds(tmp_path: Path) -> None:
    theirs(tmp_path, "oldest", age=40)
    path = ours(tmp_path, "older", age=30)
    theirs(tmp_path, "newer", age=20)
    theirs(tmp_path, "newest", age=10)
    assert cache.size(tmp_path) == sum(entry.size for entry in cache.entries(tmp_path)) > 4000
    assert cache.trim(tmp_path, 1 << 20) == (0, 0)
    count, size = cache.trim(tmp_path, 2000)
    assert count == 2
    assert size > 2000
    assert not path.exists()
    assert cache_lookup(str(tmp_path), "oldest") is None
    assert cache_lookup(str(tmp_path), "newest") is not None
    assert [entry.kernel for entry in cache.entries(tmp_path)] == ["newest", "newer"]


def test_clearing(tmp_path: Path) -> None:
    theirs(tmp_path, "a", size=300_000)
    path = ours(tmp_path, "b")
    part = path.with_name(f".{path.name}.123")
    part.write_bytes(b"half")
    grown = (tmp_path / "cache.db").stat().st_size
    assert kernel_cache.clear(settings(tmp_path))[0] == 2
    assert cache.entries(tmp_path) == []
    assert (tmp_path / "cache.db").stat().st_size < grown / 5
    assert not part.exists()
    assert kernel_cache.clear(settings(tmp_path)) == (0, 0)


def test_nothing_there(tmp_path: Path) -> None:
    assert kernel_cache.report(settings(tmp_path / "absent")).entries == ()
    assert kernel_cache.trim(settings(tmp_path / "absent")) == (0, 0)
    assert not (tmp_path / "absent").exists()


def test_a_damaged_database(tmp_path: Path) -> None:
    (tmp_path / "cache.db").write_bytes(b"SQLite format 3\0" + b"\xff" * 4000)
    with pytest.raises(DiskError, match="kernel cache can't be read") as caught:
        kernel_cache.report(settings(tmp_path))
    assert caught.value.hint is not None
    assert "--clear" in caught.value.hint
    assert kernel_cache.clear(settings(tmp_path)) == (0, 0)
    assert kernel_cache.report(settings(tmp_path)).entries == ()


def test_a_file_in_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is not a folder"):
        kernel_cache.report(settings(tmp_path / "file"))


def test_what_a_kernel_is_made_of_does_not_depend_on_its_folder(tmp_path: Path) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "kernel.py").write_text("x = 1\n")
    digest = _folder_digest(tmp_path / "here")
    assert digest == _folder_digest(tmp_path / "there")
    (tmp_path / "third").mkdir()
    (tmp_path / "third" / "kernel.py").write_text("x = 2\n")
    assert digest != _folder_digest(tmp_path / "third")
