"""All kernels of a model compiled in parallel before the first token, and loaded onto the device.

A model's plans name every kernel with the arrays it will get, so what is compiled is what will be launched. Results go
to disk (kernels/cubin_store.py): on the next run nothing is compiled again. Then each kernel is launched once, on the
first layer of its kind and the scratch page, because the driver loads a kernel at its first launch. Both happen in a
thread while the weights are read: tileiras runs in processes of its own, and reading files holds no lock of Python's.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kernels.cache import size_limit
from kernels.compile import CompileError, CompileTimeoutError, compile_all, distinct
from kernels.cubin_store import CubinStore
from kernels.processes import children, end_tree
from tileinfer_core.backends.cuda.buffers import ROW_STEP
from tileinfer_core.compiler_settings import MORE_TIME, compiler_timeout, timeout_text
from tileinfer_core.errors import BackendError, CompilerTimeoutError
from tileinfer_core.progress import ProgressEvent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernels.specs import Recorded
    from tileinfer_core.backends.cuda.device import Array, Device
    from tileinfer_core.backends.cuda.plan import Plans
    from tileinfer_core.progress import OnProgress

TASK = "compile kernels"
MAX_COMPILERS = 8
COMPILER = "tileiras"
HINT = "`tileinfer doctor` looks at the compiler"
PREFILL_ROWS = (ROW_STEP, 128, 256, 512, 1024, 2048)  # lengths at which the kernels' configurations change


class KernelWarmup:
    """Works in a thread of its own. `finish` waits for it, shows how far it is, and raises what went wrong."""

    def __init__(self, plans: Plans, ends: Sequence[int], device: Device, length: Array, chunk: int) -> None:
        self._plans = plans
        self._ends = ends
        self._device = device
        self._length = length
        self._rows = [*(rows for rows in PREFILL_ROWS if rows < chunk), chunk]  # whose range no other length stands for
        self._state = threading.Condition()
        self._done = 0
        self._total: int | None = None
        self._seconds = 0.0
        self._error: Exception | None = None
        self._refused: str | None = None
        self.unkept: str | None = None  # why the next start will compile again what this one has
        self._finished = False
        self._cancelled = threading.Event()
        self._compiling = False
        self._thread = threading.Thread(target=self._run, name="compile-kernels", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def cancel(self) -> None:
        """Start nothing more, and end the compilers that run: Python's exit would wait for them.

        Again and again, for one may be starting just now.
        """
        self._cancelled.set()
        while self._compiling and self._thread.is_alive():
            stop_compilers()
            self._thread.join(timeout=0.02)

    def finish(self, on_progress: OnProgress) -> float:
        """Seconds that compilers have run for; 0 when the cache had everything.

        Raises:
            BackendError: naming the kernel and what to do.
        """
        shown = -1
        finished = False
        while not finished:
            with self._state:
                if not self._finished and (self._total is None or self._done <= shown):
                    self._state.wait(timeout=0.2)
                done, total, finished = self._done, self._total, self._finished
            if total and done != shown:
                on_progress(ProgressEvent(TASK, done, total, "kernels"))
                shown = done
        if self._error is not None:
            raise self._error
        return self._seconds

    def records(self) -> list[Recorded]:
        """Each kernel at least once, in the order of a prompt and its answer: one layer of each kind in every step."""
        plans = self._plans
        layers = plans.layers_of_every_kind()
        found = [record for rows in self._rows for record in plans.prefill(rows, layers=layers)]
        found += [*plans.copies(layers=layers), *plans.head(), *plans.sample()]
        for end in self._ends:
            found += plans.decode(end, layers=layers)
        return found

    def _run(self) -> None:
        try:
            records = distinct(self.records())
            store = CubinStore.beside_cache(self._device.arch)
            if not store.holds(records):
                self._compiling = True
                try:
                    self._compile(records)
                finally:
                    self._compiling = False
                if store.folder is not None and not self._cancelled.is_set() and not store.holds(records):
                    self._not_kept(store.folder.parent)
            self._prime(records)
        except Exception as error:  # handed over to `finish`
            self._error = error
        with self._state:
            self._finished = True
            self._state.notify_all()

    def _not_kept(self, folder: Path) -> None:
        reason = self._refused or f"the limit of {size_limit():,} bytes is too small"
        self.unkept = f"compiled kernels are not kept in {folder}, so every start compiles: {reason}"

    def _compile(self, records: Sequence[Recorded]) -> None:
        start = time.perf_counter()
        workers = min(MAX_COMPILERS, os.cpu_count() or 1)
        timeout = compiler_timeout()
        results = compile_all(
            records,
            self._device.arch,
            workers=workers,
            timeout=timeout,
            on_progress=self._count,
            cancelled=self._cancelled,
        )
        with contextlib.closing(results):  # ends its threads, whatever keeps a reference to it
            for result in results:
                if self._cancelled.is_set():
                    return
                if isinstance(result, CompileTimeoutError):
                    text = timeout_text(result.kernel, result.arch, timeout)
                    raise CompilerTimeoutError(text, hint=MORE_TIME) from result
                if isinstance(result, CompileError):
                    hint = result.hint or HINT
                    raise BackendError(f"the kernel {result}", hint=hint) from result
                self._refused = self._refused or result.unkept
                if not result.cached:
                    self._seconds = time.perf_counter() - start

    def _count(self, done: int, total: int, _result: object) -> None:
        with self._state:
            self._done, self._total = done, total
            self._state.notify_all()

    def _prime(self, records: Sequence[Recorded]) -> None:
        """Launch each distinct kernel once. The block table names the scratch page, weights may still be arriving."""
        for record in records:
            if self._cancelled.is_set():
                return
            self._device.copy_in(self._length, np.ones(1, np.int32))
            self._device.run([record])
        self._device.synchronize()


def stop_compilers() -> None:
    """End this process's own tileiras processes, with what they run. Linux only; elsewhere they run to their end."""
    for pid in children(os.getpid()):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").startswith(COMPILER):
                end_tree(pid)
