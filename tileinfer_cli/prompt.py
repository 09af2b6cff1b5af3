"""The prompt: from the argument, from a file, from stdin, or the argument and one of these joined by a blank line.

Bytes are passed on as they are: no escape sequence is rewritten, no line ending translated. Two things are taken off
a file or stdin, because they belong to the file and not to the text: a UTF-8 byte order mark, and one final newline.
Refuses text that is not UTF-8, a NUL byte (binary), an empty prompt, and more bytes than any context could hold.
"""

from __future__ import annotations

import os
import stat
from typing import IO, TYPE_CHECKING

from tileinfer_cli.patience import read_all
from tileinfer_core.errors import ContextLengthError, UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from tileinfer_cli.terminal import Streams

# 16 MiB is about four million tokens, several times the longest context of any supported model.
MAX_PROMPT_BYTES = 16 * 1024 * 1024
_HOW = "give it as an argument, with -f FILE, or on stdin"


def read_prompt(streams: Streams, argument: str | None, file: Path | None) -> str:
    """The whole prompt. Raises UsageError (empty, binary, unreadable) or ContextLengthError (too large to be tried)."""
    attached = _attachment(streams, file)
    if argument is None and attached is None:
        raise UsageError("no prompt", hint=_HOW)
    if argument is not None:
        argument = argument_text(argument, "the prompt argument")
    text = "\n\n".join(part for part in (argument, attached) if part)
    if not text.strip():
        raise UsageError("the prompt is empty", hint=_HOW)
    return text


def argument_text(text: str, name: str) -> str:
    """Text of the command line. Its bytes are UTF-8 wherever they can be, though Python decoded them by the locale."""
    try:
        text = os.fsencode(text).decode("utf-8")
    except UnicodeError:
        _check_text(text, name)
    return text


def read_text(path: Path) -> str:
    """A text file as the prompt rules read it."""
    try:
        if stat.S_ISDIR(path.stat().st_mode):
            raise UsageError(f"{path}: is a folder, a text file was wanted")
        with path.open("rb") as stream:
            return _decode(stream, str(path))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None


def _attachment(streams: Streams, file: Path | None) -> str | None:
    """The text of -f FILE, or of stdin when it is not a terminal; None when there is neither."""
    if file is not None:
        return read_input(streams, file)
    return None if streams.stdin_is_terminal else _stdin(streams)


def read_input(streams: Streams, file: Path) -> str | None:
    """A text file, or stdin for `-`; None where that is closed."""
    return _stdin(streams) if str(file) == "-" else read_text(file)


def _stdin(streams: Streams) -> str | None:
    return None if streams.stdin is None else _decode(streams.stdin.buffer, "stdin")  # type: ignore[attr-defined]


def _decode(stream: IO[bytes], name: str) -> str:
    try:
        data = read_all(stream, MAX_PROMPT_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{name}: {error.strerror}") from None
    if len(data) > MAX_PROMPT_BYTES:
        raise ContextLengthError(
            f"{name} holds {_size(stream)} bytes; a prompt may have {MAX_PROMPT_BYTES:,}",
            hint="that is more text than any model's context holds: give it a part of it",
        )
    return strip_final_newline(decode_utf8(data, name).removeprefix("\ufeff"))


def _size(stream: IO[bytes]) -> str:
    status = os.fstat(stream.fileno())
    return f"{status.st_size:,}" if stat.S_ISREG(status.st_mode) else f"more than {MAX_PROMPT_BYTES:,}"


def decode_utf8(data: bytes, name: str) -> str:
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise UsageError(f"{name}: looks like UTF-16, UTF-8 text was wanted", hint="convert it with: iconv -t utf-8")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        found = f"byte 0x{data[error.start]:02x} at offset {error.start:,}"
        raise UsageError(f"{name}: not UTF-8 text ({found})", hint="convert it with: iconv -t utf-8") from None
    _check_text(text, name)
    return text


def _check_text(text: str, name: str) -> None:
    if "\0" in text:
        raise UsageError(f"{name}: binary data, not text (a NUL byte at offset {text.index(chr(0)):,})")
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise UsageError(f"{name}: not UTF-8 text")


def strip_final_newline(text: str) -> str:
    return text.removesuffix("\n").removesuffix("\r") if text.endswith("\n") else text
