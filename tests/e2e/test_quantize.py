"""quantize as a process of its own: a model's INT8 twin in use; runs interrupted, killed and refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.checkpoints import quantization_config, write_checkpoint
from tests.e2e.conftest import COMMAND
from tests.hub_server import HubServer
from tests.reference.tiny_models import VARIANTS, tensors

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.e2e.conftest import Result


@pytest.fixture
def model(hello: Path, tmp_path: Path) -> Path:
    """A model of the test's own that says "Hello, world!"."""
    return shutil.copytree(hello, tmp_path / "parrot")


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_quantize_and_use(tileinfer: Callable[..., Result], model: Path, tmp_path: Path) -> None:
    done = tileinfer("quantize", model, "--eval-tokens", "300")
    assert done.code == 0, done.err
    assert done.out.startswith(f"Receipt: {model} as INT8\n")
    assert "a scale a row; groups of 64 in head and down_proj; embedding unchanged" in done.out
    assert "300 tokens" in done.out
    assert "become" in done.err
    assert "\x1b" not in done.out + done.err
    int8 = tmp_path / "parrot-int8"
    assert names(tmp_path) >= {"parrot", "parrot-int8"}
    assert not (tmp_path / "parrot-int8.partial").exists()
    assert tileinfer("generate", "-m", int8, "hi", "--temperature", "0").out == "Hello, world!\n"
    assert tileinfer("generate", "-m", int8, "hi", "--temperature", "0", "--kv", "int8").out == "Hello, world!\n"
    assert tileinfer("verify", int8).code == 0
    shown = tileinfer("show", int8)
    assert "embed_tokens, lm_head" in shown.out or "lm_head" in shown.out
    assert "one scale a row" in shown.out
    assert "KL divergence" in shown.out
    document = json.loads(tileinfer("show", int8, "--json").out)
    assert document["receipt"]["quality"]["tokens"] == 300
    assert document["memory"]["weights_on_disk_bytes"] < document["receipt"]["bytes_before"]


def test_json_and_a_second_run(tileinfer: Callable[..., Result], model: Path, tmp_path: Path) -> None:
    target = tmp_path / "small"
    options = ["--group-size", "0", "--embedding", "int8", "--json", "-q"]
    first = tileinfer("quantize", model, target, "--eval-tokens", "0", *options)
    assert (first.code, first.err) == (0, "")
    document = json.loads(first.out)
    assert document["path"] == str(target)
    assert document["receipt"]["quality"] is None
    assert document["receipt"]["bytes_per_weight"] < 1.1
    again = tileinfer("quantize", model, target, "--eval-tokens", "0")
    assert again.code == 2  # a local folder has no checksums: whether it is the same can't be told
    assert "--force makes it again" in again.err
    assert tileinfer("quantize", model, target, "--eval-tokens", "0", "--force", "-q").code == 0


def start(environment: dict[str, str], model: Path) -> subprocess.Popen[str]:
    """A run that is busy measuring the loss when this returns: the weights are written, the folder is not whole."""
    run = subprocess.Popen(
        [*COMMAND, "quantize", str(model), "--eval-tokens", "60000"],
        env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert run.stderr is not None
    for line in run.stderr:
        if line.startswith("evaluate"):
            return run
    raise AssertionError("it ended before it measured anything")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_signal_leaves_nothing(
    environment: dict[str, str], model: Path, tmp_path: Path, number: int, code: int
) -> None:
    """Ctrl-C, or the end of the terminal: gigabytes may be half written."""
    run = start(environment, model)
    started = time.monotonic()
    run.send_signal(number)
    out, err = run.communicate(timeout=30)
    assert run.returncode == code
    assert time.monotonic() - started < 5
    assert out == ""
    assert "Traceback" not in err
    assert "parrot-int8" not in names(tmp_path)
    assert "parrot-int8.partial" not in names(tmp_path)


def test_a_killed_run_leaves_nothing_that_looks_whole(
    tileinfer: Callable[..., Result], environment: dict[str, str], model: Path, tmp_path: Path
) -> None:
    run = start(environment, model)
    run.kill()
    run.communicate(timeout=30)
    assert "parrot-int8" not in names(tmp_path)
    assert tileinfer("generate", "-m", tmp_path / "parrot-int8", "hi").code == 4
    assert tileinfer("quantize", model, "--eval-tokens", "0").code == 0
    assert "parrot-int8.partial" not in names(tmp_path)
    assert tileinfer("verify", tmp_path / "parrot-int8").code == 0


@pytest.mark.skipif(os.name == "nt", reason="needs resource limits")
@pytest.mark.parametrize("most", [0, 100_000, 600_000])
def test_a_disk_that_fills_up_is_code_6_and_leaves_nothing(
    environment: dict[str, str], model: Path, tmp_path: Path, most: int
) -> None:
    """No file may have more than so many bytes: config.json can't be written, or the weights only in part."""
    import resource

    done = subprocess.run(
        [*COMMAND, "quantize", str(model), "--eval-tokens", "0"],
        env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most, most)),
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (6, ""), done.stderr
    assert "File too large" in done.stderr
    assert "name a folder on another disk" in done.stderr
    assert names(tmp_path) - {"home"} == {"parrot"}


@pytest.mark.parametrize("embedding", ["int8", "bf16"])
def test_either_embedding(tileinfer: Callable[..., Result], model: Path, tmp_path: Path, embedding: str) -> None:
    assert tileinfer("quantize", model, "--eval-tokens", "0", "--embedding", embedding, "-q").code == 0
    int8 = tmp_path / "parrot-int8"
    assert tileinfer("generate", "-m", int8, "hi", "--temperature", "0").out == "Hello, world!\n"
    parts = json.loads(tileinfer("show", int8, "--json").out)["int8"]
    assert ("embed_tokens" in parts.get("not quantised", [])) == (embedding == "bf16")


def test_two_runs_at_once(tileinfer: Callable[..., Result], environment: dict[str, str], model: Path) -> None:
    run = start(environment, model)
    second = tileinfer("quantize", model, "--eval-tokens", "0")
    run.kill()
    run.communicate(timeout=30)
    assert second.code == 1
    assert "another process is working on" in second.err


def test_verify_of_a_damaged_int8_model_says_how_it_is_made_again(
    tileinfer: Callable[..., Result], model: Path, tmp_path: Path
) -> None:
    tileinfer("quantize", model, "--eval-tokens", "0", "-q")
    weights = tmp_path / "parrot-int8" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    done = tileinfer("verify", tmp_path / "parrot-int8")
    assert done.code == 7
    assert done.err.splitlines()[1] == f"  tileinfer quantize {model} --force"


# Refusals


def test_what_is_quantised_already_is_code_7(tileinfer: Callable[..., Result], model: Path, tmp_path: Path) -> None:
    tileinfer("quantize", model, "--eval-tokens", "0", "-q")
    done = tileinfer("quantize", tmp_path / "parrot-int8")
    assert (done.code, done.out) == (7, "")
    assert "is quantised already" in done.err


@pytest.mark.parametrize(
    ("section", "named"),
    [
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, "'fp8'"),
        ({"quant_method": "awq", "bits": 4}, "'awq'"),
        ({"quant_method": "gptq", "bits": 4}, "'gptq'"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "'bitsandbytes'"),
        (quantization_config({"Linear": None}, format="float-quantized"), "'float-quantized'"),
    ],
)
@pytest.mark.parametrize("command", ["quantize", "show", "generate"])
def test_other_quantisations_are_code_7_by_name(
    tileinfer: Callable[..., Result], tmp_path: Path, section: dict, named: str, command: str
) -> None:
    config = {**VARIANTS["llama-tied"], "quantization_config": section}
    folder = write_checkpoint(tmp_path / "other", config, tensors("llama-tied"))
    done = tileinfer("generate", "-m", folder, "hi") if command == "generate" else tileinfer(command, folder)
    assert (done.code, done.out) == (7, "")
    assert named in done.err
    assert len(done.err.splitlines()) <= 2


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model.layers.0.extra.weight": np.ones((2, 2), np.float32)}, "model.layers.0.extra.weight"),
        ({"model.layers.2.mlp.up_proj.weight": np.full((112, 64), np.nan, np.float32)}, "layers.2.mlp.up_proj.weight"),
    ],
)
def test_tensors_that_can_not_be_are_code_7_by_name(
    tileinfer: Callable[..., Result], tmp_path: Path, changes: dict, named: str
) -> None:
    folder = write_checkpoint(tmp_path / "m", VARIANTS["llama-tied"], {**tensors("llama-tied"), **changes})
    done = tileinfer("quantize", folder, "--eval-tokens", "0", "-q")
    assert (done.code, done.out) == (7, "")
    assert named in done.err
    assert names(tmp_path) - {"home"} == {"m"}


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (["--group-size", "7"], 2, "--group-size must be 0 or a power of two"),
        (["--group-size", "4096"], 2, "does not divide"),
        (["--eval-tokens", "-1"], 2, "--eval-tokens must be at least 0"),
        (["--calibrate", "nowhere.txt"], 2, "nowhere.txt"),
        (["--kv", "fp8"], 2, "--kv"),
        (["{tmp}"], 2, "is not a model that `quantize` has made"),
        (["{tmp}/no/such/place"], 6, "no such folder"),
        (["--backend", "cuda"], 8, "the CUDA backend can't run here"),
    ],
)
def test_wrong_usage(
    tileinfer: Callable[..., Result], model: Path, tmp_path: Path, arguments: list[str], code: int, named: str
) -> None:
    if code == 8 and shutil.which("nvidia-smi"):
        pytest.skip("there is a GPU")
    done = tileinfer("quantize", model, *(argument.format(tmp=tmp_path) for argument in arguments))
    assert (done.code, done.out) == (code, ""), done.err
    assert named in done.err
    assert names(tmp_path) - {"home"} == {"parrot"}


def test_an_unknown_model_is_code_4(tileinfer: Callable[..., Result]) -> None:
    done = tileinfer("quantize", "qwen3:4b")
    assert done.code == 4
    assert "tileinfer pull qwen3:4b" in done.err


# Beside other commands


def test_pull_and_quantize(tileinfer: Callable[..., Result], hello: Path, environment: dict[str, str]) -> None:
    with HubServer() as server:
        server.add("org/parrot", {path.name: path.read_bytes() for path in hello.iterdir()})
        environment["HF_ENDPOINT"] = server.url
        assert tileinfer("pull", "org/parrot", "--group-size", "0").code == 2
        done = tileinfer("pull", "org/parrot", "--quantize", "int8", "--eval-tokens", "0", "--json")
        assert done.code == 0, done.err
        assert json.loads(done.out)["model"] == "org/parrot-int8"
        again = tileinfer("pull", "org/parrot", "--quantize", "int8", "--eval-tokens", "0", "--json")
        assert json.loads(again.out) == json.loads(done.out)
        assert "org/parrot-int8 is complete" in again.err
    rows = {row["name"]: row["quantization"] for row in json.loads(tileinfer("list", "--json").out)}
    assert rows == {"org/parrot": None, "org/parrot-int8": "int8"}
    assert tileinfer("generate", "-m", "org/parrot-int8", "hi", "--temperature", "0").out == "Hello, world!\n"
    assert tileinfer("rm", "org/parrot-int8").code == 0
    assert [row["name"] for row in json.loads(tileinfer("list", "--json").out)] == ["org/parrot"]


def test_eval_against(tileinfer: Callable[..., Result], model: Path, tmp_path: Path) -> None:
    tileinfer("quantize", model, "--eval-tokens", "0", "-q")
    text = tmp_path / "text.txt"
    text.write_text("Pack my box with five dozen liquor jugs. " * 5)
    done = tileinfer("eval", text, "-m", tmp_path / "parrot-int8", "--against", model, "--json")
    assert done.code == 0, done.err
    document = json.loads(done.out)
    assert document["against"] == str(model)
    assert document["tokens"] == 204
    assert document.keys() >= {"perplexity", "nll", "reference_perplexity", "mean_kl", "kl_99", "agreement"}
    assert abs(document["perplexity"] / document["reference_perplexity"] - 1) < 0.02
    assert "same top token" in tileinfer("eval", text, "-m", model, "--against", model, "--tokens", "9").out
    assert tileinfer("eval", text, "-m", model, "--against", "nobody").code == 4


def test_bench_against(tileinfer: Callable[..., Result], model: Path, tmp_path: Path) -> None:
    tileinfer("quantize", model, "--eval-tokens", "0", "-q")
    small = ["--prefill", "8", "--decode-at", "8", "--tokens", "4", "--repeat", "1"]
    int8 = tmp_path / "parrot-int8"
    document = json.loads(tileinfer("bench", "-m", int8, "--against", model, *small, "--json").out)
    assert (document["model"], document["against"]["model"]) == (str(int8), str(model))
    assert document["against"]["decode"][0]["tok_s"]["median"] > 0
    shown = tileinfer("bench", "-m", int8, "--against", model, *small, "--markdown").out
    assert f"| {int8} against {model} | speed |" in shown
    assert tileinfer("bench", "--random-weights", model / "config.json", "--against", model).code == 2


def test_the_folder_asks_for_int8_keys_and_values(
    tileinfer: Callable[..., Result], model: Path, tmp_path: Path
) -> None:
    tileinfer("quantize", model, "--eval-tokens", "0", "-q", "--kv", "int8")
    shown = json.loads(tileinfer("show", tmp_path / "parrot-int8", "--json").out)
    assert shown["kv"] == {"value": "int8", "origin": "config.json"}
    config = tmp_path / "config.toml"
    config.write_text('kv = "bf16"\n')
    shown = json.loads(tileinfer("show", tmp_path / "parrot-int8", "--json", TILEINFER_CONFIG=str(config)).out)
    assert shown["kv"] == {"value": "bf16", "origin": "config file"}
    config.write_text('kv = "fp8"\n')
    assert tileinfer("show", model, TILEINFER_CONFIG=str(config)).code == 2


@pytest.mark.demo
def test_the_default_recipe_on_the_demo_model(
    tileinfer: Callable[..., Result], demo_home: Path, tmp_path: Path
) -> None:
    """The loss that docs/int8.md promises, on the first 512 tokens of the bundled text."""
    done = tileinfer(
        "quantize", "demo", tmp_path / "int8", "--eval-tokens", "512", "--json", "-q",
        TILEINFER_HOME=str(demo_home), timeout=280,
    )  # fmt: skip
    assert done.code == 0, done.err
    receipt = json.loads(done.out)["receipt"]
    assert receipt["bytes_per_weight"] < 1.03
    assert receipt["quality"]["mean_kl"] < 3.5e-3
    assert receipt["quality"]["change"] < 0.006
    answer = tileinfer("generate", "-m", tmp_path / "int8", "What is the capital of France?", "--temperature", "0")
    assert "Paris" in answer.out
