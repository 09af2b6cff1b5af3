"""The one place where errors end: message, way out, exit code."""

from __future__ import annotations

import errno
import json

import pytest

from tileinfer_cli.app import _end
from tileinfer_cli.render import print_json
from tileinfer_core.errors import (
    AccessError,
    BackendUnavailableError,
    ContextLengthError,
    DamagedModelError,
    DiskError,
    ModelNotFoundError,
    OutOfMemoryError,
    TileinferError,
    UnsupportedModelError,
    UsageError,
)

CODES = [
    (TileinferError, 1),
    (UsageError, 2),
    (ContextLengthError, 3),
    (ModelNotFoundError, 4),
    (AccessError, 5),
    (DiskError, 6),
    (DamagedModelError, 7),
    (UnsupportedModelError, 7),
    (BackendUnavailableError, 8),
    (OutOfMemoryError, 8),
]


@pytest.mark.parametrize(("kind", "code"), CODES)
def test_every_error_has_its_code_and_is_two_lines(kind: type[TileinferError], code: int, recorded) -> None:
    streams = recorded()
    assert _end(kind("wanted [bold] and found", hint="do :smile:"), streams, debug=False) == code
    assert streams.stderr == "error: wanted [bold] and found\n  do :smile:\n"
    assert streams.stdout == ""


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/x/y"), 6, "/x/y: No space left on device"),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), 6, "/x: Permission denied"),
        (OSError(errno.ECONNRESET, "Connection reset"), 1, "Connection reset"),
        (MemoryError("Unable to allocate 3 TiB"), 8, "out of memory: Unable to allocate 3 TiB"),
        (ZeroDivisionError("division by zero"), 1, "ZeroDivisionError: division by zero"),
    ],
)
def test_other_errors(error: Exception, code: int, message: str, recorded) -> None:
    streams = recorded()
    assert _end(error, streams, debug=False) == code
    assert message in streams.stderr
    assert "Traceback" not in streams.stderr


def test_control_characters_of_a_message_never_reach_the_stream(recorded) -> None:
    streams = recorded()
    _end(TileinferError("a\x1b[2Jb\rc"), streams, debug=False)
    assert streams.stderr == "error: a␛[2Jb␍c\n"


def test_an_error_starts_on_a_line_of_its_own(recorded) -> None:
    streams = recorded()
    streams.err.write("half a line")
    _end(UsageError("x"), streams, debug=False)
    assert streams.stderr == "half a line\nerror: x\n"


def test_debug_adds_the_traceback(recorded) -> None:
    streams = recorded()
    assert _end(UsageError("x"), streams, debug=True) == 2
    assert "UsageError: x" in streams.stderr.splitlines()[0] or "Traceback" in streams.stderr
    assert streams.stderr.endswith("error: x\n")


@pytest.mark.parametrize(("below", "code"), [(KeyboardInterrupt(), 130), (SystemExit(143), 143)])
def test_a_signal_wrapped_by_another_error_is_still_the_signal(below: BaseException, code: int, recorded) -> None:
    error = RuntimeError("Error calling __set_name__")
    error.__cause__ = below
    streams = recorded()
    assert _end(error, streams, debug=False) == code
    assert streams.stderr == ""


def test_a_long_message_breaks_between_words_on_a_terminal(recorded) -> None:
    streams = recorded(tty=True, environ={"TERM": "xterm", "NO_COLOR": "1", "COLUMNS": "40"})
    path = "/a/very/long/path/that/is/wider/than/the/terminal/itself"
    _end(DiskError(f"no room for the file that was wanted at {path}"), streams, debug=False)
    assert streams.stderr.splitlines() == ["error: no room for the file that was", "  wanted at", f"  {path}"]


def test_a_message_that_repeats_a_huge_name_stays_two_lines(recorded) -> None:
    streams = recorded()
    _end(
        DamagedModelError(f"config.json: the model type {'x' * 100_000} is unknown", hint="y" * 10_000),
        streams,
        debug=False,
    )
    first, hint = streams.stderr.splitlines()
    assert first.startswith("error: config.json: the model type xxx")
    assert first.endswith("xxx is unknown")
    assert "[… 98,8" in first
    assert len(first) < 1300
    assert len(hint) < 1300


def test_json_has_null_for_numbers_that_it_has_not(recorded) -> None:
    streams = recorded()
    inf, nan = float("inf"), float("nan")
    print_json(streams.out, {"a": inf, "b": [1.5, -inf, (nan, True)], "c": {"d": nan, "e": "text"}, "f": 7})
    document = json.loads(streams.stdout, parse_constant=pytest.fail)
    assert document == {"a": None, "b": [1.5, None, [None, True]], "c": {"d": None, "e": "text"}, "f": 7}
