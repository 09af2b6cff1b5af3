"""How much of the bare matrix-vector products' speed the NumPy backend keeps when it decodes. A benchmark, not a test.

    python tests/bench/cpu_decode.py [MODEL_FOLDER]

Without a folder: random weights in the shape of SmolLM2-135M. Both loops run over the same arrays, in turns of a few
tokens, so that a noisy machine hits both alike. The bare loop multiplies every weight matrix once per token with a
fixed vector: no norms, no attention, no sampling. The last line is JSON.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from itertools import islice
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from tileinfer_core.backends.numpy_backend import NumpyRunner
from tileinfer_core.config import ModelConfig
from tileinfer_core.models.define import define_from_files, define_model
from tileinfer_core.progress import silent
from tileinfer_core.sampling import SamplingParams
from tileinfer_core.weights import WeightFiles

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SMOLLM2_135M: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}
ROUNDS, TOKENS = 12, 6
PREFILL = 512
SAMPLINGS = {"greedy": SamplingParams(temperature=0.0), "top-k 40, top-p 0.95": SamplingParams(temperature=0.7)}


def random_runner() -> NumpyRunner:
    model = define_model(ModelConfig.from_dict(SMOLLM2_135M), tied=True)
    rng = np.random.default_rng(0)
    sizes = {p.name: int(np.prod(p.shape)) for p in model.parameters}
    arena = rng.standard_normal(sum(sizes.values()), dtype=np.float32)
    arena *= 0.03
    arrays, start = {}, 0
    for parameter in model.parameters:
        arrays[parameter.name] = arena[start : start + sizes[parameter.name]].reshape(parameter.shape)
        start += sizes[parameter.name]
    return NumpyRunner(model, arrays)


def stored_runner(folder: Path) -> tuple[NumpyRunner, float]:
    start = time.perf_counter()
    files = WeightFiles.open(folder)
    model, _ = define_from_files(ModelConfig.load(folder), files)
    return NumpyRunner.load(model, files, silent), time.perf_counter() - start


def matrices(runner: NumpyRunner) -> Iterator[np.ndarray]:
    """Every weight matrix that one token passes through."""
    for layer in runner._weights.layers:
        yield from (layer.qkv, layer.o, layer.gate_up, layer.down)
    yield runner._weights.lm_head


def bare_loop(runner: NumpyRunner) -> Callable[[], None]:
    pairs = [(w, np.ones(w.shape[1], np.float32)) for w in matrices(runner)]

    def one_token() -> None:
        for weight, x in pairs:
            np.dot(weight, x)

    return one_token


def seconds_per_token(step: Callable[[], object]) -> float:
    start = time.perf_counter()
    for _ in range(TOKENS):
        step()
    return (time.perf_counter() - start) / TOKENS


def measure(runner: NumpyRunner, params: SamplingParams, context: int) -> tuple[float, float, float]:
    """Median seconds per token, bare and decoding, and the median of their ratios, from `context` tokens on."""
    cache = runner.new_cache(8192)
    vocab = runner._model.config.vocab_size
    runner.prefill(cache, [i * 7919 % vocab for i in range(context)])
    steps = runner.decode(cache, params, np.ones(vocab, np.bool_), context)
    bare = bare_loop(runner)
    list(islice(steps, 2))
    bare()
    rounds = [(seconds_per_token(bare), seconds_per_token(lambda: next(steps))) for _ in range(ROUNDS)]
    return median(b for b, _ in rounds), median(d for _, d in rounds), median(b / d for b, d in rounds)


def prefill_seconds(runner: NumpyRunner) -> float:
    times = []
    for _ in range(3):
        cache = runner.new_cache(8192)
        start = time.perf_counter()
        runner.prefill(cache, list(range(3, 3 + PREFILL)))
        times.append(time.perf_counter() - start)
    return median(times)


def main() -> None:
    runner, load_s = stored_runner(Path(sys.argv[1])) if len(sys.argv) > 1 else (random_runner(), None)
    threads = os.environ.get("OMP_NUM_THREADS", "not set")
    print(f"{os.cpu_count()} CPUs, OMP_NUM_THREADS {threads}, OPENBLAS_CORETYPE {os.environ.get('OPENBLAS_CORETYPE')}")
    rows = []
    for context in (16, 512):
        for name, params in SAMPLINGS.items():
            bare, decode, share = measure(runner, params, context)
            speeds = {"bare_tok_s": 1 / bare, "decode_tok_s": 1 / decode, "share": share}
            rows.append({"context": context, "sampling": name, **speeds})
            print(f"context {context:4d}, {name}: {1 / decode:.1f} tok/s, {share:.0%} of {1 / bare:.1f} bare")
    prefill = prefill_seconds(runner)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(
        f"prefill of {PREFILL}: {prefill:.3f} s, {PREFILL / prefill:.0f} tok/s; peak memory {peak / 1e6:.0f} MB, "
        f"{peak / runner.weight_bytes:.2f} of the weights; load {load_s or 0:.3f} s"
    )
    print(json.dumps({"rows": rows, "prefill_s": prefill, "peak_bytes": peak, "load_s": load_s}))


if __name__ == "__main__":
    main()
