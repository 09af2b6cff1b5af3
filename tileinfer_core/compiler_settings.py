"""How long a kernel may compile, and where compiled kernels are kept: TileInfer's settings as cuda-tile reads them.

cuda-tile has them as environment variables, read once when it is imported, so they are set before a backend is. A
variable of cuda-tile's own that the user has set stays as it is unless TileInfer's setting says otherwise.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tileinfer_core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

    from tileinfer_core.settings import Setting

VARIABLES = {
    "compiler_timeout": "CUDA_TILE_COMPILER_TIMEOUT_SEC",
    "kernel_cache": "CUDA_TILE_CACHE_DIR",
    "kernel_cache_size": "CUDA_TILE_CACHE_SIZE",
}


def configure_compiler(environ: MutableMapping[str, str], settings: Mapping[str, Setting[Any]]) -> None:
    """Put what is set into `environ`. Names are those of VARIABLES.

    Raises:
        UsageError: naming where the value came from.
    """
    for name, setting in settings.items():
        if setting.value is not None:
            environ[VARIABLES[name]] = _checked(name, setting)


def _checked(name: str, setting: Setting[Any]) -> str:
    if name == "kernel_cache":
        value = str(setting.value)
        return "off" if value == "off" else str(Path(value).expanduser().absolute())
    kind, least = (int, 1 << 20) if name == "kernel_cache_size" else (float, 1)
    try:
        number = kind(setting.value)
    except (TypeError, ValueError):
        number = kind(0)
    if not least <= number < float("inf"):
        unit = "bytes" if kind is int else "seconds"
        raise UsageError(f"{setting.origin}: {name} must be at least {least:,} {unit}, found {setting.value!r}")
    return str(number)
