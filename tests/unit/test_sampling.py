"""The exact sampler: against Transformers' warpers, against its own definition, and at the edges."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.text_fixtures import goldens
from tileinfer_core.errors import DamagedModelError, TileinferError, UsageError
from tileinfer_core.generation_config import GenerationConfig
from tileinfer_core.philox import philox4x32, uniform
from tileinfer_core.sampling import Sampler, SamplingParams, cut, draw, resolve_sampling
from tileinfer_core.settings import Setting, Settings

OFF = SamplingParams(temperature=1, top_k=0, top_p=1, min_p=0)


def floats(*values):
    return np.array(values, np.float32)


def probabilities(logits, params, history=(), step=0):
    """[V], zero where an id was cut."""
    found = Sampler(params).candidates(logits, history, step)
    full = np.zeros(len(logits))
    full[found.ids] = found.probs
    return full


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter, key, words):
    """Random123's kat_vectors for philox4x32 with 10 rounds."""
    assert philox4x32(counter, key) == words


def test_uniform_is_exact_in_float32_and_uniform():
    numbers = [uniform(7, step) for step in range(20_000)]
    assert all(0 <= u < 1 and float(np.float32(u)) == u for u in numbers)
    counts = np.histogram(numbers, 20, (0, 1))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 43.8  # chi-square, 19 degrees of freedom, p = 0.001
    assert uniform(7, 3) == numbers[3] != uniform(8, 3)
    assert uniform(1 << 40, 0) != uniform(0, 0)


@pytest.mark.parametrize("row", goldens("sampling_goldens.json"), ids=lambda row: str(row["settings"]))
def test_distribution_equals_transformers(row):
    params = replace(OFF, **row["settings"])
    found = probabilities(np.array(row["logits"], np.float32), params, row["history"], 4)
    np.testing.assert_allclose(found, row["probs"], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    "params",
    [OFF, replace(OFF, temperature=0.5, top_k=3), replace(OFF, top_p=0.6), replace(OFF, min_p=0.3, temperature=2.0)],
)
def test_frequencies(params):
    logits = floats(1.0, 0.5, 0.0, -0.5, 2.0, -3.0)
    expected = probabilities(logits, params)
    sampler = Sampler(replace(params, seed=11))
    draws = 6000
    counts = np.bincount([sampler.sample(logits, [], step).id for step in range(draws)], minlength=6)
    kept = expected > 0
    assert counts[~kept].sum() == 0
    chi_square = ((counts[kept] - draws * expected[kept]) ** 2 / (draws * expected[kept])).sum()
    assert chi_square < [0, 10.8, 13.8, 16.3, 18.5, 20.5][kept.sum() - 1]  # p = 0.001


def test_same_seed_and_step_give_the_same_id():
    logits = np.zeros(1000, np.float32)
    first = [Sampler(replace(OFF, seed=5)).sample(logits, [], step).id for step in range(20)]
    again = Sampler(replace(OFF, seed=5))
    assert [again.sample(logits, [1, 2, 3], step).id for step in reversed(range(20))] == first[::-1]
    assert [Sampler(replace(OFF, seed=6)).sample(logits, [], step).id for step in range(20)] != first


def test_repetition_penalty_once_per_distinct_id_and_by_sign():
    logits = floats(-2, 3, 1)
    sampler = Sampler(replace(OFF, repetition_penalty=1.1))
    found = sampler._penalised(logits.astype(np.float64), [0, 1] * 20, step=3)
    np.testing.assert_allclose(found, [-2.2, 3 / 1.1, 1])


def test_presence_and_frequency_count_output_only():
    sampler = Sampler(replace(OFF, presence_penalty=0.5, frequency_penalty=0.25))
    history = [0, 0, 0, 1, 2, 2, 1, 2]  # the last four are output
    found = sampler._penalised(np.zeros(4), history, step=4)
    np.testing.assert_allclose(found, [0, -0.75, -0.5 - 0.25 * 3, 0])
    np.testing.assert_allclose(sampler._penalised(np.zeros(4), history, step=0), 0)


def test_greedy_takes_the_first_maximum_and_needs_no_seed():
    logits = floats(1, 5, 5, 0)
    greedy = replace(OFF, temperature=0, top_k=1, min_p=1, top_p=0)
    assert {Sampler(replace(greedy, seed=seed)).sample(logits, [], seed).id for seed in range(5)} == {1}
    assert Sampler(replace(greedy, repetition_penalty=2)).sample(logits, [1], 0).id == 2


def test_padded_ids_are_never_drawn():
    logits = floats(0, 0, 100, 0)
    mask = np.array([True, True, False, True])
    for temperature in (0, 1):
        sampler = Sampler(replace(OFF, temperature=temperature, repetition_penalty=1.5), mask)
        drawn = {sampler.sample(logits, [2], step).id for step in range(50)}
        assert 2 not in drawn
    assert Sampler(replace(OFF, temperature=0), mask).sample(logits, [], 0).logprob == pytest.approx(-np.log(3))


@pytest.mark.parametrize(
    ("change", "ids"),
    [
        ({"top_k": 1000}, [2, 0, 1, 3]),
        ({"top_k": 1}, [2]),
        ({"top_p": 0.0}, [2]),
        ({"min_p": 1.0}, [2]),
        ({"temperature": 1e-300}, [2]),
        ({"temperature": 5e-324}, [2]),
        ({"temperature": 100.0}, [2, 0, 1, 3]),
    ],
)
def test_edges(change, ids):
    assert list(Sampler(replace(OFF, **change)).candidates(floats(1, 1, 2, 0), [], 0).ids) == ids


def test_equal_logits_keep_the_order_of_ids():
    equal = np.full(50, -1.5, np.float32)
    assert list(Sampler(replace(OFF, top_k=7)).candidates(equal, [], 0).ids) == list(range(7))
    assert list(Sampler(replace(OFF, top_p=0.5)).candidates(equal, [], 0).ids) == list(range(25))
    assert len(Sampler(replace(OFF, min_p=1)).candidates(equal, [], 0).ids) == 50


def test_minus_infinity_is_just_impossible():
    logits = floats(-np.inf, 0, -np.inf, 0)
    for change in ({}, {"top_k": 3}, {"top_p": 0.999}, {"repetition_penalty": 2}, {"frequency_penalty": 1.0}):
        assert list(Sampler(replace(OFF, **change)).candidates(logits, [0, 1], 1).ids) in ([1, 3], [3, 1])


@pytest.mark.parametrize(("bad", "word"), [(np.nan, "NaN"), (np.inf, "infinity")])
@pytest.mark.parametrize("temperature", [0, 1])
def test_broken_logits_are_an_error(bad, word, temperature):
    with pytest.raises(TileinferError, match=word):
        Sampler(replace(OFF, temperature=temperature)).sample(floats(0, bad, 1), [], 0)
    with pytest.raises(TileinferError, match="impossible"):
        Sampler(replace(OFF, temperature=temperature)).sample(floats(-np.inf, -np.inf), [], 0)


def test_broken_logits_of_padding_do_no_harm():
    sampler = Sampler(replace(OFF, temperature=0), np.array([True, False]))
    assert sampler.sample(floats(1, np.nan), [], 0).id == 0


def test_logprob_is_the_models_own():
    logits = floats(1, 2, 3)
    sampled = Sampler(replace(OFF, top_k=1, temperature=0.1, frequency_penalty=1)).sample(logits, [2], 1)
    assert sampled.logprob == pytest.approx(logits[sampled.id] - np.log(np.exp(logits.astype(np.float64)).sum()))


def test_draw_at_the_ends():
    candidates = cut(np.array([0.0, 1.0, 2.0]), OFF)
    assert draw(candidates, 0.0) == 2
    assert draw(candidates, 1 - 2**-24) == 0


def test_real_vocabulary_size_takes_the_same_cut_as_a_full_sort():
    scores = np.random.default_rng(0).normal(size=151_936).round(1)  # many equals
    order = np.lexsort((np.arange(len(scores)), -scores))
    assert list(cut(scores, replace(OFF, top_k=50)).ids) == list(order[:50])


@pytest.mark.parametrize(
    ("setting", "flag"),
    [
        ({"temperature": -0.1}, "--temperature"),
        ({"temperature": float("nan")}, "--temperature"),
        ({"temperature": "hot"}, "--temperature"),
        ({"top_k": -1}, "--top-k"),
        ({"top_k": 1.5}, "--top-k"),
        ({"top_k": True}, "--top-k"),
        ({"top_p": 1.01}, "--top-p"),
        ({"min_p": -0.01}, "--min-p"),
        ({"repetition_penalty": 0.0}, "--repetition-penalty"),
        ({"presence_penalty": float("inf")}, "--presence-penalty"),
        ({"frequency_penalty": 101}, "--frequency-penalty"),
        ({"seed": -1}, "--seed"),
        ({"seed": 2**63}, "--seed"),
    ],
)
def test_values_out_of_range_name_the_flag(setting, flag):
    with pytest.raises(UsageError, match=rf"^{flag} must be .* from "):
        SamplingParams(**setting)


def settings(**sampling):
    loaded = Settings.load({"HOME": "/nowhere"}, Path("/nowhere/config.toml"))
    return replace(loaded, sampling={key: Setting(value, "config file") for key, value in sampling.items()})


QWEN3 = GenerationConfig(do_sample=True, temperature=0.6, top_k=20, top_p=0.95)


def test_origins():
    found = resolve_sampling({"top_p": 0.5, "top_k": None, "seed": 9}, settings(top_k=3, top_p=0.1), QWEN3)
    assert found["top_p"] == Setting(0.5, "--top-p")
    assert found["top_k"] == Setting(3, "config file")
    assert found["temperature"] == Setting(0.6, "generation_config.json")
    assert found["min_p"] == Setting(0.0, "default")
    assert found["seed"] == Setting(9, "--seed")
    assert SamplingParams.from_settings(found).top_k == 3


def test_a_seed_is_always_there():
    seeds = {resolve_sampling({}, settings(), GenerationConfig())["seed"].value for _ in range(5)}
    assert len(seeds) > 1
    assert resolve_sampling({}, settings(), GenerationConfig())["seed"].origin == "random"
    assert resolve_sampling({}, settings(seed=4), GenerationConfig())["seed"] == Setting(4, "config file")


def test_do_sample_false_is_greedy_unless_somebody_asks():
    greedy = replace(QWEN3, do_sample=False)
    assert resolve_sampling({}, settings(), greedy)["temperature"].value == 0
    assert "do_sample" in resolve_sampling({}, settings(), greedy)["temperature"].origin
    assert resolve_sampling({"temperature": 0.9}, settings(), greedy)["temperature"].value == 0.9
    assert resolve_sampling({}, settings(temperature=0.8), greedy)["temperature"].value == 0.8


def test_a_bad_value_in_the_config_file_names_it():
    with pytest.raises(UsageError, match=r"^config file: top_p must be"):
        resolve_sampling({}, settings(top_p=7), QWEN3)
    with pytest.raises(UsageError, match="top_q"):
        resolve_sampling({"top_q": 1}, settings(), QWEN3)


def write_config(tmp_path, text):
    (tmp_path / "generation_config.json").write_text(text)
    return tmp_path


def test_generation_config(tmp_path):
    assert GenerationConfig.load(tmp_path) == GenerationConfig()
    folder = write_config(
        tmp_path,
        '{"do_sample": true, "temperature": 1, "top_k": null, "eos_token_id": [5, 6, 5], "bos_token_id": 1,'
        ' "pad_token_id": -1, "max_new_tokens": 2048, "transformers_version": "4.51.0"}',
    )
    found = GenerationConfig.load(folder)
    assert found == GenerationConfig(True, 1.0, None, None, None, None, (5, 6), 1, None, 2048)
    assert isinstance(found.temperature, float)


@pytest.mark.parametrize(("value", "ids"), [("7", (7,)), ("null", ()), ("[]", ()), ("[1]", (1,)), ("-1", ())])
def test_generation_config_eos(tmp_path, value, ids):
    assert GenerationConfig.load(write_config(tmp_path, f'{{"eos_token_id": {value}}}')).eos_token_ids == ids


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{", '{"temperature": "hot"}', '{"temperature": -1}', '{"temperature": NaN}', '{"top_k": 1.5}',
        '{"top_k": true}', '{"top_p": 1.5}', '{"min_p": Infinity}', '{"do_sample": "yes"}', '{"eos_token_id": "</s>"}',
        '{"eos_token_id": [1, null]}', '{"eos_token_id": -5}', '{"eos_token_id": {}}', '{"repetition_penalty": 0}',
        '{"max_new_tokens": -1}',
    ],
)  # fmt: skip
def test_damaged_generation_config(tmp_path, text):
    with pytest.raises(DamagedModelError, match=r"generation_config\.json"):
        GenerationConfig.load(write_config(tmp_path, text))
