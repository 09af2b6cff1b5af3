"""Are a model's files what they were when they came? By SHA-256 where there is one, by structure where there is not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tileinfer_core import hub_cache
from tileinfer_core.completeness import cure as cure_for
from tileinfer_core.errors import ModelError
from tileinfer_core.files import sha256_of
from tileinfer_core.findings import Finding
from tileinfer_core.manifest import Manifest
from tileinfer_core.progress import OnProgress, ProgressEvent

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tileinfer_core.store import ModelFolder


def verify_folder(folder: ModelFolder, on_progress: OnProgress) -> list[Finding]:
    """One finding per damaged file, or a single one that says what was checked and found whole."""
    manifest = Manifest.load(folder.path)
    cure = cure_for(folder.name, manifest) if folder.kind != "local" or manifest else None
    if manifest:
        problems = list(_by_manifest(folder, manifest, cure, on_progress))
        total = sum(record.bytes for record in manifest.files.values())
        made = "written" if manifest.source.get("kind") in ("int8", "gguf") else "fetched"
        detail = f"{len(manifest.files)} files, {total:,} bytes, all as they were {made}"
    elif folder.kind == "hub-cache":
        problems = list(_by_blob_names(folder, cure))
        detail = "all files match their hashes"
    else:
        problems = []
        detail = "the weight files are whole; there are no checksums to compare"
    problems = problems or list(_structure(folder, cure))
    return problems or [Finding(folder.name, "ok", detail)]


def _by_manifest(
    folder: ModelFolder, manifest: Manifest, cure: str | None, on_progress: OnProgress
) -> Iterator[Finding]:
    total = sum(record.bytes for record in manifest.files.values())
    done = 0

    def step(count: int) -> None:
        nonlocal done
        done += count
        on_progress(ProgressEvent("verify", min(done, total), total, "bytes"))

    for path, record in sorted(manifest.files.items()):
        try:
            size = (folder.path / path).stat().st_size
            if size != record.bytes:
                yield Finding(path, "problem", f"{record.bytes:,} bytes expected, {size:,} found", cure)
            elif sha256_of(folder.path / path, step) != record.sha256:
                yield Finding(path, "problem", "its SHA-256 is not the recorded one", cure)
        except OSError as error:
            yield Finding(path, "problem", error.strerror or str(error), cure)


def _by_blob_names(folder: ModelFolder, cure: str | None) -> Iterator[Finding]:
    for path in sorted(path for path in folder.path.rglob("*") if path.is_file()):
        what = hub_cache.damage(path)
        if what:
            yield Finding(path.name, "problem", what, cure)


def _structure(folder: ModelFolder, cure: str | None) -> Iterator[Finding]:
    from tileinfer_core.weights import WeightFiles  # noqa: PLC0415 - it needs NumPy, which a list of models does not

    try:
        WeightFiles.open(folder.path)
    except ModelError as error:
        yield Finding("weights", "problem", str(error), cure)
