"""Pulls with the real Hub client against a small Hub on loopback."""

from __future__ import annotations

import json
import os
import socket
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import save

from tests.hub_server import TOKEN, HubServer
from tileinfer_core import download
from tileinfer_core.errors import (
    AccessError,
    DamagedModelError,
    DiskError,
    ModelNotFoundError,
    TileinferError,
    UnsupportedModelError,
    UsageError,
)
from tileinfer_core.hub import execute_pull, plan_pull
from tileinfer_core.manifest import Manifest
from tileinfer_core.pull_plan import exclusive
from tileinfer_core.store import Store

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tileinfer_core.progress import ProgressEvent

NAME = "org/tiny-model"
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


def model_files() -> dict[str, bytes]:
    """Two shards of about 3 MB and what belongs to them, with things beside that must not be fetched."""
    rng = np.random.default_rng(0)
    shards = [save({f"w{i}": rng.normal(size=(800, 1000)).astype(np.float32)}) for i in range(2)]
    index = {"weight_map": {"w0": SHARDS[0], "w1": SHARDS[1]}}
    return {
        "config.json": b'{"model_type": "llama"}',
        "generation_config.json": b"{}",
        "tokenizer.json": b'{"x": 1}',
        "tokenizer_config.json": b"{}",
        "chat_template.jinja": b"{{ messages }}",
        "model.safetensors.index.json": json.dumps(index).encode(),
        SHARDS[0]: shards[0],
        SHARDS[1]: shards[1],
        "README.md": b"hello",
        "pytorch_model.bin": b"\x80\x04",
        "model.safetensors": b"stray",
        "consolidated.safetensors": b"stray",
        "onnx/model.onnx": b"x",
        "model-q4.gguf": b"GGUF",
        "original/params.json": b"{}",
    }


WANTED = {
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
    "model.safetensors.index.json", *SHARDS,
}  # fmt: skip


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    return model_files()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: dict[str, bytes]) -> Iterator[HubServer]:
    with HubServer() as server:
        server.add(NAME, files)
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.setattr(download.time, "sleep", lambda _seconds: None)
        yield server


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store", cache=tmp_path / "cache")


def pull(store: Store, name: str = NAME, *, force: bool = False) -> Path:
    return execute_pull(plan_pull(store, name, force=force)).path


def test_only_what_a_model_needs_is_fetched(hub: HubServer, store: Store, files: dict[str, bytes]) -> None:
    plan = plan_pull(store, NAME)
    assert {file.path for file in plan.files} == WANTED
    assert plan.download_bytes == plan.total_bytes == sum(len(files[name]) for name in WANTED)
    assert plan.fits
    assert plan.free_bytes > 0
    assert plan.config == {"model_type": "llama"}
    events: list[ProgressEvent] = []
    folder = execute_pull(plan, events.append)
    assert (folder.name, folder.kind, folder.revision) == (NAME, "tileinfer", hub.repos[NAME].commit)
    on_disk = {path.name: path.read_bytes() for path in folder.path.iterdir()}
    assert on_disk.keys() == WANTED | {"tileinfer.json"}
    assert all(on_disk[name] == files[name] for name in WANTED)
    assert [e.done for e in events] == sorted(e.done for e in events)
    assert (events[0].done, events[-1].done) == (0, plan.total_bytes)
    assert len(events) > 8  # byte by byte, not file by file
    assert store.resolve(NAME) == folder
    assert [path.name for path in store.root.iterdir() if path.is_dir()] == ["org--tiny-model"]


def test_a_complete_model_is_not_fetched_again(hub: HubServer, store: Store) -> None:
    pull(store)
    plan = plan_pull(store, NAME)
    assert plan.complete
    hub.requests.clear()
    execute_pull(plan)
    assert hub.requests == []


def test_an_interrupted_pull_goes_on_where_it_was(hub: HubServer, store: Store, files: dict[str, bytes]) -> None:
    plan = plan_pull(store, NAME)

    def interrupt(event: ProgressEvent) -> None:
        if event.done > 0.8 * plan.total_bytes:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute_pull(plan, interrupt)
    with pytest.raises(DamagedModelError, match="incomplete, 7 of 8 files") as caught:
        store.resolve(NAME)
    assert caught.value.hint == f"run tileinfer pull {NAME}"
    [summary] = store.list()
    assert (summary.name, summary.complete) == (NAME, False)

    again = plan_pull(store, NAME)
    assert again.have_bytes > 0.75 * plan.total_bytes
    assert again.download_bytes < 0.25 * plan.total_bytes
    hub.requests.clear()
    folder = execute_pull(again)
    assert [(path.rsplit("/", 1)[1], bool(ranged)) for _, path, ranged in hub.requests] == [(SHARDS[1], True)]
    assert (folder.path / SHARDS[1]).read_bytes() == files[SHARDS[1]]


def test_a_broken_connection_is_taken_up_within_one_pull(hub: HubServer, store: Store, files: dict[str, bytes]) -> None:
    hub.cut[SHARDS[0]] = 1_500_000
    folder = pull(store)
    assert (folder / SHARDS[0]).read_bytes() == files[SHARDS[0]]
    ranges = [ranged for _, path, ranged in hub.requests if path.endswith(SHARDS[0])]
    assert ranges[0] is None
    assert ranges[1] == "bytes=1310720-"  # written in pieces of 256 KiB


def test_a_server_without_ranges_starts_the_file_over(hub: HubServer, store: Store, files: dict[str, bytes]) -> None:
    hub.cut[SHARDS[0]] = 1_500_000
    hub.ranges = False
    events: list[ProgressEvent] = []
    folder = execute_pull(plan_pull(store, NAME), events.append)
    assert (folder.path / SHARDS[0]).read_bytes() == files[SHARDS[0]]
    assert events[-1].done == events[-1].total


@pytest.mark.parametrize("name", [SHARDS[0], "tokenizer.json"])
def test_wrong_bytes_are_fetched_once_more(hub: HubServer, store: Store, files: dict[str, bytes], name: str) -> None:
    hub.alter[name] = b"?" * len(files[name])
    assert (pull(store) / name).read_bytes() == files[name]
    assert hub.fetched().count(name) == 2


def test_bytes_that_stay_wrong_are_damage(hub: HubServer, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stubborn(dict):  # type: ignore[type-arg]
        def pop(self, key: Any, *_: Any) -> Any:
            return self[key]

    hub.alter = Stubborn({SHARDS[0]: b"?" * len(hub.repos[NAME].files[SHARDS[0]])})
    with pytest.raises(DamagedModelError, match=r"hash .* expected"):
        pull(store)
    with pytest.raises(DamagedModelError, match="incomplete"):
        store.resolve(NAME)


def test_a_flipped_byte_is_found_and_that_file_fetched(hub: HubServer, store: Store, files: dict[str, bytes]) -> None:
    folder = pull(store)
    damaged = bytearray(files[SHARDS[1]])
    damaged[2_000_000] ^= 1
    (folder / SHARDS[1]).write_bytes(damaged)
    [finding] = store.verify(NAME)
    assert (finding.name, finding.status, finding.cure) == (SHARDS[1], "problem", f"tileinfer pull {NAME}")
    plan = plan_pull(store, NAME)
    assert plan.download_bytes == len(files[SHARDS[1]])
    hub.requests.clear()
    execute_pull(plan)
    assert hub.fetched() == [SHARDS[1]]
    assert [finding.status for finding in store.verify(NAME)] == ["ok"]


def test_a_new_revision_fetches_what_changed(hub: HubServer, store: Store, files: dict[str, bytes]) -> None:
    pull(store)
    hub.repos[NAME].files["tokenizer.json"] = b'{"x": 2}'
    plan = plan_pull(store, NAME)
    assert plan.download_bytes == 8
    hub.requests.clear()
    folder = execute_pull(plan)
    assert hub.fetched() == ["tokenizer.json"]
    assert (folder.path / "tokenizer.json").read_bytes() == b'{"x": 2}'
    manifest = Manifest.load(folder.path)
    assert manifest is not None
    assert manifest.revision == hub.repos[NAME].commit


def test_the_old_version_serves_while_the_new_one_is_unfinished(hub: HubServer, store: Store) -> None:
    pull(store)
    old = store.resolve(NAME).revision
    hub.repos[NAME].files["tokenizer.json"] = b'{"x": 3}'

    def interrupt(_event: ProgressEvent) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute_pull(plan_pull(store, NAME), interrupt)
    assert store.resolve(NAME).revision == old


def test_force_fetches_everything(hub: HubServer, store: Store) -> None:
    pull(store)
    hub.requests.clear()
    pull(store, force=True)
    assert set(hub.fetched()) >= WANTED


def test_a_deleted_shard_is_repaired(hub: HubServer, store: Store) -> None:
    (pull(store) / SHARDS[0]).unlink()
    with pytest.raises(DamagedModelError, match="incomplete, 7 of 8 files"):
        store.resolve(NAME)
    hub.requests.clear()
    pull(store)
    assert [name for name in hub.fetched() if name.startswith("model-")] == [SHARDS[0]]
    store.resolve(NAME)


def test_files_of_the_hugging_face_cache_are_not_fetched(
    hub: HubServer, store: Store, files: dict[str, bytes], tmp_path: Path
) -> None:
    base = store.cache / "models--org--tiny-model"
    snapshot = base / "snapshots" / ("b" * 40)
    snapshot.mkdir(parents=True)
    (base / "blobs").mkdir()
    for name in (SHARDS[0], "tokenizer.json"):
        (base / "blobs" / name).write_bytes(files[name])
        (snapshot / name).symlink_to(base / "blobs" / name)
    (snapshot / SHARDS[1]).write_bytes(b"damaged")
    plan = plan_pull(store, NAME)
    assert plan.have_bytes == len(files[SHARDS[0]]) + len(files["tokenizer.json"])
    hub.requests.clear()
    folder = execute_pull(plan).path
    assert not {SHARDS[0], "tokenizer.json"} & set(hub.fetched())
    assert not (folder / SHARDS[0]).is_symlink()
    assert (folder / SHARDS[0]).read_bytes() == files[SHARDS[0]]
    store.remove(NAME)
    assert (snapshot / SHARDS[0]).read_bytes() == files[SHARDS[0]]


def test_single_file_models(hub: HubServer, store: Store) -> None:
    hub.add("org/single", {"config.json": b"{}", "model.safetensors": save({"w": np.ones(3, np.float32)})})
    found = {path.name for path in pull(store, "org/single").iterdir()}
    assert found == {"config.json", "model.safetensors", "tileinfer.json"}


def test_file_names_that_lead_elsewhere_are_not_fetched(hub: HubServer, store: Store) -> None:
    weights = save({"w": np.ones(3, np.float32)})
    hostile = ["tokenizer/../../x", "tokenizer\\..\\x", "../tokenizer.json", "tokenizer\x1b[2J", "/tokenizer.json"]
    hub.add("org/evil", {"config.json": b"{}", "model.safetensors": weights, **dict.fromkeys(hostile, b"x")})
    assert {file.path for file in plan_pull(store, "org/evil").files} == {"config.json", "model.safetensors"}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"config.json": b"{}", "pytorch_model.bin": b"x"}, "only pytorch_model.bin"),
        ({"config.json": b"{}", "m-q4.gguf": b"x"}, "only m-q4.gguf"),
        ({"config.json": b"{}"}, "no weights at all"),
        ({"README.md": b"x"}, "no config.json"),
    ],
)
def test_repositories_without_safetensors(hub: HubServer, store: Store, content: dict[str, bytes], says: str) -> None:
    hub.add("org/other", content)
    with pytest.raises(UnsupportedModelError, match=says):
        plan_pull(store, "org/other")


def test_an_index_that_names_absent_files(hub: HubServer, store: Store, files: dict[str, bytes]) -> None:
    hub.add("org/broken", {name: data for name, data in files.items() if name != SHARDS[1]})
    with pytest.raises(DamagedModelError, match=SHARDS[1]):
        plan_pull(store, "org/broken")


def test_weights_that_are_not_weights(hub: HubServer, store: Store) -> None:
    hub.add("org/fake", {"config.json": b"{}", "model.safetensors": b"nonsense" * 4})
    with pytest.raises(DamagedModelError, match="header claims"):
        pull(store, "org/fake")
    with pytest.raises(DamagedModelError):
        store.resolve("org/fake")


# Refusals


def test_no_token(hub: HubServer, store: Store) -> None:
    hub.add("org/secret", {"config.json": b"{}"}, access="private")
    with pytest.raises(AccessError, match="no token is set") as caught:
        plan_pull(store, "org/secret")
    assert "HF_TOKEN" in (caught.value.hint or "")


def test_gated_without_and_with_a_token(hub: HubServer, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/gated", model_files(), access="gated", members=(TOKEN + "_member",))
    page = f"{hub.url}/org/gated"
    with pytest.raises(AccessError, match="no token is set") as caught:
        plan_pull(store, "org/gated")
    assert page in (caught.value.hint or "")
    monkeypatch.setenv("HF_TOKEN", TOKEN + "_stranger")
    with pytest.raises(AccessError, match="has not been given access") as caught:
        plan_pull(store, "org/gated")
    assert f"accept the terms at {page}" in (caught.value.hint or "")
    monkeypatch.setenv("HF_TOKEN", TOKEN + "_member")
    assert (pull(store, "org/gated") / "config.json").is_file()


def test_no_such_model_names_near_ones(hub: HubServer, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    pull(store)
    with pytest.raises(ModelNotFoundError, match="no model named org/tiny-modle") as caught:
        plan_pull(store, "org/tiny-modle")
    assert caught.value.hint == f"did you mean {NAME}?"


def test_a_wrong_token(hub: HubServer, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_wrong"[:6])
    with pytest.raises(AccessError, match="refused the token"):
        plan_pull(store, NAME)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_hub_that_is_not_well(hub: HubServer, store: Store, status: int) -> None:
    hub.status = status
    with pytest.raises(TileinferError, match=f"answered {status}") as caught:
        plan_pull(store, NAME)
    assert caught.value.exit_code == 1


def test_no_network_fails_fast(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{unused.getsockname()[1]}")
        start = time.monotonic()
        with pytest.raises(TileinferError, match="can't reach"):
            plan_pull(store, NAME)
        assert time.monotonic() - start < 5  # 0.1 s; the client's own retries take 15


def test_a_page_that_is_no_hub(hub: HubServer, store: Store) -> None:
    hub.status = 200  # JSON, but not about a model
    with pytest.raises(TileinferError, match=r"does not answer like|no config\.json"):
        plan_pull(store, NAME)


def test_offline_mode(hub: HubServer, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(TileinferError, match="HF_HUB_OFFLINE"):
        plan_pull(store, NAME)
    assert hub.requests == []


def test_the_network_goes_away_for_good(hub: HubServer, store: Store) -> None:
    plan = plan_pull(store, NAME)

    class Always(dict):  # type: ignore[type-arg]
        def pop(self, key: Any, *_: Any) -> Any:
            return 0

    hub.cut = Always({SHARDS[1]: 0})
    with pytest.raises(TileinferError, match=r"0 of [\d,]+ bytes fetched") as caught:
        execute_pull(plan)
    assert "goes on from here" in (caught.value.hint or "")


# Disk and concurrency


def test_no_room_is_said_before_anything_is_fetched(
    hub: HubServer, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tileinfer_core.hub.free_bytes", lambda _path: 1_000_000)
    plan = plan_pull(store, NAME)
    assert not plan.fits
    hub.requests.clear()
    with pytest.raises(DiskError, match="free are 1,000,000"):
        execute_pull(plan)
    assert hub.requests == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")  # noqa: PTH110
def test_the_disk_fills_up_on_the_way(hub: HubServer, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_pull(store, NAME)
    real = download.incomplete_path

    def full(folder: Path, file: Any) -> Path:
        path = real(folder, file)
        if file.path == SHARDS[0] and not path.is_symlink():
            path.symlink_to("/dev/full")
        return path

    monkeypatch.setattr(download, "incomplete_path", full)
    with pytest.raises(DiskError, match="disk is full"):
        execute_pull(plan)


def test_two_pulls_of_one_model_do_not_mix(hub: HubServer, store: Store) -> None:
    plan = plan_pull(store, NAME)
    with exclusive(plan.target, NAME), pytest.raises(TileinferError, match="another process is working on"):
        execute_pull(plan)
    execute_pull(plan)


def test_what_a_forced_pull_left_goes_with_the_next_one(hub: HubServer, store: Store) -> None:
    folder = pull(store)
    partial = store.root / "org--tiny-model.partial"
    partial.mkdir()
    (partial / f"{SHARDS[0]}.abc.incomplete").write_bytes(b"x")
    with exclusive(folder, NAME):
        pull(store)
        assert partial.exists()  # another process may be at it
    pull(store)
    assert [path.name for path in store.root.iterdir()] == [folder.name]


def test_a_plan_that_another_pull_has_overtaken(
    hub: HubServer, store: Store, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planning hashes what is here, which takes minutes: enough for another process to end its pull."""
    partial = store.root / "org--tiny-model.partial"
    partial.mkdir(parents=True)
    for name in (*SHARDS, "tokenizer.json"):
        (partial / name).write_bytes(files[name])
    late = plan_pull(store, NAME)
    assert {file.path for file in late.files if file.copy} == {*SHARDS, "tokenizer.json"}
    folder = pull(store)
    hub.requests.clear()
    assert execute_pull(late).path == folder
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.name in WANTED} == {
        name: files[name] for name in WANTED
    }
    assert [finding.status for finding in store.verify(NAME)] == ["ok"]
    assert not [path for _, path, _ in hub.requests if path.endswith((*SHARDS, "tokenizer.json"))]
    store.remove(NAME)
    assert execute_pull(late).path == folder  # all of it is fetched
    assert [finding.status for finding in store.verify(NAME)] == ["ok"]


def test_what_cannot_be_pulled(hub: HubServer, store: Store, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nothing to pull"):
        plan_pull(store, str(tmp_path))
    for name in ("a[q8]", "nothing", "x/../y", "a/b/c", "-x/y", "x/y.git", "a\x1b[2Jb/c", ""):
        with pytest.raises((ModelNotFoundError, UsageError)):
            plan_pull(store, name)
    assert hub.requests == []
