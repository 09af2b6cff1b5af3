"""The cache of compiled kernels as `tileinfer kernels cache` sees it: where, how large, what is in it, and clearing it.

Importing this file raises BackendUnavailableError where cuda-tile is missing or broken. Nothing here needs a GPU.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tileinfer_core.errors import BackendUnavailableError, DiskError, UsageError

try:
    from kernels import cache
except ImportError as _error:
    raise BackendUnavailableError(
        f"the kernels need cuda-tile: {_error}", hint='pip install "cuda-tile[tileiras]"'
    ) from _error

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tileinfer_core.compiler_settings import CompilerSettings


@dataclass(frozen=True, slots=True)
class CachedKernel:
    """One compiled kernel. `last_use` is UTC, ISO 8601; `store` says whose entry it is: cuda-tile's or TileInfer's."""

    kernel: str
    target: str | None
    compiler: str | None
    size: int
    last_use: str
    store: str
    symbol: str


@dataclass(frozen=True, slots=True)
class CacheReport:
    """What is in the folder that the settings name, what was used last first."""

    settings: CompilerSettings
    entries: tuple[CachedKernel, ...]

    @property
    def size(self) -> int:
        return sum(entry.size for entry in self.entries)

    def as_dict(self) -> dict[str, Any]:
        return {
            "location": str(self.settings.cache_dir.value),
            "size_bytes": self.size,
            "limit_bytes": self.settings.cache_size_bytes.value,
            "settings": {
                name: {"value": _plain(setting.value), "origin": setting.origin}
                for name, setting in self.settings.items()
            },
            "entries": [asdict(entry) for entry in self.entries],
        }


def _plain(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float)) else str(value)


def report(settings: CompilerSettings) -> CacheReport:
    """Read the folder, also where `disk_cache` is off: what it holds is still on the disk.

    Raises:
        DiskError: it can't be read, with the way out.
    """
    found = _with_disk_errors(settings.cache_dir.value, cache.entries)
    return CacheReport(settings, tuple(_cached(entry) for entry in found))


def clear(settings: CompilerSettings) -> tuple[int, int]:
    """Remove everything. Returns how many there were, and their bytes. Raises DiskError."""
    count, size = _with_disk_errors(settings.cache_dir.value, cache.clear)
    return count, size


def trim(settings: CompilerSettings) -> tuple[int, int]:
    """Remove what was used longest ago until the size limit holds. Raises DiskError, UsageError."""
    limit = settings.cache_size_bytes.value
    count, size = _with_disk_errors(settings.cache_dir.value, lambda folder: cache.trim(folder, limit))
    return count, size


def _with_disk_errors(folder: Path, action: Callable[[Path], Any]) -> Any:
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"the kernel cache {folder} is not a folder")
    try:
        return action(folder)
    except cache.UnreadableCacheError as error:
        raise DiskError(
            f"the kernel cache can't be read: {error}", hint="`tileinfer kernels cache --clear` empties it"
        ) from error
    except OSError as error:
        raise DiskError(f"the kernel cache in {folder}: {error.strerror or error}") from error


def _cached(entry: cache.Entry) -> CachedKernel:
    when = dt.datetime.fromtimestamp(entry.last_use, dt.UTC).isoformat(timespec="seconds")
    return CachedKernel(entry.kernel, entry.target, entry.compiler, entry.size, when, entry.store, entry.symbol)
