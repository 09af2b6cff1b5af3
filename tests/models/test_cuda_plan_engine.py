"""The whole CUDA engine through the kernel interpreter: every step kind, against the NumPy backend, token for token.

The kernels round activations to half precision where NumPy keeps float32. On these models that moves a logit by at most
TOLERANCE; where NumPy's two best logits are closer than that, either is right, and both go on with the device's
choice. `near_ties` are bounded, so that a test can't pass by ties alone.
"""

from __future__ import annotations

from contextlib import closing
from itertools import islice

import numpy as np
import pytest

from tests.checkpoints import int8_tensors, packed, quantization_config, write_checkpoint
from tests.int8_oracle import dequantise
from tests.reference import tiny_models
from tests.reference.tiny_models import VARIANTS
from tileinfer_core.backends.base import LoadOptions
from tileinfer_core.backends.cuda import load, loader, runner
from tileinfer_core.backends.cuda.interpreted import InterpretedDevice
from tileinfer_core.backends.numpy_backend import NumpyRunner
from tileinfer_core.config import ModelConfig
from tileinfer_core.errors import ContextLengthError, OutOfMemoryError, TileinferError, UnsupportedModelError
from tileinfer_core.models.define import define_from_files
from tileinfer_core.progress import silent
from tileinfer_core.quantization import Int8
from tileinfer_core.sampling import Sampler, SamplingParams
from tileinfer_core.weights import WeightFiles

GREEDY = SamplingParams(temperature=0)
TOLERANCE = {"BF16": 0.15, "F16": 0.03}
SMALL = {"num_hidden_layers": 1, "head_dim": 64, "intermediate_size": 96}
MODELS = {
    "qwen3": {**VARIANTS["qwen3-tied"], **SMALL},
    "llama": {
        **VARIANTS["llama-llama3"],
        **SMALL,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "vocab_size": 307,
    },
    "qwen3-bias": {**VARIANTS["qwen3-untied"], **SMALL, "num_attention_heads": 2, "num_key_value_heads": 2},
    "llama-biases": {**VARIANTS["llama-biases"], **SMALL, "num_attention_heads": 2},
    "qwen2": {**VARIANTS["qwen2-untied"], **SMALL, "num_attention_heads": 3},
    "apertus": {**VARIANTS["apertus-llama3"], **SMALL, "num_hidden_layers": 2},
    "apertus1p5": {**VARIANTS["apertus1p5-text"], **SMALL, "num_attention_heads": 2},
    "apertus-bias": {**VARIANTS["apertus-biases"], **SMALL, "head_dim": 128, "num_attention_heads": 2},
    "llama-128": {**VARIANTS["llama-yarn"], **SMALL, "head_dim": 128, "num_attention_heads": 8, "num_hidden_layers": 1},
}


class Pair:
    """The same checkpoint on both backends. `int8`: columns of a scale in the layers, in embedding and head, and in
    down_proj where that differs.

    None there is one scale a row; without `int8` the weights are half precision. `kept`: names of modules that stay.
    """

    def __init__(
        self, folder, name, *, dtype="BF16", int8=(), kept=(), pack=False, kv="bf16", context=256, chunk=128,
        half_copies=True, **device,
    ):  # fmt: skip
        config = MODELS[name]
        arrays = {t: tiny_models._values(f"{name}/{t}", shape) for t, shape in tiny_models.shapes(config).items()}
        if int8:
            layers, head, *down = int8
            matrices = {t: a for t, a in arrays.items() if not t.startswith(kept or "!")}
            arrays = arrays | int8_tensors(matrices, layers, head)
            targets = {"Linear": layers, "model.embed_tokens": head, "lm_head": head}
            for columns in down:
                matrices = {t: a for t, a in matrices.items() if "down_proj" in t}
                arrays |= int8_tensors(matrices, columns, head)
                targets["re:.*down_proj"] = columns
            layout = "pack-quantized" if pack else "int-quantized"
            section = quantization_config(targets, format=layout, ignore=[*kept])
            config = {**config, "quantization_config": section}
            arrays = packed(arrays) if pack else arrays
        write_checkpoint(folder, config, arrays, dtype=dtype)
        files = WeightFiles.open(folder)
        self.model, _ = define_from_files(ModelConfig.load(folder), files)
        self.numpy = NumpyRunner.load(self.model, files, silent, kv=kv)
        self.device = InterpretedDevice(**device)
        options = LoadOptions(context, chunk, kv, half_copies)
        self.cuda = load.load_runner(self.model, files, self.device, options, silent)
        self.tolerance = TOLERANCE[dtype]

    def ids(self, count, salt=0):
        vocab = self.model.config.vocab_size
        return np.random.default_rng(salt).integers(0, vocab, count).tolist()

    def logits_after(self, ids):
        cache = self.numpy.new_cache(len(ids))
        return self.numpy.logits(cache, ids)


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch):
    """Nothing is compiled for the interpreter; warm-up has its own test."""

    class NoWarmup:
        unkept = None

        def __init__(self, *_args): ...
        def start(self): ...
        def cancel(self): ...
        def finish(self, _on_progress):
            return 0.0

    monkeypatch.setattr(load, "KernelWarmup", NoWarmup)


@pytest.fixture
def pair(tmp_path):
    return lambda name="qwen3", **options: Pair(tmp_path, name, **options)


def decode(runner, cache, params, prompt, count, valid=None):
    with closing(runner.decode(cache, params, valid, prompt)) as steps:
        return list(islice(steps, count))


def assert_greedy_follows(p, prompt, sampled):
    """Each sampled id is NumPy's choice after the ids before it, or within the rounding of it."""
    ids = [s.id for s in sampled]
    rows = p.logits_after([*prompt, *ids[:-1]])[len(prompt) - 1 :]
    near_ties = 0
    for row, id_ in zip(rows, ids, strict=True):
        near_ties += id_ != row.argmax()
        assert row[id_] >= row.max() - p.tolerance
    assert near_ties <= len(ids) // 8


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("qwen3", "BF16"),
        ("llama", "F16"),
        ("qwen3-bias", "F16"),
        ("llama-128", "BF16"),
        ("llama-biases", "F16"),
        ("qwen2", "F16"),
        ("apertus", "BF16"),
        ("apertus-bias", "F16"),
        ("apertus1p5", "BF16"),
    ],
)
def test_logits_equal_numpys(pair, name, dtype):
    p = pair(name, dtype=dtype)
    ids = p.ids(70)
    cache = p.cuda.new_cache(256)
    first, rest = p.cuda.logits(cache, ids[:41]), p.cuda.logits(cache, ids[41:])
    np.testing.assert_allclose(np.concatenate([first, rest]), p.logits_after(ids), rtol=0, atol=p.tolerance)


@pytest.mark.parametrize(
    ("name", "dtype", "int8"), [("qwen3", "BF16", ()), ("llama", "F16", ()), ("llama-128", "BF16", (None, 32))]
)
def test_an_int8_cache_gives_numpys_logits_and_tokens(pair, name, dtype, int8):
    p = pair(name, dtype=dtype, int8=int8, kv="int8")
    p.tolerance = TOLERANCE["BF16"]  # a key's last bit in half precision decides where it rounds in INT8
    prompt = p.ids(61)
    cache = p.cuda.new_cache(256)
    first, rest = p.cuda.logits(cache, prompt[:21]), p.cuda.logits(cache, prompt[21:])
    np.testing.assert_allclose(np.concatenate([first, rest]), p.logits_after(prompt), rtol=0, atol=p.tolerance)
    sampled = decode(p.cuda, cache, GREEDY, 61, 8)
    assert_greedy_follows(p, prompt, sampled)


INT8 = [("qwen3", "BF16", (None, 32)), ("llama", "F16", (32, None)), ("qwen3-bias", "F16", (None, None))]
INT8 += [("apertus", "F16", (None, 16)), ("apertus", "BF16", (16, None))]
# as `quantize` makes them: down's weights are widened behind products in digits that still run
INT8 += [("qwen3", "BF16", (None, 32, 32)), ("apertus", "F16", (None, 16, 32))]


def products_of(p, rows):
    """How a chunk's products go, and what is widened for them."""
    names = [record.name for record in p.cuda.plans.prefill(rows)]
    in_digits = sum(name.startswith("linear_prefill_digits") for name in names)
    return (
        in_digits,
        len([name for name in names if name.startswith("linear_prefill")]),
        names.count("dequantise_kernel"),
    )


@pytest.mark.parametrize("half_copies", [False, True], ids=["stored", "copies"])
@pytest.mark.parametrize(("name", "dtype", "int8"), INT8)
def test_int8_logits_and_greedy_tokens_equal_numpys(pair, name, dtype, int8, half_copies):
    p = pair(name, dtype=dtype, int8=int8, half_copies=half_copies)
    grouped = any((int8[0], *int8[2:]))  # the others go by digits, in chunks of 128
    assert (p.cuda.copy_bytes > 0) == (half_copies and grouped)
    prompt = p.ids(61)
    cache = p.cuda.new_cache(256)
    logits = p.cuda.logits(cache, prompt)
    np.testing.assert_allclose(logits, p.logits_after(prompt), rtol=0, atol=p.tolerance)
    sampled = decode(p.cuda, cache, GREEDY, 61, 8)  # position 64 opens the second page
    assert_greedy_follows(p, prompt, sampled)


def test_short_chunks_go_by_digits_and_long_ones_by_copies(pair):
    """But for weights in groups, which would have to be widened."""
    p = pair("qwen3", int8=(None, 32, 32), chunk=256)
    layers = p.model.config.num_hidden_layers
    assert products_of(p, 128) == (3 * layers, 4 * layers, 0)
    assert products_of(p, 192) == (0, 4 * layers, 0)
    ids = p.ids(190)
    logits = p.cuda.logits(p.cuda.new_cache(256), ids)
    np.testing.assert_allclose(logits, p.logits_after(ids), rtol=0, atol=p.tolerance)
    stored = pair("qwen3", int8=(None, 32, 32), chunk=256, half_copies=False)
    assert products_of(stored, 192)[:2] == (3 * layers, 4 * layers)
    assert products_of(stored, 192)[2] > 0
    assert (stored.cuda.memory.copied, stored.cuda.copy_bytes) == ((), 0)


def test_copies_hold_what_int8_stands_for(pair):
    p = pair("qwen3", int8=(None, 32, 32), chunk=256)
    for weight in p.cuda.plans.products(0):
        want = dequantise(weight.values, weight.scale).astype(weight.copy.dtype)
        np.testing.assert_array_equal(weight.copy, want)
    assert p.cuda.copy_bytes == sum(weight.copy.nbytes for weight in p.cuda.plans.products(0))


@pytest.mark.parametrize("failing", ["copies", "keys and values"])
def test_a_gpu_that_has_filled_up_meanwhile_does_without_copies(pair, monkeypatch, failing):
    """Whatever it is that there is no more room for."""
    calls = []

    def refuse_once(real):
        def allocate(*args):
            calls.append(args)
            if len(calls) == 1:
                raise OutOfMemoryError("another program has it")
            return real(*args)

        return allocate

    if failing == "copies":
        monkeypatch.setattr(load, "allocate_copies", refuse_once(load.allocate_copies))
    else:
        monkeypatch.setattr(runner, "KvPool", refuse_once(runner.KvPool))
    p = pair("qwen3", int8=(None, 32, 32))
    assert len(calls) == 2
    assert (p.cuda.copy_bytes, p.cuda.memory.copied) == (0, ())
    ids = p.ids(70)
    np.testing.assert_allclose(p.cuda.logits(p.cuda.new_cache(256), ids), p.logits_after(ids), rtol=0, atol=p.tolerance)


def test_packed_layers_and_head_with_an_embedding_in_half_precision(pair):
    """As `quantize` writes a model whose head is a matrix of its own."""
    p = pair("qwen3-bias", dtype="F16", int8=(None, 32), kept=("model.embed_tokens",), pack=True)
    assert (p.model.int8("embedding"), p.model.int8("lm_head")) == (None, Int8(32))
    assert p.cuda.weight_bytes - p.cuda.step_weight_bytes == 2 * p.model.config.vocab_size * p.model.config.hidden_size
    prompt = p.ids(61)
    cache = p.cuda.new_cache(256)
    logits = p.cuda.logits(cache, prompt)
    np.testing.assert_allclose(logits, p.logits_after(prompt), rtol=0, atol=p.tolerance)
    assert_greedy_follows(p, prompt, decode(p.cuda, cache, GREEDY, 61, 8))


@pytest.mark.parametrize(
    ("name", "dtype", "pdl"),
    [
        ("qwen3", "BF16", True),
        ("llama", "F16", False),
        ("llama-biases", "F16", True),
        ("qwen2", "F16", True),
        ("apertus", "BF16", False),
        ("apertus-bias", "F16", True),
    ],
)
def test_greedy_tokens_equal_numpys_across_a_page_border(pair, name, dtype, pdl):
    p = pair(name, dtype=dtype, pdl=pdl)
    prompt = p.ids(58)
    cache = p.cuda.new_cache(256)
    p.cuda.prefill(cache, prompt)
    sampled = decode(p.cuda, cache, GREEDY, 58, 12)  # position 64 opens the second page
    assert_greedy_follows(p, prompt, sampled)
    assert cache.token_ids == [*prompt, *(s.id for s in sampled[:-1])]
    assert len(cache.block_table) == 2


@pytest.mark.parametrize("kv", ["bf16", "int8"])
def test_a_prompt_in_chunks_over_several_pages(pair, kv):
    p = pair(chunk=64, kv=kv)
    prompt = p.ids(150)
    cache = p.cuda.new_cache(256)
    p.cuda.prefill(cache, prompt)
    assert p.cuda.prefill_chunk == 64
    assert_greedy_follows(p, prompt, decode(p.cuda, cache, GREEDY, 150, 3))


def test_cached_decoding_equals_one_prefill_of_all(pair):
    p = pair(dtype="F16")
    prompt = p.ids(61)
    cache = p.cuda.new_cache(256)
    p.cuda.prefill(cache, prompt)
    sampled = decode(p.cuda, cache, GREEDY, 61, 6)
    whole = [*prompt, *(s.id for s in sampled)]
    rows = p.cuda.logits(p.cuda.new_cache(256), whole[:-1])[60:]
    for row, s in zip(rows, sampled, strict=True):
        logprob = row[s.id] - row.max() - np.log(np.exp(row - row.max()).sum())
        assert abs(s.logprob - logprob) < p.tolerance


def test_a_truncated_prefix_is_reused_and_pages_come_back(pair):
    p = pair()
    prompt, other = p.ids(70), p.ids(20, salt=1)
    cache = p.cuda.new_cache(256)
    p.cuda.prefill(cache, prompt)
    decode(p.cuda, cache, GREEDY, 70, 4)
    cache.truncate(40)
    assert p.cuda.pool.free_tokens == 256 - 64
    p.cuda.prefill(cache, other)
    assert_greedy_follows(p, [*prompt[:40], *other], decode(p.cuda, cache, GREEDY, 60, 6))


@pytest.mark.parametrize("kv", ["bf16", "int8"])
def test_two_sequences_take_turns(pair, kv):
    p = pair(kv=kv)
    prompts = [p.ids(30), p.ids(66, salt=2)]
    caches = [p.cuda.new_cache(256) for _ in prompts]
    for turn in range(2):
        for cache, prompt in zip(caches, prompts, strict=True):
            cache.truncate(0)
            p.cuda.prefill(cache, prompt[: 20 + 5 * turn])
            p.cuda.prefill(cache, prompt[20 + 5 * turn :])
            assert_greedy_follows(p, prompt, decode(p.cuda, cache, GREEDY, len(prompt), 2))
    assert not set(caches[0].block_table) & set(caches[1].block_table)


SETTINGS = [
    SamplingParams(temperature=1.0, top_k=0, top_p=1.0, seed=3),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.95, seed=2**62 + 5),
    SamplingParams(temperature=1.5, top_k=0, top_p=0.9, min_p=0.02, seed=1),
    SamplingParams(
        temperature=1.2, top_k=5, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.7, seed=9
    ),
    SamplingParams(temperature=0, repetition_penalty=1.5, frequency_penalty=1.0),
]


@pytest.mark.parametrize("params", SETTINGS, ids=str)
def test_the_device_draws_what_the_reference_draws_from_its_logits(pair, params):
    p = pair(dtype="F16")
    prompt = p.ids(12)
    valid = np.ones(160, bool)
    valid[[3, 100, 159]] = False
    reference = Sampler(params, valid)
    cache = p.cuda.new_cache(256)
    p.cuda.prefill(cache, prompt)
    steps = p.cuda.decode(cache, params, valid, 10)  # the last two of the 12 count as output
    history = list(prompt)
    logits = []
    record_logits(p, logits)
    for step in range(6):
        sampled = next(steps)
        wanted = reference.sample(logits[step], history, len(history) - 10)
        assert sampled.id == wanted.id
        assert abs(sampled.logprob - wanted.logprob) < 1e-4
        history.append(sampled.id)
    steps.close()


def record_logits(p, into):
    """Keep a copy of the logits of every draw."""
    launch = p.cuda.graphs.launch

    def kept(key, plan, **options):
        launch(key, plan, **options)
        if key == "head" or key[0] == "decode":
            into.append(p.device.download(p.cuda.buffers["logits"])[0])

    p.cuda.graphs.launch = kept


def test_a_seed_gives_the_same_ids_again_and_another_one_others(pair):
    p = pair()
    prompt = p.ids(10)

    def run(seed):
        cache = p.cuda.new_cache(64)
        p.cuda.prefill(cache, prompt)
        return [
            s.id for s in decode(p.cuda, cache, SamplingParams(temperature=2.0, top_k=0, top_p=1, seed=seed), 10, 6)
        ]

    assert run(5) == run(5) != run(6)


def test_steps_are_recorded_once_and_only_one_is_wasted(pair):
    p = pair()
    prompt = p.ids(10)
    for _ in range(3):
        cache = p.cuda.new_cache(64)
        p.cuda.prefill(cache, prompt)
        before = p.device.replays
        decode(p.cuda, cache, GREEDY, 10, 4)
        assert p.device.replays - before == 2 + 4  # head, sample, and a step for each id with the one in flight
    assert p.device.recorded == 4  # prefill (the second time it came), head, sample, decode
    assert len(p.cuda.graphs) == 4


def test_the_last_token_of_the_context_is_given_and_then_refused(pair):
    p = pair()
    prompt = p.ids(60)
    cache = p.cuda.new_cache(62)
    p.cuda.prefill(cache, prompt)
    steps = p.cuda.decode(cache, GREEDY, None, 60)
    sampled = [next(steps) for _ in range(3)]
    assert_greedy_follows(p, prompt, sampled)
    with pytest.raises(ContextLengthError, match="62"):
        next(steps)
    with pytest.raises(ContextLengthError):
        p.cuda.new_cache(62).reserve(63)


def test_a_full_pool_stops_one_sequence_and_spares_the_others(pair):
    p = pair(context=128)
    one, two = p.cuda.new_cache(128), p.cuda.new_cache(128)
    p.cuda.prefill(one, p.ids(64))
    p.cuda.prefill(two, p.ids(64))
    steps = p.cuda.decode(two, GREEDY, None, 64)
    next(steps)
    with pytest.raises(OutOfMemoryError, match="has room for 0"):
        next(steps)
    del one
    p.cuda.prefill(two, p.ids(3))
    assert two.length == 67


def test_logits_that_are_no_numbers_are_said(pair):
    p = pair()
    p.device._launcher.checks = False  # the sampler's ranks are no ranks then; a GPU doesn't mind
    p.cuda.plans._weights.norm[...] = np.nan
    cache = p.cuda.new_cache(64)
    p.cuda.prefill(cache, p.ids(5))
    with pytest.raises(TileinferError, match="NaN"):
        next(p.cuda.decode(cache, GREEDY, None, 5))


def test_an_interrupted_prefill_leaves_the_cache_as_it_was(pair, monkeypatch):
    p = pair(chunk=64)
    prompt = p.ids(150)
    cache = p.cuda.new_cache(256)
    run, calls = p.device.run, []

    def interrupted(step):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        run(step)

    monkeypatch.setattr(p.device, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        p.cuda.prefill(cache, prompt)
    assert cache.length == 64
    monkeypatch.setattr(p.device, "run", run)
    p.cuda.prefill(cache, prompt[64:])
    assert_greedy_follows(p, prompt, decode(p.cuda, cache, GREEDY, 150, 2))


def test_memory_is_planned_before_anything_is_taken(pair, monkeypatch):
    monkeypatch.setattr(load, "allocate", lambda *_: pytest.fail("too late"))
    with pytest.raises(OutOfMemoryError, match="context of 256 tokens") as caught:
        pair(memory_bytes=380 << 20)
    assert caught.value.exit_code == 8


@pytest.mark.parametrize("fields", [{"head_dim": 32}, {"num_attention_heads": 32, "num_key_value_heads": 2}])
def test_shapes_the_kernels_do_not_take_are_refused_by_name(tmp_path, monkeypatch, fields):
    monkeypatch.setitem(MODELS, "odd", {**VARIANTS["llama-tied"], **SMALL, **fields})
    with pytest.raises(UnsupportedModelError, match="CUDA kernels") as caught:
        Pair(tmp_path, "odd")
    assert "--backend cpu" in caught.value.hint


def test_constants_of_xielu_that_the_kernels_lack_are_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(tiny_models, "_xielu", lambda name, _, shape: np.full(shape, 0.75 if "beta" in name else -1e-6))
    monkeypatch.setattr(loader, "_pieces", lambda *_: pytest.fail("too late"))
    with pytest.raises(UnsupportedModelError, match=r"xIELU with beta 0\.75 .* supported: 0\.5") as caught:
        Pair(tmp_path, "apertus")
    assert "--backend cpu" in caught.value.hint


@pytest.mark.parametrize(
    ("int8", "message"), [((8, None), "groups of 8"), ((None, 8), r"groups of 8 \(model.embed_tokens.weight\)")]
)
def test_int8_groups_the_kernels_do_not_take_are_refused_by_name(pair, int8, message):
    with pytest.raises(UnsupportedModelError, match=message):
        pair(int8=int8)


def test_closing_gives_everything_back(pair):
    p = pair()
    cache = p.cuda.new_cache(64)
    p.cuda.prefill(cache, p.ids(5))
    p.cuda.close()
    assert not hasattr(p.cuda, "pool")
