"""Compiled kernels on disk: where they are, what each is, how much they take, and removing them.

One folder holds two stores, counted and trimmed together:

    cache.db      cuda-tile's own, keyed by Tile IR: found again only from the same source folder (kernels/compile.py)
    tileinfer/    this project's, keyed by sources and signature: found without making Tile IR (kernels/cubin_store.py)

A kernel that the engine uses lies in both. The size limit is one for the folder: the entries that were used longest ago
go first. cuda-tile itself trims only its own file, and only when its JIT compiles.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import re
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from cutile_cache._env import get_cache_dir_from_env

from kernels.cubin import target
from kernels.without_torch import without_torch

with without_torch():
    from cuda.tile._compile import _get_compiler_version_string
    from cuda.tile._context import get_cache_size_limit_from_env

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

DATABASE = "cache.db"
OWN_FOLDER = "tileinfer"
SUFFIX = ".cubin"


@dataclass(frozen=True, slots=True)
class Entry:
    """One compiled kernel. `target` and `compiler` are None where nobody wrote them down.

    `last_use` is in seconds since 1970; `key` finds the entry in its store.
    """

    kernel: str
    symbol: str
    target: str | None
    compiler: str | None
    size: int
    last_use: float
    store: Literal["cuda-tile", "tileinfer"]
    key: str


class UnreadableCacheError(Exception):
    """cuda-tile's database is damaged. cuda-tile would begin a new one."""


def compiler_version() -> str:
    """cuda-tile's version and its compiler's: code compiled by others may differ."""
    return f"{importlib.metadata.version('cuda-tile')} {(_get_compiler_version_string() or 'unknown').strip()}"


def short_version(text: str) -> str:
    """ "tileiras 13.4.92" from the lines that the compiler says of itself."""
    found = re.search(r"V(\d+(?:\.\d+)+)", text)
    return f"tileiras {found[1]}" if found else text


def cache_dir() -> Path | None:
    """cuda-tile's own cache folder; None when its user has switched it off."""
    found = get_cache_dir_from_env()
    return None if found is None else Path(found)


def size_limit() -> int:
    """Bytes that the folder may hold."""
    return get_cache_size_limit_from_env()


def kernel_of(symbol: str) -> str:
    """The kernel's name in a mangled symbol: "rms_norm_kernel_Kt2_A2f32…" is of rms_norm_kernel."""
    return symbol.partition("_Kt")[0] or symbol


def entries(folder: Path) -> list[Entry]:
    """Everything in the folder, what was used last first.

    Raises:
        UnreadableCacheError: the database is damaged.
        OSError: the folder can't be read.
    """
    found = [*_database_entries(folder), *_own_entries(folder)]
    return sorted(found, key=lambda entry: (-entry.last_use, entry.key))


def _database_entries(folder: Path) -> Iterator[Entry]:
    with _database(folder) as connection:
        if connection is None:
            return
        rows = connection.execute("SELECT key, substr(blob, 1, 64), blob_size, atime, metadata FROM cache")
        for key, head, size, last_use, text in rows:  # 64 bytes are an ELF header, which names the target
            about = _metadata(text)
            names = about.get("kernel_names")
            symbol = ", ".join(map(str, names)) if isinstance(names, list) and names else "unknown"
            compiler = about.get("compiler_version")
            written = short_version(str(compiler)) if compiler else None
            yield Entry(kernel_of(symbol), symbol, _target(head), written, size, last_use, "cuda-tile", key)


@contextlib.contextmanager
def _database(folder: Path) -> Iterator[sqlite3.Connection | None]:
    """cuda-tile's database; None where there is none yet, or one without its table.

    Raises:
        UnreadableCacheError: it is damaged, or of another shape, or the disk has no room to change it.
    """
    path = folder / DATABASE
    if not path.is_file():
        yield None
        return
    connection = sqlite3.connect(path, timeout=5.0)
    try:
        there = connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'cache'").fetchone()
        yield connection if there else None
    except sqlite3.Error as error:
        raise UnreadableCacheError(f"{path}: {error}") from error
    finally:
        connection.close()


def _metadata(text: str | None) -> dict[str, object]:
    with contextlib.suppress(ValueError):
        about = json.loads(text or "{}")
        if isinstance(about, dict):
            return about
    return {}


def _target(head: bytes) -> str | None:
    with contextlib.suppress(ValueError):
        return target(bytes(head))
    return None


def _own_files(folder: Path) -> list[Path]:
    """Files alone: a folder of such a name is nobody's entry."""
    return [path for path in sorted((folder / OWN_FOLDER).glob(f"*{SUFFIX}")) if path.is_file()]


def _own_entries(folder: Path) -> Iterator[Entry]:
    for path in _own_files(folder):
        with contextlib.suppress(FileNotFoundError):  # another process may be clearing
            status = path.stat()
            with path.open("rb") as file:
                about = _metadata(file.readline(1 << 16).decode("utf-8", "replace"))
            symbol = str(about.get("symbol") or "unknown")
            arch, compiler = about.get("arch"), about.get("compiler")
            yield Entry(
                kernel_of(symbol),
                symbol,
                None if arch is None else str(arch),
                None if compiler is None else str(compiler),
                status.st_size,
                status.st_mtime,
                "tileinfer",
                path.name,
            )


def size(folder: Path) -> int:
    """Bytes of all entries, without looking at each. Raises UnreadableCacheError, OSError."""
    own = 0
    for path in _own_files(folder):
        with contextlib.suppress(FileNotFoundError):
            own += path.stat().st_size
    with _database(folder) as connection:
        if connection is None:
            return own
        (theirs,) = connection.execute("SELECT SUM(blob_size) FROM cache").fetchone()
        return own + int(theirs or 0)


def remove(folder: Path, chosen: Iterable[Entry]) -> None:
    """Take these out; those that are gone already don't matter. The database gives its space back to the disk."""
    keys = []
    for entry in chosen:
        if entry.store == "cuda-tile":
            keys.append((entry.key,))
        else:
            (folder / OWN_FOLDER / entry.key).unlink(missing_ok=True)
    if keys:
        with _database(folder) as connection:
            if connection is not None:
                connection.executemany("DELETE FROM cache WHERE key = ?", keys)
                connection.commit()
                connection.execute("VACUUM")


def forget(folder: Path, key: str) -> None:
    """Take one entry of cuda-tile's out, where that is possible."""
    with contextlib.suppress(UnreadableCacheError), _database(folder) as connection:
        if connection is not None:
            connection.execute("DELETE FROM cache WHERE key = ?", (key,))
            connection.commit()


def clear(folder: Path) -> tuple[int, int]:
    """Remove every entry, and a damaged database. Returns how many there were and their bytes.

    A database that can't be changed, for want of room, goes as a whole.
    """
    try:
        found = entries(folder)
    except UnreadableCacheError:
        _remove_database(folder)
        found = entries(folder)
    try:
        remove(folder, found)
    except UnreadableCacheError:
        _remove_database(folder)
        remove(folder, found)
    for part in (folder / OWN_FOLDER).glob(f".*{SUFFIX}.*"):  # left by a process that was killed while it wrote
        part.unlink(missing_ok=True)
    return len(found), sum(entry.size for entry in found)


def _remove_database(folder: Path) -> None:
    """With its journal, which would be rolled back into the next one."""
    for name in (f"{DATABASE}-journal", f"{DATABASE}-wal", f"{DATABASE}-shm", DATABASE):
        (folder / name).unlink(missing_ok=True)


def trim(folder: Path, limit: int) -> tuple[int, int]:
    """Remove what was used longest ago until the rest fits. Returns how many went and their bytes."""
    total = size(folder)
    if total <= limit:
        return 0, 0
    found, gone = entries(folder), []
    while found and total > limit:
        gone.append(found.pop())
        total -= gone[-1].size
    remove(folder, gone)
    return len(gone), sum(entry.size for entry in gone)


def touch(path: Path) -> None:
    """Note that an own entry was used."""
    with contextlib.suppress(OSError):
        os.utime(path)
