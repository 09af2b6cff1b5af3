"""Every family can be quantised: its own tensors (xIELU's numbers, odd names, unread parts) come through."""

from __future__ import annotations

import numpy as np
import pytest

from tests.checkpoints import load_runner, write_variant
from tests.reference.tiny_models import prompt
from tileinfer_core.progress import silent
from tileinfer_core.quantize import execute_quantize, plan_quantize
from tileinfer_core.quantize_recipe import Recipe
from tileinfer_core.store import ModelFolder


@pytest.mark.parametrize(
    "name", ["apertus-biases", "apertus-constants", "apertus1p5", "apertus1p5-text", "qwen2-untied", "mistral-window"]
)
def test_int8_moves_logits_by_little(tmp_path, name):
    """3 % of their spread; another model's would be off by more than all of it."""
    folder = write_variant(tmp_path / "whole", name)
    plan = plan_quantize(ModelFolder("whole", folder, "local", None), tmp_path / "int8", "int8", Recipe())
    execute_quantize(plan, None, silent)
    ids = prompt(name, 40)
    whole, int8 = (runner.logits(runner.new_cache(64), ids) for runner in map(load_runner, (folder, tmp_path / "int8")))
    assert 0 < np.sqrt(((whole - int8) ** 2).mean()) < 0.03 * whole.std()
