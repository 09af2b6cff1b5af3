"""Streams that take or give a part at a time: nothing is lost, nothing ends early."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from typing import IO

import pytest

from tileinfer_cli.chat.editor import LineReader
from tileinfer_cli.patience import read_all, read_line, write_all
from tileinfer_cli.prompt import read_prompt
from tileinfer_cli.terminal import Streams, TextStream

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows' pipes can't be non-blocking")
DATA = bytes(range(256)) * 2000  # several times what a pipe holds


@pytest.fixture
def pipe() -> tuple[int, int]:
    """Each end is the test's to close, by descriptor or by a file made of it."""
    return os.pipe()


def slow_reader(end: int, got: list[bytes]) -> threading.Thread:
    def work() -> None:
        while piece := os.read(end, 50_000):
            got.append(piece)
            time.sleep(0.001)

    thread = threading.Thread(target=work)
    thread.start()
    return thread


@pytest.mark.parametrize("buffering", [0, -1])
def test_a_full_pipe_that_would_block_gets_everything(pipe: tuple[int, int], buffering: int) -> None:
    got: list[bytes] = []
    os.set_blocking(pipe[1], False)
    thread = slow_reader(pipe[0], got)
    with os.fdopen(pipe[1], "wb", buffering=buffering) as out:
        for start in range(0, len(DATA), 100_000):
            write_all(out, DATA[start : start + 100_000])
    thread.join()
    os.close(pipe[0])
    assert b"".join(got) == DATA


class Short:
    """A raw stream that takes three bytes a write, as a disk does that is nearly full; then an error."""

    def __init__(self) -> None:
        self.taken = b""

    def write(self, data: memoryview) -> int:
        if len(self.taken) > 8:
            raise OSError(28, "No space left on device")
        self.taken += bytes(data[:3])
        return len(bytes(data[:3]))

    def flush(self) -> None:
        pass


def test_a_short_write_is_gone_on_with_until_the_error_shows() -> None:
    out = Short()
    with pytest.raises(OSError, match="No space"):
        write_all(out, b"0123456789")  # type: ignore[arg-type]
    assert out.taken == b"012345678"


def slow_writer(end: int, pieces: list[bytes]) -> threading.Thread:
    def work() -> None:
        for piece in pieces:
            time.sleep(0.02)
            os.write(end, piece)
        os.close(end)

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def nonblocking(end: int) -> IO[bytes]:
    os.set_blocking(end, False)
    return os.fdopen(end, "rb")


def test_reading_waits_for_what_is_not_there_yet(pipe: tuple[int, int]) -> None:
    thread = slow_writer(pipe[1], [b"one\ntw", b"o\n", b"", b"three"])
    with nonblocking(pipe[0]) as source:
        assert read_line(source, 100) == b"one\n"
        assert read_line(source, 100) == b"two\n"
        assert read_line(source, 2) == b"th"
        assert read_all(source, 100) == b"ree"
        assert read_all(source, 100) == read_line(source, 100) == b""
    thread.join()


def test_reading_stops_at_the_limit(pipe: tuple[int, int]) -> None:
    thread = slow_writer(pipe[1], [b"abc", b"def"])
    with nonblocking(pipe[0]) as source:
        assert read_all(source, 4) == b"abcd"
    thread.join()


def streams_of(end: int) -> Streams:
    os.set_blocking(end, False)
    nothing = TextStream(None, {}, name="x", required=False)
    return Streams(os.fdopen(end, "r"), nothing, nothing)


def test_a_prompt_comes_whole(pipe: tuple[int, int]) -> None:
    thread = slow_writer(pipe[1], [b"hel", b"lo\n"])
    streams = streams_of(pipe[0])
    assert read_prompt(streams, None, None) == "hello"
    thread.join()


def test_the_lines_of_a_chat_come_whole(pipe: tuple[int, int]) -> None:
    thread = slow_writer(pipe[1], [b"hel", b"lo\nsec", b"ond"])
    streams = streams_of(pipe[0])
    reader = LineReader(streams)
    assert [reader.read() for _ in range(3)] == ["hello", "second", None]
    thread.join()


def test_the_command_line_writes_all_to_a_raw_stream_that_would_block(pipe: tuple[int, int]) -> None:
    os.set_blocking(pipe[1], False)
    got: list[bytes] = []
    thread = slow_reader(pipe[0], got)
    program = (
        "import sys; from tileinfer_cli.terminal import Streams;"
        "out = Streams.of_process().out; [out.write(f'{i:9}\\n') for i in range(20_000)]; out.write('x' * 200_000)"
    )
    environ = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], stdout=pipe[1], env=environ, check=True)
    os.close(pipe[1])
    thread.join()
    os.close(pipe[0])
    assert done.returncode == 0
    assert b"".join(got) == b"".join(b"%9d\n" % i for i in range(20_000)) + b"x" * 200_000
