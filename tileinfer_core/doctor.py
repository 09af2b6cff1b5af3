"""What on this machine helps or keeps TileInfer from running well, each trouble with the command that ends it.

Looks only: imports neither CuPy nor cuda.tile (a broken installation of either must not break its diagnosis), opens
no network connection, and changes nothing beyond a probe file in its own folders.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tileinfer_core import cuda_probe
from tileinfer_core.backends.cuda.probe import MIN_CAPABILITY, MIN_CUDA
from tileinfer_core.backends.select import choose_backend
from tileinfer_core.compiler_settings import NAMES, compiler_settings
from tileinfer_core.errors import TileinferError
from tileinfer_core.files import folder_bytes, free_bytes, home_folder
from tileinfer_core.findings import Finding
from tileinfer_core.store import Store
from tileinfer_core.units import bytes_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tileinfer_core.cuda_probe import Compiler, Driver
    from tileinfer_core.findings import Status
    from tileinfer_core.settings import Settings

INSTALL_CUDA = 'pip install "tileinfer[cuda]"'


def diagnose(settings: Settings, environ: Mapping[str, str] | None = None) -> list[Finding]:
    """Everything that was looked at, in the order a person would ask. A machine without a GPU is not a problem."""
    environ = os.environ if environ is None else environ
    driver = cuda_probe.probe_driver()
    compiler = cuda_probe.find_compiler(environ)
    return [
        *check_python(),
        *check_driver(driver),
        *check_packages(has_gpu=bool(driver.gpus)),
        *check_compiler(compiler, driver),
        *check_toolkits(environ, compiler),
        *check_kernels_package(),
        *check_backend(settings),
        *check_folders(settings),
        *check_kernel_cache(settings, environ),
        *check_models(settings),
        *check_token(environ),
    ]


def check_python() -> Iterator[Finding]:
    """pip refuses an older Python itself, so this only says which one runs."""
    yield Finding("python", "ok", f"Python {platform.python_version()}, {platform.system()} {platform.machine()}")


def check_driver(driver: Driver) -> Iterator[Finding]:
    if driver.fault:
        known = "no NVIDIA driver" in driver.fault
        cure = None if known else "nvidia-smi"
        yield Finding("driver", "info" if known else "problem", f"{driver.fault}; models run on the CPU", cure)
        return
    cuda = driver.cuda or (0, 0)
    detail = f"version {driver.version or 'unknown'}, for CUDA up to {cuda[0]}.{cuda[1]}"
    if cuda < MIN_CUDA:
        cure = "install NVIDIA driver 580 or newer"
        yield Finding("driver", "problem", f"{detail}; {MIN_CUDA[0]}.{MIN_CUDA[1]} is needed", cure)
    else:
        yield Finding("driver", "ok", detail)
    if not driver.gpus:
        yield Finding("gpu", "problem", "the driver shows no GPU", "check CUDA_VISIBLE_DEVICES")
    for gpu in driver.gpus:
        memory = f"{gpu.memory_bytes / 2**30:.1f} GiB"
        if gpu.capability < MIN_CAPABILITY:
            yield Finding("gpu", "problem", f"{gpu.name}, {memory}, {gpu.arch}: cuTile needs sm_80 or newer")
        else:
            yield Finding("gpu", "ok", f"{gpu.name}, {memory}, {gpu.arch}")


def check_packages(*, has_gpu: bool) -> Iterator[Finding]:
    """cuda-tile and CuPy: missing ones matter only where there is a GPU."""
    tile = cuda_probe.distribution("cuda-tile")
    if tile:
        yield Finding("cuda-tile", "ok", f"version {tile}")
    else:
        yield Finding("cuda-tile", "problem" if has_gpu else "info", "not installed", INSTALL_CUDA if has_gpu else None)
    names = ("cupy-cuda13x", "cupy-cuda12x", "cupy-cuda11x", "cupy")
    found = {name: version for name in names if (version := cuda_probe.distribution(name))}
    if not found:
        yield Finding("cupy", "problem" if has_gpu else "info", "not installed", INSTALL_CUDA if has_gpu else None)
        return
    listed = ", ".join(f"{name} {version}" for name, version in found.items())
    if len(found) > 1:
        unwanted = " ".join(name for name in found if name != "cupy-cuda13x")
        cure = f"pip uninstall {unwanted}; pip install --force-reinstall cupy-cuda13x"
        yield Finding("cupy", "problem", f"{listed}: they share one folder, only one may be installed", cure)
    elif "cupy-cuda12x" in found or "cupy-cuda11x" in found:
        name = next(iter(found))
        yield Finding("cupy", "problem", f"{listed}, made for an older CUDA", f"pip uninstall {name}; {INSTALL_CUDA}")
    else:
        yield Finding("cupy", "ok", listed)


def check_compiler(compiler: Compiler | None, driver: Driver) -> Iterator[Finding]:
    """tileiras compiles the kernels; without a GPU it is needed only for `kernels compile`."""
    if mismatch := cuda_probe.mismatched_packages():
        cure = 'pip install --force-reinstall "cuda-tile[tileiras]"'
        yield Finding("tileiras", "problem", f"its packages differ, so cuda-tile leaves them unused: {mismatch}", cure)
    if compiler is None:
        needed = bool(driver.gpus)
        detail = "not found" if needed else "not found; `kernels compile` needs it, also without a GPU"
        yield Finding("tileiras", "problem" if needed else "info", detail, INSTALL_CUDA if needed else None)
        return
    detail = f"version {compiler.version or 'unknown'}, {compiler.path}"
    unknown = [gpu.arch for gpu in driver.gpus if compiler.architectures and gpu.arch not in compiler.architectures]
    if compiler.version is None:
        yield Finding("tileiras", "problem", f"{compiler.path} does not run", f"{compiler.path} --version")
    elif unknown:
        cure = 'pip install --upgrade "cuda-tile[tileiras]"'
        yield Finding("tileiras", "problem", f"{detail}; it can't compile for {', '.join(unknown)}", cure)
    else:
        yield Finding("tileiras", "ok", detail)


def check_toolkits(environ: Mapping[str, str], compiler: Compiler | None) -> Iterator[Finding]:
    """With an older toolkit in CUDA_HOME or CUDA_PATH, a tileiras of the system fails to compile any kernel.

    Its message is "failed to compile Tile IR program". The one from pip is run without these variables.
    """
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        value = environ.get(variable)
        if not value:
            continue
        version = cuda_probe.toolkit_version(Path(value))
        if version is None:
            yield Finding(variable, "warning", f"{value} holds no CUDA toolkit", f"unset {variable}")
        elif version < MIN_CUDA:
            status: Status = "warning" if compiler is None or compiler.from_pip else "problem"
            detail = f"{value} is CUDA {version[0]}.{version[1]}, older than {MIN_CUDA[0]}.{MIN_CUDA[1]}"
            yield Finding(variable, status, f"{detail}: compiling kernels may fail", f"unset {variable}")
        else:
            yield Finding(variable, "ok", f"{value}, CUDA {version[0]}.{version[1]}")


def check_kernels_package() -> Iterator[Finding]:
    """The Hugging Face package `kernels` installs into the same folder name as TileInfer's own kernels."""
    cure = "pip uninstall kernels; pip install --force-reinstall --no-deps tileinfer (or use an environment of its own)"
    spec = importlib.util.find_spec("kernels")
    home = Path(__file__).resolve().parent.parent
    place = Path(spec.origin).resolve().parent if spec and spec.origin else None
    other = _hugging_face_kernels()
    if place is None or not (home / "kernels" / "launch.py").is_file():
        yield Finding("kernels", "problem", f"TileInfer's folder `kernels` is missing in {home}", cure)
    elif place.parent != home:
        yield Finding("kernels", "problem", f"`kernels` is imported from {place}, TileInfer's own is in {home}", cure)
    elif other and other[1] == place:
        detail = f"the package kernels {other[0]} of Hugging Face overwrote files in {place}"
        yield Finding("kernels", "problem", detail, cure)
    elif other:
        detail = f"the package kernels {other[0]} of Hugging Face in {other[1]} has the same name as {place}"
        yield Finding("kernels", "warning", detail, cure)
    else:
        yield Finding("kernels", "ok", str(place))


def _hugging_face_kernels() -> tuple[str, Path] | None:
    """(version, folder) of the PyPI package `kernels`, if it is installed."""
    try:
        found = importlib.metadata.distribution("kernels")
    except importlib.metadata.PackageNotFoundError:
        return None
    return found.version, Path(str(found.locate_file("kernels"))).resolve()


def check_backend(settings: Settings) -> Iterator[Finding]:
    try:
        choice = choose_backend(settings.backend.value)
    except TileinferError as error:
        yield Finding("backend", "problem", str(error), error.hint)
        return
    asked = f"{settings.backend.value} ({settings.backend.origin})"
    yield Finding("backend", "ok", f"{asked} means {choice.name}: {choice.reason}")


def check_folders(settings: Settings) -> Iterator[Finding]:
    for name, folder in (("models", settings.models_dir.value), ("state", settings.state_dir.value)):
        fault = write_fault(folder)
        if fault:
            setting = "TILEINFER_HOME" if name == "models" else f"state_dir in {settings.config_path}"
            yield Finding(f"{name} folder", "problem", f"{folder}: {fault}", f"set {setting} to a folder you may write")
            continue
        size, free = folder_bytes(folder), free_bytes(folder)
        yield Finding(f"{name} folder", "ok", f"{folder}: {bytes_text(size)}, {bytes_text(free)} free")
    cache = Store.from_settings(settings).cache
    used = bytes_text(folder_bytes(cache, follow=False)) if cache.is_dir() else "not there"
    yield Finding("hugging face cache", "info", f"{cache}: {used}")
    present = "" if settings.config_path.is_file() else " (not there; defaults apply)"
    yield Finding("config file", "info", f"{settings.config_path}{present}")


def check_kernel_cache(settings: Settings, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Where compiled kernels are kept; `tileinfer kernels cache` lists them."""
    found = compiler_settings(environ, {name: getattr(settings, name) for name in NAMES})
    folder, origin = found.cache_dir.value, found.cache_dir.origin
    if not found.disk_cache.value:
        detail = f"off ({found.disk_cache.origin}): every start compiles the kernels again"
        yield Finding("kernel cache", "warning", detail, "--disk-cache")
    elif fault := write_fault(folder):
        yield Finding("kernel cache", "warning", f"{folder}: {fault}; every start compiles", "--cache-dir DIR")
    else:
        limit = bytes_text(found.cache_size_bytes.value)
        yield Finding("kernel cache", "info", f"{folder} ({origin}): {bytes_text(folder_bytes(folder))} of {limit}")


def check_models(settings: Settings) -> Iterator[Finding]:
    summaries = Store.from_settings(settings).list()
    yield Finding("models", "info", f"{sum(s.complete for s in summaries)} ready to run")
    for summary in summaries:
        if not summary.complete:
            yield Finding("models", "warning", f"{summary.name} is incomplete", f"tileinfer pull {summary.name}")


def check_token(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Whether there is a token, never what it is."""
    home = Path(environ.get("HF_HOME") or home_folder(environ) / ".cache" / "huggingface")
    path = Path(environ.get("HF_TOKEN_PATH") or home / "token")
    if environ.get("HF_TOKEN"):
        yield Finding("hub token", "info", "set in HF_TOKEN")
    elif path.is_file():
        yield Finding("hub token", "info", f"in {path}")
    else:
        yield Finding("hub token", "info", "none; gated models need one (HF_TOKEN, or `hf auth login`)")


def write_fault(folder: Path) -> str | None:
    """Why nothing can be written into `folder` (or where it would be made); None when it can."""
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        return f"{place} is not a folder"
    try:
        with tempfile.TemporaryFile(dir=place):
            return None
    except OSError as error:
        return error.strerror or str(error)
