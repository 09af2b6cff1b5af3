"""How long a kernel may compile, and where compiled kernels are kept: TileInfer's settings as cuda-tile reads them.

    compiler_timeout_seconds   for one kernel; then the compiler is ended and CompilerTimeoutError raised
    disk_cache                 whether compiled kernels are kept
    cache_dir                  the folder that keeps them
    cache_size_bytes           the most it may hold; what was used longest ago goes first

cuda-tile has them as environment variables, read once when it is imported, so they are set before a backend is. A
variable of cuda-tile's own that the user has set counts wherever TileInfer's setting says nothing.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tileinfer_core.errors import UsageError
from tileinfer_core.files import expanded, home_folder
from tileinfer_core.settings import Setting

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

NAMES = ("compiler_timeout_seconds", "disk_cache", "cache_dir", "cache_size_bytes")
TIMEOUT, FOLDER, SIZE = "CUDA_TILE_COMPILER_TIMEOUT_SEC", "CUDA_TILE_CACHE_DIR", "CUDA_TILE_CACHE_SIZE"
DEFAULT_TIMEOUT = 300.0
DEFAULT_SIZE = 1 << 31  # cuda-tile's
SMALLEST_SIZE = 1 << 20
MORE_TIME = "--compiler-timeout-seconds gives it more time"
_OFF = ("0", "off", "none", "")  # cuda-tile's words
_SWITCH = {"1": True, "true": True, "on": True, "yes": True, "0": False, "false": False, "off": False, "no": False}


@dataclass(frozen=True, slots=True)
class CompilerSettings:
    """What holds, each value with its origin."""

    compiler_timeout_seconds: Setting[float]
    disk_cache: Setting[bool]
    cache_dir: Setting[Path]
    cache_size_bytes: Setting[int]

    def items(self) -> list[tuple[str, Setting[Any]]]:
        return [(name, getattr(self, name)) for name in NAMES]


def compiler_settings(environ: Mapping[str, str], settings: Mapping[str, Setting[Any]]) -> CompilerSettings:
    """TileInfer's settings (a value of None: not set) over cuda-tile's own variables over the defaults.

    Raises:
        UsageError: naming where the value came from.
    """
    seconds = _first(settings["compiler_timeout_seconds"], environ, TIMEOUT, DEFAULT_TIMEOUT)
    size = _first(settings["cache_size_bytes"], environ, SIZE, DEFAULT_SIZE)
    own = environ.get(FOLDER)
    off = own is not None and own.strip().lower() in _OFF
    folder = _first(settings["cache_dir"], {} if off else environ, FOLDER, default_folder(environ))
    switch = settings["disk_cache"]
    if switch.value is None:
        switch = Setting(False, FOLDER) if off and settings["cache_dir"].value is None else Setting(True, "default")
    return CompilerSettings(
        compiler_timeout_seconds=_number("compiler_timeout_seconds", seconds, float, 0.001, "seconds"),
        disk_cache=_switch(switch),
        cache_dir=Setting(_path(folder), folder.origin),
        cache_size_bytes=_number("cache_size_bytes", size, int, SMALLEST_SIZE, "bytes"),
    )


def configure_compiler(environ: MutableMapping[str, str], settings: Mapping[str, Setting[Any]]) -> CompilerSettings:
    """Put what holds into `environ`, for cuda-tile and for `compiler_timeout`."""
    found = compiler_settings(environ, settings)
    environ[TIMEOUT] = str(found.compiler_timeout_seconds.value)
    environ[FOLDER] = str(found.cache_dir.value) if found.disk_cache.value else "off"
    environ[SIZE] = str(found.cache_size_bytes.value)
    return found


def compiler_timeout() -> float:
    """Seconds for one kernel: cuda-tile's own variable, so that compilations through either of us keep it."""
    return float(os.environ.get(TIMEOUT) or DEFAULT_TIMEOUT)


def timeout_text(kernel: str, arch: str, seconds: float) -> str:
    return f"the compiler took longer than {seconds:g} s over {kernel} for {arch}, and was ended"


def default_folder(environ: Mapping[str, str]) -> Path:
    """cuda-tile's: cutile-python in the user's cache folder."""
    base = environ.get("XDG_CACHE_HOME") or str(home_folder(environ) / ".cache")
    return Path(base) / "cutile-python"


def _first(setting: Setting[Any], environ: Mapping[str, str], variable: str, default: Any) -> Setting[Any]:
    if setting.value is not None:
        return setting
    return Setting(environ[variable], variable) if environ.get(variable) else Setting(default, "default")


def _path(folder: Setting[Any]) -> Path:
    text = str(folder.value)
    if not text or "\0" in text:
        raise UsageError(f"{folder.origin}: {text!r} can't be the name of a folder")
    return expanded(text).absolute()


def _switch(setting: Setting[Any]) -> Setting[bool]:
    if isinstance(setting.value, bool):
        return setting
    found = _SWITCH.get(str(setting.value).strip().lower())
    if found is None:
        raise UsageError(f"{setting.origin}: disk_cache must be one of {', '.join(_SWITCH)}, found {setting.value!r}")
    return Setting(found, setting.origin)


def _number(name: str, setting: Setting[Any], kind: type[Any], least: float, unit: str) -> Setting[Any]:
    try:
        number = kind(setting.value)
    except (TypeError, ValueError):
        number = kind(0)
    if not least <= number < float("inf"):
        whole = "whole " if kind is int else ""
        raise UsageError(
            f"{setting.origin}: {name} must be a {whole}number of {unit}, at least {least:,}, found {setting.value!r}"
        )
    return Setting(number, setting.origin)
