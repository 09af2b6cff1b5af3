"""Tiny models whose weights follow from a hash, so that no checkpoint needs to be stored.

The golden script (Transformers) and the tests (TileInfer) both build their checkpoints from here. Values are small
multiples of powers of two: exact in float32, float16 and bfloat16 alike, so that one golden serves all three.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

_BASE: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
    "bos_token_id": 1,
}
_LLAMA = {**_BASE, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
_QWEN3 = {**_BASE, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "rms_norm_eps": 1e-6, "head_dim": 32}
WINDOW = 134  # a prompt of 70 tokens and 64 more: the longest sequence through which every token sees every other
_ASKED = {"use_sliding_window": True, "max_window_layers": 1}
_QWEN2 = {**_BASE, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "rms_norm_eps": 1e-6}
_MISTRAL = {**_BASE, "model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": None}
_APERTUS = {**_BASE, "model_type": "apertus", "architectures": ["ApertusForCausalLM"], "hidden_act": "xielu"}
_APERTUS_TEXT = {k: v for k, v in _APERTUS.items() if k != "architectures"}
_APERTUS_TEXT |= {"model_type": "apertus1p5_text", "vocab_size": 208, "output_vocab_size": 160}
_LONG = {**_LLAMA, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
_LONG["max_position_embeddings"] = 16384


def _new(kind: str, theta: float = 10000.0, **options: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **options}}


def _old(kind: str, theta: float = 10000.0, key: str = "rope_type", **options: Any) -> dict[str, Any]:
    return {"rope_theta": theta, "rope_scaling": {key: kind, **options}}


_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
_LLAMA3_LONG = {**_LLAMA3, "original_max_position_embeddings": 2048}
_YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
_YARN_FULL = {**_YARN, "beta_fast": 16.0, "beta_slow": 2.0, "mscale": 0.7, "mscale_all_dim": 1.1, "truncate": False}

# name -> config.json
VARIANTS: dict[str, dict[str, Any]] = {
    "llama-tied": {**_LLAMA, "rope_theta": 10000.0, "rope_scaling": None, "tie_word_embeddings": True},
    "llama-head-dim": {**_LLAMA, **_new("default", 5e5), "head_dim": 24, "num_key_value_heads": 1},
    "llama-biases": {**_LLAMA, **_new("default"), "attention_bias": True, "mlp_bias": True, "head_dim": None},
    "llama-mha": {**_LLAMA, "rope_theta": 10000, "num_key_value_heads": None, "num_attention_heads": 8},
    "llama-linear": {**_LLAMA, **_old("linear", key="type", factor=2.5)},
    "llama-dynamic": {**_LLAMA, **_old("dynamic", factor=4.0)},
    "llama-llama3": {**_LLAMA, **_old("llama3", 5e5, **_LLAMA3), "tie_word_embeddings": True},
    "llama-yarn": {**_LLAMA, **_new("yarn", **_YARN)},
    "qwen3-tied": {**_QWEN3, **_new("default", 1e6), "tie_word_embeddings": True},
    "qwen3-untied": {**_QWEN3, "rope_theta": 1000000, "rope_scaling": None, "attention_bias": True},
    "qwen3-linear": {**_QWEN3, **_new("linear", factor=4.0), "num_key_value_heads": 4},
    "qwen3-yarn": {**_QWEN3, **_old("yarn", 1e6, **_YARN_FULL), "num_key_value_heads": 1},
    "llama-eps": {**_LLAMA, **_new("default"), "rms_norm_eps": 0.02, "hidden_act": "swish"},
    "qwen3-llama3": {**_QWEN3, **_new("llama3", 1e6, **_LLAMA3), "attention_bias": True},
    "qwen3-dynamic": {**_QWEN3, **_old("dynamic", 1e6, key="type", factor=2.0), "tie_word_embeddings": True},
    "qwen2-tied": {**_QWEN2, **_new("default", 1e6), "tie_word_embeddings": True, "sliding_window": 4096},
    "qwen2-untied": {**_QWEN2, "rope_theta": 1e6, "rope_scaling": None, "num_key_value_heads": 1},
    "qwen2-yarn": {**_QWEN2, **_old("yarn", 1e6, key="type", **_YARN, attention_factor=0.8), "num_key_value_heads": 4},
    "qwen2-window": {**_QWEN2, **_new("default", 1e4), **_ASKED, "sliding_window": WINDOW},
    "mistral": {**_MISTRAL, **_new("default", 1e6), "head_dim": 24},
    "mistral-window": {**_MISTRAL, "rope_theta": 10000.0, "sliding_window": WINDOW, "tie_word_embeddings": True},
    "mistral-linear": {**_MISTRAL, **_old("linear", 1e4, factor=2.0), "num_key_value_heads": 4},
    "apertus-llama3": {**_APERTUS, **_old("llama3", 12e6, **_LLAMA3), "qk_norm": True, "post_norm": False},
    "apertus-tied": {**_APERTUS, **_new("default", 12e6), "tie_word_embeddings": True, "rms_norm_eps": 0.01},
    "apertus-biases": {**_APERTUS, **_new("linear", 1e6, factor=2.0), "attention_bias": True, "mlp_bias": False},
    "apertus-head-dim": {**_APERTUS, **_new("yarn", 1e6, **_YARN), "head_dim": 24, "num_key_value_heads": 1},
    "apertus-constants": {**_APERTUS, **_old("dynamic", 1e6, factor=4.0), "num_key_value_heads": None},
    "apertus1p5": {
        "model_type": "apertus1p5",
        "architectures": ["Apertus1p5ForConditionalGeneration"],
        "text_config": {**_APERTUS_TEXT, **_new("llama3", 4e6, **_LLAMA3), "tie_word_embeddings": False},
        "vision_config": {"codebook_size": 32},
        "audio_config": {"model_type": "wavtokenizer"},
        "image_token_id": 161,
        "tie_word_embeddings": False,
    },
    "apertus1p5-text": {**_APERTUS_TEXT, **_new("linear", 4e6, factor=2.0), "attention_bias": True},
    "long-default": {**_LONG, **_new("default", 5e5)},
    "long-linear": {**_LONG, **_old("linear", key="type", factor=4.0)},
    "long-llama3": {**_LONG, **_old("llama3", 5e5, key="type", **_LLAMA3_LONG)},
    "long-yarn": {**_LONG, **_new("yarn", **{**_YARN, "original_max_position_embeddings": 4096})},
    "long-dynamic": {**_LONG, **_new("dynamic", 5e5, factor=4.0), "max_position_embeddings": 65536},
}
# Model types that only docs/adding_a_model.md has.
EXAMPLES: dict[str, dict[str, Any]] = {
    "seed-oss": {
        **_BASE,
        "model_type": "seed_oss",
        "architectures": ["SeedOssForCausalLM"],
        "attention_bias": True,
        "attention_out_bias": False,
        "head_dim": 64,
        **_new("default", 1e7),
    },
}
GREEDY = tuple(name for name in VARIANTS if not name.startswith("long"))
LONG = tuple(name for name in VARIANTS if name.startswith("long"))
GREEDY_STEPS = 64
LONG_TOKENS = 12_004
ROPE_POSITIONS = (0, 1, 255, 4_095, 12_000, 40_959)


def other_rope_form(config: dict[str, Any]) -> dict[str, Any]:
    """The same config with its rope fields in the other of the two forms."""
    if "text_config" in config:
        return {**config, "text_config": other_rope_form(config["text_config"])}
    rest = {k: v for k, v in config.items() if k not in ("rope_theta", "rope_scaling", "rope_parameters")}
    if "rope_parameters" in config:
        options = dict(config["rope_parameters"])
        theta = options.pop("rope_theta")
        default = (
            options.get("rope_type") == "default" and config["model_type"] != "apertus"
        )  # null is no default there
        return {**rest, "rope_theta": theta, "rope_scaling": None if default else options}
    options = dict(config.get("rope_scaling") or {"rope_type": "default"})
    options["rope_type"] = options.pop("type", options.get("rope_type"))
    return {**rest, "rope_parameters": {**options, "rope_theta": config["rope_theta"]}}


def prompt(name: str, length: int, salt: int = 0) -> list[int]:
    """Token ids that follow from the name and the salt; 0 … 2 are left out."""
    config = text_config((VARIANTS | EXAMPLES)[name])
    vocab = config.get("output_vocab_size") or config["vocab_size"]
    return (3 + _hash(f"{name}/prompt/{salt}", length) % np.uint64(vocab - 3)).astype(int).tolist()


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of the text model."""
    return config.get("text_config", config)


def tensors(name: str) -> dict[str, np.ndarray]:
    """The checkpoint of a variant by Hugging Face's names, as float32."""
    return {tensor: _values(f"{name}/{tensor}", shape) for tensor, shape in shapes((VARIANTS | EXAMPLES)[name]).items()}


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Hugging Face's tensor names and shapes of a checkpoint."""
    if "text_config" in config:
        found = {
            name.replace("model.", "model.language_model.", 1): shape
            for name, shape in shapes(config["text_config"]).items()
        }
        return found | {"model.vision_tokenizer.encoder.conv_in.weight": (4, 3, 3, 3)}
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    kv_rows = (config.get("num_key_value_heads") or heads) * head_dim
    kind = config["model_type"]
    qkv, mlp = kind == "qwen2" or config.get("attention_bias"), config.get("mlp_bias")
    o = config.get("attention_out_bias", config.get("attention_bias"))
    linears = {
        "self_attn.q_proj": (heads * head_dim, hidden, qkv),
        "self_attn.k_proj": (kv_rows, hidden, qkv),
        "self_attn.v_proj": (kv_rows, hidden, qkv),
        "self_attn.o_proj": (hidden, heads * head_dim, o),
        "mlp.gate_proj": (inner, hidden, mlp),
        "mlp.up_proj": (inner, hidden, mlp),
        "mlp.down_proj": (hidden, inner, mlp),
    }
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    if "apertus" in kind:
        del linears["mlp.gate_proj"]
        norms = ("attention_layernorm", "feedforward_layernorm")
    result: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for linear, (rows, columns, bias) in linears.items():
            result[f"{prefix}{linear}.weight"] = (rows, columns)
            if bias:
                result[f"{prefix}{linear}.bias"] = (rows,)
        for norm in norms:
            result[f"{prefix}{norm}.weight"] = (hidden,)
        if kind == "qwen3" or "apertus" in kind:
            result |= {f"{prefix}self_attn.{which}_norm.weight": (head_dim,) for which in "qk"}
        if "apertus" in kind:
            result |= {f"{prefix}mlp.act_fn.{alpha}": (1,) for alpha in ("alpha_p", "alpha_n")}
            result |= {f"{prefix}mlp.act_fn.{buffer}": () for buffer in ("beta", "eps")}
    result["model.norm.weight"] = (hidden,)
    if not config.get("tie_word_embeddings"):
        result["lm_head.weight"] = (config.get("output_vocab_size") or config["vocab_size"], hidden)
    return result


def _values(name: str, shape: tuple[int, ...]) -> np.ndarray:
    count = int(np.prod(shape))
    steps = (_hash(name, count) % np.uint64(255)).astype(np.int64) - 127  # -127 … 127
    if "norm" in name:
        return (1 + (steps // 4) / 64).astype(np.float32).reshape(shape)  # 0.5 … 1.5
    if ".act_fn." in name:
        return _xielu(name, steps, shape)
    scale = 2.0**-8 if "embed" in name or name.endswith(("o_proj.weight", "down_proj.weight")) else 2.0**-9
    return (steps * scale).astype(np.float32).reshape(shape)


def _xielu(name: str, steps: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """alpha_p and alpha_n from -2 to 2; beta and eps as trained, but for the variant that has others."""
    usual = {"beta": 0.5, "eps": -(2.0**-20)}  # -1e-6 has no exact bfloat16
    other = {"beta": 0.75, "eps": -(2.0**-3)}
    constants = other if name.startswith("apertus-constants/") else usual
    kind = name.rpartition(".")[2]
    return (steps / 64 if kind not in constants else np.full(1, constants[kind])).astype(np.float32).reshape(shape)


def _hash(name: str, count: int) -> np.ndarray:
    """SplitMix64 of a counter that starts at the name's CRC-32."""
    z = np.arange(count, dtype=np.uint64) + (np.uint64(zlib.crc32(name.encode())) << np.uint64(32))
    z = (z + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
