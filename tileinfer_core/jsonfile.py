"""Reads a JSON object from a file that may be hostile: damaged, truncated, huge, or nested a million deep.

Everything that goes wrong is a DamagedModelError with the file's name and the reason. Duplicate keys are refused,
because which one wins would depend on the reader. A byte order mark is accepted: Windows editors write one.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tileinfer_core.errors import DamagedModelError
from tileinfer_core.files import FileTooLargeError, read_small

if TYPE_CHECKING:
    from pathlib import Path

FETCH_AGAIN = "copy the model here again, or fetch it with `tileinfer pull`"
MAX_BYTES = 256 << 20  # the largest tokenizer.json in the wild has about 35 MB


def read_json_object(path: Path, *, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """The object in the file.

    Raises:
        DamagedModelError: absent, unreadable, too large, not UTF-8, not JSON, not an object, or a key given twice.
    """
    try:
        return parse_json_object(read_small(path, max_bytes), str(path))
    except FileNotFoundError:
        raise DamagedModelError(f"{path}: missing", hint=FETCH_AGAIN) from None
    except FileTooLargeError as error:
        raise DamagedModelError(f"{path}: has {error.size:,} bytes, expected at most {max_bytes:,}") from None
    except OSError as error:
        raise DamagedModelError(f"{path}: can't be read: {error.strerror}") from error


def parse_json_object(raw: bytes, where: str) -> dict[str, Any]:
    """The object in `raw`; `where` names it in errors."""
    try:
        value = json.loads(raw.decode("utf-8-sig"), object_pairs_hook=_unique)
    except _DuplicateKeyError as error:
        raise DamagedModelError(f"{where}: the key {error} is there twice") from None
    except RecursionError:
        raise DamagedModelError(f"{where}: not usable JSON: nested too deeply") from None
    except ValueError as error:  # JSONDecodeError, UnicodeDecodeError, an integer of too many digits
        raise DamagedModelError(f"{where}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise DamagedModelError(f"{where}: expected a JSON object, found {type(value).__name__}")
    return value


class _DuplicateKeyError(Exception):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        names = [name for name, _ in pairs]
        raise _DuplicateKeyError(repr(next(name for name in names if names.count(name) > 1)))
    return table
