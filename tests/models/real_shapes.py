"""The config.json of published models, as far as it decides what is computed.

The pages of docs/models/ take their tables from here, the comparison on a GPU (logits_on_gpu.py) its models.
"""

from __future__ import annotations

from typing import Any


def _sizes(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, head_dim: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }


def _llama3(factor: float) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


_SILU = {"hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False}
_TIED = {"tie_word_embeddings": True}
_QWEN3 = {**_SILU, "model_type": "qwen3", "vocab_size": 151936, "rms_norm_eps": 1e-6, "rope_theta": 1e6}
_QWEN3 |= {"max_position_embeddings": 40960}
_QWEN2 = {**_SILU, "model_type": "qwen2", "vocab_size": 151936, "rms_norm_eps": 1e-6, "rope_theta": 1e6}
_QWEN2 |= {"max_position_embeddings": 32768, "use_sliding_window": False}
_LLAMA = {**_SILU, "model_type": "llama", "vocab_size": 128256, "rms_norm_eps": 1e-5, "rope_theta": 5e5}
_LLAMA |= {"max_position_embeddings": 131072}
_SMOLLM2 = {**_SILU, **_TIED, "model_type": "llama", "vocab_size": 49152, "rms_norm_eps": 1e-5}
_SMOLLM2 |= {"max_position_embeddings": 8192}
_MISTRAL = {**_SILU, "model_type": "mistral", "rms_norm_eps": 1e-5, **_sizes(4096, 14336, 32, 32, 8, 128)}
_MISTRAL |= {"max_position_embeddings": 32768}
_APERTUS = {**_SILU, "model_type": "apertus", "vocab_size": 131072, "hidden_act": "xielu", "rms_norm_eps": 1e-5}
_APERTUS |= {"max_position_embeddings": 65536, "rope_theta": 12e6, "rope_scaling": _llama3(8.0)}

REAL: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": {**_QWEN3, **_sizes(1024, 3072, 28, 16, 8, 128), **_TIED},
    "Qwen3-1.7B": {**_QWEN3, **_sizes(2048, 6144, 28, 16, 8, 128), **_TIED},
    "Qwen3-4B": {**_QWEN3, **_sizes(2560, 9728, 36, 32, 8, 128), **_TIED},
    "Qwen3-8B": {**_QWEN3, **_sizes(4096, 12288, 36, 32, 8, 128)},
    "Qwen3-14B": {**_QWEN3, **_sizes(5120, 17408, 40, 40, 8, 128)},
    "Qwen3-32B": {**_QWEN3, **_sizes(5120, 25600, 64, 64, 8, 128)},
    "Qwen2.5-0.5B": {**_QWEN2, **_sizes(896, 4864, 24, 14, 2, 64), **_TIED},
    "Qwen2.5-1.5B": {**_QWEN2, **_sizes(1536, 8960, 28, 12, 2, 128), **_TIED},
    "Qwen2.5-3B": {**_QWEN2, **_sizes(2048, 11008, 36, 16, 2, 128), **_TIED},
    "Qwen2.5-7B": {**_QWEN2, **_sizes(3584, 18944, 28, 28, 4, 128), "vocab_size": 152064},
    "Llama-3.2-1B": {**_LLAMA, **_sizes(2048, 8192, 16, 32, 8, 64), **_TIED, "rope_scaling": _llama3(32.0)},
    "Llama-3.2-3B": {**_LLAMA, **_sizes(3072, 8192, 28, 24, 8, 128), **_TIED, "rope_scaling": _llama3(32.0)},
    "Llama-3.1-8B": {**_LLAMA, **_sizes(4096, 14336, 32, 32, 8, 128), "rope_scaling": _llama3(8.0)},
    "SmolLM2-135M": {**_SMOLLM2, **_sizes(576, 1536, 30, 9, 3, 64), "rope_theta": 1e5},
    "SmolLM2-360M": {**_SMOLLM2, **_sizes(960, 2560, 32, 15, 5, 64), "rope_theta": 1e5},
    "SmolLM2-1.7B": {**_SMOLLM2, **_sizes(2048, 8192, 24, 32, 32, 64), "rope_theta": 1.3e5},
    "Mistral-7B-v0.1": {**_MISTRAL, "vocab_size": 32000, "rope_theta": 1e4, "sliding_window": 4096},
    "Mistral-7B-v0.3": {**_MISTRAL, "vocab_size": 32768, "rope_theta": 1e6, "sliding_window": None},
    "Apertus-8B": {**_APERTUS, **_sizes(4096, 21504, 32, 32, 8, 128), "qk_norm": True, "post_norm": False},
    "Apertus-1.5-8B": {
        "model_type": "apertus1p5",
        "text_config": {
            **{k: v for k, v in _APERTUS.items() if k not in ("rope_theta", "rope_scaling")},
            **_sizes(4096, 21504, 32, 32, 8, 128),
            "model_type": "apertus1p5_text",
            "vocab_size": 266752,
            "output_vocab_size": 131072,
            "max_position_embeddings": 262144,
            "rope_parameters": {**_llama3(32.0), "rope_theta": 4e6},
        },
        "tie_word_embeddings": False,
    },
}
