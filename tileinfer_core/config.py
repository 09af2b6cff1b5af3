"""A model's config.json as a frozen, checked object. What TileInfer can't run is refused here, by name.

This file reads no weight: a model is refused before anything is loaded. What a field means for one model type alone is
in that model's CONFIG_RULES (models/rules.py).
An absurd value (0, negative, 2^40, NaN, heads that do not divide) is a DamagedModelError; an option that would
change the result and that no code here implements is an UnsupportedModelError that lists what is supported. Fields
that nothing reads are kept by name in `unread`.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from tileinfer_core.config_fields import Fields
from tileinfer_core.errors import DamagedModelError, UnsupportedModelError
from tileinfer_core.jsonfile import read_json_object
from tileinfer_core.models import MODEL_TYPES
from tileinfer_core.quantization import Quantization, read_quantization
from tileinfer_core.rope_config import RopeConfig, read_rope
from tileinfer_core.settings import KV_FORMATS

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tileinfer_core.models.rules import ConfigRules

# Fields that change the result, with the values under which they do not.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "attn_logit_softcapping": (),
        "final_logit_softcapping": (),
        "logit_softcapping": (),
        "query_pre_attn_scalar": (),
        "num_experts": (0,),
        "num_local_experts": (0,),
        "n_routed_experts": (0,),
        "moe_intermediate_size": (0,),
        "attention_chunk_size": (),
        "no_rope_layers": ([],),
        "alibi": (False,),
        "clip_qkv": (),
        "dual_chunk_attention_config": ({},),
        "use_qk_norm": (False,),
        "qk_norm": (False,),
        "post_norm": (False,),
        "attention_multiplier": (),
        "embedding_multiplier": (1, 1.0),
        "residual_multiplier": (1, 1.0),
        "logits_scaling": (1, 1.0),
        "scale_emb": (1, 1.0),
        "is_encoder_decoder": (False,),
        "add_cross_attention": (False,),
        "vision_config": ({},),
        "text_config": ({},),
    }
)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Fields have Hugging Face's names. `head_dim` is resolved; `unread`: fields that nothing reads.

    `hidden_act` is LayerStructure's name of it. `sliding_window`: None where no layer has one. `vocab_size`: the ids
    that the model can read and write; `embedding_rows`: of the stored embedding, which can have more (images, sound).
    """

    model_type: str
    vocab_size: int
    embedding_rows: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_act: Literal["silu", "xielu"]
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dtype: str | None
    sliding_window: int | None = None
    unread: tuple[str, ...] = ()
    quantization: Quantization | None = None
    kv: str | None = None  # how keys and values are kept unless the user says: one of KV_FORMATS, or None

    @property
    def q_size(self) -> int:
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_key_value_heads * self.head_dim

    @property
    def max_context(self) -> int:
        """The longest sequence that is computed exactly.

        The positions end it, which YaRN stretches by its factor, or a sliding window: up to its length a sequence is
        the same as with full attention.
        """
        longest = self.max_position_embeddings
        if self.rope.type == "yarn":
            longest = max(longest, int(self.rope.original_max_position_embeddings * self.rope.factor))
        return longest if self.sliding_window is None else min(longest, self.sliding_window)

    @classmethod
    def load(cls, folder: Path) -> ModelConfig:
        """Read `folder`/config.json.

        Raises:
            DamagedModelError: the file is absent or broken, or a value is impossible.
            UnsupportedModelError: the model asks for something that TileInfer doesn't have.
        """
        path = folder / "config.json"
        return cls.from_dict(read_json_object(path, max_bytes=4 << 20), str(path))

    @classmethod
    def from_dict(cls, table: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
        """Check the fields of a config; `where` names it in errors."""
        model_type = _model_type(Fields(table, where), where)
        rules: ConfigRules = importlib.import_module(MODEL_TYPES[model_type]).CONFIG_RULES
        _check_architecture(Fields(table, where), where, rules)
        fields = Fields(rules.flattened(table), where)
        fields.read |= {"model_type", "architectures"}
        _refuse_options(fields, where, {**_NEUTRAL, **rules.fixed})
        if rules.needs_rope_object and not (fields.raw("rope_parameters") or fields.raw("rope_scaling")):
            raise DamagedModelError(
                f"{where}: neither rope_parameters nor rope_scaling; a model of type {model_type!r} needs one of them",
                hint='where the positions are not scaled, "rope_scaling": {"rope_type": "default"} says so',
            )
        heads = fields.integer("num_attention_heads", high=1 << 10)
        hidden = fields.integer("hidden_size", high=1 << 17)
        max_position = fields.integer("max_position_embeddings", high=1 << 28)
        layers = fields.integer("num_hidden_layers", high=1 << 10)
        bos = fields.token_ids("bos_token_id")
        embedding_rows = fields.integer("vocab_size", high=1 << 24)
        config: dict[str, Any] = {
            "model_type": model_type,
            "vocab_size": _head_rows(fields, where, rules, embedding_rows),
            "embedding_rows": embedding_rows,
            "hidden_size": hidden,
            "intermediate_size": fields.integer("intermediate_size", high=1 << 20),
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": _kv_heads(fields, heads),
            "head_dim": _head_dim(fields, hidden, heads),
            "hidden_act": _activation(fields, where, model_type, rules.activations),
            "rms_norm_eps": fields.number("rms_norm_eps", low=1e-12, high=1.0),
            "max_position_embeddings": max_position,
            "rope": read_rope(fields, where, max_position),
            "tie_word_embeddings": fields.boolean("tie_word_embeddings", default=False),
            "attention_bias": fields.boolean("attention_bias", default=False),
            "mlp_bias": fields.boolean("mlp_bias", default=False),
            "eos_token_ids": fields.token_ids("eos_token_id"),
            "bos_token_id": bos[0] if bos else None,
            "dtype": _dtype(fields),
            "kv": _kv(fields),
            "quantization": read_quantization(_quantization(fields), where),
            "sliding_window": _sliding_window(fields, where, layers),
        }
        return cls(**config, unread=fields.unread)


def _model_type(fields: Fields, where: str) -> str:
    supported = ", ".join(sorted(MODEL_TYPES))
    model_type = fields.string("model_type")
    if model_type not in MODEL_TYPES:
        raise UnsupportedModelError(
            f"{where}: the model type {model_type!r} is not supported", hint=f"supported model types: {supported}"
        )
    return model_type


def _check_architecture(fields: Fields, where: str, rules: ConfigRules) -> None:
    architectures = fields.raw("architectures")
    if architectures is None:
        return
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise fields.error("architectures", "a list of names", architectures)
    if architectures and not any(name.endswith("ForCausalLM") or name in rules.architectures for name in architectures):
        raise UnsupportedModelError(
            f"{where}: the architecture {', '.join(architectures)} does not write text",
            hint="TileInfer runs causal language models (…ForCausalLM)",
        )


def _refuse_options(fields: Fields, where: str, accepted: Mapping[str, tuple[Any, ...]]) -> None:
    for name, neutral in accepted.items():
        value = fields.raw(name)
        if value is None or any(type(value) is type(ok) and value == ok for ok in neutral):
            continue
        raise UnsupportedModelError(
            f"{where}: not supported: {f'{name} {value!r}'[:160]}",
            hint="supported: dense decoder models in bfloat16, float16 or float32, with full attention",
        )


def _sliding_window(fields: Fields, where: str, layers: int) -> int | None:
    """The window of the layers that have one; None where none has."""
    window = fields.optional_integer("sliding_window", low=-1, high=1 << 30)
    asked = fields.boolean("use_sliding_window", default=True)
    first_layer = fields.integer("max_window_layers", low=0, high=1 << 10, default=0)
    kinds = fields.raw("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds)):
        raise fields.error("layer_types", "a list of names", kinds)
    other = sorted(set(kinds or ()) - {"full_attention", "sliding_attention"})
    if other:
        raise UnsupportedModelError(
            f"{where}: layers of type {', '.join(other)} are not supported",
            hint="supported layer types: full_attention, sliding_attention up to the window's length",
        )
    in_use = "sliding_attention" in kinds if kinds is not None else asked and first_layer < layers
    return window if in_use and window is not None and window > 1 else None


def _head_rows(fields: Fields, where: str, rules: ConfigRules, embedding_rows: int) -> int:
    rows = fields.optional_integer("output_vocab_size", high=embedding_rows)
    if rows is None or rows == embedding_rows:
        return embedding_rows
    if not rules.cut_head:
        raise UnsupportedModelError(
            f"{where}: a head with fewer rows than the embedding (output_vocab_size {rows}) is not supported",
            hint="supported in Apertus models",
        )
    if fields.boolean("tie_word_embeddings", default=False):
        raise fields.error("tie_word_embeddings", f"false beside output_vocab_size {rows}", True)
    return rows


def _kv_heads(fields: Fields, heads: int) -> int:
    kv_heads = fields.integer("num_key_value_heads", high=heads, default=heads)
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", f"a divisor of num_attention_heads ({heads})", kv_heads)
    return kv_heads


def _head_dim(fields: Fields, hidden: int, heads: int) -> int:
    """An explicit head_dim wins; null or absent means hidden_size / num_attention_heads."""
    head_dim = fields.optional_integer("head_dim", high=1 << 10)
    if head_dim is None:
        if hidden % heads:
            raise fields.error("hidden_size", f"a multiple of num_attention_heads ({heads}) without head_dim", hidden)
        head_dim = hidden // heads
    if head_dim % 2:
        raise fields.error("head_dim", "even, for rotary position embedding", head_dim)
    return head_dim


def _activation(fields: Fields, where: str, model_type: str, supported: Mapping[str, str]) -> str:
    name = fields.string("hidden_act")
    if name not in supported:
        raise UnsupportedModelError(
            f"{where}: the activation {name!r} (hidden_act) is not supported in a model of type {model_type!r}",
            hint=f"supported activations: {', '.join(sorted(supported))}",
        )
    return supported[name]


def _kv(fields: Fields) -> str | None:
    """The `kv` of the table "tileinfer", which `quantize --kv` writes; other programs do not look there."""
    table = fields.raw("tileinfer")
    if table is None:
        return None
    if not isinstance(table, dict) or table.get("kv") not in (None, *KV_FORMATS):
        raise fields.error("tileinfer", f'a table whose "kv" is one of {", ".join(KV_FORMATS)}', table)
    kv: str | None = table.get("kv")
    return kv


def _quantization(fields: Fields) -> object:
    """How the weights are quantised: by the name of 2024's files where there is none of today's."""
    section = fields.raw("quantization_config")
    older = fields.raw("compression_config")
    return older if section in (None, {}) else section


def _dtype(fields: Fields) -> str | None:
    """The storage type that the config names, under its new or its old key. Information only: the files decide."""
    for name in ("dtype", "torch_dtype"):
        if isinstance(value := fields.raw(name), str):
            return value.removeprefix("torch.")
    return None
