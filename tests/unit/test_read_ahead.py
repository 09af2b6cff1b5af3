"""Weights are brought into the page cache beforehand, all of them up to a limit, and nothing that is wrong matters."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import pytest

from tileinfer_core import read_ahead

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the null device takes files on Linux alone")


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of every call."""
    sizes: list[int] = []
    send = os.sendfile

    def counting(*args: int) -> int:
        sizes.append(send(*args))
        return sizes[-1]

    monkeypatch.setattr(os, "sendfile", counting)
    return sizes


def fetch(folder: Path) -> None:
    thread = read_ahead.read_ahead(folder)
    assert thread is not None
    assert thread.daemon  # the end of the program does not wait for a slow disk
    thread.join(10)
    assert not thread.is_alive()


def test_the_weights_are_fetched_to_the_end(tmp_path: Path, fetched: list[int]) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(300_000))
    (tmp_path / "other.bin").write_bytes(bytes(70_000))
    fetch(tmp_path)
    assert (sum(fetched), fetched[-1]) == (300_000, 0)


def test_no_more_than_the_limit(tmp_path: Path, fetched: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "MAX_BYTES", 1000)
    (tmp_path / "model.safetensors").write_bytes(bytes(300_000))
    fetch(tmp_path)
    assert sum(fetched) == 1000


def test_what_is_wrong_is_left_to_who_reads(tmp_path: Path, fetched: list[int]) -> None:
    fetch(tmp_path / "absent")
    (tmp_path / "model.safetensors.index.json").write_text("[")
    fetch(tmp_path)
    assert fetched == []
