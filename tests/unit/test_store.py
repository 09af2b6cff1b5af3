"""Names to folders, the list, removal and checksums, all without a network call."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.gguf_files import TinyModel
from tests.hub_server import git_hash
from tileinfer_core import aliases
from tileinfer_core.errors import DamagedModelError, ModelError, ModelNotFoundError, TileinferError, UsageError
from tileinfer_core.hub_cache import cache_folder
from tileinfer_core.manifest import MANIFEST_NAME, Manifest, record_of
from tileinfer_core.pull_plan import exclusive
from tileinfer_core.settings import Settings
from tileinfer_core.store import Store

if TYPE_CHECKING:
    from tileinfer_core.progress import ProgressEvent

SHA = "a" * 40


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """An empty store. Any attempt to open a socket is an error, in every test of this file."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the store opened a socket")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.chdir(tmp_path)
    return Store(tmp_path / "store", aliases={"mine": "org/model", "file": "./t.gguf"}, cache=tmp_path / "hub")


def write_model(folder: Path, *, manifest: str | None = None, **config: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    save_file({"w": np.ones((4, 4), np.float32)}, folder / "model.safetensors")
    if manifest:
        records = {path.name: record_of(path) for path in folder.iterdir()}
        Manifest(manifest, {"kind": "test"}, SHA, records).write(folder)
    return folder


def write_cached(cache: Path, model: str, *, weights: bool = True, ref: bool = True) -> Path:
    """A model as the Hugging Face libraries leave it: blobs named after their hash, links in a snapshot."""
    base = cache / ("models--" + model.replace("/", "--"))
    snapshot = base / "snapshots" / SHA
    for folder in (base / "blobs", base / "refs", snapshot):
        folder.mkdir(parents=True)
    if ref:
        (base / "refs/main").write_text(SHA)
    config = b'{"model_type": "qwen3"}'
    (base / "blobs" / git_hash(config)).write_bytes(config)
    (snapshot / "config.json").symlink_to(base / "blobs" / git_hash(config))
    if weights:
        save_file({"w": np.ones(3, np.float32)}, base / "data")
        blob = base / "blobs" / hashlib.sha256((base / "data").read_bytes()).hexdigest()
        (base / "data").rename(blob)
        (snapshot / "model.safetensors").symlink_to(blob)
    return snapshot


# Resolving


def test_a_pulled_model(store: Store) -> None:
    folder = write_model(store.root / "org--model", manifest="org/model")
    for reference in ("org/model", "mine", "MINE"):
        found = store.resolve(reference)
        assert (found.name, found.path, found.kind, found.revision) == ("org/model", folder, "tileinfer", SHA)


def test_a_local_folder_stays_where_it_is(store: Store, tmp_path: Path) -> None:
    write_model(tmp_path / "local/model")
    for reference in ("local/model", "./local/model", str(tmp_path / "local/model")):
        found = store.resolve(reference)
        assert found.kind == "local"
        assert found.path.resolve() == tmp_path / "local/model"
    assert not store.root.exists()


def test_an_alias_wins_over_a_folder_of_the_same_name(store: Store, tmp_path: Path) -> None:
    write_model(tmp_path / "demo")
    with pytest.raises(ModelNotFoundError) as caught:
        store.resolve("demo")
    assert caught.value.hint == "fetch it: tileinfer pull demo"
    assert store.resolve("./demo").kind == "local"


def test_a_model_in_the_hugging_face_cache(store: Store) -> None:
    snapshot = write_cached(store.cache, "org/model")
    found = store.resolve("org/model")
    assert (found.kind, found.path, found.revision) == ("hub-cache", snapshot, SHA)
    write_model(store.root / "org--model", manifest="org/model")
    assert store.resolve("org/model").kind == "tileinfer"  # the store's own copy comes first


def test_a_cached_model_without_a_reference(store: Store) -> None:
    write_cached(store.cache, "org/model", ref=False)
    assert store.resolve("org/model").revision == SHA


def test_a_cached_config_alone_is_no_model(store: Store) -> None:
    write_cached(store.cache, "org/model", weights=False)
    with pytest.raises(ModelNotFoundError):
        store.resolve("org/model")
    assert store.list() == []


def test_a_gguf_file_is_converted_once(store: Store, tmp_path: Path) -> None:
    gguf = TinyModel().write(tmp_path / "t.gguf")
    events: list[ProgressEvent] = []
    first = store.resolve("t.gguf", events.append)
    assert events
    assert first.kind == "tileinfer"
    events.clear()
    for reference in ("./t.gguf", str(gguf), "file"):
        assert store.resolve(reference, events.append).path == first.path
    assert events == []
    time.sleep(0.01)
    TinyModel(arch="qwen3").write(gguf)  # another file under the same name
    os.utime(gguf)
    assert store.resolve("t.gguf").path != first.path


def test_a_gguf_file_with_an_awkward_name(store: Store, tmp_path: Path) -> None:
    TinyModel().write(tmp_path / "a [q8] é.GGUF")
    assert store.resolve("a [q8] é.GGUF").path.parent == store.root


def test_a_damaged_conversion(store: Store, tmp_path: Path) -> None:
    TinyModel().write(tmp_path / "t.gguf")
    folder = store.resolve("t.gguf").path
    (folder / "tokenizer.json").unlink()
    assert store.resolve("t.gguf").path == folder  # made again: the file it comes from is here
    assert (folder / "tokenizer.json").exists()
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    [finding] = store.verify("t.gguf")
    assert (finding.name, finding.cure) == ("model.safetensors", "tileinfer rm t.gguf")
    store.remove("t.gguf")
    store.resolve("t.gguf")
    assert store.verify("t.gguf")[0].status == "ok"


def test_two_processes_convert_one_file_once(store: Store, tmp_path: Path) -> None:
    TinyModel().write(tmp_path / "t.gguf")
    code = (
        "import sys; from pathlib import Path; from tileinfer_core.store import Store;"
        "events = []; Store(Path(sys.argv[1])).resolve('t.gguf', events.append); print(len(events) > 0)"
    )
    command = [sys.executable, "-c", code, str(store.root)]
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    both = [subprocess.Popen(command, cwd=tmp_path, env=environ, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert sorted(process.communicate(timeout=60)[0] for process in both) == ["False\n", "True\n"]
    assert [process.returncode for process in both] == [0, 0]


def test_a_model_that_is_being_pulled_is_not_removed(store: Store) -> None:
    folder = write_model(store.root / "org--model", manifest="org/model")
    with exclusive(folder, "org/model"), pytest.raises(TileinferError, match="another process is working on"):
        store.remove("org/model")
    assert folder.exists()


def test_a_damaged_gguf_leaves_nothing_in_the_store(store: Store, tmp_path: Path) -> None:
    gguf = TinyModel().write(tmp_path / "t.gguf")
    gguf.write_bytes(gguf.read_bytes()[:-100])
    with pytest.raises(DamagedModelError, match=r"t\.gguf"):
        store.resolve("t.gguf")
    assert store.list() == []


def test_an_unfinished_pull(store: Store) -> None:
    partial = write_model(store.root / "org--model.partial")
    sizes = {path.name: path.stat().st_size for path in partial.iterdir()}
    (partial / "tileinfer-pull.json").write_text(json.dumps({"files": {**sizes, "more.safetensors": 5}}))
    with pytest.raises(DamagedModelError, match=r"^org/model: incomplete, 2 of 3 files$") as caught:
        store.resolve("org/model")
    assert caught.value.hint == "run tileinfer pull org/model"
    [summary] = store.list()
    assert not summary.complete


def test_a_folder_without_a_manifest_is_not_complete(store: Store) -> None:
    write_model(store.root / "org--model")
    with pytest.raises(DamagedModelError, match="incomplete"):
        store.resolve("org/model")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 2}', '{"format": 1, "complete": false}', "[" * 9999])
def test_a_manifest_that_cannot_be_trusted(store: Store, text: str) -> None:
    folder = write_model(store.root / "org--model", manifest="org/model")
    (folder / MANIFEST_NAME).write_text(text)
    with pytest.raises(DamagedModelError, match=MANIFEST_NAME):
        store.resolve("org/model")
    assert [summary.complete for summary in store.list()] == [False]
    assert store.remove("org/model") > 0


def test_a_file_of_another_size_than_the_manifest_says(store: Store) -> None:
    folder = write_model(store.root / "org--model", manifest="org/model")
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"x")
    with pytest.raises(DamagedModelError, match=r"model\.safetensors: [\d,]+ bytes expected, [\d,]+ found"):
        store.resolve("org/model")
    [finding] = store.verify("org/model")
    assert finding.status == "problem"


def test_a_local_folder_with_a_missing_shard(store: Store, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "local")
    index = {"weight_map": {"w": "model.safetensors", "v": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(DamagedModelError, match=r"1 of 2 weight files; no model-2\.safetensors"):
        store.resolve("./local")


@pytest.mark.parametrize(
    ("reference", "error", "says"),
    [
        ("./nowhere", ModelNotFoundError, "no file or folder"),
        ("nowhere.gguf", ModelNotFoundError, "no file or folder"),
        ("../x", ModelNotFoundError, "no file or folder"),
        ("./empty", DamagedModelError, r"no config\.json"),
        ("empty", DamagedModelError, r"no config\.json"),
        ("./text.txt", UsageError, "is a file"),
        ("a[q8]", ModelNotFoundError, r"no model named a\[q8\]"),
        ("[/login]", ModelNotFoundError, r"\[/login\]"),
        ("org/../etc", ModelNotFoundError, "org/../etc"),
        ("a/b/c", ModelNotFoundError, "a/b/c"),
        ("", ModelNotFoundError, "''"),
        ("a\x1b[2J/b", ModelNotFoundError, r"\\x1b"),
        ("a\0b", ModelNotFoundError, r"\\x00"),
        ("a\nb/c", ModelNotFoundError, r"\\n"),
        ("x" * 5000, ModelNotFoundError, "xxx"),
        ("x/" + "y" * 5000, ModelNotFoundError, "yyy"),
        ("./" + "z" * 5000, ModelNotFoundError, "too long"),
        ("~/surely-not-here", ModelNotFoundError, "no file or folder"),
        ("org/model.partial", ModelNotFoundError, "org/model.partial"),
        ("con--fusing/name", ModelNotFoundError, "con--fusing"),
    ],
)
def test_references_that_lead_nowhere(
    store: Store, tmp_path: Path, reference: str, error: type[TileinferError], says: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.txt").touch()
    start = time.monotonic()
    with pytest.raises(error, match=says) as caught:
        store.resolve(reference)
    assert time.monotonic() - start < 5  # milliseconds; a network that is asked and does not answer takes longer
    assert "\x1b" not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("qwen3:0.6", "qwen3:0.6b"), ("demmo", "demo"), ("Qwen/Qwen3-0.6", "qwen3"), ("smollm2:135", "smollm2:135m")],
)
def test_near_names(store: Store, typed: str, meant: str) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        store.resolve(typed)
    assert meant in (caught.value.hint or "") or typed.startswith("Qwen/")


def test_near_names_among_the_models_here(store: Store) -> None:
    write_model(store.root / "org--Wonderful-7B", manifest="org/Wonderful-7B")
    with pytest.raises(ModelNotFoundError) as caught:
        store.resolve("other/wonderful-7b")
    assert caught.value.hint == "fetch it: tileinfer pull other/wonderful-7b (did you mean org/Wonderful-7B?)"


def test_every_shipped_alias_leads_to_a_name_the_hub_can_have() -> None:
    for alias, target in aliases.SHIPPED.items():
        assert aliases.lookup(alias.upper(), {}) == target
        assert target == aliases.DEMO or aliases.is_hub_id(target)


def test_an_own_alias_may_replace_a_shipped_one() -> None:
    assert aliases.lookup("qwen3:4b", {"Qwen3:4B": "me/better"}) == "me/better"


def test_settings_make_a_store(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text('[aliases]\nx = "org/model"\n')
    store = Store.from_settings(Settings.load({"HOME": str(tmp_path), "TILEINFER_HOME": "/models"}, config))
    assert store.root == Path("/models")
    assert store.canonical("x") == "org/model"


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"HOME": "/h"}, "/h/.cache/huggingface/hub"),
        ({"HOME": "/h", "XDG_CACHE_HOME": "/x"}, "/x/huggingface/hub"),
        ({"HOME": "/h", "HF_HOME": "/hf"}, "/hf/hub"),
        ({"HOME": "/h", "HF_HOME": "/hf", "HF_HUB_CACHE": "/c"}, "/c"),
    ],
)
def test_where_the_hugging_face_cache_is(environ: dict[str, str], expected: str) -> None:
    assert cache_folder(environ) == Path(expected)


# The list


def test_the_list(store: Store, tmp_path: Path) -> None:
    assert store.list() == []
    write_model(store.root / "Qwen--Qwen3-4B", manifest="Qwen/Qwen3-4B")
    groups = {"group_0": {"weights": {"num_bits": 8}}}
    quantised = {"quant_method": "compressed-tensors", "config_groups": groups}
    write_model(store.root / "org--small", manifest="org/small", quantization_config=quantised)
    write_cached(store.cache, "org/cached")
    TinyModel().write(tmp_path / "t.gguf")
    store.resolve("t.gguf")
    (store.root / "stray-file").touch()
    by_name = {summary.name: summary for summary in store.list()}
    assert by_name.keys() == {"Qwen/Qwen3-4B", "org/small", "org/cached", str(tmp_path / "t.gguf")}
    assert by_name["Qwen/Qwen3-4B"].aliases == ("qwen3:4b",)
    assert by_name["org/small"].quantization == "int8"
    assert by_name["Qwen/Qwen3-4B"].quantization is None
    assert by_name["org/cached"].kind == "hub-cache"
    assert all(summary.complete and summary.bytes > 80 and summary.files >= 2 for summary in by_name.values())


# Removing and verifying


def test_remove_frees_what_it_says(store: Store) -> None:
    folder = write_model(store.root / "org--model", manifest="org/model")
    write_model(store.root / "org--model.partial")
    size = sum(path.stat().st_size for path in store.root.rglob("*") if path.is_file())
    assert store.remove("mine") == size
    assert not folder.exists()
    assert list(store.root.iterdir()) == []
    with pytest.raises(ModelNotFoundError):
        store.remove("mine")


def test_remove_a_converted_file_keeps_the_file(store: Store, tmp_path: Path) -> None:
    gguf = TinyModel().write(tmp_path / "t.gguf")
    folder = store.resolve("t.gguf").path
    assert store.remove("./t.gguf") > 0
    assert gguf.exists()
    assert not folder.exists()


def test_remove_leaves_what_is_not_ours(store: Store, tmp_path: Path) -> None:
    local = write_model(tmp_path / "local")
    cached = write_cached(store.cache, "org/cached")
    with pytest.raises(UsageError, match="not in TileInfer's store"):
        store.remove("./local")
    with pytest.raises(UsageError, match="Hugging Face cache") as caught:
        store.remove("org/cached")
    assert caught.value.hint == "hf cache rm model/org/cached"
    assert local.exists()
    assert cached.exists()


@pytest.mark.parametrize("reference", ["..", ".", "/", "../..", "a[q8]", "", "x\0y", "org/.."])
def test_remove_never_follows_a_hostile_name(store: Store, tmp_path: Path, reference: str) -> None:
    write_model(store.root / "org--model", manifest="org/model")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises((UsageError, ModelNotFoundError)):
        store.remove(reference)
    assert sorted(tmp_path.rglob("*")) == before


def test_remove_unlinks_a_linked_model_folder(store: Store, tmp_path: Path) -> None:
    elsewhere = write_model(tmp_path / "elsewhere", manifest="org/model")
    store.root.mkdir()
    (store.root / "org--model").symlink_to(elsewhere)
    store.remove("org/model")
    assert elsewhere.exists()
    assert not (store.root / "org--model").is_symlink()


def test_verify_finds_a_flipped_byte(store: Store) -> None:
    folder = write_model(store.root / "org--model", manifest="org/model")
    assert [finding.status for finding in store.verify("org/model")] == ["ok"]
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    [finding] = store.verify("org/model")
    assert (finding.name, finding.status) == ("model.safetensors", "problem")
    assert finding.cure == "tileinfer pull org/model"


def test_verify_reports_progress(store: Store) -> None:
    write_model(store.root / "org--model", manifest="org/model")
    events: list[ProgressEvent] = []
    store.verify("org/model", events.append)
    assert events[-1].done == events[-1].total


def test_verify_a_cached_model_by_its_blob_names(store: Store) -> None:
    snapshot = write_cached(store.cache, "org/cached")
    assert [finding.status for finding in store.verify("org/cached")] == ["ok"]
    blob = (snapshot / "model.safetensors").resolve()
    data = bytearray(blob.read_bytes())
    data[-1] ^= 1
    blob.write_bytes(data)
    [finding] = store.verify("org/cached")
    assert (finding.name, finding.status) == ("model.safetensors", "problem")


def test_verify_a_local_folder_by_its_structure(store: Store, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "local")
    assert store.verify("./local")[0].status == "ok"
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(100)
    [finding] = store.verify("./local")
    assert finding.status == "problem"
    assert "100 found" in finding.detail
    with pytest.raises(ModelError):
        store.verify("./local/..")
