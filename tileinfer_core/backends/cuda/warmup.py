"""All kernels of a model compiled in parallel before the first token.

A model's plans name every kernel with the arrays it will get, so what is compiled is what will be launched. Results go
to cuda-tile's cache on disk; on the next run there is nothing left to compile. tileiras runs in processes of its own:
compilation goes on while the weights are read.
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING

from kernels.compile import CompileError, compile_all
from tileinfer_core.backends.cuda.buffers import ROW_STEP
from tileinfer_core.errors import BackendError
from tileinfer_core.progress import ProgressEvent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernels.specs import Recorded
    from tileinfer_core.backends.cuda.device import Device
    from tileinfer_core.backends.cuda.plan import Plans
    from tileinfer_core.progress import OnProgress

TASK = "compile kernels"
MAX_COMPILERS = 8


class KernelWarmup:
    """Compiles in a thread of its own. `finish` waits for it, shows how far it is, and raises what went wrong."""

    def __init__(self, plans: Plans, buckets: Sequence[int], device: Device) -> None:
        self._plans = plans
        self._buckets = buckets
        self._device = device
        self._state = threading.Condition()
        self._done = 0
        self._total: int | None = None
        self._seconds = 0.0
        self._error: Exception | None = None
        self._finished = False
        self._cancelled = False
        self._thread = threading.Thread(target=self._run, name="compile-kernels", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def cancel(self) -> None:
        """Leave compilers that run to themselves; start no more."""
        self._cancelled = True

    def finish(self, on_progress: OnProgress) -> float:
        """Seconds that compilers have run for.

        Raises:
            BackendError: naming the kernel and what to do.
        """
        shown = -1
        while True:
            with self._state:
                if not self._finished and self._done <= shown:
                    self._state.wait(timeout=0.2)
                done, total, finished = self._done, self._total, self._finished
            if total and done != shown:
                on_progress(ProgressEvent(TASK, done, total, "kernels"))
                shown = done
            if finished:
                break
        if self._error is not None:
            raise self._error
        return self._seconds

    def records(self) -> list[Recorded]:
        """Every launch of every kind of step."""
        plans = self._plans
        found = [*plans.prefill(ROW_STEP), *plans.head(), *plans.sample()]
        for bucket in self._buckets:
            found += plans.decode(bucket)
        return found

    def _run(self) -> None:
        try:
            self._compile()
        except Exception as error:  # handed over to `finish`
            self._error = error
        with self._state:
            self._finished = True
            self._state.notify_all()

    def _compile(self) -> None:
        start = time.perf_counter()
        for result in compile_all(
            self.records(),
            self._device.arch,
            workers=min(MAX_COMPILERS, os.cpu_count() or 1),
            report=False,
            on_progress=self._count,
        ):
            if isinstance(result, CompileError):
                raise BackendError(f"the kernel {result}", hint=result.hint) from result
            if not result.cached:
                self._seconds = time.perf_counter() - start
            if self._cancelled:
                return

    def _count(self, done: int, total: int, _result: object) -> None:
        with self._state:
            self._done, self._total = done, total
            self._state.notify_all()
