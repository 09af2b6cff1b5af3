"""Which models are on this disk, and where: names to folders, the list, removal, checksums. No network call, ever.

    ROOT/ORG--NAME/           pulled from the Hub             ROOT/demo/      the demo model
    ROOT/ORG--NAME-int8/      quantised from that model       ROOT/….partial  unfinished work, never served
    ROOT/gguf--STEM-KEY/      converted from a .gguf file

A complete folder has a manifest (tileinfer.json), written last. Local folders and the Hugging Face cache are used
where they are and never changed.
"""

from __future__ import annotations

import hashlib
import json
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from tileinfer_core import hub_cache
from tileinfer_core.aliases import DEMO, INT8_SUFFIX, SHIPPED, aliases_of, is_hub_id, is_stored_name, lookup, nearest
from tileinfer_core.completeness import PLAN_NAME, check_files, quantization, unfinished, whole_manifest
from tileinfer_core.errors import DamagedModelError, ModelError, ModelNotFoundError, UsageError
from tileinfer_core.files import PARTIAL, disk_errors, expanded, folder_bytes, remove_tree
from tileinfer_core.manifest import MANIFEST_NAME, Manifest
from tileinfer_core.progress import OnProgress, silent
from tileinfer_core.pull_plan import exclusive
from tileinfer_core.verify import verify_folder
from tileinfer_core.weight_index import weight_files

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tileinfer_core.findings import Finding
    from tileinfer_core.settings import Settings

Kind = Literal["tileinfer", "hub-cache", "local"]
_GGUF_PREFIX = "gguf--"
Paths: TypeAlias = list[Path]  # the class has a method named list
Findings: TypeAlias = "list[Finding]"


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model that can be loaded. `name` is the Hub id, "demo", or the path the user gave."""

    name: str
    path: Path
    kind: Kind
    revision: str | None


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """One line of the list. `modified` is in seconds since 1970; `quantization` is "int8", …, or None."""

    name: str
    kind: Kind
    path: Path
    bytes: int
    files: int
    complete: bool
    aliases: tuple[str, ...]
    quantization: str | None
    modified: float


class Store:
    """The models below `root`, seen together with the Hugging Face cache and local paths."""

    def __init__(self, root: Path, *, aliases: Mapping[str, str] | None = None, cache: Path | None = None) -> None:
        self.root = root
        self.aliases = dict(aliases or {})
        self.cache = cache or hub_cache.cache_folder()

    @classmethod
    def from_settings(cls, settings: Settings) -> Store:
        return cls(settings.models_dir.value, aliases=settings.aliases)

    # Names

    def canonical(self, reference: str) -> str:
        """The model an alias stands for; other references as they are. Aliases may lead to a path."""
        return lookup(reference, self.aliases) or reference

    def folder_of(self, model: str) -> Path:
        """Where a pulled model lies or would lie; `model` must be a Hub id or the demo."""
        if not is_stored_name(model):
            raise UsageError(f"{_shown(model)} is not a model on the Hub: expected ORGANISATION/NAME")
        return self.root / model.replace("/", "--")

    def int8_target(self, source: ModelFolder) -> tuple[str, Path]:
        """(name, folder) of what `quantize` makes of a model: in the store, or beside a local folder or file."""
        if is_stored_name(source.name):
            name = source.name + INT8_SUFFIX
            return name, self.folder_of(name)
        path = expanded(source.name).absolute()
        target = path.with_name((path.stem if path.suffix == ".gguf" else path.name) + INT8_SUFFIX)
        return str(target), target

    def known_names(self) -> list[str]:
        """Everything a user could mean: aliases, and models on this disk."""
        return sorted({*SHIPPED, *self.aliases, *self._stored_names(), *hub_cache.models(self.cache)})

    def names_here(self) -> list[str]:
        """The models on this disk by every name they have, without a look at their files."""
        models = {*self._stored_names(), *hub_cache.models(self.cache)}
        return sorted({*models, *self.aliases, *(alias for name in models for alias in aliases_of(name, self.aliases))})

    # Resolving

    def resolve(self, reference: str, on_progress: OnProgress = silent) -> ModelFolder:
        """The folder of a model named by an alias, a Hub id, a folder or a .gguf file (converted once, then kept).

        Raises:
            ModelNotFoundError: nothing here by that name, with the command that fetches it or the names it resembles.
            DamagedModelError: only part of it is here.
        """
        check_reference(reference)
        model = self.canonical(reference)
        path = local_path(model) if lookup(reference, {}) is None else None
        if path is not None:
            return self._local(path, model, on_progress)
        if is_stored_name(model):
            return self._pulled(model, reference)
        if len(model) < 256 and Path(model).is_dir():
            raise DamagedModelError(f"{model}: no config.json, so this is not a model folder")
        raise self.not_found(reference)

    def not_found(self, reference: str) -> ModelNotFoundError:
        model = self.canonical(reference)
        near = self._near(reference)
        base = reference[: -len(INT8_SUFFIX)]
        if model.endswith(INT8_SUFFIX) and self.canonical(base) + INT8_SUFFIX == model:
            hint = f"make it: tileinfer quantize {base}"
        elif model == DEMO or lookup(reference, self.aliases) or lookup(model, {}) or model in SHIPPED.values():
            hint = f"fetch it: tileinfer pull {reference}"
        elif is_hub_id(model):
            hint = f"fetch it: tileinfer pull {reference}" + (f" ({near})" if near else "")
        else:
            hint = near or "`tileinfer list` shows the models on this disk"
        return ModelNotFoundError(f"no model named {_shown(reference)} on this disk", hint=hint)

    def no_such_name(self, reference: str) -> ModelNotFoundError:
        """For a pull: what is neither an alias nor a name that the Hub could have."""
        hint = self._near(reference) or f"aliases: {', '.join(sorted({*SHIPPED, *self.aliases}))}"
        return ModelNotFoundError(f"{_shown(reference)} is neither an alias nor ORGANISATION/NAME", hint=hint)

    def _near(self, reference: str) -> str | None:
        model = self.canonical(reference)
        known = {name for name in self.known_names() if self.canonical(name) != model}
        return f"did you mean {' or '.join(names)}?" if (names := nearest(reference, known)) else None

    def _pulled(self, model: str, reference: str) -> ModelFolder:
        folder = self.folder_of(model)
        manifest = Manifest.load(folder)
        if manifest:
            check_files(model, folder, manifest)
            return ModelFolder(model, folder, "tileinfer", manifest.revision)
        cached = hub_cache.snapshot(self.cache, model)
        if cached and hub_cache.is_complete(cached[0]):
            return ModelFolder(model, cached[0], "hub-cache", cached[1])
        progress = unfinished(folder)
        if progress:
            whole, total = progress
            raise DamagedModelError(
                f"{model}: incomplete, {whole} of {total} files", hint=f"run tileinfer pull {model}"
            )
        if folder.exists():
            raise DamagedModelError(f"{model}: incomplete, no manifest in {folder}", hint=f"run tileinfer pull {model}")
        raise self.not_found(reference)

    def _local(self, path: Path, name: str, on_progress: OnProgress) -> ModelFolder:
        found = _file_or_folder(path, name)
        if found == "file" and path.suffix.lower() == ".gguf":
            return self._converted(path, name, on_progress)
        if found == "file":
            raise UsageError(f"{_shown(name)} is a file; expected a model folder or a .gguf file")
        if not (path / "config.json").is_file():
            raise DamagedModelError(f"{path}: no config.json, so this is not a model folder")
        weight_files(path)  # says which file is missing, if one is
        manifest = Manifest.load(path)
        kind: Kind = "tileinfer" if manifest and path.parent == self.root else "local"
        return ModelFolder(name, path, kind, manifest.revision if manifest else None)

    def _converted(self, gguf: Path, name: str, on_progress: OnProgress) -> ModelFolder:
        """The converted copy of a .gguf file. Path, size and time make the key: hashing 5 GB each start takes 5 s."""
        status = gguf.stat()
        source = {"kind": "gguf", "path": str(gguf.absolute()), "bytes": status.st_size, "mtime_ns": status.st_mtime_ns}
        key = hashlib.sha256(json.dumps(source).encode()).hexdigest()[:12]
        stem = re.sub(r"[^A-Za-z0-9._-]+", "-", gguf.stem)[:60]
        folder = self.root / f"{_GGUF_PREFIX}{stem}-{key}"
        manifest = whole_manifest(folder) or self._convert(gguf, folder, source, on_progress)
        return ModelFolder(name, folder, "tileinfer", manifest.revision)

    def _convert(self, gguf: Path, folder: Path, source: dict[str, Any], on_progress: OnProgress) -> Manifest:
        """Convert, unless a second process did it while this one waited for the lock."""
        from tileinfer_core.gguf_import import convert  # noqa: PLC0415 - 100 ms that only this needs

        with exclusive(folder, gguf.name, wait=True):
            if whole_manifest(folder) is None:
                convert(gguf, folder, on_progress, name=gguf.stem, source=source)
        manifest = Manifest.load(folder)
        assert manifest is not None  # noqa: S101 - convert has written it
        return manifest

    # The list

    def _stored_names(self) -> Iterator[str]:
        for folder in self._folders():
            if folder.name == DEMO or not folder.name.startswith(_GGUF_PREFIX):
                yield _name_of(folder)

    def _folders(self) -> Paths:
        """Folders of models, and unfinished ones that have no finished folder beside them."""
        try:
            folders = sorted(path for path in self.root.iterdir() if path.is_dir())
        except OSError:
            return []
        names = {path.name for path in folders}
        return [
            path
            for path in folders
            if not path.name.endswith((".old", ".download"))
            and not (path.name.endswith(PARTIAL) and path.name.removesuffix(PARTIAL) in names)
        ]

    def list(self) -> list[ModelSummary]:
        """Every model here: pulled and converted ones, and the runnable ones of the Hugging Face cache."""
        summaries = [self._summary(folder) for folder in self._folders()]
        known = {summary.name for summary in summaries if summary.complete}
        for name in hub_cache.models(self.cache):
            found = hub_cache.snapshot(self.cache, name)
            if found and name not in known:
                summaries.append(self._summarise(name, "hub-cache", found[0], complete=True))
        return sorted(summaries, key=lambda summary: summary.name.lower())

    def _summary(self, folder: Path) -> ModelSummary:
        try:
            manifest = Manifest.load(folder)
            complete = manifest is not None
            name = manifest.name if manifest else _name_of(folder)
            if manifest:
                check_files(name, folder, manifest)
        except ModelError:
            name, complete = _name_of(folder), False
        if folder.name.startswith(_GGUF_PREFIX):
            name = str(manifest.source.get("path", name)) if complete and manifest else name
        return self._summarise(name, "tileinfer", folder, complete=complete)

    def _summarise(self, name: str, kind: Kind, folder: Path, *, complete: bool) -> ModelSummary:
        files = [path for path in folder.rglob("*") if path.is_file() and path.name not in (MANIFEST_NAME, PLAN_NAME)]
        return ModelSummary(
            name=name,
            kind=kind,
            path=folder,
            bytes=folder_bytes(folder),
            files=len(files),
            complete=complete,
            aliases=aliases_of(name, self.aliases),
            quantization=quantization(folder),
            modified=folder.stat().st_mtime,
        )

    # Removing and verifying

    def remove(self, reference: str) -> int:
        """Delete a model of this store, finished or not; returns the bytes freed. Of a .gguf file it is the converted
        copy: the file stays.

        Raises:
            UsageError: a local folder, or a model of the Hugging Face cache: neither is TileInfer's to delete.
            ModelNotFoundError: nothing by that name.
        """
        check_reference(reference)
        freed = 0
        for base, folders in self._removable(reference).items():
            with exclusive(base, reference), disk_errors(self.root):
                for folder in folders:
                    freed += folder_bytes(folder)
                    remove_tree(folder)
        return freed

    def _removable(self, reference: str) -> dict[Path, Paths]:
        """{model folder: what there is of it}."""
        model = self.canonical(reference)
        converted = [f for f in self._folders() if f.name.startswith(_GGUF_PREFIX) and _is_copy_of(f, model)]
        if converted:
            return {folder: [folder] for folder in converted}
        if lookup(reference, {}) is None and (path := local_path(model)) is not None:
            _file_or_folder(path, model)
            raise UsageError(
                f"{path} is not in TileInfer's store, so it is left alone", hint="delete it yourself if you mean to"
            )
        if not is_stored_name(model):
            raise self.not_found(reference)
        folder = self.folder_of(model)
        suffixes = ("", PARTIAL, ".old", ".download")
        found = [path for path in (folder.with_name(folder.name + suffix) for suffix in suffixes) if path.exists()]
        if not found and hub_cache.snapshot(self.cache, model):
            raise UsageError(
                f"{model} is in the Hugging Face cache, which other tools use too",
                hint=f"hf cache rm model/{model}",
            )
        if not found:
            raise self.not_found(reference)
        return {folder: found}

    def verify(self, reference: str, on_progress: OnProgress = silent) -> Findings:
        """Check every byte that can be checked; one finding per damaged file, or one that says all is well.

        Models of the store are compared with their manifest, cached ones with the hashes their files are named
        after. A local folder has no checksums: only the structure of its weight files is checked.
        """
        return verify_folder(self.resolve_unchecked(reference), on_progress)

    def resolve_unchecked(self, reference: str) -> ModelFolder:
        """Like `resolve`, but a stored model whose files have the wrong size is returned too: verify reports on it."""
        model = self.canonical(reference)
        if is_stored_name(model):
            folder = self.folder_of(model)
            manifest = Manifest.load(folder)
            if manifest:
                return ModelFolder(model, folder, "tileinfer", manifest.revision)
        return self.resolve(reference)

    def folder_to_examine(self, reference: str) -> ModelFolder:
        """Like `resolve_unchecked`, and a folder on this disk is taken as it is, whatever it lacks."""
        check_reference(reference)
        path = expanded(reference)
        try:
            is_folder = path.is_dir()
        except OSError:  # a name too long for the file system is no path
            is_folder = False
        if is_folder and lookup(reference, self.aliases) is None:
            return ModelFolder(reference, path, "local", None)
        return self.resolve_unchecked(reference)


def check_reference(reference: str) -> None:
    """Raises ModelNotFoundError for what can't be the name of anything: nothing at all, or control characters."""
    if not reference or not reference.isprintable():
        raise ModelNotFoundError(f"no model is named {reference!r}")


def local_path(reference: str) -> Path | None:
    """The path a reference names, or None when it is a name. A folder that exists is a path; so is ./x, ~/x, x.gguf."""
    path = expanded(reference) if reference.startswith("~/") else Path(reference)
    explicit = reference.startswith(("/", "./", "../", "~/")) or reference in (".", "..") or "\\" in reference
    try:
        exists = path.exists()
    except OSError:  # a name too long for the file system is no path
        exists = False
    if explicit or path.suffix.lower() == ".gguf" or (exists and (path / "config.json").exists()):
        return path
    return None


def _file_or_folder(path: Path, name: str) -> Literal["file", "folder"]:
    """Raises ModelNotFoundError for a path that is not there or can't be looked at."""
    try:
        return "folder" if stat.S_ISDIR(path.stat().st_mode) else "file"
    except (FileNotFoundError, NotADirectoryError):
        raise ModelNotFoundError(f"no file or folder named {_shown(name)}") from None
    except OSError as error:
        raise ModelNotFoundError(f"{_shown(name)}: {error.strerror}") from error


def _shown(name: str) -> str:
    """A name for an error message: as typed, or quoted where it has characters that a terminal would act on."""
    return name if name.isprintable() and len(name) <= 120 else repr(name[:120])


def _name_of(folder: Path) -> str:
    name = folder.name.removesuffix(PARTIAL)
    return name if name.startswith(_GGUF_PREFIX) else name.replace("--", "/", 1)


def _is_copy_of(folder: Path, reference: str) -> bool:
    """Whether a converted folder was made of the .gguf file a user names, by path or by the folder's own name."""
    if reference == folder.name:
        return True
    try:
        manifest = Manifest.load(folder)
    except ModelError:
        return False
    return manifest is not None and manifest.source.get("path") == str(expanded(reference).absolute())
