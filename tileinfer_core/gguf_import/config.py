"""config.json and generation_config.json from the keys of a GGUF file, for the architectures llama, qwen2 and qwen3.

Every key of the architecture is either used, known not to change the result, or a reason to refuse: a setting that
is dropped in silence gives wrong text. What can't be said in config.json (rope_freqs.weight holds only the factors
that Llama 3's scaling comes to) is worked back to the parameters that make exactly those factors.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from tileinfer_core.errors import DamagedModelError, UnsupportedModelError

if TYPE_CHECKING:
    from tileinfer_core.gguf_import.container import GgufFile
    from tileinfer_core.gguf_import.metadata import Metadata

Json = dict[str, Any]

CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
MAX_LAYERS = 1024

_USED = {
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size", "rope.freq_base",
    "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor", "attention.head_count",
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.layer_norm_rms_epsilon",
}  # fmt: skip
# Present in real files without changing what is computed here.
_HARMLESS = {"rope.scaling.original_context_length", "rope.scaling.finetuned", "tensor_data_layout"}
# Harmless at one value only.
_NEUTRAL: Json = {
    "expert_count": 0,
    "expert_used_count": 0,
    "attention.sliding_window": 0,
    "attention.causal": True,
    "rope.scaling.attn_factor": 1.0,
    "rope.scale_linear": 1.0,
    "use_parallel_residual": False,
}


def model_config(gguf: GgufFile, metadata: Metadata, end_ids: list[int], bos_id: int | None) -> Json:
    """The content of config.json.

    Raises:
        UnsupportedModelError: an architecture or a setting that can't be run, by name.
        DamagedModelError: a key that is missing or impossible.
    """
    arch = metadata.text("general.architecture")
    if arch not in CLASSES:
        raise UnsupportedModelError(
            f"{gguf.path}: the architecture {arch!r} is not supported in GGUF files; supported are {', '.join(CLASSES)}"
        )
    _refuse_unknown(gguf, metadata, arch)
    layers = _positive(metadata, f"{arch}.block_count", MAX_LAYERS)
    hidden = _positive(metadata, f"{arch}.embedding_length")
    heads = metadata.per_layer(f"{arch}.attention.head_count", layers)
    kv_key = f"{arch}.attention.head_count_kv"
    kv_heads = metadata.per_layer(kv_key, layers) if kv_key in metadata.values else heads
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise DamagedModelError(f"{gguf.path}: {heads} attention heads can't share {kv_heads} key-value heads")
    head_dim = _head_dim(metadata, arch, hidden, heads)
    return {
        "architectures": [CLASSES[arch]],
        "model_type": arch,
        "vocab_size": gguf.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": metadata.per_layer(f"{arch}.feed_forward_length", layers),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": metadata.number(f"{arch}.attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": _positive(metadata, f"{arch}.context_length"),
        "rope_theta": rope_theta(metadata, arch),
        "rope_scaling": rope_scaling(gguf, metadata, arch, head_dim),
        "attention_bias": "blk.0.attn_q.bias" in gguf.tensors,
        "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "bos_token_id": bos_id,
        "eos_token_id": end_ids[0] if end_ids else None,
    }


def generation_config(metadata: Metadata, end_ids: list[int], bos_id: int | None) -> Json:
    """The content of generation_config.json: end tokens, and the sampling settings where the file recommends some."""
    config: Json = {"bos_token_id": bos_id, "eos_token_id": end_ids or None}
    for key, name in (
        ("temp", "temperature"),
        ("top_p", "top_p"),
        ("min_p", "min_p"),
        ("penalty_repeat", "repetition_penalty"),
    ):
        value = metadata.number_or(f"general.sampling.{key}", None)
        if value is not None:
            config[name] = value
    top_k = metadata.integer_or("general.sampling.top_k", None)
    if top_k is not None:
        config["top_k"] = top_k
    if "temperature" in config:
        config["do_sample"] = config["temperature"] > 0
    return config


def _refuse_unknown(gguf: GgufFile, metadata: Metadata, arch: str) -> None:
    if metadata.integer_or("split.count", 0) > 1:
        raise UnsupportedModelError(
            f"{gguf.path}: one part of a model split into {metadata.values['split.count']} files",
            hint="join them with `llama-gguf-split --merge FIRST_PART WHOLE.gguf`",
        )
    for key, value in metadata.values.items():
        name = key.removeprefix(f"{arch}.")
        if name == key or name in _USED or name in _HARMLESS or (name in _NEUTRAL and value == _NEUTRAL[name]):
            continue
        raise UnsupportedModelError(f"{gguf.path}: the setting {key} = {value!r:.40} is not supported for {arch}")


def _positive(metadata: Metadata, key: str, limit: int = 1 << 31) -> int:
    value = metadata.integer(key)
    if not 1 <= value <= limit:
        raise DamagedModelError(f"{metadata.path}: {key} is {value}, expected 1 to {limit}")
    return value


def _head_dim(metadata: Metadata, arch: str, hidden: int, heads: int) -> int:
    key_length = metadata.integer_or(f"{arch}.attention.key_length", hidden // heads)
    value_length = metadata.integer_or(f"{arch}.attention.value_length", key_length)
    rotary = metadata.integer_or(f"{arch}.rope.dimension_count", key_length)
    if key_length < 2 or key_length % 2 or not key_length == value_length == rotary:
        raise UnsupportedModelError(
            f"{metadata.path}: head sizes {key_length} (key), {value_length} (value) and {rotary} (rotary) "
            "must be one even number"
        )
    return key_length


def rope_theta(metadata: Metadata, arch: str) -> float:
    """10,000 where the file does not say: the format defines that default (older Llama files rely on it)."""
    theta = metadata.number_or(f"{arch}.rope.freq_base", 10000.0)
    if not (math.isfinite(theta) and theta > 0):
        raise DamagedModelError(f"{metadata.path}: {arch}.rope.freq_base is {theta}")
    return theta


def rope_scaling(gguf: GgufFile, metadata: Metadata, arch: str, head_dim: int) -> Json | None:
    kind = metadata.text_or(f"{arch}.rope.scaling.type", "none")
    factor = metadata.number_or(f"{arch}.rope.scaling.factor", 1.0)
    if "rope_freqs.weight" in gguf.tensors:
        return llama3_scaling(rope_factors(gguf, head_dim), rope_theta(metadata, arch), str(gguf.path))
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    if kind == "linear" and math.isfinite(factor) and factor > 0:
        return {"rope_type": "linear", "factor": factor}
    raise UnsupportedModelError(f"{gguf.path}: the rope scaling {kind!r} with factor {factor} is not supported")


def rope_factors(gguf: GgufFile, head_dim: int) -> np.ndarray[Any, np.dtype[Any]]:
    """The divisors of the rotary frequencies, [head_dim / 2] float64."""
    tensor = gguf.tensors["rope_freqs.weight"]
    if tensor.type.name != "F32" or tensor.shape != (head_dim // 2,):
        raise DamagedModelError(f"{gguf.path}: rope_freqs.weight is {tensor.type.name} {list(tensor.shape)}")
    with gguf.path.open("rb") as file:
        file.seek(tensor.offset)
        factors = np.frombuffer(file.read(tensor.bytes), "<f4").astype(np.float64)
    if not (np.isfinite(factors).all() and (factors > 0).all()):
        raise DamagedModelError(f"{gguf.path}: rope_freqs.weight has values that are not positive numbers")
    return factors


def llama3_scaling(factors: np.ndarray[Any, np.dtype[Any]], theta: float, where: str) -> Json | None:
    """The parameters of Llama 3's rope scaling that give exactly these divisors, or UnsupportedModelError.

    Between the two wavelength bounds, 1 / factor_i = (1 - s_i) / factor + s_i with
    s_i = (original / wavelength_i - low) / (high - low): linear in 1 / wavelength. So two points in between fix the
    line, up to a common scale of (original, low, high), which low = 1 (as Meta has it) settles.
    """
    if (factors == 1).all():
        return None
    factor = float(factors.max())
    known: list[Json] = [_llama3(factor, 4.0, 8192)]
    inverse_wavelength = theta ** (-np.arange(len(factors)) / len(factors)) / (2 * math.pi)
    between = np.flatnonzero((factors > 1 + 1e-6) & (factors < factor * (1 - 1e-6)))
    if len(between) >= 2:
        smooth = (1 / factors[between] - 1 / factor) / (1 - 1 / factor)
        slope, intercept = np.polyfit(inverse_wavelength[between], smooth, 1)
        high = 1 - 1 / intercept if intercept < 0 else 0.0
        if high > 1:
            known.append(_llama3(factor, round(high, 3), round(slope * (high - 1))))
    for scaling in known:
        if np.allclose(_llama3_factors(scaling, inverse_wavelength), factors, rtol=1e-4):
            return scaling
    raise UnsupportedModelError(f"{where}: rope_freqs.weight holds factors that are not Llama 3's rope scaling")


def _llama3(factor: float, high: float, original: int) -> Json:
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _llama3_factors(
    scaling: Json, inverse_wavelength: np.ndarray[Any, np.dtype[Any]]
) -> np.ndarray[Any, np.dtype[Any]]:
    factor, high = scaling["factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * inverse_wavelength
    smooth = np.clip((turns - 1) / (high - 1), 0, 1)
    return np.asarray(1 / ((1 - smooth) / factor + smooth))
