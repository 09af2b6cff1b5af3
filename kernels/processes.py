"""Ends a compiler with what it has started: tileiras runs ptxas, which would go on without it.

Children are read from /proc, so elsewhere than on Linux only the process itself is ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path


def children(pid: int) -> list[int]:
    """Processes that a process has started and that still run."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError, ValueError):
            found += map(int, path.read_text(encoding="ascii").split())
    return found


def end_tree(pid: int, how: int = signal.SIGTERM) -> None:
    """Signal a process and all below it. The process is stopped first, so that it starts nothing meanwhile."""
    with contextlib.suppress(OSError):
        if hasattr(signal, "SIGSTOP"):
            os.kill(pid, signal.SIGSTOP)
        for child in children(pid):
            end_tree(child, how)
        os.kill(pid, how)
        if hasattr(signal, "SIGCONT"):
            os.kill(pid, signal.SIGCONT)
