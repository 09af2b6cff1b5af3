"""A short run of every kind of step on a GPU, for a memory checker.

    compute-sanitizer --tool memcheck --error-exitcode 9 python tests/bench/short_run.py

A small Qwen3 with noise for weights: prefill in one and several chunks, every bucket of decoding, greedy, sorted,
nucleus and penalised sampling, logits of a whole text; then the runner is closed.
"""

from __future__ import annotations

from contextlib import closing
from itertools import islice

import numpy as np

from tileinfer_core.backends.base import LoadOptions
from tileinfer_core.backends.cuda.gpu import GpuDevice
from tileinfer_core.backends.cuda.load import load_runner
from tileinfer_core.config import ModelConfig
from tileinfer_core.models.define import define_model
from tileinfer_core.progress import silent
from tileinfer_core.sampling import SamplingParams

CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 5003,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "head_dim": 128,
    "num_key_value_heads": 2,
    "num_attention_heads": 4,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "rope_theta": 1e6,
    "eos_token_id": 1,
    "bos_token_id": 1,
    "tie_word_embeddings": True,
}
CONTEXT = 2500
RUNS = [  # prompt length, sampling: one bucket each
    (10, SamplingParams(temperature=0)),
    (60, SamplingParams(temperature=1.0, top_k=0, top_p=0.99, repetition_penalty=1.2, seed=3)),
    (505, SamplingParams(temperature=0.8, top_k=20, min_p=0.02, seed=3)),
    (636, SamplingParams(temperature=0.8, top_k=20, seed=3)),
    (1020, SamplingParams(temperature=0.8, top_k=20, seed=3)),
    (2100, SamplingParams(temperature=0.8, top_k=20, seed=3)),
]


def main() -> None:
    model = define_model(ModelConfig.from_dict(CONFIG), tied=True)
    runner = load_runner(model, None, GpuDevice(), LoadOptions(CONTEXT), silent)
    ids = np.random.default_rng(0).integers(0, CONFIG["vocab_size"], 2300).tolist()
    for length, params in RUNS:
        cache = runner.new_cache(CONTEXT)
        runner.prefill(cache, ids[:length])
        with closing(runner.decode(cache, params, None, length)) as steps:
            print(length, [sampled.id for sampled in islice(steps, 12)])
    print(runner.logits(runner.new_cache(CONTEXT), ids[:70]).shape)
    runner.close()


if __name__ == "__main__":
    main()
