"""What Tab offers, in a chat and in a shell."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from tileinfer_cli import completion
from tileinfer_cli.chat import slash

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store with two models, and an alias in the config file."""
    for name in ("models/demo", "models/Qwen--Qwen3-4B-int8", "models/demo.partial", "hub"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "config.toml").write_text('[aliases]\nwork = "~/my-model"\n')
    monkeypatch.setenv("TILEINFER_HOME", str(tmp_path / "models"))
    monkeypatch.setenv("TILEINFER_CONFIG", str(tmp_path / "config.toml"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_models_on_this_disk_by_every_name(home: Path) -> None:
    assert set(completion.models_here("")) == {"demo", "Qwen/Qwen3-4B-int8", "work"}
    assert completion.models_here("de") == ["demo"]
    (home / "models" / "Qwen--Qwen3-4B").mkdir()
    assert completion.models_here("qwen3:") == ["qwen3:4b"]


def test_what_can_be_pulled_needs_no_network(home: Path) -> None:
    assert "qwen3:0.6b" in completion.models_to_pull("qwen3")


def test_a_config_file_with_a_fault_offers_nothing(home: Path) -> None:
    (home / "config.toml").write_text("modle = 1")
    assert completion.models_here("") == []


def test_files_as_they_are_typed(home: Path) -> None:
    (home / ".hidden").write_text("")
    assert completion.paths("") == ["config.toml", "hub/", "models/"]
    assert completion.paths("models/de") == ["models/demo/", "models/demo.partial/"]
    assert completion.paths(".h") == [".hidden"]
    assert completion.paths(f"{home}/con") == [f"{home}/config.toml"]
    assert completion.paths("gone/") == []
    assert completion.paths("~nobody-here/") == []


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("/cl", [(0, "/clear")]),
        ("/set top_", [(5, "top_k"), (5, "top_p")]),
        ("/set max", [(5, "max_tokens")]),
        ("/think o", [(7, "on"), (7, "off")]),
        ("/model d", [(7, "demo")]),
        ("/load con", [(6, "config.toml")]),
        ("/undo x", []),
        ("hello /cl", []),
        ("/cl\n", []),
        ("//cl", []),
    ],
)
def test_a_slash_command_and_what_follows_it(line: str, offered: list[tuple[int, str]], home: Path) -> None:
    chat = SimpleNamespace(flags={"temperature": None, "top_k": None, "top_p": None})
    assert slash.complete(chat, line) == offered
