"""`tileinfer kernels probe`: variants of a kernel held equal, compiled, and timed where there is the GPU for it.

Importing this file raises BackendUnavailableError where cuda-tile is missing or broken. Only the times need a GPU.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tileinfer_core.compiler_settings import compiler_timeout
from tileinfer_core.errors import BackendError, BackendUnavailableError, DiskError, UsageError
from tileinfer_core.kernel_tools import MAX_WORKERS, require_compiler, this_gpu
from tileinfer_core.progress import OnProgress, ProgressEvent, silent

try:
    from kernels.interpreter import InterpreterError
    from kernels.lab import code, probe
except ImportError as _error:
    raise BackendUnavailableError(
        f"the kernels need cuda-tile: {_error}", hint='pip install "cuda-tile[tileiras]"'
    ) from _error

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from kernels.lab.code import Code
    from kernels.lab.probe import Probe
    from tileinfer_core.backends.cuda.probe_times import ProbeTimer, Times

_TASK = "probe the compiler"


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """One probe on one target. `times` are by the variants' order in `codes`; () without the GPU for it.

    `compared` counts the variants that the interpreter held equal to another before anything was compiled.
    """

    name: str
    question: str
    about: str
    arch: str
    gpu: str | None
    compared: int
    codes: tuple[Code, ...]
    times: tuple[Times, ...]
    folder: Path | None

    def time_of(self, variant: str) -> Times | None:
        return next((times for times in self.times if times.variant == variant), None)

    def as_dict(self) -> dict[str, Any]:
        rows = []
        for each in self.codes:
            row = {key: value for key, value in asdict(each).items() if not key.endswith("digest")}
            times = self.time_of(each.variant)
            row["times_us"] = None if times is None else {k: v for k, v in asdict(times).items() if k != "variant"}
            rows.append(row)
        return {
            "probe": self.name,
            "question": self.question,
            "about": self.about,
            "arch": self.arch,
            "gpu": self.gpu,
            "compared": self.compared,
            "folder": None if self.folder is None else str(self.folder),
            "variants": rows,
        }


def find_probes(names: Iterable[str]) -> list[Probe]:
    """Raises UsageError for a name that no probe has."""
    try:
        return probe.find(names)
    except KeyError as error:
        raise UsageError(str(error.args[0])) from None


def run_probes(
    names: Iterable[str],
    archs: Iterable[str],
    *,
    folder: Path | None = None,
    timed: bool = True,
    workers: int | None = None,
    on_progress: OnProgress = silent,
) -> list[ProbeResult]:
    """Check, compile and, for this machine's GPU, time. Code is saved in folder/<arch>/<probe>.

    Raises:
        BackendError: variants differ, or there is no compiler.
        DiskError: the folder can't be written.
    """
    chosen, targets = find_probes(names), list(archs)
    require_compiler()
    timer = _timer(targets) if timed else None
    total = len(chosen) * (1 + len(targets) + (timer is not None))
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        on_progress(ProgressEvent(_TASK, done, total, "steps"))

    found = []
    for each in chosen:
        compared = _checked(each)
        step()
        for arch in targets:
            place = None if folder is None else folder / arch / each.name
            codes = _compiled(each, arch, place, workers or min(MAX_WORKERS, os.cpu_count() or 1))
            step()
            here = timer is not None and timer.arch == arch
            times = tuple(timer.time(each)) if here and timer is not None else ()
            if here:
                step()
            gpu = timer.name if here and timer is not None else None
            about = (each.name, each.question, each.about, arch, gpu, compared)
            found.append(ProbeResult(*about, tuple(codes), times, place))
    return found


def _timer(archs: list[str]) -> ProbeTimer | None:
    """This machine's GPU, where it is one of the targets and everything needed is there."""
    if this_gpu() not in archs:
        return None
    from tileinfer_core.backends.cuda.probe import cuda_status  # noqa: PLC0415 - asked only where there is a GPU

    status = cuda_status()
    if status.problem is not None:
        raise BackendUnavailableError(f"no times from this GPU: {status.problem}", hint=status.cure)
    from tileinfer_core.backends.cuda.probe_times import ProbeTimer  # noqa: PLC0415

    return ProbeTimer()


def _checked(each: Probe) -> int:
    try:
        return probe.check(each)
    except (probe.ProbeError, InterpreterError) as error:
        raise BackendError(f"the probe {each.name} is not what it says: {error}") from error


def _compiled(each: Probe, arch: str, folder: Path | None, workers: int) -> list[Code]:
    try:
        return code.compile_probe(each, arch, folder=folder, workers=workers, timeout=compiler_timeout())
    except OSError as error:
        raise DiskError(f"the probe's code can't be saved in {folder}: {error.strerror or error}") from error
