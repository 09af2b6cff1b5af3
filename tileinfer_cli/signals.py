"""The signals that end a program in good order, as far as the system has them. Standard library only."""

from __future__ import annotations

import signal

ENDING: tuple[signal.Signals, ...] = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)
)
