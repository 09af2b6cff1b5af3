"""Runs the real command line in processes of its own, with a home of its own.

`tileinfer` is the one way tests start it: it gives the exit code, both streams and the time. Models are real folders
that say a known text (scripted_model.py), so that a run costs its start and little more.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.scripted_model import write_scripted_model

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "tileinfer_cli"]


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str
    seconds: float


def clean_environment(home: Path, **more: str) -> dict[str, str]:
    """Nothing of the user's: no config, no models, no colour settings, no Hub token."""
    kept = {name: value for name, value in os.environ.items() if name in {"PATH", "LD_LIBRARY_PATH", "TMPDIR", "LANG"}}
    return kept | {"HOME": str(home), "PYTHONPATH": str(ROOT), "TERM": "xterm", "OPENBLAS_NUM_THREADS": "1"} | more


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    return folder


@pytest.fixture
def environment(home: Path) -> dict[str, str]:
    return clean_environment(home)


@pytest.fixture
def tileinfer(environment: dict[str, str]) -> Callable[..., Result]:
    """tileinfer("generate", "hi", stdin=b"", TILEINFER_MODEL="…") → Result."""

    def run(*args: str | Path, stdin: bytes | None = b"", timeout: float = 60, **environ: str) -> Result:
        started = time.monotonic()
        done = subprocess.run(
            [*COMMAND, *map(str, args)],
            input=stdin,
            capture_output=True,
            env=environment | environ,
            timeout=timeout,
            check=False,
        )
        seconds = time.monotonic() - started
        return Result(done.returncode, done.stdout.decode(), done.stderr.decode(), seconds)

    return run


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """scripted(["Hello", " world"]) → a model folder that says it. Made once for each script."""
    base = tmp_path_factory.mktemp("models")
    made: dict[str, Path] = {}

    def make(script: Sequence[str | bytes], **options: object) -> Path:
        key = repr((script, sorted(options.items())))
        if key not in made:
            made[key] = write_scripted_model(base / f"model-{len(made)}", script, **options)
        return made[key]

    return make


@pytest.fixture
def hello(scripted: Callable[..., Path]) -> Path:
    return scripted(["Hello", ",", " world", "!"])


@pytest.fixture
def endless(scripted: Callable[..., Path]) -> Path:
    """Says `tick tock` and a newline until the context is full, which takes minutes."""
    return scripted(["tick", " tock", "\n"], forever=True, context=200_000)


@pytest.fixture(scope="session")
def demo_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A TILEINFER_HOME that holds the demo model. Tests that change it take a copy."""
    base = tmp_path_factory.mktemp("demo")
    environment = clean_environment(base, TILEINFER_HOME=str(base / "models"))
    done = subprocess.run([*COMMAND, "pull", "demo"], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert "to fetch" in done.stderr
    assert "\x1b" not in done.stderr
    return base / "models"
