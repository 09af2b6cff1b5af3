"""`tileinfer bench` as a process, on a tiny shape with made-up weights."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.reference.tiny_models import VARIANTS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

QUICK = ("--backend", "cpu", "--prefill", "24", "--decode-at", "16", "--tokens", "4", "--repeat", "2")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "shape.json"
    path.write_text(json.dumps(VARIANTS["qwen3-tied"]))
    return path


def test_a_shape_by_its_name(tileinfer: Callable[..., Any]) -> None:
    pytest.importorskip("cuda.tile")
    wrong = tileinfer("bench", "--random-weights", "Qwen4-5B", *QUICK)
    assert (wrong.code, wrong.out) == (4, "")
    assert "no model named Qwen4-5B on this disk, nor a shape of that name\n  known shapes: SmolLM2-135M" in wrong.err
    result = tileinfer("bench", "--random-weights", "smollm2-135m", *QUICK, "--repeat", "1")
    assert result.code == 0, result.err
    assert "1 run of 4 tokens" in result.out


def test_json_has_every_figure_with_its_ceiling(tileinfer: Callable[..., Any], config: Path) -> None:
    result = tileinfer("bench", "--random-weights", config, *QUICK, "--json")
    document = json.loads(result.out)
    assert result.code == 0
    assert document["backend"] == "cpu"
    (prefill,), (decode,) = document["prefill"], document["decode"]
    assert (prefill["tokens"], decode["context"]) == (24, 16)
    for speed in (prefill["tok_s"], decode["tok_s"], document["first_token_s"]):
        assert 0 < speed["low"] <= speed["median"] <= speed["high"]
        assert speed["runs"] == 2
    assert decode["step_s"] == pytest.approx(1 / decode["tok_s"]["median"])
    rate = decode["bytes_per_token"] * decode["tok_s"]["median"]
    assert decode["share_of_copy"] == pytest.approx(rate / document["ceilings"]["copy"])
    # every weight but no untied embedding, and 18 tokens of keys and values
    assert document["copy_bytes"] == 0
    assert decode["bytes_per_token"] == document["weight_bytes"] + 18 * 2 * 4 * 3 * 2 * 32


def test_the_table_and_markdown_have_the_same_rows(tileinfer: Callable[..., Any], config: Path) -> None:
    text = tileinfer("bench", "--random-weights", config, *QUICK).out
    markdown = tileinfer("bench", "--random-weights", config, *QUICK, "--markdown").out
    for row in ("prefill 24", "decode at 16"):
        assert any(line.startswith(row) for line in text.splitlines())
        assert any(line.startswith(f"| {row} |") for line in markdown.splitlines())
    assert "| --- | ---: |" in markdown


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--tokens", "1"), "--tokens must be at least 2, found 1"),
        (("--repeat", "0"), "--repeat must be at least 1, found 0"),
        (("--prefill", "0"), "--prefill must be at least 1, found 0"),
        (("--decode-at", "999"), "the context holds 256"),
    ],
)
def test_what_can_not_be_measured_is_refused(
    tileinfer: Callable[..., Any], config: Path, flags: tuple[str, ...], words: str
) -> None:
    result = tileinfer("bench", "--random-weights", config, "--backend", "cpu", *flags)
    assert result.code == 2
    assert words in result.err
