"""Every kernel of the engine's plans compiles as the engine will launch it: types, lengths, strides, constants."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from kernels.compile import CompileError, compile_all
from kernels.specs import ArraySpec
from tests.checkpoints import quantization_config
from tileinfer_core.backends.cuda import buffers as buf
from tileinfer_core.backends.cuda import ops
from tileinfer_core.backends.cuda.loader import target_dtype
from tileinfer_core.backends.cuda.memory import pages_for
from tileinfer_core.backends.cuda.plan import Plans
from tileinfer_core.backends.cuda.warmup import KernelWarmup
from tileinfer_core.config import ModelConfig
from tileinfer_core.cuda_probe import compiler_path
from tileinfer_core.models.decoder import bind
from tileinfer_core.models.define import define_model

COMMON = {"hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "num_hidden_layers": 2}
COMMON |= {"rope_theta": 1e5, "eos_token_id": 1, "bos_token_id": 0, "tie_word_embeddings": True}
SMOLLM2 = {**COMMON, "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536}
SMOLLM2 |= {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}
QWEN3 = {**COMMON, "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072}
QWEN3 |= {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
APERTUS = {**COMMON, "model_type": "apertus", "vocab_size": 8192, "hidden_size": 1024, "intermediate_size": 2688}
APERTUS |= {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128, "hidden_act": "xielu"}
APERTUS |= {"rope_scaling": {"rope_type": "default"}, "attention_bias": True}


@pytest.fixture
def cache(compile_cache, monkeypatch):
    """The compile matrix' own: most of these kernels are in it."""
    if compiler_path(os.environ)[0] is None:
        pytest.skip("tileiras is not installed")
    monkeypatch.setenv("CUDA_TILE_CACHE_DIR", str(compile_cache))


GROUPS = {"Linear": None, "re:.*down_proj": 64, "model.embed_tokens": 64}
INT8 = {**QWEN3, "quantization_config": quantization_config(GROUPS)}


@pytest.mark.parametrize(
    ("config", "arch", "half"),
    [
        (SMOLLM2, "sm_80", "float16"),
        (QWEN3, "sm_90", "bfloat16"),
        (APERTUS, "sm_90", "bfloat16"),
        (INT8, "sm_90", "bfloat16"),
    ],
    ids=["sm_80", "sm_90", "sm_90-xielu", "sm_90-int8"],
)
@pytest.mark.usefixtures("cache")
def test_the_kernels_of_every_step_compile(config, arch, half):
    """In INT8 keys and values too."""
    model = define_model(ModelConfig.from_dict(config), tied=True)
    s, layers, context, pdl = model.structure, 2, 8192, arch == "sm_90"
    rows = pages_for(context) * s.num_key_value_heads
    kept = "int8" if config is INT8 else half
    scales = (ArraySpec((rows, 64), "float32"),) * 2 if kept == "int8" else None
    pool = SimpleNamespace(
        k=[ArraySpec((rows * 64, s.head_dim), kept)] * layers,
        v=[ArraySpec((rows * s.head_dim, 64), kept)] * layers,
        scales=[scales] * layers,
    )
    specs = buf.buffer_specs(model, arch, context, 2048, half, kv="int8" if kept == "int8" else "bf16")
    buffers = {name: ArraySpec(*spec) for name, spec in specs.items()}
    weights = bind(model, {p.name: ArraySpec(p.shape, target_dtype(p, half)) for p in model.parameters})
    plans = Plans(model, weights, pool, ArraySpec(144, "int32"), buffers=buffers, arch=arch, pdl=pdl, processors=132)
    ends = ops.bucket_ends(s, arch, context)
    warmup = KernelWarmup(plans, ends, SimpleNamespace(arch=arch), buffers["length"], 2048)
    records = warmup.records()
    records += plans.all_logits(0, 64, ArraySpec((64, model.config.vocab_size), "float32"))
    results = list(compile_all(records, arch, workers=2))
    assert [result for result in results if isinstance(result, CompileError)] == []
    assert len(results) > 20
