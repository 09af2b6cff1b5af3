"""One file from the Hub to disk, over the Hub client's own session: resumable, counted byte by byte, checked.

The client's `hf_hub_download` throws an interrupted download away, which for a 5 GB file costs the user the evening;
here the bytes stay in NAME.KEY.incomplete and the next attempt asks for the rest with a Range request. KEY comes from
the expected hash, so the remains of an older version are never continued.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from huggingface_hub import get_session
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]

from tileinfer_core import hub_cache
from tileinfer_core.errors import DamagedModelError, TileinferError
from tileinfer_core.files import disk_errors, sha256_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tileinfer_core.pull_plan import PullFile

# The base of all errors of the HTTP library below the client (httpx or httpx2, by its version).
TransportError: type[Exception] = next(base for base in HfHubHTTPError.__mro__ if base.__name__ == "HTTPError")

TIMEOUT = 30.0  # seconds without a byte
PIECE = 1 << 18
ATTEMPTS = 5  # in a row without a new byte
_RANGE_NOT_SATISFIABLE = 416


def incomplete_path(folder: Path, file: PullFile) -> Path:
    key = (file.sha256 or file.git_hash or str(file.bytes))[:12]
    return folder / f"{file.path}.{key}.incomplete"


def fault(path: Path, file: PullFile, on_bytes: Callable[[int], None] | None = None) -> str | None:
    """What is wrong with a local copy of `file`, by size and by the hash the Hub has for it; None when it is whole."""
    size = path.stat().st_size
    if size != file.bytes:
        return f"{file.bytes:,} bytes expected, {size:,} found"
    if file.sha256:
        found, expected = sha256_of(path, on_bytes), file.sha256
    elif file.git_hash:
        found, expected = hub_cache.git_hash(path), file.git_hash
    else:
        return None
    return None if found == expected else f"hash {expected[:16]}… expected, {found[:16]}… found"


def fetch(url: str, file: PullFile, folder: Path, on_bytes: Callable[[int], None]) -> None:
    """Bring `file` to `folder`, going on from what an earlier attempt left. `on_bytes` gets changes of the count.

    Raises:
        DamagedModelError: what arrives is not what the Hub says it is, twice.
        TileinferError: the connection fails again and again; what has come is kept.
        HfHubHTTPError: the Hub refuses.
    """
    part = incomplete_path(folder, file)
    for last in (False, True):
        _receive(url, part, file, on_bytes)
        with disk_errors(part):
            what = fault(part, file)
            if what is None:
                part.replace(folder / file.path)
                return
            on_bytes(-part.stat().st_size)
            part.unlink()
        if last:
            raise DamagedModelError(
                f"{url}: {what}", hint="try again later; the file may be changing, or a proxy alters it"
            )


def _receive(url: str, part: Path, file: PullFile, on_bytes: Callable[[int], None]) -> None:
    """Append to `part` until it has all bytes; a broken connection is taken up again where it broke."""
    failures = 0
    with disk_errors(part):
        part.touch()
        size = part.stat().st_size
    while size < file.bytes:
        try:
            _stream(url, part, size, on_bytes)
        except HfHubHTTPError as error:
            if error.response.status_code != _RANGE_NOT_SATISFIABLE:
                raise
            with disk_errors(part):  # the server has another length: start over, the hash decides
                on_bytes(-size)
                part.unlink()
                part.touch()
        except TransportError as error:
            reason = str(error) or type(error).__name__
        else:
            reason = "the connection closed early"
        with disk_errors(part):
            before, size = size, part.stat().st_size
        failures = 0 if size > before else failures + 1
        if size < file.bytes and failures >= ATTEMPTS:
            raise TileinferError(
                f"{file.path}: {size:,} of {file.bytes:,} bytes fetched, then: {reason}",
                hint="run the same pull again; it goes on from here",
            )
        if failures:
            time.sleep(min(failures, 3))


def _stream(url: str, part: Path, start: int, on_bytes: Callable[[int], None]) -> None:
    headers: dict[str, Any] = {**build_hf_headers(library_name="tileinfer"), "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    with get_session().stream("GET", url, headers=headers, timeout=TIMEOUT) as response:
        hf_raise_for_status(response)
        with disk_errors(part), part.open("ab") as out:
            if start and response.status_code != 206:  # the server sends the whole file instead of the rest
                out.truncate(0)
                on_bytes(-start)
            for piece in response.iter_bytes(chunk_size=PIECE):
                out.write(piece)
                on_bytes(len(piece))
