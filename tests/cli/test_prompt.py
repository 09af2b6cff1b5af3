"""The prompt from argument, file and stdin: the same bytes, and clear refusals."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import pytest

from tileinfer_cli.prompt import MAX_PROMPT_BYTES, _decode, read_prompt, strip_final_newline
from tileinfer_core.errors import ContextLengthError, UsageError

if TYPE_CHECKING:
    from pathlib import Path

TRICKY = [
    r"regex \n\t\\d",
    "a\r\nb\r\n\r\nc",
    "  spaces  ",
    "[/INST] arr[0] [bold]x :smile:",
    "नमस्ते\u200d🧑🏽‍🚀",
    "{{ x }} %s",
]


@pytest.mark.parametrize("text", TRICKY)
def test_argument_file_and_stdin_give_the_same_text(text: str, tmp_path: Path, recorded) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes(text.encode())
    assert read_prompt(recorded(tty=True), text, None) == text
    assert read_prompt(recorded(tty=True), None, file) == text
    assert read_prompt(recorded(stdin=text.encode()), None, None) == text
    assert read_prompt(recorded(stdin=text.encode() + b"\n"), None, None) == text


def test_argument_and_attachment_are_joined_by_a_blank_line(tmp_path: Path, recorded) -> None:
    file = tmp_path / "f"
    file.write_text("from file\n")
    assert read_prompt(recorded(stdin=b"x = 1\n"), "Explain", None) == "Explain\n\nx = 1"
    assert read_prompt(recorded(stdin=b"unread"), "Explain", file) == "Explain\n\nfrom file"
    assert read_prompt(recorded(stdin=b""), "Explain", None) == "Explain"


@pytest.mark.parametrize(
    ("text", "stripped"), [("a\n", "a"), ("a\r\n", "a"), ("a\n\n", "a\n"), ("a\r", "a\r"), ("a ", "a "), ("\n", "")]
)
def test_one_final_newline_belongs_to_the_file(text: str, stripped: str) -> None:
    assert strip_final_newline(text) == stripped


def test_a_byte_order_mark_is_not_text(recorded) -> None:
    assert read_prompt(recorded(stdin=b"\xef\xbb\xbfhi"), None, None) == "hi"


@pytest.mark.parametrize(
    ("stdin", "message"),
    [
        (b"", "prompt is empty"),
        (b" \n\t\n", "prompt is empty"),
        (b"\x89PNG\r\n", "stdin: not UTF-8 text .byte 0x89 at offset 0"),
        (b"ok\xff", "offset 2"),
        (b"\x7fELF\x00", "binary data"),
        ("hi".encode("utf-16"), "UTF-16"),
    ],
)
def test_what_is_no_text_is_refused(stdin: bytes, message: str, recorded) -> None:
    with pytest.raises(UsageError, match=message):
        read_prompt(recorded(stdin=stdin), None, None)


def test_no_prompt_at_a_terminal_is_refused_not_waited_for(recorded) -> None:
    with pytest.raises(UsageError, match="no prompt"):
        read_prompt(recorded(tty=True), None, None)


@pytest.mark.parametrize("argument", ["", "   "])
def test_an_empty_argument_is_refused(argument: str, recorded) -> None:
    with pytest.raises(UsageError, match="empty"):
        read_prompt(recorded(tty=True), argument, None)


def test_an_argument_that_is_not_utf8_is_refused(recorded) -> None:
    with pytest.raises(UsageError, match="not UTF-8"):
        read_prompt(recorded(tty=True), b"caf\xe9".decode("utf-8", "surrogateescape"), None)


def test_files_that_cannot_be_read_are_named(tmp_path: Path, recorded) -> None:
    with pytest.raises(UsageError, match=r"missing.txt: No such file"):
        read_prompt(recorded(), None, tmp_path / "missing.txt")
    with pytest.raises(UsageError, match="is a folder"):
        read_prompt(recorded(), None, tmp_path)


def test_a_huge_file_is_refused_with_both_numbers(tmp_path: Path, recorded) -> None:
    file = tmp_path / "big"
    with file.open("wb") as stream:
        stream.truncate(MAX_PROMPT_BYTES + 5)
    with pytest.raises(ContextLengthError) as caught:
        read_prompt(recorded(), None, file)
    assert f"{MAX_PROMPT_BYTES + 5:,}" in str(caught.value)
    assert f"{MAX_PROMPT_BYTES:,}" in str(caught.value)


def test_an_endless_stdin_ends() -> None:
    class Endless(io.RawIOBase):
        def readable(self) -> bool:
            return True

        def readinto(self, buffer) -> int:
            buffer[:] = b"x" * len(buffer)
            return len(buffer)

    class Source(io.BufferedReader):
        def fileno(self) -> int:
            return 0

    with pytest.raises(ContextLengthError):
        _decode(Source(Endless()), "stdin")
