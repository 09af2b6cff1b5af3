"""`tileinfer doctor MODEL` as a user and a script see it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tests.scripted_model import write_scripted_model

if TYPE_CHECKING:
    from pathlib import Path


def test_a_model_that_runs(tileinfer, tmp_path: Path) -> None:
    folder = write_scripted_model(tmp_path / "model", ["Hello"])
    result = tileinfer("doctor", folder)
    assert result.code == 0
    assert result.err == ""
    assert "every weight is a finite number" in result.out
    findings = json.loads(tileinfer("doctor", folder, "--json", "--skip-values").out)
    assert {"name", "status", "detail", "cure"} == set(findings[0])
    assert "values" not in {finding["name"] for finding in findings}
    assert not [finding for finding in findings if finding["status"] == "problem"]


def test_a_damaged_one_ends_with_7_and_says_all_of_it(tileinfer, tmp_path: Path) -> None:
    folder = write_scripted_model(tmp_path / "model", ["Hello"])
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    (folder / "tokenizer.json").write_text("{")
    result = tileinfer("doctor", folder)
    assert result.code == 7
    assert "Traceback" not in result.out + result.err
    problems = [line for line in result.out.splitlines() if line.startswith("problem")]
    assert len(problems) == 2


def test_an_unknown_one_is_not_found(tileinfer) -> None:
    result = tileinfer("doctor", "org/nothing-here")
    assert (result.code, result.out) == (4, "")
    assert "tileinfer pull org/nothing-here" in result.err
