"""Tiny random models of every model type against what Transformers computed for them (reference/make_model_goldens.py).

Logits within 2e-4 in float32: rounding of sums in another order stays below 2e-5 here, a wrong rope table at position
12,000 moves them by 1e-1.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from tests.checkpoints import load_runner, write_checkpoint, write_variant
from tests.reference.tiny_models import (
    GREEDY,
    GREEDY_STEPS,
    LONG,
    LONG_TOKENS,
    ROPE_POSITIONS,
    VARIANTS,
    WINDOW,
    other_rope_form,
    prompt,
    tensors,
)
from tileinfer_core.config import ModelConfig
from tileinfer_core.models.rope import cos_sin, inverse_frequencies
from tileinfer_core.sampling import SamplingParams

GOLDENS = np.load(Path(__file__).parents[1] / "reference" / "model_goldens.npz")
TOLERANCE = 2e-4


def last_rows(runner, ids, rows):
    cache = runner.new_cache(len(ids))
    runner.prefill(cache, ids[:-rows])
    return runner.logits(cache, ids[-rows:])


@pytest.mark.parametrize("name", GREEDY)
def test_logits_equal_transformers(tmp_path, name):
    runner = load_runner(write_variant(tmp_path, name))
    golden = GOLDENS[f"{name}/logits"]
    ids = prompt(name, 70, int(GOLDENS[f"{name}/salt"]))
    np.testing.assert_allclose(last_rows(runner, ids, len(golden)), golden, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", GREEDY)
def test_the_other_form_of_the_rope_fields_gives_the_same_model(tmp_path, name):
    twin = write_checkpoint(tmp_path, other_rope_form(VARIANTS[name]), tensors(name))
    golden = GOLDENS[f"{name}/logits"]
    ids = prompt(name, 70, int(GOLDENS[f"{name}/salt"]))
    np.testing.assert_allclose(last_rows(load_runner(twin), ids, len(golden)), golden, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", GREEDY)
def test_greedy_tokens_equal_transformers(tmp_path, name):
    runner = load_runner(write_variant(tmp_path, name))
    ids = prompt(name, 70, int(GOLDENS[f"{name}/salt"]))
    cache = runner.new_cache(256)
    runner.prefill(cache, ids)
    steps = runner.decode(cache, SamplingParams(temperature=0.0), None, len(ids))
    assert [s.id for s in islice(steps, GREEDY_STEPS)] == GOLDENS[f"{name}/greedy"].tolist()


@pytest.mark.parametrize("name", ["mistral-window", "qwen2-window"])
def test_a_sliding_window_is_honoured_up_to_its_length(name):
    """Transformers' goldens are of sequences that end at the window; TileInfer makes no longer ones."""
    assert ModelConfig.from_dict(VARIANTS[name]).max_context == WINDOW == 70 + GREEDY_STEPS


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
@pytest.mark.parametrize("name", ["llama-biases", "qwen3-tied", "qwen2-untied", "apertus-constants"])
def test_half_precision_files_give_the_same_logits(tmp_path, name, dtype):
    """The tiny weights are exact in every storage type, so the golden holds for all of them."""
    runner = load_runner(write_variant(tmp_path, name, dtype=dtype))
    golden = GOLDENS[f"{name}/logits"]
    ids = prompt(name, 70, int(GOLDENS[f"{name}/salt"]))
    np.testing.assert_allclose(last_rows(runner, ids, len(golden)), golden, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", LONG)
def test_logits_at_position_12000(tmp_path, name):
    runner = load_runner(write_variant(tmp_path, name))
    ids = prompt(name, LONG_TOKENS)
    cache = runner.new_cache(LONG_TOKENS)
    golden = GOLDENS[f"{name}/logits"]
    for start in range(0, len(ids) - len(golden), 1000):
        runner.prefill(cache, ids[start : min(start + 1000, len(ids) - len(golden))])
    np.testing.assert_allclose(runner.logits(cache, ids[-len(golden) :]), golden, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", VARIANTS)
def test_rope_tables_equal_transformers(name):
    config = ModelConfig.from_dict(VARIANTS[name])
    inv_freq, scale = inverse_frequencies(config.rope, config.head_dim)
    for position, golden in zip(ROPE_POSITIONS, GOLDENS[f"{name}/rope"], strict=False):  # [2, d/2]
        cos, sin = cos_sin(inv_freq, scale, position, position + 1)
        np.testing.assert_allclose(np.concatenate((cos, sin)), golden, rtol=0, atol=3e-7, err_msg=str(position))
