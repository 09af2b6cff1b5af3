"""What this machine has of CUDA, found without importing CuPy or cuda.tile: driver, GPUs, compiler, toolkits.

The driver is asked through its own library (libcuda, by ctypes), so that CUDA_VISIBLE_DEVICES counts; nvidia-smi adds
only the driver's version. Programs get five seconds: a hanging nvidia-smi is a known sign of a broken driver.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

Version = tuple[int, int]

# Attribute numbers of cuDeviceGetAttribute (CUdevice_attribute in cuda.h).
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76
_TILEIRAS_PACKAGES = ("nvidia-cuda-tileiras", "nvidia-cuda-nvcc", "nvidia-nvvm")


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    memory_bytes: int
    capability: Version

    @property
    def arch(self) -> str:
        return f"sm_{self.capability[0]}{self.capability[1]}"


@dataclass(frozen=True, slots=True)
class Driver:
    """`fault` is why there is no usable driver; `cuda` is the newest CUDA it can run, `version` its own number."""

    fault: str | None = None
    cuda: Version | None = None
    version: str | None = None
    gpus: tuple[Gpu, ...] = ()


@dataclass(frozen=True, slots=True)
class Compiler:
    """tileiras as cuda.tile would find it. `from_pip`: it then ignores CUDA_HOME and CUDA_PATH."""

    path: Path
    from_pip: bool
    version: str | None
    architectures: frozenset[str]


def distribution(name: str) -> str | None:
    """The installed version of a package, or None."""
    from importlib import metadata  # noqa: PLC0415 - 9 ms that a machine without a driver need not spend

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def probe_driver(*, with_smi: bool = True) -> Driver:
    """Ask the driver what there is. Never raises: a broken driver is a result. Without nvidia-smi: in 1 ms or so."""
    smi = smi_version if with_smi else lambda: None
    try:
        cuda = load_libcuda()
    except OSError:
        return Driver(fault="no NVIDIA driver on this machine (libcuda is not there)")
    code = int(cuda.cuInit(0))
    if code:
        reasons = {100: "the driver sees no GPU", 803: "driver and kernel module differ; restart the machine"}
        reason = reasons.get(code, "see what `nvidia-smi` says")
        return Driver(fault=f"cuInit failed with {code}: {reason}", version=smi())
    number, count = ctypes.c_int(), ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(number))
    cuda.cuDeviceGetCount(ctypes.byref(count))
    gpus = tuple(_gpu(cuda, index) for index in range(count.value))
    return Driver(None, (number.value // 1000, number.value % 1000 // 10), smi(), gpus)


def load_libcuda() -> Any:
    """The driver's library; OSError when there is none."""
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def _gpu(cuda: Any, index: int) -> Gpu:
    device, name = ctypes.c_int(), ctypes.create_string_buffer(256)
    size = ctypes.c_size_t()
    cuda.cuDeviceGet(ctypes.byref(device), index)
    cuda.cuDeviceGetName(name, len(name), device)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(size), device)
    parts = []
    for attribute in (_CAPABILITY_MAJOR, _CAPABILITY_MINOR):
        value = ctypes.c_int()
        cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        parts.append(value.value)
    return Gpu(name.value.decode(errors="replace"), size.value, (parts[0], parts[1]))


def run(command: list[str]) -> str | None:
    """What a program prints within five seconds, or None when it can't be run or fails."""
    try:
        result = subprocess.run(  # noqa: S603 - fixed commands, no shell
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=5, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout


def smi_version() -> str | None:
    """The driver's version by nvidia-smi, such as "580.95.05"."""
    said = run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    return said.split()[0] if said and said.split() else None


def compiler_path(environ: Mapping[str, str]) -> tuple[str | None, bool]:
    """tileiras where cuda.tile looks: the pip package (True), the PATH, $CUDA_HOME/bin ($CUDA_PATH on Windows)."""
    if (path := _pip_tileiras()) is not None:
        return path, True
    home = environ.get("CUDA_PATH" if sys.platform == "win32" else "CUDA_HOME")
    folders = [environ.get("PATH", ""), str(Path(home) / "bin") if home else ""]
    found = (shutil.which("tileiras", path=folder) for folder in folders if folder)
    return next((path for path in found if path), None), False


def find_compiler(environ: Mapping[str, str]) -> Compiler | None:
    """The compiler and what it says of itself."""
    path, from_pip = compiler_path(environ)
    if path is None:
        return None
    version = re.search(r"release (\d+\.\d+)", run([path, "--version"]) or "")
    architectures = re.findall(r"=(sm_\d+)", run([path, "--help"]) or "")
    return Compiler(Path(path), from_pip, version[1] if version else None, frozenset(architectures))


def _pip_tileiras() -> str | None:
    """The compiler of the package nvidia-cuda-tileiras; cuda.tile takes it only if its companions match it."""
    if distribution(_TILEIRAS_PACKAGES[0]) is None or mismatched_packages() is not None:
        return None
    try:
        spec = importlib.util.find_spec("nvidia.cu13")
    except (ImportError, ValueError):
        return None
    folders = (spec.submodule_search_locations if spec else None) or []
    return next((found for folder in folders if (found := shutil.which("tileiras", path=f"{folder}/bin"))), None)


def mismatched_packages() -> str | None:
    """The versions of the tileiras packages when they differ, for which cuda.tile leaves them unused."""
    versions = {package: distribution(package) for package in _TILEIRAS_PACKAGES}
    if versions[_TILEIRAS_PACKAGES[0]] is None:
        return None
    if len({tuple((version or "none").split(".")[:2]) for version in versions.values()}) == 1:
        return None
    return ", ".join(f"{package} {version or 'missing'}" for package, version in versions.items())


def toolkit_version(folder: Path) -> Version | None:
    """The version of the CUDA toolkit in `folder`, from version.json or cuda.h; None when it is none."""
    try:
        text = (folder / "version.json").read_text(errors="replace")
        if match := re.search(r'"cuda"\s*:\s*{[^}]*"version"\s*:\s*"(\d+)\.(\d+)', text):
            return int(match[1]), int(match[2])
    except OSError:
        pass
    try:
        text = (folder / "include" / "cuda.h").read_text(errors="replace")
        if match := re.search(r"#define\s+CUDA_VERSION\s+(\d+)", text):
            return int(match[1]) // 1000, int(match[1]) % 1000 // 10
    except OSError:
        pass
    return None
