"""Whether this machine can run the CUDA backend, and if not, what is missing and what cures it.

It asks the driver's own library through ctypes and looks packages up without importing them: milliseconds, so that
every command can choose a backend by it, and the same findings are what `doctor` prints. Checks stop where the later
ones make no sense.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import importlib.util
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tileinfer_core.findings import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator

MIN_DRIVER = 13000  # CUDA 13.0, driver branch 580: older ones don't load what tileiras 13 makes
MIN_ARCH = 80
INSTALL = "pip install 'tileinfer[cuda]'"
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*


@dataclass(frozen=True, slots=True)
class Gpu:
    """The first CUDA device, as the driver describes it. `driver` is the CUDA version it supports, such as 13000."""

    name: str
    arch: int
    memory_bytes: int
    driver: int


@dataclass(frozen=True, slots=True)
class CudaStatus:
    """`findings` has one entry per check that was made, in order; `usable` when none is a problem."""

    gpu: Gpu | None
    findings: tuple[Finding, ...]

    @property
    def problem(self) -> Finding | None:
        return next((finding for finding in self.findings if finding.status == "problem"), None)

    @property
    def usable(self) -> bool:
        return self.problem is None


@functools.cache
def cuda_status() -> CudaStatus:
    """Looked at once per process."""
    found = _gpu()
    if isinstance(found, Finding):
        return CudaStatus(None, (found,))
    findings = [*_driver_findings(found)]
    findings += _package_findings()
    return CudaStatus(found, tuple(findings))


def _gpu() -> Gpu | Finding:
    """The device, or the finding that says why there is none."""
    library = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        cuda = ctypes.CDLL(library)
    except OSError:
        cure = "install the NVIDIA driver, 580 or newer"
        return Finding("GPU", "problem", f"no NVIDIA driver ({library} not found)", cure)
    if code := cuda.cuInit(0):
        return _no_device(code)
    count, driver = ctypes.c_int(), ctypes.c_int()
    if code := cuda.cuDeviceGetCount(ctypes.byref(count)):
        return _no_device(code)
    if count.value == 0:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        detail = "no NVIDIA GPU" if hidden is None else f"no NVIDIA GPU visible (CUDA_VISIBLE_DEVICES={hidden!r})"
        return Finding("GPU", "problem", detail)
    cuda.cuDriverGetVersion(ctypes.byref(driver))
    return _describe(cuda, driver.value)


def _no_device(code: int) -> Finding:
    reasons = {100: "no NVIDIA GPU", 802: "the GPU is not ready yet", 803: "driver and its library differ in version"}
    detail = reasons.get(code, f"the driver does not start (CUDA error {code})")
    cure = "reboot, or install the NVIDIA driver again" if code == 803 else None
    return Finding("GPU", "problem", detail, cure)


def _describe(cuda: ctypes.CDLL, driver: int) -> Gpu:
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    memory, name = ctypes.c_size_t(), ctypes.create_string_buffer(256)
    cuda.cuDeviceGet(ctypes.byref(device), 0)
    cuda.cuDeviceGetName(name, len(name), device)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    cuda.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, device)
    cuda.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, device)
    return Gpu(name.value.decode(errors="replace"), 10 * major.value + minor.value, memory.value, driver)


def _driver_findings(gpu: Gpu) -> Iterator[Finding]:
    detail = f"{gpu.name}, sm_{gpu.arch}, {gpu.memory_bytes / 2**30:.0f} GiB"
    if gpu.arch < MIN_ARCH:
        yield Finding("GPU", "problem", f"{detail}: older than sm_{MIN_ARCH} (Ampere), which the kernels need")
        return
    yield Finding("GPU", "ok", detail)
    version = f"CUDA {gpu.driver // 1000}.{gpu.driver % 1000 // 10}"
    if gpu.driver < MIN_DRIVER:
        cure = "install NVIDIA driver 580 or newer"
        yield Finding("driver", "problem", f"supports {version}, CUDA 13.0 is needed", cure)
    else:
        yield Finding("driver", "ok", f"supports {version}")


def _package_findings() -> Iterator[Finding]:
    yield _package("CuPy", "cupy", ("cupy-cuda13x", "cupy-cuda14x", "cupy"))
    tile = _package("cuda-tile", "cuda.tile", ("cuda-tile",))
    yield tile
    if tile.status == "ok":
        yield _compiler()
        yield from _toolkit()


def _package(name: str, module: str, distributions: tuple[str, ...]) -> Finding:
    try:
        found = importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        found = False
    if not found:
        return Finding(name, "problem", "not installed", INSTALL)
    for distribution in distributions:
        try:
            return Finding(name, "ok", importlib.metadata.version(distribution))
        except importlib.metadata.PackageNotFoundError:
            continue
    return Finding(name, "ok", "installed, version unknown")


def _compiler() -> Finding:
    """tileiras where cuda-tile looks for it: its wheel, PATH, CUDA_HOME."""
    path = find_tileiras()
    if path is None:
        return Finding("tileiras", "problem", "the compiler is not installed", INSTALL)
    try:
        version = importlib.metadata.version("nvidia-cuda-tileiras")
    except importlib.metadata.PackageNotFoundError:
        version = "version unknown"
    return Finding("tileiras", "ok", f"{version}, {path}")


def find_tileiras() -> Path | None:
    binary = "tileiras.exe" if sys.platform == "win32" else "tileiras"
    if (spec := importlib.util.find_spec("nvidia")) is not None:
        for folder in spec.submodule_search_locations or ():
            if (path := Path(folder) / "cu13" / "bin" / binary).exists():
                return path
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    places = [os.environ.get("PATH", ""), *([str(Path(home) / "bin")] if home else [])]
    found = shutil.which("tileiras", path=os.pathsep.join(places))
    return Path(found) if found else None


def _toolkit() -> Iterator[Finding]:
    """An older toolkit in CUDA_HOME breaks a tileiras from PATH ("failed to compile Tile IR program")."""
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        home = os.environ.get(variable)
        version = _toolkit_version(Path(home)) if home else None
        if version is not None and version < (13, 1):
            detail = f"names CUDA {version[0]}.{version[1]} ({home}), older than the compiler: kernels may not compile"
            yield Finding(variable, "warning", detail, f"unset {variable}")


def _toolkit_version(home: Path) -> tuple[int, int] | None:
    try:
        text = (home / "version.json").read_text(encoding="utf-8")
        import json  # noqa: PLC0415 - hardly ever needed

        major, minor, *_ = json.loads(text)["cuda"]["version"].split(".")
        return int(major), int(minor)
    except (OSError, ValueError, KeyError, TypeError):
        return None
