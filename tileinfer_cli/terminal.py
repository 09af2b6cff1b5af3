"""The three standard streams, as a terminal user expects them to behave. Standard library only.

Each output stream decides for itself, from its own isatty, whether it may have colour and moving lines. What goes to
a terminal has its control characters made visible; what goes to a pipe or a file is passed on as it is. Everything
is UTF-8, whatever the locale says. A closed stderr swallows the talk; a closed stdout is an error.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import operator
import os
import re
import select
import signal
import sys
import time
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

try:
    import fcntl
    import termios
except ImportError:  # no pipes of this kind on Windows
    fcntl = termios = None  # type: ignore[assignment]

from tileinfer_cli.patience import write_all
from tileinfer_core.errors import DiskError, TileinferError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

# C0 without tab and newline, DEL, and C1: what a terminal obeys instead of showing.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_COLUMNS = 80
_READER_LAG_S = 0.05  # what a reader of our pipe may take to pass on what it has read


def neutralise(text: str) -> str:
    """Control characters as visible symbols: ESC becomes ␛. Newline and tab stay. Never changes the length."""
    return _CONTROL.sub(_visible, text)


def _visible(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x20:
        return chr(0x2400 + code)
    return "\N{SYMBOL FOR DELETE}" if code == 0x7F else "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class Look:
    """What a stream may use: `colour` for SGR codes, `motion` for lines that are redrawn."""

    terminal: bool
    colour: bool
    motion: bool


def look_of(stream: IO[str] | None, environ: Mapping[str, str]) -> Look:
    terminal = stream is not None and not stream.closed and stream.isatty()
    clever = terminal and environ.get("TERM", "") not in {"", "dumb"}
    return Look(terminal, clever and not environ.get("NO_COLOR"), clever)


class TextStream:
    """An output stream of UTF-8 text, flushed at every write. `required` streams must exist and must accept text."""

    def __init__(self, stream: IO[str] | None, environ: Mapping[str, str], *, name: str, required: bool) -> None:
        self._stream = stream
        self._environ = environ
        self._required = required
        self.name = name
        self.look = look_of(stream, environ)
        self.at_line_start = True

    @property
    def file(self) -> IO[str] | None:
        """The stream below, for a library that draws on it."""
        return self._stream

    @property
    def descriptor(self) -> int | None:
        """The file descriptor; None for a stream that is closed or only in memory."""
        return descriptor_of(self._stream)

    @property
    def columns(self) -> int:
        """Of the terminal; 80 where it does not say, or says 0."""
        asked = self._environ.get("COLUMNS", "")
        if asked.isdecimal() and len(asked) < 5 and int(asked) > 0:
            return int(asked)
        with contextlib.suppress(OSError, TypeError):  # no terminal, no descriptor
            return os.get_terminal_size(self.descriptor).columns or _COLUMNS  # type: ignore[arg-type]
        return _COLUMNS

    def write(self, text: str) -> None:
        """Text of any origin. Raises BrokenPipeError, or DiskError when the device is full (required streams only)."""
        if text:
            self._send(neutralise(text) if self.look.terminal else text, ends_line=text.endswith("\n"))

    def styled(self, text: str, sgr: str) -> None:
        """Like write, in a colour or weight (an SGR code such as "2" for dim) where the stream has them."""
        if not self.look.colour or not text:
            return self.write(text)
        self._send(f"\x1b[{sgr}m{neutralise(text)}\x1b[0m", ends_line=text.endswith("\n"))
        return None

    def command(self, codes: str) -> None:
        """Escape codes that move nothing and show nothing, where the stream takes them."""
        if self.look.motion:
            self._pass_on(codes)

    def redraw(self, text: str) -> None:
        """`text`, which may have SGR codes and must fit into `columns`, in place of all that the line has. For
        streams with motion."""
        self._send(f"\r\x1b[2K{text}", ends_line=not text)

    def end_line(self) -> None:
        """A newline, unless the stream stands at the start of a line already."""
        if not self.at_line_start:
            self.write("\n")

    def check_reader(self) -> None:
        """Raises BrokenPipeError if a pipe's reader has gone, before anything is written to it."""
        descriptor = self.descriptor
        if descriptor is None or self.look.terminal or not hasattr(select, "poll"):
            return
        poll = select.poll()
        poll.register(descriptor, 0)
        if any(event & select.POLLERR for _, event in poll.poll(0)):
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    def drain(self, patience_s: float = 0.2) -> None:
        """Waits until a pipe's reader (tee, say) has taken everything: what stderr shows next then comes after it."""
        descriptor = self.descriptor
        if descriptor is None or self.look.terminal or fcntl is None:
            return
        end = time.monotonic() + patience_s
        try:
            while time.monotonic() < end and _unread_bytes(descriptor):
                time.sleep(0.005)
            time.sleep(_READER_LAG_S)
        except OSError:  # not a pipe
            return

    def require(self) -> None:
        """Raises if nobody could ever read this stream: before a model is loaded for nothing."""
        if self._stream is None:
            raise TileinferError(f"{self.name} is closed: there is nowhere to write the answer")

    def _send(self, text: str, *, ends_line: bool) -> None:
        # A signal may end this after any of its steps, and nobody can tell whether the text was out by then. So until
        # the end the line counts as begun: an empty line too many is a lesser evil than a last line without its end.
        self.at_line_start = False
        self._pass_on(text)
        self.at_line_start = ends_line

    def _pass_on(self, text: str) -> None:
        if self._stream is None:
            if self._required:
                self.require()
            return
        try:
            write_all(self._stream.buffer, text.encode("utf-8", "replace"))  # type: ignore[attr-defined]
        except OSError as error:
            self._failed(error)

    def _failed(self, error: OSError) -> None:
        silence(self._stream)
        if not self._required:
            self._stream = None
        elif error.errno == errno.EPIPE:
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE)) from error
        else:
            raise DiskError(f"could not write to {self.name}: {error.strerror}") from error


@contextlib.contextmanager
def keys_unseen(stdin: IO[str] | None) -> Iterator[None]:
    """Keys typed while an answer is written are kept for the next line, and not echoed into the answer."""
    with _terminal_without(stdin, "ECHO"):
        yield


PASTE_ON, PASTE_OFF = "\x1b[?2004h", "\x1b[?2004l"


@contextlib.contextmanager
def keys_kept(stdin: IO[str] | None, canvas: TextStream) -> Iterator[None]:
    """Keys typed while nobody reads them wait for the line editor that is drawn on `canvas`, and are not echoed.

    A paste waits as one message: the terminal goes on to mark where it begins and ends, and hands keys on as they
    come. Line by line, as terminals do by themselves, it would drop all beyond 4,096 bytes. Ctrl-C still interrupts,
    and Ctrl-Z stops: a shell takes the terminal back as it likes it, so that all this is set again on SIGCONT.
    """
    with _terminal_without(stdin, "ECHO", "ICANON") as set_again:

        def settle(*_signal: object) -> None:
            set_again()
            canvas.command(PASTE_ON)

        settle()
        before = signal.signal(signal.SIGCONT, settle) if hasattr(signal, "SIGCONT") else None
        try:
            yield
        finally:
            if hasattr(signal, "SIGCONT"):
                signal.signal(signal.SIGCONT, before)
            canvas.command(PASTE_OFF)


@contextlib.contextmanager
def _terminal_without(stdin: IO[str] | None, *modes: str) -> Iterator[Callable[[], None]]:
    """Local modes of a terminal, off while this lasts, and what sets that again; nothing where stdin is none."""
    descriptor = descriptor_of(stdin)
    if termios is None or descriptor is None or not os.isatty(descriptor):
        yield lambda: None
        return
    before = termios.tcgetattr(descriptor)
    mask = functools.reduce(operator.or_, (getattr(termios, name) for name in modes))
    changed = [*before[:3], before[3] & ~mask, *before[4:]]
    set_again = functools.partial(termios.tcsetattr, descriptor, termios.TCSADRAIN, changed)

    def restore() -> None:
        with contextlib.suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(descriptor, termios.TCSANOW, before)

    try:
        try:
            set_again()
            yield set_again
        finally:
            restore()
    finally:
        restore()  # Ctrl-C may have come in the other one, before it did anything


def _unread_bytes(descriptor: int) -> int:
    answer = fcntl.ioctl(descriptor, termios.FIONREAD, b"\0" * 4)
    return int.from_bytes(answer, sys.byteorder)


def descriptor_of(stream: IO[str] | None) -> int | None:
    try:
        return stream.fileno() if stream is not None else None
    except OSError:  # io.UnsupportedOperation
        return None


def silence(stream: IO[str] | None) -> None:
    """Points a stream that failed at the null device, so that Python's own flush at exit has nothing to complain of."""
    if stream is None:
        return
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


@dataclass
class Streams:
    """stdin, stdout (the answer) and stderr (the talk) of this process."""

    stdin: IO[str] | None
    out: TextStream
    err: TextStream

    @classmethod
    def of_process(cls) -> Streams:
        out = TextStream(sys.stdout, os.environ, name="stdout", required=True)
        err = TextStream(sys.stderr, os.environ, name="stderr", required=False)
        return cls(sys.stdin, out, err)

    @property
    def stdin_is_terminal(self) -> bool:
        return self.stdin is not None and self.stdin.isatty()
