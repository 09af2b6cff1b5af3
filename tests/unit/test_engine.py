"""One answer: events, counts, reasons to finish, and what an interrupt leaves behind."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import numpy as np
import pytest

from tests.scripted_model import write_scripted_model
from tileinfer_core.backends.numpy_backend import NumpyRunner
from tileinfer_core.backends.numpy_weights import WeightLoad
from tileinfer_core.engine import Engine, EngineOptions, Request
from tileinfer_core.errors import (
    BackendUnavailableError,
    ContextLengthError,
    DamagedModelError,
    ModelError,
    UnsupportedModelError,
    UsageError,
)
from tileinfer_core.events import Finished, PrefillProgress, TextDelta
from tileinfer_core.messages import Message
from tileinfer_core.prompting import PromptEncoder
from tileinfer_core.sampling import SamplingParams

GREEDY = Request(SamplingParams(temperature=0.0))
WORDS = ["one", " two", " thr", "ee", " four"]


@pytest.fixture
def scripted(tmp_path):
    """(script, **options) -> a loaded engine that says the script."""

    def make(script=WORDS, *, options=None, **kinds):
        return Engine.load(write_scripted_model(tmp_path / "model", script, **kinds), options)

    return make


def ask(engine, request=GREEDY, text="hello", cache=None):
    return list(engine.generate(engine.prompt_ids([Message("user", text)], think=request.think), request, cache))


def spoken(events, *, thinking=False):
    return "".join(event.text for event in events if isinstance(event, TextDelta) and event.thinking == thinking)


# Events


def test_events_come_in_order_and_the_text_is_whole(scripted):
    engine = scripted(options=EngineOptions(prefill_chunk=16))
    events = ask(engine)
    prompt = len(engine.prompt_ids([Message("user", "hello")]))
    kinds = [type(event) for event in events]
    chunks = -(-prompt // 16)
    assert kinds == [PrefillProgress] * chunks + [TextDelta] * 5 + [Finished]
    assert [event.done for event in events[:chunks]] == [*range(16, prompt, 16), prompt]
    assert {event.total for event in events[:chunks]} == {prompt}
    assert spoken(events) == events[-1].text == "one two three four"


def test_the_end_says_what_was_counted_and_measured(scripted):
    finished = ask(scripted(), Request(SamplingParams(temperature=0.0, seed=7)))[-1]
    assert finished.reason == "stop"
    assert finished.seed == 7
    assert (finished.usage.reused_tokens, finished.usage.completion_tokens) == (0, 6)  # five words and the end
    timings = finished.timings
    assert timings.load_s > 0
    assert timings.compile_s == 0
    assert timings.ttft_s > 0
    assert timings.prefill_tok_s > 0
    assert timings.decode_tok_s > 0


def test_a_character_split_over_tokens_comes_whole(scripted):
    events = ask(scripted([b"\xc3", b"\xa9", b"\xf0\x9f", b"\xa7", b"\x91", b"\xe0\xa4", b"\x95", b"\xe4"]))
    assert [event.text for event in events if isinstance(event, TextDelta)] == [
        "é",
        "🧑",
        "क",
        "\N{REPLACEMENT CHARACTER}",
    ]
    assert spoken(events) == events[-1].text


# Reasons to finish


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_max_tokens_counts_exactly(scripted, limit):
    finished = ask(scripted(forever=True), replace(GREEDY, max_tokens=limit))[-1]
    assert (finished.reason, finished.usage.completion_tokens) == ("length", limit)
    assert finished.text == "".join(WORDS[:limit])


@pytest.mark.parametrize("source", ["generation", "config", "tokenizer"])
def test_an_end_that_only_one_file_names_is_an_end(tmp_path, source):
    """Three files name three ids; each of them ends an answer."""
    folder = write_scripted_model(tmp_path / "m", ["a", "b", "c", "d"], forever=True)
    vocab = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    ends = {"generation": vocab["b"], "config": vocab["c"], "tokenizer": vocab["d"]}
    chosen = {source: ends[source]}
    files = {
        "generation_config.json": {"eos_token_id": chosen.get("generation")},
        "config.json": {
            **json.loads((folder / "config.json").read_text()),
            "eos_token_id": [chosen["config"]] if source == "config" else None,
        },
        "tokenizer_config.json": {"eos_token": "d"} if source == "tokenizer" else {},
    }
    for name, table in files.items():
        (folder / name).write_text(json.dumps(table))
    engine = Engine.load(folder)
    assert engine.eos_token_ids == {ends[source]}
    said = {"generation": "a", "config": "ab", "tokenizer": "abc"}[source]
    assert ask(engine, replace(GREEDY, max_tokens=9))[-1].text == said
    ignoring = ask(engine, replace(GREEDY, max_tokens=6, ignore_eos=True))[-1]
    assert (ignoring.reason, ignoring.usage.completion_tokens) == ("length", 6)


def test_without_a_generation_config_the_other_files_end_an_answer(tmp_path):
    folder = write_scripted_model(tmp_path / "m", WORDS)
    (folder / "generation_config.json").unlink()
    assert ask(Engine.load(folder))[-1].reason == "stop"


def test_a_stop_string_over_two_tokens_is_never_shown(scripted):
    events = ask(scripted(), replace(GREEDY, stop=("three",)))
    assert events[-1].reason == "stop"
    assert events[-1].stop == "three"
    assert spoken(events) == events[-1].text == "one two "


def test_a_false_start_of_a_stop_string_is_not_lost(scripted):
    events = ask(scripted(), replace(GREEDY, stop=("three five", "fourteen")))
    assert spoken(events) == events[-1].text == "one two three four"
    assert events[-1].stop is None


def test_a_full_context_ends_the_answer(scripted):
    engine = scripted(forever=True, context=64)
    prompt = len(engine.prompt_ids([Message("user", "hello")]))
    finished = ask(engine)[-1]
    assert (finished.reason, finished.usage.completion_tokens) == ("context", 64 - prompt)


# Requests that are refused


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(scripted):
    engine = scripted(context=64, options=EngineOptions(context=50))
    prompt = engine.prompt_ids("x" * 60)
    with pytest.raises(ContextLengthError, match="the prompt has 60 tokens, the context holds 50") as caught:
        engine.generate(prompt, GREEDY)
    assert caught.value.exit_code == 3
    assert "--context (this model allows 64)" in caught.value.hint
    with pytest.raises(ContextLengthError):
        engine.generate(engine.prompt_ids("x" * 50), GREEDY)
    assert list(engine.generate(engine.prompt_ids("x" * 49), GREEDY))[-1].reason == "context"


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (replace(GREEDY, max_tokens=0), "--max-tokens"),
        (replace(GREEDY, stop=("",)), "--stop"),
        (replace(GREEDY, think_budget=-1), "--think-budget"),
    ],
)
def test_an_impossible_request_is_refused_at_the_call(scripted, request_, message):
    engine = scripted()
    with pytest.raises(UsageError, match=message):
        engine.generate([5], request_)


def test_an_empty_raw_prompt_is_refused(scripted):
    engine = scripted()
    with pytest.raises(UsageError, match="the prompt is empty"):
        engine.generate(engine.prompt_ids(""), GREEDY)


@pytest.mark.parametrize("context", [0, 1, -5, 4097])
def test_a_context_beyond_the_model_is_refused_before_loading(tmp_path, context):
    folder = write_scripted_model(tmp_path / "m", WORDS)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UsageError, match="--context must be from 2 to 4,096"):
        Engine.load(folder, EngineOptions(context=context))


def test_the_cuda_backend_is_refused_before_loading(tmp_path):
    folder = write_scripted_model(tmp_path / "m", WORDS)
    (folder / "model.safetensors").unlink()
    with pytest.raises(BackendUnavailableError):
        Engine.load(folder, EngineOptions(backend="cuda"))


def test_an_unsupported_model_is_refused_before_its_weights_are_looked_at(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(UnsupportedModelError, match="gpt2"):
        Engine.load(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"\xff", b'{"a":' * 50_000])
def test_a_damaged_file_is_a_model_error_with_its_name(tmp_path, name, raw):
    folder = write_scripted_model(tmp_path / "m", WORDS)
    (folder / name).write_bytes(raw)
    with pytest.raises(ModelError, match=name):
        Engine.load(folder)


def test_the_text_side_loads_while_the_weights_are_read(tmp_path, monkeypatch):
    order = []
    for owner, name in ((WeightLoad, "__init__"), (PromptEncoder, "__init__"), (WeightLoad, "finish")):
        monkeypatch.setattr(owner, name, _noting(getattr(owner, name), order))
    Engine.load(write_scripted_model(tmp_path / "m", WORDS))
    assert order == ["WeightLoad.__init__", "PromptEncoder.__init__", "WeightLoad.finish"]


def test_a_text_side_that_fails_stops_the_reading(tmp_path, monkeypatch):
    calls, turns = [], sys.getswitchinterval()
    monkeypatch.setattr(WeightLoad, "cancel", _noting(WeightLoad.cancel, calls))
    folder = write_scripted_model(tmp_path / "m", WORDS)
    (folder / "tokenizer.json").write_bytes(b"{")
    with pytest.raises(ModelError):
        Engine.load(folder)
    assert (calls, sys.getswitchinterval()) == (["WeightLoad.cancel"], turns)


def _noting(function, names):
    def noting(*args, **kwargs):
        names.append(function.__qualname__)
        return function(*args, **kwargs)

    return noting


def test_weights_cut_short_are_damage(tmp_path):
    folder = write_scripted_model(tmp_path / "m", WORDS)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4096])
    with pytest.raises(DamagedModelError, match="bytes expected"):
        Engine.load(folder)


def test_chat_without_a_template_is_refused_and_raw_works(scripted):
    engine = scripted(template=None)
    with pytest.raises(ModelError, match="no chat template") as caught:
        engine.prompt_ids([Message("user", "hi")])
    assert "--raw" in caught.value.hint
    assert list(engine.generate(engine.prompt_ids("hi"), GREEDY))[-1].text == "one two three four"


# Thinking

THOUGHT = ["<think>", "\nlet", " me", " see", "</think>", "\n\n", "Yes"]


def test_thinking_and_answer_are_told_apart(scripted):
    events = ask(scripted(THOUGHT, thinking=True))
    assert spoken(events, thinking=True) == events[-1].thinking == "let me see"
    assert spoken(events) == events[-1].text == "Yes"
    assert events[-1].usage.completion_tokens == 8


def test_a_stop_string_in_the_thinking_does_not_end_the_answer(scripted):
    finished = ask(scripted(THOUGHT, thinking=True), replace(GREEDY, stop=("me",)))[-1]
    assert (finished.text, finished.stop) == ("Yes", None)


def test_a_spent_budget_closes_the_thinking(tmp_path):
    """The model would think for ever; after the closing tokens it goes on from the last of them."""
    folder = write_scripted_model(tmp_path / "m", ["<think>", "a", "b", "c"], forever=True, thinking=True)
    engine = Engine.load(folder)
    events = ask(engine, replace(GREEDY, think_budget=6, max_tokens=20))
    finished = events[-1]
    assert finished.thinking == "abc<think>a"  # with the opening marker: six tokens
    assert (finished.reason, finished.usage.completion_tokens) == ("length", 20)
    assert finished.text.startswith("<think>abc")  # once closed, the marker is text
    assert spoken(events, thinking=True) == finished.thinking


def test_a_budget_that_is_not_spent_changes_nothing(scripted):
    engine = scripted(THOUGHT, thinking=True)
    plain, budget = ask(engine)[-1], ask(engine, replace(GREEDY, think_budget=100))[-1]
    assert (plain.text, plain.thinking, plain.usage) == (budget.text, budget.thinking, budget.usage)


@pytest.mark.parametrize("limit", [3, 4, 5, 6, 7, 8, 9])
def test_closing_tokens_count_toward_max_tokens(tmp_path, limit):
    engine = Engine.load(write_scripted_model(tmp_path / "m", ["<think>", "a", "b"], forever=True, thinking=True))
    finished = ask(engine, replace(GREEDY, think_budget=3, max_tokens=limit))[-1]
    assert (finished.reason, finished.usage.completion_tokens) == ("length", limit)


# The cache


def test_a_second_answer_reuses_the_prefix_and_says_the_same(scripted):
    engine = scripted()
    cache = engine.new_cache()
    first, second = ask(engine, cache=cache)[-1], ask(engine, cache=cache)[-1]
    assert first.usage.reused_tokens == 0
    assert second.usage.reused_tokens == second.usage.prompt_tokens - 1
    assert first.text == second.text


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_seed_gives_the_same_text_cold_and_warm(tmp_path, temperature):
    """Also with a prefix reused, which is computed in other chunks then."""
    folder = write_scripted_model(tmp_path / "m", WORDS, forever=True)
    request = Request(SamplingParams(temperature=temperature, seed=11), max_tokens=40)
    cold = ask(Engine.load(folder), request)[-1].text
    engine = Engine.load(folder)
    cache = engine.new_cache()
    ask(engine, request, "something else", cache)
    assert [ask(engine, request, cache=cache)[-1].text for _ in range(2)] == [cold, cold]


@pytest.mark.parametrize("call", range(1, 8))
def test_an_interrupt_in_any_step_leaves_a_usable_cache(scripted, monkeypatch, call):
    engine = scripted(options=EngineOptions(prefill_chunk=16))
    expected = ask(engine)[-1].text
    cache, calls = engine.new_cache(), []
    real = NumpyRunner._append

    def interrupted(self, *args):
        calls.append(1)
        if len(calls) == call:
            raise KeyboardInterrupt
        return real(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(NumpyRunner, "_append", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ask(engine, cache=cache)
    assert ask(engine, cache=cache)[-1].text == expected


def test_closing_the_events_stops_the_work(scripted):
    engine = scripted(forever=True)
    cache = engine.new_cache()
    events = engine.generate(engine.prompt_ids("hi"), GREEDY, cache)
    next(event for event in events if isinstance(event, TextDelta))
    length = cache.length
    events.close()
    assert cache.length == length
    assert list(events) == []


def test_padded_rows_of_the_vocabulary_are_never_sampled(tmp_path):
    """More rows than tokens, logits peaked on a row that is no token."""
    folder = write_scripted_model(tmp_path / "m", WORDS)
    config = json.loads((folder / "config.json").read_text())
    arrays = _read(folder)
    pad = np.zeros((7, 512), np.float32)
    arrays["model.embed_tokens.weight"] = np.concatenate((arrays["model.embed_tokens.weight"], pad))
    arrays["lm_head.weight"] = np.concatenate((arrays["lm_head.weight"], pad + 50))
    config["vocab_size"] += 7
    (folder / "config.json").write_text(json.dumps(config))
    from tests.checkpoints import write_safetensors

    write_safetensors(folder / "model.safetensors", arrays)
    assert ask(Engine.load(folder))[-1].text == "one two three four"


def _read(folder):
    from tileinfer_core.weights import WeightFiles

    files = WeightFiles.open(folder)
    return {name: np.array(files.read(name)) for name in files.names}
