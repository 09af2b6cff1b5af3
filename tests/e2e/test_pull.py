"""pull, list, verify and rm as processes of their own, against a Hub on loopback and the real client."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from typing import TYPE_CHECKING

import pytest

from tests.e2e.conftest import COMMAND
from tests.hub_server import TOKEN, HubServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.e2e.conftest import Result

NAME = "org/parrot"
WEIGHTS = "model.safetensors"


@pytest.fixture
def hub(hello: Path, environment: dict[str, str]) -> Iterator[HubServer]:
    """A Hub with one model, a real one that says "Hello, world!"."""
    with HubServer() as server:
        server.add(NAME, {path.name: path.read_bytes() for path in hello.iterdir()})
        server.repos[NAME].files["README.md"] = b"not wanted"
        environment["HF_ENDPOINT"] = server.url
        yield server


def test_pull_then_run_then_remove(tileinfer: Callable[..., Result], hub: HubServer) -> None:
    missing = tileinfer("generate", "-m", NAME, "hi")
    assert missing.code == 4
    assert f"tileinfer pull {NAME}" in missing.err
    pulled = tileinfer("pull", NAME)
    assert (pulled.code, pulled.out) == (0, "")
    assert "to fetch" in pulled.err
    assert "free" in pulled.err
    assert "\x1b" not in pulled.err
    hub.requests.clear()
    assert tileinfer("generate", "-m", NAME, "hi", "--temperature", "0").out == "Hello, world!\n"
    [row] = json.loads(tileinfer("list", "--json").out)
    assert (row["name"], row["complete"], row["kind"]) == (NAME, True, "tileinfer")
    assert tileinfer("verify", NAME).code == 0
    assert hub.requests == []  # once here, nothing asks the network
    assert tileinfer("rm", NAME).code == 0
    assert json.loads(tileinfer("list", "--json").out) == []


def test_ctrl_c_in_the_middle_then_generate_then_pull(
    tileinfer: Callable[..., Result], hub: HubServer, environment: dict[str, str], home: Path
) -> None:
    size = len(hub.repos[NAME].files[WEIGHTS])
    hub.stall[WEIGHTS] = size * 6 // 10
    pull = subprocess.Popen([*COMMAND, "pull", NAME], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert hub.stalled.wait(30)
    deadline = time.monotonic() + 30
    while not any(path.stat().st_size for path in home.rglob("*.incomplete")) and time.monotonic() < deadline:
        time.sleep(0.02)
    pull.send_signal(signal.SIGINT)
    _, err = pull.communicate(timeout=10)
    assert pull.returncode == 130
    assert b"Traceback" not in err
    refused = tileinfer("generate", "-m", NAME, "hi")
    assert refused.code == 7
    files = len(hub.repos[NAME].files) - 1
    assert f"incomplete, {files - 1} of {files} files" in refused.err
    assert f"tileinfer pull {NAME}" in refused.err
    hub.requests.clear()
    resumed = tileinfer("pull", NAME)
    assert resumed.code == 0
    assert "already here" in resumed.err
    asked = [(path.rsplit("/", 1)[1], bool(ranged)) for _, path, ranged in hub.requests if "/resolve/" in path]
    assert asked == [("config.json", False), (WEIGHTS, True)]  # the first to see what model it is
    assert tileinfer("generate", "-m", NAME, "hi", "--temperature", "0").out == "Hello, world!\n"


def test_a_flipped_byte(tileinfer: Callable[..., Result], hub: HubServer, home: Path) -> None:
    tileinfer("pull", NAME)
    path = next(home.rglob(WEIGHTS))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    found = tileinfer("verify", NAME)
    assert found.err.endswith(f"1 of 1 checks failed\n  tileinfer pull {NAME}\n")
    assert found.code == 7
    assert WEIGHTS in found.out + found.err
    hub.requests.clear()
    assert tileinfer("pull", NAME).code == 0
    assert WEIGHTS in hub.fetched()
    assert "tokenizer.json" not in hub.fetched()
    assert tileinfer("verify", NAME).code == 0


@pytest.mark.parametrize(
    ("access", "token", "code", "says"),
    [
        ("private", None, 5, "no token is set"),
        ("gated", None, 5, "accepted its terms"),
        ("gated", TOKEN, 5, "accept the terms at http"),
        ("public", "hf_ba", 5, "refused the token"),
    ],
)
def test_refusals(
    tileinfer: Callable[..., Result], hub: HubServer, access: str, token: str | None, code: int, says: str
) -> None:
    hub.repos[NAME].access = access
    result = tileinfer("pull", NAME, **({"HF_TOKEN": token} if token else {}))
    assert result.code == code
    assert says in result.err
    assert "Traceback" not in result.err


def test_no_such_model(tileinfer: Callable[..., Result], hub: HubServer) -> None:
    result = tileinfer("pull", "org/parot", HF_TOKEN=TOKEN)
    assert result.code == 4
    assert "no model named org/parot" in result.err
    near = tileinfer("pull", "qwen3:0.6")
    assert near.code == 4
    assert "qwen3:0.6b" in near.err


def test_the_network_is_gone(tileinfer: Callable[..., Result], hub: HubServer) -> None:
    tileinfer("pull", NAME)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        gone = f"http://127.0.0.1:{unused.getsockname()[1]}"
        assert tileinfer("generate", "-m", NAME, "hi", HF_ENDPOINT=gone).code == 0
        result = tileinfer("pull", "org/other", HF_ENDPOINT=gone)
        assert result.code == 1
        assert "can't reach" in result.err
        absent = tileinfer("generate", "-m", "org/other", "hi", HF_ENDPOINT=gone)
        assert absent.code == 4
    assert tileinfer("pull", NAME, HF_HUB_OFFLINE="1").code == 1


def test_a_closed_stderr(hub: HubServer, environment: dict[str, str], home: Path) -> None:
    """`2>&-`: there is nowhere to write progress to, and the pull goes on all the same."""
    command = f"{' '.join(COMMAND)} pull {NAME} 2>&-"
    assert subprocess.run(["/bin/sh", "-c", command], env=environment, check=False, timeout=60).returncode == 0
    assert any(home.rglob("tileinfer.json"))


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("pull", "a[q8]"),
        ("pull", "org/../x"),
        ("rm", "../x"),
        ("rm", "a b"),
        ("verify", "[/login]"),
        ("show", "x\x1b[2Jy"),
    ],
)
def test_names_that_are_none(tileinfer: Callable[..., Result], hub: HubServer, command: str, name: str) -> None:
    result = tileinfer(command, name)
    assert result.code in (2, 4)
    assert "\x1b" not in result.err
    assert "Traceback" not in result.err
    assert name in result.err or "\x1b" in name
    assert hub.requests == []


def test_a_damaged_folder_of_ones_own_is_not_said_to_be_pulled_again(
    tileinfer: Callable[..., Result], hello: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(hello, tmp_path / "mine")
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-1])
    found = tileinfer("verify", folder)
    assert found.code == 7
    assert found.err == f"error: {folder}: 1 of 1 checks failed\n"


def test_what_is_not_ours_is_not_removed(tileinfer: Callable[..., Result], hello: Path) -> None:
    result = tileinfer("rm", hello)
    assert result.code == 2
    assert "left alone" in result.err
    assert (hello / WEIGHTS).exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_store_that_cannot_be_written(tileinfer: Callable[..., Result], hub: HubServer, home: Path) -> None:
    home.chmod(0o555)
    result = tileinfer("pull", NAME)
    assert result.code == 6


def test_a_store_that_is_a_file(tileinfer: Callable[..., Result], hub: HubServer, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = tileinfer("pull", NAME, TILEINFER_HOME=str(tmp_path / "file"))
    assert result.code == 6
    assert "TILEINFER_HOME" in result.err
