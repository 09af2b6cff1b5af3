"""What the user has set outside the command line: environment variables and the config file.

Each value travels with its origin, so that `show` and `/params` can say where it came from. An unknown key, a
value of the wrong type or a file that is not TOML is an error: a setting that is ignored in silence is worse than
none. Ranges are checked where the values are used, by the same code that checks the flags.
"""

from __future__ import annotations

import os
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tileinfer_core.errors import UsageError
from tileinfer_core.files import FileTooLargeError, expanded, home_folder, read_small

if TYPE_CHECKING:
    from collections.abc import Mapping

T = TypeVar("T")

DEFAULT_MODEL = "demo"
MAX_BYTES = 1 << 20
BACKENDS = ("auto", "cuda", "cpu")
KV_FORMATS = ("bf16", "int8")

_SAMPLING_TYPES: Mapping[str, type] = MappingProxyType(
    {
        "temperature": float,
        "top_k": int,
        "top_p": float,
        "min_p": float,
        "repetition_penalty": float,
        "presence_penalty": float,
        "frequency_penalty": float,
        "seed": int,
    }
)
_TOP_TYPES: Mapping[str, type] = MappingProxyType(
    {
        "model": str,
        "backend": str,
        "context": int,
        "kv": str,
        "half_copies": bool,
        "max_tokens": int,
        "system": str,
        "models_dir": str,
        "state_dir": str,
        "compiler_timeout_seconds": float,
        "disk_cache": bool,
        "cache_dir": str,
        "cache_size_bytes": int,
        "sampling": dict,
        "aliases": dict,
    }
)
_TYPE_WORDS = {str: "a string", int: "a whole number", float: "a number", bool: "true or false", dict: "a table"}


@dataclass(frozen=True, slots=True)
class Setting(Generic[T]):
    """A value and who chose it, such as "--temperature", "TILEINFER_MODEL", "config file" or "default"."""

    value: T
    origin: str


@dataclass(frozen=True, slots=True)
class Settings:
    """The environment and the config file, read once at the start of a command.

    `sampling` holds only what the config file sets. `aliases` are the user's own names for models.
    """

    config_path: Path
    model: Setting[str]
    backend: Setting[str]
    context: Setting[int | None]
    kv: Setting[str | None]  # one of KV_FORMATS
    half_copies: Setting[bool]  # INT8 weights in half precision too, where a GPU has memory to spare
    max_tokens: Setting[int | None]
    system: Setting[str | None]
    models_dir: Setting[Path]
    state_dir: Setting[Path]
    compiler_timeout_seconds: Setting[float | str | None]  # for one kernel; a str where it is the environment's
    disk_cache: Setting[bool | str | None]  # keep compiled kernels
    cache_dir: Setting[str | None]  # where
    cache_size_bytes: Setting[int | str | None]
    sampling: Mapping[str, Setting[float | int]] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)

    @property
    def history_path(self) -> Path:
        return self.state_dir.value / "history"

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None, config_path: Path | None = None) -> Settings:
        """Read the config file and the environment, which wins over it. A file that TILEINFER_CONFIG names must be
        there; without one nothing is set, as with /dev/null.

        Raises:
            UsageError: naming the key or variable, the file, and what was found.
        """
        environ = os.environ if environ is None else environ
        path = config_path or default_config_path(environ)
        asked = config_path is None and bool(environ.get("TILEINFER_CONFIG"))
        return _merge(environ, path, _read(path, required=asked))


def default_config_path(environ: Mapping[str, str]) -> Path:
    """$TILEINFER_CONFIG, else tileinfer/config.toml under $XDG_CONFIG_HOME (default ~/.config)."""
    if explicit := environ.get("TILEINFER_CONFIG"):
        return expanded(explicit)
    return _xdg(environ, "XDG_CONFIG_HOME", ".config") / "tileinfer" / "config.toml"


def _xdg(environ: Mapping[str, str], variable: str, fallback: str) -> Path:
    """A base directory of the XDG specification, which says to ignore relative values."""
    value = Path(environ.get(variable, ""))
    return value if value.is_absolute() else _home(environ) / fallback


def _home(environ: Mapping[str, str]) -> Path:
    return home_folder(environ)


def _read(path: Path, *, required: bool) -> dict[str, Any]:
    if str(path) == os.devnull:
        return {}
    try:
        table = tomllib.loads(read_small(path, MAX_BYTES).decode("utf-8-sig"))
    except (FileNotFoundError, NotADirectoryError):  # HOME=/dev/null, as services have it
        if required:
            raise UsageError(f"TILEINFER_CONFIG: there is no file {path}") from None
        return {}
    except FileTooLargeError as error:
        raise UsageError(f"{path}: has {error.size:,} bytes, a config file may have {MAX_BYTES:,}") from None
    except RecursionError:
        raise UsageError(f"{path}: not usable TOML: nested too deeply") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not valid TOML: {error}") from None
    except OSError as error:
        raise UsageError(f"{path}: the config file can't be read: {error.strerror}") from None
    _check_table(table, _TOP_TYPES, path, "")
    _check_table(table.get("sampling", {}), _SAMPLING_TYPES, path, "sampling.")
    for alias, target in table.get("aliases", {}).items():
        _check_type(target, str, path, f"aliases.{alias}")
    return table


def _check_table(table: Mapping[str, Any], types: Mapping[str, type], path: Path, prefix: str) -> None:
    for key, value in table.items():
        if key not in types:
            raise UsageError(
                f"{path}: unknown setting {prefix + key!r}",
                hint=_nearest_key(key, types, prefix),
            )
        _check_type(value, types[key], path, prefix + key)


def _nearest_key(key: str, types: Mapping[str, type], prefix: str) -> str:
    from tileinfer_core.aliases import nearest  # noqa: PLC0415 - difflib, for a fault only

    near = nearest(key, types)[:1] or (nearest(key, _SAMPLING_TYPES)[:1] if not prefix else [])
    if not near:
        return f"known settings: {', '.join(prefix + known for known in types)}"
    return f"did you mean {near[0]}{'' if near[0] in types else ', in the table [sampling]'}?"


def _check_type(value: object, wanted: type, path: Path, key: str) -> None:
    fits = type(value) in ((int, float) if wanted is float else (wanted,))  # bool is not a number here
    if not fits:
        raise UsageError(f"{path}: {key} must be {_TYPE_WORDS[wanted]}, found {_as_toml(value)}")


def _as_toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _merge(environ: Mapping[str, str], path: Path, table: dict[str, Any]) -> Settings:
    def pick(key: str, variable: str | None, default: Any) -> Setting[Any]:
        if variable and environ.get(variable):
            return Setting(environ[variable], variable)
        return Setting(table[key], "config file") if key in table else Setting(default, "default")

    backend = pick("backend", "TILEINFER_BACKEND", "auto")
    if backend.value not in BACKENDS:
        raise UsageError(f"{backend.origin}: backend must be one of {', '.join(BACKENDS)}, found {backend.value!r}")
    kv = pick("kv", None, None)
    if kv.value not in (None, *KV_FORMATS):
        raise UsageError(f"{kv.origin}: kv must be one of {', '.join(KV_FORMATS)}, found {kv.value!r}")
    models_dir = _xdg(environ, "XDG_DATA_HOME", ".local/share") / "tileinfer"
    state_dir = _xdg(environ, "XDG_STATE_HOME", ".local/state") / "tileinfer"
    return Settings(
        config_path=path,
        model=pick("model", "TILEINFER_MODEL", DEFAULT_MODEL),
        backend=backend,
        context=_positive(pick("context", None, None), "context"),
        kv=kv,
        half_copies=pick("half_copies", None, True),
        max_tokens=_positive(pick("max_tokens", None, None), "max_tokens"),
        system=pick("system", None, None),
        models_dir=_folder(pick("models_dir", "TILEINFER_HOME", models_dir), environ),
        state_dir=_folder(pick("state_dir", None, state_dir), environ),
        compiler_timeout_seconds=pick("compiler_timeout_seconds", "TILEINFER_COMPILER_TIMEOUT_SECONDS", None),
        disk_cache=pick("disk_cache", "TILEINFER_DISK_CACHE", None),
        cache_dir=pick("cache_dir", "TILEINFER_CACHE_DIR", None),
        cache_size_bytes=pick("cache_size_bytes", "TILEINFER_CACHE_SIZE_BYTES", None),
        sampling={key: Setting(value, "config file") for key, value in table.get("sampling", {}).items()},
        aliases=dict(table.get("aliases", {})),
    )


def _positive(setting: Setting[int | None], key: str) -> Setting[int | None]:
    if setting.value is not None and setting.value < 1:
        raise UsageError(f"{setting.origin}: {key} must be at least 1, found {setting.value}")
    return setting


def _folder(setting: Setting[Any], environ: Mapping[str, str]) -> Setting[Path]:
    """The setting as an absolute path, with a leading ~ opened."""
    text = str(setting.value)
    if "\0" in text:
        raise UsageError(f"{setting.origin}: {text!r} can't be the name of a folder")
    path = _home(environ) / text[2:] if text.startswith("~/") else Path(text)
    return Setting(path.absolute(), setting.origin)
