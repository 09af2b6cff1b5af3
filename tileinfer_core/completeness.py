"""Is a model folder whole? By its manifest, by sizes (not by hashes: this runs at every start), by what a pull left."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tileinfer_core.errors import DamagedModelError, ModelError
from tileinfer_core.files import PARTIAL
from tileinfer_core.jsonfile import read_json_object
from tileinfer_core.manifest import Manifest

if TYPE_CHECKING:
    from pathlib import Path

PLAN_NAME = "tileinfer-pull.json"  # in a .partial folder: what an unfinished pull was fetching


def check_files(name: str, folder: Path, manifest: Manifest) -> None:
    """Raises DamagedModelError unless every file of the manifest is there with its size."""
    absent, wrong = [], []
    for path, record in manifest.files.items():
        try:
            size = (folder / path).stat().st_size
        except OSError:
            absent.append(path)
            continue
        if size != record.bytes:
            wrong.append(f"{folder / path}: {record.bytes:,} bytes expected, {size:,} found")
    hint = f"run {cure(name, manifest)}"
    if absent:
        whole, total = len(manifest.files) - len(absent), len(manifest.files)
        raise DamagedModelError(f"{name}: incomplete, {whole} of {total} files; no {', '.join(absent[:3])}", hint=hint)
    if wrong:
        raise DamagedModelError(wrong[0], hint=hint)


def cure(name: str, manifest: Manifest | None) -> str:
    """The command that makes the files of a stored model again."""
    kind = manifest.source.get("kind") if manifest else None
    if kind == "gguf":
        return f"tileinfer rm {name}"  # it is converted again on its next use
    if manifest and kind == "int8":
        return f"tileinfer quantize {manifest.source.get('model')} --force"
    return f"tileinfer pull {name}"


def whole_manifest(folder: Path) -> Manifest | None:
    """The manifest of a folder whose files are all there; None for one that must be made (again)."""
    try:
        manifest = Manifest.load(folder)
        if manifest:
            check_files(folder.name, folder, manifest)
    except ModelError:
        return None
    return manifest


def unfinished(folder: Path) -> tuple[int, int] | None:
    """(whole files, all files) of an interrupted pull into `folder`, or None when there is none."""
    partial = folder.with_name(folder.name + PARTIAL)
    try:
        planned = read_json_object(partial / PLAN_NAME)["files"]
        sizes = {str(path): int(size) for path, size in planned.items()}
    except (ModelError, ValueError, KeyError, TypeError, AttributeError):
        return None
    whole = sum((partial / path).is_file() and (partial / path).stat().st_size == size for path, size in sizes.items())
    return whole, len(sizes)


def quantization(folder: Path) -> str | None:
    """How the weights are quantised, by config.json; None when they are not, or when that can't be told."""
    try:
        config: Any = read_json_object(folder / "config.json")
        section = config.get("quantization_config") or config.get("compression_config")
        if not section:
            return None
        groups: dict[str, Any] = section.get("config_groups", {})
        weights: dict[str, Any] = next(iter(groups.values()))["weights"] if groups else {}
        bits, kind = weights.get("num_bits"), weights.get("type", "int")
        return f"{kind}{bits}" if bits else str(section.get("quant_method"))
    except (ModelError, AttributeError, TypeError, KeyError):
        return None
