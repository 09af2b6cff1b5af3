"""Perplexity: exact on a uniform model, equal to a direct sum on a random one, every token scored once."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from tests.checkpoints import write_safetensors
from tests.reference.tiny_models import VARIANTS, _values, shapes
from tests.scripted_model import write_scripted_model
from tileinfer_core import evaluate
from tileinfer_core.engine import Engine
from tileinfer_core.errors import TileinferError, UsageError
from tileinfer_core.evaluate import perplexity, windows

TEXT = "It was the best of times, it was the worst of times. " * 4


@pytest.fixture
def random_engine(tmp_path):
    """Random weights behind the byte tokenizer of the scripted model."""
    folder = write_scripted_model(tmp_path / "m", ["a"])
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    config = {**VARIANTS["llama-head-dim"], "vocab_size": vocab}
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", {n: _values(n, shape) for n, shape in shapes(config).items()})
    return Engine.load(folder)


def direct(engine, ids, start=1):
    """-log p of ids[start:], each from a pass over everything before it."""
    logits = engine.runner.logits(engine.new_cache(), ids[:-1]).astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return -sum(logprobs[i - 1, ids[i]] for i in range(start, len(ids)))


def test_a_uniform_model_has_its_vocabulary_as_perplexity(tmp_path):
    engine = Engine.load(write_scripted_model(tmp_path / "m", ["a"]))
    engine.runner._weights.lm_head[:] = 0
    result = perplexity(engine, TEXT)
    assert result.perplexity == pytest.approx(engine.config.vocab_size, rel=1e-6)
    assert result.nll == pytest.approx(math.log(engine.config.vocab_size), rel=1e-6)
    assert result.tokens == len(TEXT) - 1


@pytest.mark.parametrize("logit_bytes", [1, 1 << 15, 1 << 25])
def test_one_window_equals_a_direct_sum(random_engine, monkeypatch, logit_bytes):
    monkeypatch.setattr(evaluate, "LOGIT_BYTES", logit_bytes)
    ids = random_engine.tokenizer.encode(TEXT, special=False)
    result = perplexity(random_engine, TEXT)
    assert result.nll == pytest.approx(direct(random_engine, ids) / (len(ids) - 1), rel=1e-6)
    assert result.perplexity == pytest.approx(math.exp(result.nll))


def test_overlapping_windows_score_with_their_own_context(random_engine):
    ids = random_engine.tokenizer.encode(TEXT, special=False)
    total = direct(random_engine, ids[:50])
    start, first = 25, 50
    while first < len(ids):
        stop = min(start + 50, len(ids))
        total += direct(random_engine, ids[start:stop], first - start)
        first, start = stop, stop - 25
    assert perplexity(random_engine, TEXT, window=50).nll == pytest.approx(total / (len(ids) - 1), rel=1e-6)


@pytest.mark.parametrize("count", [2, 3, 7, 8, 9, 100])
@pytest.mark.parametrize("window", [2, 3, 8, 200])
def test_every_token_but_the_first_is_scored_once(count, window):
    scored = []
    for start, first, stop in windows(count, window):
        assert 0 <= start < first < stop <= start + window
        assert start == 0 or first - start >= window // 2
        scored += range(first, stop)
    assert scored == list(range(1, count))


@pytest.mark.parametrize("text", ["", "a"])
def test_a_text_without_two_tokens_is_refused(random_engine, text):
    with pytest.raises(UsageError, match=f"the text has {len(text)} tokens"):
        perplexity(random_engine, text)


@pytest.mark.parametrize("window", [-1, 0, 1, 257])
def test_a_window_that_cannot_be_is_refused(random_engine, window):
    with pytest.raises(UsageError, match="--window must be from 2 to 256"):
        perplexity(random_engine, TEXT, window=window)


def test_logits_that_are_not_finite_are_reported(random_engine):
    random_engine.runner._weights.norm[3] = np.nan
    with pytest.raises(TileinferError, match="not finite"):
        perplexity(random_engine, TEXT)


def test_progress_reaches_the_end(random_engine):
    events = []
    perplexity(random_engine, TEXT, window=50, on_progress=events.append)
    assert events[-1].done == events[-1].total == len(TEXT)


def test_a_perplexity_beyond_any_number_is_infinite(tmp_path):
    engine = Engine.load(write_scripted_model(tmp_path / "m", ["a"]))
    engine.runner._weights.lm_head[:] *= 1e5
    result = perplexity(engine, TEXT)
    assert result.nll > 710
    assert result.perplexity == math.inf
