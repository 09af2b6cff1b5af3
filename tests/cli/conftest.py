"""Streams that tests can read back."""

from __future__ import annotations

import io

import pytest

from tileinfer_cli.terminal import Streams, TextStream


class Recorder(io.TextIOWrapper):
    """A text stream in memory that is a terminal or not."""

    def __init__(self, *, tty: bool, content: bytes = b"") -> None:
        super().__init__(io.BytesIO(content), encoding="utf-8")
        self._tty = tty

    def isatty(self) -> bool:
        return self._tty

    def shown(self) -> str:
        return self.buffer.getvalue().decode("utf-8")  # type: ignore[attr-defined]


class Recorded(Streams):
    """Streams in memory. `tty` makes all three a terminal."""

    def __init__(self, *, tty: bool = False, stdin: bytes = b"", environ: dict[str, str] | None = None) -> None:
        environ = {"TERM": "xterm", "NO_COLOR": "1"} if environ is None else environ
        self.out_file, self.err_file = Recorder(tty=tty), Recorder(tty=tty)
        super().__init__(
            Recorder(tty=tty, content=stdin),
            TextStream(self.out_file, environ, name="stdout", required=True),
            TextStream(self.err_file, environ, name="stderr", required=False),
        )

    @property
    def stdout(self) -> str:
        return self.out_file.shown()

    @property
    def stderr(self) -> str:
        return self.err_file.shown()


@pytest.fixture
def recorded() -> type[Recorded]:
    return Recorded
