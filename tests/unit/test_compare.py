"""Two models on one text: KL, agreement and both perplexities equal a direct computation; what can't be is refused."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from tests.checkpoints import write_safetensors
from tests.reference.tiny_models import VARIANTS, _values, shapes
from tests.scripted_model import write_scripted_model
from tileinfer_core import compare as module
from tileinfer_core.compare import compare
from tileinfer_core.engine import Engine, EngineOptions
from tileinfer_core.errors import DiskError, TileinferError, UsageError
from tileinfer_core.evaluate import perplexity, windows

TEXT = "It was the best of times, it was the worst of times. " * 4


def write_random(folder, salt=""):
    write_scripted_model(folder, ["a"])
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    config = {**VARIANTS["llama-head-dim"], "vocab_size": vocab}
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", {n: _values(n + salt, s) for n, s in shapes(config).items()})
    return folder


@pytest.fixture
def pair(tmp_path):
    """Loaders of two models whose weights differ a little."""
    left, right = write_random(tmp_path / "a"), write_random(tmp_path / "b")
    arrays = {n: _values(n, s) for n, s in shapes(json.loads((right / "config.json").read_text())).items()}
    rng = np.random.default_rng(0)
    noisy = {n: a + rng.standard_normal(a.shape, np.float32) * 0.01 * (a.ndim > 1) for n, a in arrays.items()}
    write_safetensors(right / "model.safetensors", {n: a.astype(np.float32) for n, a in noisy.items()})
    return (lambda: Engine.load(left)), (lambda: Engine.load(right))


def direct(engine, ids, window):
    """log p [T, V] in float64 of every id but the first."""
    rows = []
    for start, first, stop in windows(len(ids), window):
        part = ids[start:stop]
        logits = engine.runner.logits(engine.runner.new_cache(len(part)), part[:-1]).astype(np.float64)
        rows.append((logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))[first - start - 1 :])
    return np.concatenate(rows)


@pytest.mark.parametrize("window", [None, 50])
def test_the_numbers_are_those_of_a_direct_computation(pair, window):
    found = compare(*pair, TEXT, window=window)
    a, b = (load() for load in pair)
    ids = a.tokenizer.encode(TEXT, special=False)
    p, q = (direct(engine, ids, found.window) for engine in (a, b))
    kl = (np.exp(p) * (p - q)).sum(axis=1)
    targets = np.arange(len(ids) - 1), ids[1:]
    assert found.tokens == len(ids) - 1
    assert found.reference_nll == pytest.approx(-p[targets].mean(), rel=1e-5)
    assert found.nll == pytest.approx(-q[targets].mean(), rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(found.nll))
    assert found.change == pytest.approx(math.exp(found.nll - found.reference_nll) - 1, rel=1e-6)
    assert found.mean_kl == pytest.approx(kl.mean(), rel=1e-3)
    assert found.kl_99 == pytest.approx(np.quantile(kl, 0.99), rel=1e-3)
    assert found.agreement == pytest.approx((p.argmax(1) == q.argmax(1)).mean())
    assert found.mean_kl > 1e-4


def test_a_model_against_itself(pair):
    found = compare(pair[0], pair[0], TEXT, window=50)
    assert found.change == 0
    assert found.mean_kl == found.kl_99 == 0
    assert found.agreement == 1
    assert found.perplexity == pytest.approx(perplexity(pair[0](), TEXT, window=50).perplexity, rel=1e-5)


def test_int8_keys_and_values_change_a_little(pair, tmp_path):
    found = compare(pair[0], lambda: Engine.load(tmp_path / "a", EngineOptions(kv="int8")), TEXT)
    assert 0 < found.mean_kl < 0.05


def test_tokens_limits_what_is_scored(pair):
    found = compare(*pair, TEXT, tokens=20)
    assert found.tokens == 20
    ids = pair[0]().tokenizer.encode(TEXT, special=False)[:21]
    assert found.reference_nll == pytest.approx(-direct(pair[0](), ids, 1024)[np.arange(20), ids[1:]].mean(), rel=1e-5)


def test_one_model_is_closed_before_the_next_is_loaded(pair):
    events = []

    def watched(name, load):
        def loader():
            events.append(f"load {name}")
            engine = load()
            close = engine.runner.close
            engine.runner.close = lambda: (events.append(f"close {name}"), close())
            return engine

        return loader

    compare(watched("a", pair[0]), watched("b", pair[1]), TEXT, tokens=5)
    assert events == ["load a", "close a", "load b", "close b"]


def test_models_of_different_vocabularies_are_refused(pair, tmp_path):
    other = write_scripted_model(tmp_path / "other", ["much", "longer", "vocabulary"])
    with pytest.raises(UsageError, match="different vocabularies"):
        compare(pair[0], lambda: Engine.load(other), TEXT)


def test_too_little_room_for_the_logits_is_said(pair, monkeypatch):
    monkeypatch.setattr(module, "free_bytes", lambda _folder: 1000)
    with pytest.raises(DiskError, match=r"needs [\d,]+ bytes there, free are 1,000") as caught:
        compare(*pair, TEXT)
    assert "--tokens" in caught.value.hint


@pytest.mark.parametrize(("options", "named"), [({"tokens": 0}, "--tokens"), ({"window": 1}, "--window")])
def test_limits_that_can_not_be(pair, options, named):
    with pytest.raises(UsageError, match=named):
        compare(*pair, TEXT, **options)


def test_logits_that_are_not_finite_are_reported(pair):
    def broken():
        engine = pair[0]()
        engine.runner._weights.norm[3] = np.nan
        return engine

    with pytest.raises(TileinferError, match="not finite"):
        compare(pair[1], broken, TEXT)
