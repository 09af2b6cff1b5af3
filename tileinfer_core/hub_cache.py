"""Models that other tools have left in the Hugging Face cache: found by reading folders, without any network call.

Layout: models--ORG--NAME/refs/main names a commit; snapshots/COMMIT/ holds links into blobs/, whose names are the
SHA-256 of large files and the Git hash of small ones. TileInfer reads this cache and never writes or deletes in it.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from tileinfer_core.errors import ModelError
from tileinfer_core.files import FileTooLargeError, expanded, home_folder, read_small, sha256_of
from tileinfer_core.weight_index import weight_files

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_COMMIT = re.compile(r"[0-9a-f]{40}")


def cache_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Where the Hugging Face libraries keep models: $HF_HUB_CACHE, else hub/ in $HF_HOME or ~/.cache/huggingface."""
    environ = os.environ if environ is None else environ
    if explicit := environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE"):
        return expanded(explicit)
    if home := environ.get("HF_HOME"):
        return expanded(home) / "hub"
    base = environ.get("XDG_CACHE_HOME") or str(home_folder(environ) / ".cache")
    return Path(base) / "huggingface" / "hub"


def snapshot(cache: Path, model: str) -> tuple[Path, str] | None:
    """(folder, commit) of a model in the cache: the commit that refs/main names, else the newest one there."""
    base = cache / ("models--" + model.replace("/", "--"))
    try:
        commit = read_small(base / "refs" / "main", 4096).decode().strip()
    except (OSError, FileTooLargeError, UnicodeDecodeError):
        commit = ""
    if _COMMIT.fullmatch(commit) and (base / "snapshots" / commit).is_dir():
        return base / "snapshots" / commit, commit
    try:
        folders = [path for path in (base / "snapshots").iterdir() if path.is_dir()]
    except OSError:
        return None
    newest = max(folders, key=lambda path: path.stat().st_mtime, default=None)
    return (newest, newest.name) if newest else None


def is_complete(folder: Path) -> bool:
    """Whether a snapshot has what a model needs; libraries often fetch only a config or a tokenizer."""
    if not (folder / "config.json").is_file():
        return False
    try:
        return bool(weight_files(folder))
    except ModelError:
        return False


def models(cache: Path) -> Iterator[str]:
    """Names of the cached models that could run."""
    try:
        folders = sorted(path.name for path in cache.iterdir() if path.name.startswith("models--"))
    except OSError:
        return
    for folder in folders:
        name = folder.removeprefix("models--").replace("--", "/", 1)
        found = snapshot(cache, name)
        if found and "/" in name and is_complete(found[0]):
            yield name


def damage(path: Path) -> str | None:
    """What is wrong with a cached file, by the hash that its blob is named after; None when it is whole."""
    blob = path.resolve()
    if re.fullmatch(r"[0-9a-f]{64}", blob.name):
        found = sha256_of(blob)
    elif _COMMIT.fullmatch(blob.name):
        found = git_hash(blob)
    else:
        return None
    return None if found == blob.name else f"its hash is {found[:12]}…, expected {blob.name[:12]}…"


def git_hash(path: Path) -> str:
    """The hash Git gives a file: SHA-1 of "blob SIZE\\0" and the content. It identifies, it does not protect."""
    digest = hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
