"""Whether this machine can run the CUDA backend, in milliseconds: every command that loads a model asks.

Nothing is imported or started: the driver's library is asked, packages are looked up. `doctor` looks closer, with the
same functions (cuda_probe.py).
"""

from __future__ import annotations

import functools
import importlib.util
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tileinfer_core import cuda_probe

if TYPE_CHECKING:
    from tileinfer_core.cuda_probe import Gpu

MIN_CUDA = (13, 0)  # driver branch 580: older ones don't load what tileiras 13 makes
MIN_CAPABILITY = (8, 0)
INSTALL = "pip install 'tileinfer[cuda]'"


@dataclass(frozen=True, slots=True)
class CudaStatus:
    """`problem` is why the backend can't run, `cure` what to do about it; without a problem there is a GPU."""

    gpu: Gpu | None = None
    problem: str | None = None
    cure: str | None = None


@functools.cache
def cuda_status() -> CudaStatus:
    """Looked at once per process."""
    driver = cuda_probe.probe_driver(with_smi=False)
    if driver.fault:
        return CudaStatus(None, driver.fault)
    if not driver.gpus:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = "" if hidden is None else f" (CUDA_VISIBLE_DEVICES is {hidden!r})"
        return CudaStatus(None, f"the driver shows no GPU{why}")
    gpu = driver.gpus[0]
    if gpu.capability < MIN_CAPABILITY:
        return CudaStatus(gpu, f"{gpu.name} is {gpu.arch}, the kernels need sm_80 or newer")
    if driver.cuda is None or driver.cuda < MIN_CUDA:
        major, minor = driver.cuda or (0, 0)
        problem = f"the driver supports CUDA {major}.{minor}, {MIN_CUDA[0]}.{MIN_CUDA[1]} is needed"
        return CudaStatus(gpu, problem, "install NVIDIA driver 580 or newer")
    if missing := _missing():
        return CudaStatus(gpu, f"{' and '.join(missing)} not installed", INSTALL)
    return CudaStatus(gpu)


def _missing() -> list[str]:
    modules = {"CuPy": "cupy", "cuda-tile": "cuda.tile"}
    found = [name for name, module in modules.items() if not _is_there(module)]
    if cuda_probe.compiler_path(os.environ)[0] is None:
        found.append("the compiler tileiras")
    return found


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
