"""Which files of a folder hold its weights. Needs no NumPy: commands that look for models start without it.

The index (model.safetensors.index.json) is the authority where there is one: files it does not name are not read.
Pickled weights (.bin, .pth) are never read: they can run code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tileinfer_core.errors import DamagedModelError, UnsupportedModelError
from tileinfer_core.jsonfile import read_json_object

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


def weight_files(folder: Path) -> dict[Path, frozenset[str] | None]:
    """The weight files of a folder, each with the tensor names the index places there (None: no index).

    Raises:
        DamagedModelError: files that the index names and the folder does not have, or no weights at all.
        UnsupportedModelError: weights in another format than safetensors.
    """
    index = folder / INDEX_NAME
    if index.exists():
        placed = read_index(index)
        absent = sorted(name for name in placed if not (folder / name).is_file())
        if absent:
            raise DamagedModelError(
                f"{folder}: incomplete, {len(placed) - len(absent)} of {len(placed)} weight files; no {some(absent)}",
                hint="fetch the missing files with `tileinfer pull`",
            )
        return {folder / name: frozenset(names) for name, names in placed.items()}
    if (folder / SINGLE_NAME).is_file():
        return {folder / SINGLE_NAME: None}
    return dict.fromkeys(_without_index(folder))


def _without_index(folder: Path) -> list[Path]:
    """A folder with neither index nor model.safetensors: one file of another name will do, several are ambiguous."""
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found
    if found:
        raise DamagedModelError(f"{folder}: {len(found)} safetensors files but no {INDEX_NAME} that says what is where")
    for pattern in ("*.bin", "*.pth", "*.pt", "*.gguf"):
        for other in sorted(folder.glob(pattern)):
            raise UnsupportedModelError(
                f"{folder}: no safetensors files, only {other.name}",
                hint="name a .gguf file itself as the model"
                if pattern == "*.gguf"
                else "look for a safetensors version of this model",
            )
    raise DamagedModelError(f"{folder}: no weights ({SINGLE_NAME} or {INDEX_NAME}) in this folder")


def read_index(path: Path) -> dict[str, list[str]]:
    """{file name: tensor names} of an index. File names that lead out of the folder are refused."""
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise DamagedModelError(f"{path}: not a safetensors index: no weight_map with entries")
    placed: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or "/" in file or "\\" in file or not file.endswith(".safetensors"):
            raise DamagedModelError(
                f"{path}: names {file!r} as a weight file, expected a .safetensors file of this folder"
            )
        placed.setdefault(file, []).append(name)
    return placed


def some(items: Sequence[str], limit: int = 4) -> str:
    """The first few names; what a file calls its tensors may hold anything, so odd ones are quoted."""
    rest = len(items) - limit
    return ", ".join(item if item.isprintable() else repr(item) for item in items[:limit]) + (
        f", and {rest} more" if rest > 0 else ""
    )
