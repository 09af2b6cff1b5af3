"""Memory that does not suffice: code 8, the numbers, and what to change. In real processes with a limit."""

from __future__ import annotations

import json
import math
import re
import struct
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.scripted_model import write_scripted_model
from tileinfer_core.config import ModelConfig
from tileinfer_core.models.define import define_model

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits the address space as Linux counts it")

# The libraries come first: what they map is not to be counted. So does OpenBLAS's buffer, without which it ends the
# process by itself.
LIMITED = """
import resource, sys
from pathlib import Path
import jinja2, numpy, tokenizers
a = numpy.ones((900, 900), numpy.float32)
a @ a @ a[0]
mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
limit = mapped + int(sys.argv.pop(1))
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
from tileinfer_cli.app import main
main()
"""
MIB = 1 << 20


def write_hollow_model(folder: Path, **changes: int) -> Path:
    """A model whose weights are a hole in a file: zeros that take no room on the disk, whatever their size."""
    write_scripted_model(folder, ["a", "b"])
    table = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(table))
    header: dict[str, object] = {}
    end = 0
    for parameter in define_model(ModelConfig.load(folder), tied=False).parameters:
        for part in parameter.parts:
            start, end = end, end + 2 * math.prod(part.shape)
            header[part.name] = {"dtype": "BF16", "shape": part.shape, "data_offsets": [start, end]}
    raw = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(file.tell() + end)
    return folder


def run_within(extra: int, environment: dict[str, str], *args: str | Path, stdin: str = "") -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(extra), *map(str, args)],
        input=stdin,
        capture_output=True,
        text=True,
        env=environment | {"MALLOC_ARENA_MAX": "1"},
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_weights_that_do_not_fit_are_code_8_with_their_size(environment, tmp_path: Path) -> None:
    model = write_hollow_model(tmp_path / "wide", intermediate_size=400_000)  # 2.5 GB as float32
    code, out, err = run_within(512 * MIB, environment, "generate", "hi", "-m", model, "--backend", "cpu")
    assert (code, out) == (8, ""), err
    assert re.search(r"error: .*2\.5 GB .*float32.*\n  a smaller model needs less", err), err
    assert len(err.splitlines()) == 2


# 128 KiB of keys and values a token over 16 layers: 3,000 tokens need 375 MiB beside 130 MiB of weights.
WIDE_KV = {"num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 64}
LIMIT = 420 * MIB


def test_a_prompt_whose_keys_and_values_do_not_fit_is_code_8_with_the_numbers(environment, tmp_path: Path) -> None:
    model = write_hollow_model(tmp_path / "deep", **WIDE_KV)
    args = ("generate", "x" * 3000, "--raw", "-m", model, "--backend", "cpu", "--max-tokens", "1")
    code, out, err = run_within(LIMIT, environment, *args)
    assert (code, out) == (8, ""), err
    assert re.search(r"error: no memory for the keys and values of [\d,]+ tokens; [\d,]+ are held\n", err), err
    assert "--context" in err.splitlines()[-1]
    assert "Traceback" not in err


def test_a_step_that_does_not_fit_is_code_8_with_the_numbers(environment, tmp_path: Path) -> None:
    """Wide rows: what 512 tokens need on the way takes more than their keys and values."""
    model = write_hollow_model(tmp_path / "wide", num_attention_heads=512, head_dim=64)
    args = ("generate", "x" * 600, "--raw", "-m", model, "--backend", "cpu", "--max-tokens", "1")
    code, out, err = run_within(240 * MIB, environment, *args)
    assert (code, out) == (8, ""), err
    assert re.search(r"error: no memory for a step of 512 tokens after 0 held\n  .*--context", err), err
    assert len(err.splitlines()) == 2


def test_the_same_model_answers_a_short_prompt(environment, tmp_path: Path) -> None:
    """The limit above is one of the prompt's length, not of the model."""
    model = write_hollow_model(tmp_path / "deep", **WIDE_KV)
    args = ("generate", "x", "--raw", "-m", model, "--backend", "cpu", "--max-tokens", "1")
    code, _, err = run_within(LIMIT, environment, *args)
    assert code == 0, err
