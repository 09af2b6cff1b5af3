"""Writing to disk so that a crash, a full disk or a second process never leaves something that looks whole and is not.

Everything large is made in a sibling folder or file that ends in ".partial" and takes its place by one rename.
Operating-system errors become DiskError with the path and the way out.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import os
import shutil
import stat
from pathlib import Path
from typing import IO, TYPE_CHECKING

from tileinfer_core.errors import DiskError, TileinferError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

PARTIAL = ".partial"
CHUNK = 8 << 20

_CAUSES = {
    errno.ENOSPC: ("the disk is full", "free some space, or set TILEINFER_HOME to a folder on a larger disk"),
    errno.EDQUOT: ("the disk quota is used up", "free some space, or set TILEINFER_HOME to a folder on another disk"),
    errno.EROFS: ("the file system is read-only", "set TILEINFER_HOME to a folder that can be written"),
    errno.EACCES: ("permission denied", "set TILEINFER_HOME to a folder that you may write"),
    errno.EPERM: ("permission denied", "set TILEINFER_HOME to a folder that you may write"),
    errno.EEXIST: ("a file is in the place of a folder", "set TILEINFER_HOME to a folder"),
    errno.ENOTDIR: ("a part of the path is a file, not a folder", "set TILEINFER_HOME to a folder"),
}


def expanded(path: Path | str) -> Path:
    """The path with ~ and ~NAME as home folders. Raises UsageError where there is none."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UsageError(f"{path}: there is no such home folder") from None


def home_folder(environ: Mapping[str, str]) -> Path:
    """$HOME, else what the system's list of users says. Raises UsageError where it has none, as in some containers."""
    try:
        return Path(environ["HOME"]) if environ.get("HOME") else Path.home()
    except RuntimeError:
        raise UsageError("HOME is not set, and this user has no home folder", hint="set HOME to a folder") from None


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn an OSError of the block into a DiskError that names `path` or the file the system named."""
    try:
        yield
    except TileinferError:
        raise
    except OSError as error:
        raise disk_error(error, path) from error


def disk_error(error: OSError, path: Path) -> DiskError:
    cause, hint = _CAUSES.get(error.errno or 0, (error.strerror or str(error), None))
    return DiskError(f"{error.filename or path}: {cause}", hint=hint)


def write_atomic(path: Path, data: bytes | str) -> None:
    """Write a small file by way of a temporary name, so that readers see the old content or the new.

    The name is this process's own: two that write the same file don't mix. A link stays one, a mode what it was.
    """
    path = Path(os.path.realpath(path))
    temporary = path.with_name(f"{path.name}.{os.getpid()}{PARTIAL}")
    if not path.parent.is_dir():
        raise DiskError(f"{path.parent}: no such folder")
    with disk_errors(path):
        try:
            with temporary.open("wb") as file:
                file.write(data.encode() if isinstance(data, str) else data)
                file.flush()
                os.fsync(file.fileno())
            with contextlib.suppress(OSError):  # a new file
                shutil.copymode(path, temporary)
            temporary.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise


def read_small(path: Path, max_bytes: int) -> bytes:
    """The content of a regular file. A pipe would block and a device never end: both are OSErrors here.

    Raises:
        OSError: absent, unreadable, or not a file.
        FileTooLargeError: more than `max_bytes`, by what the system says of it or by what came.
    """
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with os.fdopen(handle, "rb", buffering=0) as file:
        status = os.fstat(handle)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        content = b"" if status.st_size > max_bytes else _read_all(file, max_bytes + 1)
    size = max(status.st_size, len(content))
    if size > max_bytes:
        raise FileTooLargeError(size)
    return content


def regular_size(path: Path) -> int:
    """The size of a regular file, before it is opened: opening a pipe would wait for its writer. Raises OSError."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return status.st_size


class FileTooLargeError(Exception):
    """A file that was to be read whole has too many bytes; `size` says how many."""

    def __init__(self, size: int) -> None:
        super().__init__(f"{size:,} bytes")
        self.size = size


def _read_all(file: IO[bytes], at_most: int) -> bytes:
    pieces, left = [], at_most
    while left and (piece := file.read(min(left, CHUNK))):
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)


def fresh_folder(path: Path) -> Path:
    """An empty folder at `path`; what was left there by an earlier, interrupted run is removed."""
    with disk_errors(path):
        remove_tree(path)
        path.mkdir(parents=True)
    return path


def publish(partial: Path, target: Path) -> None:
    """Give a finished folder its name. An older folder of that name is there until the new one is, and goes then."""
    with disk_errors(target):
        old = target.with_name(target.name + ".old")
        remove_tree(old)
        if not os.path.lexists(target):
            partial.replace(target)
        elif not _exchange(partial, target):
            _replace_by_way_of(old, partial, target)
        sync_folder(target.parent)
        remove_tree(partial)
        remove_tree(old)


def _exchange(one: Path, other: Path) -> bool:
    """Let two paths change names in one step of the system. False where it can't: not Linux, or an old file system."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError, TypeError):
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return bool(rename(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0)


def _replace_by_way_of(old: Path, partial: Path, target: Path) -> None:
    """In two steps: what comes between them must not leave the place empty."""
    try:
        target.replace(old)
        partial.replace(target)
    except BaseException:
        if not os.path.lexists(target):
            old.replace(target)
        raise


def remove_tree(path: Path) -> None:
    """Remove a folder or a file if it is there. A symbolic link is removed, never what it points to."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def sync_folder(path: Path) -> None:
    """Make a rename in `path` survive a power cut, where the system can (not on Windows)."""
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def sha256_of(path: Path, on_bytes: Callable[[int], None] | None = None) -> str:
    """The SHA-256 of a file in hexadecimal; `on_bytes` gets the size of each piece as it is read."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(CHUNK):
            digest.update(piece)
            if on_bytes:
                on_bytes(len(piece))
    return digest.hexdigest()


def free_bytes(path: Path) -> int:
    """Free bytes where `path` is or would be made."""
    while not path.exists() and path != path.parent:
        path = path.parent
    with disk_errors(path):
        return shutil.disk_usage(path).free


def folder_bytes(path: Path, *, follow: bool = True) -> int:
    """The size of all files below `path`. Links count as what they point to, or as nothing with follow=False."""
    total = 0
    for root, _, names in os.walk(path):
        for name in names:
            file = Path(root) / name
            with contextlib.suppress(OSError):
                total += file.stat().st_size if follow or not file.is_symlink() else 0
    return total
