"""tileinfer.json: the list of a stored model's files, written last. A folder without it is not complete.

    {"format": 1, "name": …, "source": …, "revision": …, "complete": true, "files": {path: {"bytes": n, "sha256": hex}}}

Further keys are allowed ("notes": what a conversion had to decide). Folders that TileInfer did not make have none.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tileinfer_core.errors import DamagedModelError
from tileinfer_core.files import sha256_of, write_atomic
from tileinfer_core.jsonfile import read_json_object

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MANIFEST_NAME = "tileinfer.json"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class FileRecord:
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """`source` says where the files came from: {"kind": "hub" | "pypi" | "gguf", …}."""

    name: str
    source: Mapping[str, Any]
    revision: str | None
    files: Mapping[str, FileRecord]
    notes: tuple[str, ...] = field(default=())

    @classmethod
    def load(cls, folder: Path) -> Manifest | None:
        """None when the folder has no manifest; DamagedModelError when it has one that can't be trusted."""
        path = folder / MANIFEST_NAME
        if not path.exists():
            return None
        data = read_json_object(path)
        match data:
            case {"format": 1, "name": str(name), "source": dict(source), "complete": True, "files": dict(files)}:
                records = {path_: _record(path, entry) for path_, entry in files.items()}
                revision = data.get("revision")
                notes = tuple(str(note) for note in data.get("notes") or ())
                return cls(name, source, None if revision is None else str(revision), records, notes)
            case _:
                raise DamagedModelError(f"{path}: not a manifest of format {FORMAT}", hint=_AGAIN)

    def write(self, folder: Path) -> None:
        files = {path: {"bytes": r.bytes, "sha256": r.sha256} for path, r in sorted(self.files.items())}
        data: dict[str, Any] = {
            "format": FORMAT,
            "name": self.name,
            "source": dict(self.source),
            "revision": self.revision,
            "complete": True,
            "files": files,
        }
        if self.notes:
            data["notes"] = list(self.notes)
        write_atomic(folder / MANIFEST_NAME, json.dumps(data, indent=2, ensure_ascii=False) + "\n")


_AGAIN = "fetch the model again with `tileinfer pull --force`"


def _record(path: Path, entry: object) -> FileRecord:
    match entry:
        case {"bytes": int(size), "sha256": str(sha256)}:
            return FileRecord(size, sha256)
        case _:
            raise DamagedModelError(f'{path}: an entry of "files" lacks bytes or sha256', hint=_AGAIN)


def record_of(path: Path) -> FileRecord:
    return FileRecord(path.stat().st_size, sha256_of(path))
