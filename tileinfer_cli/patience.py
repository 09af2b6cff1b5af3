"""Whole reads and writes on streams that give and take a part at a time.

A descriptor is non-blocking where another program that shares it has made it so: a terminal after a program of Node's,
a pipe that a server hands down. And with PYTHONUNBUFFERED, which many container images set, Python's own streams are
raw: one write is one system call, which a full pipe, a nearly full disk or a signal cuts short without an error.
"""

from __future__ import annotations

import os
import select
import time
from typing import IO

_PAUSE_S = 0.01  # where the system can't wait for a descriptor


def write_all(out: IO[bytes], data: bytes) -> None:
    """All of `data`, down to the descriptor. Raises what the stream raises, but for BlockingIOError."""
    left = memoryview(data)
    while left:
        try:
            count = out.write(left)
        except BlockingIOError as error:
            count = error.characters_written
            _wait(out, "w")
        if count is None:  # a raw stream's word for "would block"
            _wait(out, "w")
        else:
            left = left[count:]
    while True:
        try:
            out.flush()
        except BlockingIOError:
            _wait(out, "w")
        else:
            return


def read_all(source: IO[bytes], limit: int) -> bytes:
    """Everything up to the end, or `limit` bytes."""
    data = source.read(limit) or b""
    while len(data) < limit and _is_nonblocking(source):
        ready = _wait(source, "r")
        piece = source.read(limit - len(data))
        if ready and piece == b"":
            break
        data += piece or b""
    return data


def read_line(source: IO[bytes], limit: int) -> bytes:
    """A line with its end, the rest before the end of the file, or `limit` bytes; nothing at the end."""
    data = source.readline(limit)
    while len(data) < limit and not data.endswith(b"\n") and _is_nonblocking(source):
        ready = _wait(source, "r")
        piece = source.readline(limit - len(data))
        if ready and not piece:
            break
        data += piece
    return data


def _is_nonblocking(stream: IO[bytes]) -> bool:
    try:
        return not os.get_blocking(stream.fileno())
    except (OSError, AttributeError):  # in memory; Windows
        return False


def _wait(stream: IO[bytes], how: str) -> bool:
    """Until the descriptor can be read or written. Whether it is known to be."""
    if not hasattr(select, "poll"):
        time.sleep(_PAUSE_S)
        return False
    poll = select.poll()
    poll.register(stream.fileno(), select.POLLIN if how == "r" else select.POLLOUT)
    return bool(poll.poll())
