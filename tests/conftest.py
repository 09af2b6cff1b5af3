"""For all tests, before NumPy is imported.

BLAS gets one thread. The tests' matrices are tiny, and on a machine that is busy with other work two BLAS threads that
wait for each other made the same tests take 181 s instead of 41 s.

The compile matrix comes last. In a session with many other tests its cache is filled meanwhile by a process of its own
(tests/compile/ahead.py): those tests use one core.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

if TYPE_CHECKING:
    from collections.abc import Iterator

MATRIX = "compile/test_catalogue.py"
MANY = 5  # tests, some ten seconds


def of_the_matrix(item: pytest.Item) -> bool:
    return MATRIX in item.nodeid


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=of_the_matrix)  # stable


@pytest.fixture(scope="session")
def compile_cache() -> Iterator[Path]:
    """A fresh cache for compiled kernels, unless TILEINFER_TEST_CACHE names one to keep between runs."""
    kept = os.environ.get("TILEINFER_TEST_CACHE")
    if kept:
        yield Path(kept)
        return
    with tempfile.TemporaryDirectory(prefix="tileinfer-cache-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture(autouse=True, scope="session")
def _matrix_ahead(request: pytest.FixtureRequest) -> Iterator[None]:
    """Starts with the first test and ends with the last."""
    matrix = sum(map(of_the_matrix, request.session.items))
    if not matrix or len(request.session.items) - matrix < MANY or sys.platform != "linux":
        yield
        return
    # The shell ends at once, so that the process is no child of this one: tests look at their children.
    command = 'setsid "$@" >/dev/null 2>&1 & echo $!'
    ahead = [sys.executable, "-m", "tests.compile.ahead", str(request.getfixturevalue("compile_cache"))]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}
    started = subprocess.run(
        ["/bin/sh", "-c", command, "sh", *ahead, str(os.getpid())], env=environ, stdout=subprocess.PIPE, check=True
    )
    yield
    with contextlib.suppress(ProcessLookupError):
        os.killpg(int(started.stdout), signal.SIGTERM)  # with the compiler that runs
