"""Fills a cache with the kernels of the compile matrix, the last of them first: `python -m tests.compile.ahead FOLDER`.

Runs beside the other tests of a session (tests/conftest.py), on whatever they leave of the processor. What is not there
when the matrix is tested is compiled then; what fails here fails there again, and is reported there. With a process id
as second argument it ends when that process does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING

from kernels.catalogue import FAMILIES, TARGETS, entries
from kernels.compile import compile_all

if TYPE_CHECKING:
    from collections.abc import Iterator


def fill(folder: str) -> Iterator[tuple[str, str]]:
    """Yields what has been done: architecture and family."""
    os.environ["CUDA_TILE_CACHE_DIR"] = folder
    os.environ.pop("CUDA_HOME", None)
    for arch in reversed(TARGETS):
        for family in reversed(FAMILIES):
            for _ in compile_all([entry.record for entry in entries(arch, families=[family])], arch, workers=1):
                pass
            yield arch, family


def end_with(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        while True:
            os.kill(pid, 0)
            time.sleep(2)
    os.killpg(0, signal.SIGTERM)  # with the compiler that runs


if __name__ == "__main__":
    os.nice(19)
    threading.Thread(target=end_with, args=[int(sys.argv[2])], daemon=True).start()
    for _done in fill(sys.argv[1]):
        pass
