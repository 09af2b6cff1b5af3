"""The NumPy backend by itself: cached decoding, blocks, growth, widening, memory, interrupts."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from tests.checkpoints import load_runner, write_checkpoint, write_safetensors, write_variant
from tests.reference.tiny_models import VARIANTS, prompt, tensors
from tileinfer_core.backends import numpy_backend, numpy_kv, numpy_weights
from tileinfer_core.backends.numpy_weights import available_bytes, load_arrays, widen_bfloat16, widen_float16
from tileinfer_core.dtypes import BFLOAT16
from tileinfer_core.errors import ContextLengthError, DamagedModelError, OutOfMemoryError
from tileinfer_core.models.structure import Parameter
from tileinfer_core.progress import silent
from tileinfer_core.sampling import Sampler, SamplingParams
from tileinfer_core.weights import TensorSpec, WeightFiles

GREEDY = SamplingParams(temperature=0.0)
NAMES = ["llama-head-dim", "qwen3-linear"]


@pytest.fixture(params=NAMES)
def runner(request, tmp_path):
    return load_runner(write_variant(tmp_path, request.param))


def ids(count):
    return prompt("llama-tied", count)


# The cache


@pytest.mark.parametrize("chunks", [[1] * 40, [3, 1, 5, 31], [39, 1], [1, 39]])
def test_cached_decode_equals_one_shot_prefill(runner, chunks):
    whole = runner.logits(runner.new_cache(64), ids(40))
    cache, parts, start = runner.new_cache(64), [], 0
    for size in chunks:
        parts.append(runner.logits(cache, ids(40)[start : start + size]))
        start += size
    np.testing.assert_allclose(np.concatenate(parts), whole, rtol=0, atol=2e-5)


@pytest.mark.parametrize("count", [63, 64, 65, 257, 300])
def test_lengths_around_pages_and_the_long_past_agree_with_one_shot(runner, count):
    whole = runner.logits(runner.new_cache(512), ids(count))[-1]
    cache = runner.new_cache(512)
    runner.prefill(cache, ids(count)[: count - 3])
    last = [runner.logits(cache, [token]) for token in ids(count)[count - 3 :]][-1]
    np.testing.assert_allclose(last[0], whole, rtol=0, atol=2e-5)


def test_attention_in_small_blocks_changes_nothing(runner, monkeypatch):
    whole = runner.logits(runner.new_cache(256), ids(150))
    monkeypatch.setattr(numpy_backend, "SCORE_FLOATS", 1)
    monkeypatch.setattr(numpy_backend, "MIN_QUERY_ROWS", 7)
    np.testing.assert_allclose(runner.logits(runner.new_cache(256), ids(150)), whole, rtol=0, atol=2e-5)


def test_a_truncated_cache_goes_on_as_if_the_rest_had_never_been(runner):
    cache = runner.new_cache(512)
    runner.prefill(cache, ids(290))
    cache.truncate(70)
    after = runner.logits(cache, [9, 8, 7])
    fresh = runner.new_cache(512)
    runner.prefill(fresh, ids(70))
    np.testing.assert_allclose(after, runner.logits(fresh, [9, 8, 7]), rtol=0, atol=2e-5)


def test_memory_grows_by_doubling_and_never_past_the_context(runner):
    cache = runner.new_cache(700)
    sizes = []
    for token in ids(700):
        runner.prefill(cache, [token])
        sizes.append(cache.store.keys[0].shape[1])
    assert sorted(set(sizes)) == [256, 512, 704]
    with pytest.raises(ContextLengthError, match="701 tokens do not fit into a context of 700"):
        runner.prefill(cache, [5])


def test_no_memory_for_a_longer_past_names_the_number_and_leaves_the_cache_usable(runner, monkeypatch):
    cache = runner.new_cache(4096)
    runner.prefill(cache, ids(250))

    def no_memory(*_args):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(numpy_kv, "_grown", no_memory)
        with pytest.raises(OutOfMemoryError, match="keys and values of 512 tokens; 256 are held"):
            runner.prefill(cache, ids(20))
    assert cache.length == 250
    runner.prefill(cache, ids(20))
    whole = runner.logits(runner.new_cache(300), [*ids(250), *ids(20), 3])[-1]
    np.testing.assert_allclose(runner.logits(cache, [3])[0], whole, rtol=0, atol=2e-5)


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_an_interrupt_in_any_layer_leaves_the_cache_as_it_was(runner, monkeypatch, layer):
    cache = runner.new_cache(256)
    runner.prefill(cache, ids(100))
    expected = [s.id for s in islice(runner.decode(cache, GREEDY, None, 100), 5)]
    cache.truncate(60)
    real = numpy_backend.NumpyBackend.attention

    def interrupted(self, q, cache, index):
        if index == layer:
            raise KeyboardInterrupt
        return real(self, q, cache, index)

    with monkeypatch.context() as patch:
        patch.setattr(numpy_backend.NumpyBackend, "attention", interrupted)
        with pytest.raises(KeyboardInterrupt):
            runner.prefill(cache, ids(100)[60:])
    assert cache.length == 60
    runner.prefill(cache, ids(100)[60:])
    assert [s.id for s in islice(runner.decode(cache, GREEDY, None, 100), 5)] == expected


def test_decode_writes_every_token_but_the_last(runner):
    cache = runner.new_cache(256)
    runner.prefill(cache, ids(10))
    steps = runner.decode(cache, GREEDY, None, 10)
    said = [s.id for s in islice(steps, 6)]
    steps.close()
    assert list(cache.token_ids) == [*ids(10), *said[:-1]]


def test_one_forward_pass_per_token(runner, monkeypatch):
    passes = []
    real = numpy_backend.forward
    monkeypatch.setattr(numpy_backend, "forward", lambda *a: passes.append(len(a[-1])) or real(*a))
    cache = runner.new_cache(256)
    runner.prefill(cache, ids(10))
    list(islice(runner.decode(cache, GREEDY, None, 10), 6))
    assert passes == [10, 1, 1, 1, 1, 1]


def test_masked_ids_are_never_sampled(runner):
    cache = runner.new_cache(256)
    runner.prefill(cache, ids(10))
    first = next(runner.decode(cache, GREEDY, None, 10)).id
    valid = np.ones(160, np.bool_)
    valid[first] = False
    assert next(runner.decode(cache, GREEDY, valid, 10)).id != first


def test_what_is_drawn_follows_the_sampler_with_the_prompt_as_prompt(runner):
    """Presence counts in the answer alone, and the random counter starts with it."""
    params = SamplingParams(temperature=1.5, top_k=0, top_p=1.0, seed=3, presence_penalty=2.0, repetition_penalty=1.2)
    sampler = Sampler(params)
    cache, history = runner.new_cache(256), ids(20)
    logits = runner.logits(cache, history)[-1]
    wanted = []
    for step in range(12):
        wanted.append(sampler.sample(logits, history, step).id)
        history = [*history, wanted[-1]]
        logits = runner.logits(cache, wanted[-1:])[-1]
    cache = runner.new_cache(256)
    runner.prefill(cache, ids(20))
    assert [s.id for s in islice(runner.decode(cache, params, None, 20), 12)] == wanted


# Operations


def test_the_activation_has_the_right_limits_without_a_warning(runner):
    gate_up = np.array([[-1e4, -100.0, 0.0, 100.0, 2.0, 2.0, 2.0, 2.0]], np.float32)
    with np.errstate(over="ignore"):
        got = runner._ops.gated_activation(gate_up, "silu")
    np.testing.assert_allclose(got, [[0.0, 0.0, 0.0, 200.0]], atol=1e-30)


def test_one_row_and_many_rows_are_normed_alike(runner):
    x = np.random.default_rng(0).standard_normal((5, 64), dtype=np.float32)
    weight = np.linspace(0.5, 1.5, 64, dtype=np.float32)
    many = runner._ops.rms_norm(x, weight, 1e-6)
    one = np.concatenate([runner._ops.rms_norm(row[None], weight, 1e-6) for row in x])
    np.testing.assert_allclose(one, many, rtol=0, atol=5e-7)


# Weights


def test_every_float16_value_is_widened_exactly():
    bits = np.arange(1 << 16, dtype=np.uint16)
    expected = bits.view(np.float16).astype(np.float32)
    finite = np.isfinite(expected)
    for chosen in (bits[finite], bits):
        out = np.empty(len(chosen), np.float32)
        widen_float16(chosen.view(np.int16).copy(), out)
        np.testing.assert_array_equal(out, chosen.view(np.float16).astype(np.float32))
        assert (np.signbit(out) == np.signbit(chosen.view(np.float16))).all()


def test_every_bfloat16_value_is_widened_exactly():
    bits = np.arange(1 << 16, dtype=np.uint16)
    out = np.empty(1 << 16, np.float32)
    widen_bfloat16(bits, out)
    np.testing.assert_array_equal(out, bits.view(BFLOAT16).astype(np.float32))


@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32"])
def test_tensors_longer_than_a_job_arrive_whole(tmp_path, monkeypatch, dtype):
    monkeypatch.setattr(numpy_weights, "BLOCK", 64)
    a = (np.arange(7 * 333) % 251 - 125).astype(np.float32).reshape(333, 7) / 64
    b = a[:33] * -2
    write_safetensors(tmp_path / "model.safetensors", {"pad": np.ones(3, np.float32), "a": a, "b": b}, dtype)
    parameter = Parameter("ab", (TensorSpec("a", a.shape), TensorSpec("b", b.shape)))
    events = []
    arrays = load_arrays((parameter,), WeightFiles.open(tmp_path), events.append)
    np.testing.assert_array_equal(arrays["ab"], np.concatenate((a, b)))
    assert events[-1].done == events[-1].total == (a.size + b.size) * (4 if dtype == "F32" else 2)
    assert [event.done for event in events] == sorted(event.done for event in events)


def test_a_file_that_shrinks_while_it_is_read_is_damage(tmp_path):
    folder = write_variant(tmp_path, "llama-tied")
    files = WeightFiles.open(folder)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4096])
    parameter = Parameter("norm", (TensorSpec("model.norm.weight", (64,)),))
    with pytest.raises(DamagedModelError, match="cut off while it was read"):
        load_arrays((parameter,), files, silent)


def test_weights_beyond_the_memory_are_refused_with_both_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(numpy_weights, "available_bytes", lambda: 1000)
    with pytest.raises(OutOfMemoryError, match=r"need [\d.]+ [kM]B as float32, 1.0 kB are available") as caught:
        load_runner(write_variant(tmp_path, "llama-tied"))
    assert caught.value.exit_code == 8


def test_available_memory_is_read_where_linux_says_it(tmp_path):
    info = tmp_path / "meminfo"
    info.write_text("MemTotal: 100 kB\nMemAvailable:    64 kB\nSwapFree: 8 kB\n")
    assert available_bytes(str(info)) == 72 * 1024
    info.write_text("MemTotal: 100 kB\nnonsense\n")
    assert available_bytes(str(info)) is None
    assert available_bytes(str(tmp_path / "absent")) is None


def test_an_interrupt_while_loading_stops_the_threads(tmp_path, monkeypatch):
    monkeypatch.setattr(numpy_weights, "BLOCK", 500)
    folder = write_checkpoint(tmp_path, VARIANTS["llama-tied"], tensors("llama-tied"))

    def interrupt(_event):
        raise KeyboardInterrupt

    files = WeightFiles.open(folder)
    parameters = tuple(Parameter(name, (TensorSpec(name, files.info(name).shape),)) for name in files.names)
    with pytest.raises(KeyboardInterrupt):
        load_arrays(parameters, files, interrupt)


def test_bookkeeping_of_memory(runner):
    assert runner.weight_bytes == sum(array.nbytes for array in runner_arrays(runner))
    unread = 0 if runner._model.tied else runner._weights.embedding.nbytes
    assert runner.step_weight_bytes == runner.weight_bytes - unread
    assert runner.kv_bytes_per_token == 3 * 2 * 4 * runner._model.structure.kv_size
    runner.close()


def runner_arrays(runner):
    weights = runner._weights
    named = [weights.embedding, weights.norm, weights.lm_head]
    for layer in weights.layers:
        named += [getattr(layer, field) for field in layer.__slots__]
    return [array for array in named if array is not None]
