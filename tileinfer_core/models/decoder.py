"""The parts that decoder models share, each driven by what the model declares.

    base_structure       the pre-norm layer from a config's numbers, with what a model's file says of it
    decoder_parameters   the arrays of the model, with what is joined: q, k, v into one, gate and up into one
    bind                 arrays by name -> typed weights
    forward              token ids -> hidden states, one layer after the other, in Backend's operations

A model's file picks from these and writes its own where its layers differ. Names of stored tensors are Hugging Face's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

from tileinfer_core.errors import UnsupportedModelError
from tileinfer_core.models.structure import LayerStructure, Parameter, scale_name
from tileinfer_core.models.xielu import xielu_parameter
from tileinfer_core.weights import FLOAT_DTYPES, INT8_DTYPES, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tileinfer_core.backends.base import Backend
    from tileinfer_core.config import ModelConfig
    from tileinfer_core.kv_cache import KvCache
    from tileinfer_core.quantization import Int8, Quantization

T = TypeVar("T")

# Our name of an array -> the stored tensors it is made of, in this order.
JOINED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o_proj": ("self_attn.o_proj",),
    "gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "down_proj": ("mlp.down_proj",),
}
UP_ALONE = ("mlp.up_proj",)  # a plain MLP's gate_up_proj
NORMS = ("input_layernorm", "post_attention_layernorm")  # stored names of the norms before attention and MLP
ROOT = "model."
LM_HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class ModelDefinition:
    """All that a backend needs to know of a model. `parameters` has each array once: a tied head is not in it."""

    config: ModelConfig
    structure: LayerStructure
    parameters: tuple[Parameter, ...]
    tied: bool

    def only_looked_up(self, parameter: str) -> bool:
        """Whether a token reads a row of it alone: an embedding that is not the head, and its scales."""
        return not self.tied and parameter in (EMBEDDING, scale_name(EMBEDDING))

    def int8(self, product: str, layer: int | None = None) -> Int8 | None:
        """The format of one product's weights; None where they are not quantised.

        `product` is "qkv_proj", "o_proj", "gate_up_proj" or "down_proj" of a layer, else "embedding" or "lm_head".
        """
        if layer is not None:
            name = layer_weight(layer, product)
        else:
            name = LM_HEAD if product == "lm_head" and not self.tied else EMBEDDING
        return next(parameter.int8 for parameter in self.parameters if parameter.name == name)

    def int8_weights(self, products: Sequence[str]) -> list[Parameter]:
        """All layers' INT8 arrays of these products of JOINED."""
        layers = range(self.config.num_hidden_layers)
        names = {layer_weight(layer, product) for layer in layers for product in products}
        return [parameter for parameter in self.parameters if parameter.int8 is not None and parameter.name in names]


@dataclass(frozen=True, slots=True)
class LayerWeights(Generic[T]):
    """One layer's arrays: qkv [(H + 2K)·d, D], o [D, H·d], gate_up [2F, D], down [D, F]; norms and biases 1-D.

    A plain MLP has its up product alone in gate_up [F, D]. xielu: [α_p, α_n, β, ε]. Scales [rows, groups] belong to
    INT8 weights; None where a weight is not quantised, or was dequantised when loaded.
    """

    input_norm: T
    qkv: T
    qkv_bias: T | None
    q_norm: T | None
    k_norm: T | None
    o: T
    o_bias: T | None
    post_norm: T
    gate_up: T
    gate_up_bias: T | None
    down: T
    down_bias: T | None
    xielu: T | None = None
    qkv_scale: T | None = None
    o_scale: T | None = None
    gate_up_scale: T | None = None
    down_scale: T | None = None


@dataclass(frozen=True, slots=True)
class DecoderWeights(Generic[T]):
    """embedding and lm_head [V, D], the same array when tied; norm [D]; scales as in LayerWeights."""

    embedding: T
    layers: tuple[LayerWeights[T], ...]
    norm: T
    lm_head: T
    embedding_scale: T | None = None
    lm_head_scale: T | None = None


def layer_weight(layer: int, product: str) -> str:
    """The name of a layer's array for a product of JOINED."""
    return f"model.layers.{layer}.{product}.weight"


def base_structure(
    config: ModelConfig,
    *,
    qk_norm: bool = False,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    mlp: Literal["gated", "plain"] = "gated",
) -> LayerStructure:
    """The pre-norm layer, from a config's numbers."""
    return LayerStructure(
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        rms_norm_eps=config.rms_norm_eps,
        rope=config.rope,
        qk_norm=qk_norm,
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=mlp_bias,
        activation=config.hidden_act,
        mlp=mlp,
    )


def decoder_parameters(
    config: ModelConfig,
    structure: LayerStructure,
    *,
    tied: bool,
    norms: tuple[str, str] = NORMS,
    stored_in: str = ROOT,
) -> tuple[Parameter, ...]:
    """The arrays in the order in which a forward pass first needs them.

    `norms`: the layer norms' stored names. `stored_in`: what the files have in place of ROOT.
    """
    rows = config.vocab_size if config.vocab_size < config.embedding_rows else None
    whole = TensorSpec(EMBEDDING, (config.embedding_rows, config.hidden_size), rows=rows)
    arrays = [Parameter(EMBEDDING, (whole,))]
    for layer in range(config.num_hidden_layers):
        arrays += _layer_parameters(structure, layer, norms)
    arrays.append(_single("model.norm.weight", (config.hidden_size,)))
    if not tied:
        arrays.append(_single(LM_HEAD, (config.vocab_size, config.hidden_size)))
    if stored_in != ROOT:
        arrays = [_stored_in(stored_in, parameter) for parameter in arrays]
    return tuple(chain.from_iterable(_as_quantised(parameter, config.quantization) for parameter in arrays))


def _stored_in(root: str, parameter: Parameter) -> Parameter:
    parts = (
        replace(part, name=root + part.name.removeprefix(ROOT)) if part.name.startswith(ROOT) else part
        for part in parameter.parts
    )
    return replace(parameter, parts=tuple(parts))


def _as_quantised(parameter: Parameter, quantization: Quantization | None) -> Iterator[Parameter]:
    """The parameter; one that is INT8 says so, and its scales follow."""
    int8 = _format_of(parameter, quantization)
    if int8 is None:
        yield parameter
        return
    parts, columns = parameter.parts, parameter.parts[0].shape[1]
    if int8.group_size is not None and columns % int8.group_size:
        raise UnsupportedModelError(
            f"{parts[0].name}: quantised in groups of {int8.group_size}, which do not divide its {columns} columns"
        )
    yield replace(parameter, parts=tuple(replace(part, dtypes=INT8_DTYPES) for part in parts), int8=int8)
    groups = int8.groups(columns)
    scales = (
        replace(part, name=scale_name(part.name), shape=(part.shape[0], groups), dtypes=FLOAT_DTYPES) for part in parts
    )
    yield Parameter(scale_name(parameter.name), tuple(scales))


def _format_of(parameter: Parameter, quantization: Quantization | None) -> Int8 | None:
    """The format of the modules of one product, which must be one."""
    if quantization is None or len(parameter.shape) != 2:
        return None
    formats = {part.name: quantization.of(part.name.removesuffix(".weight")) for part in parameter.parts}
    if len(set(formats.values())) > 1:
        found = ", ".join(f"{name}: {int8 or 'not quantised'}" for name, int8 in formats.items())
        raise UnsupportedModelError(f"weights that are joined into one product are quantised differently: {found}")
    return next(iter(formats.values()))


def _single(name: str, shape: tuple[int, ...]) -> Parameter:
    return Parameter(name, (TensorSpec(name, shape),))


def _layer_parameters(structure: LayerStructure, layer: int, norms: tuple[str, str]) -> list[Parameter]:
    s, prefix = structure, f"model.layers.{layer}."
    hidden, inner = s.hidden_size, s.intermediate_size
    rows = {"q_proj": s.q_size, "k_proj": s.kv_size, "v_proj": s.kv_size, "o_proj": hidden}
    rows |= {"gate_proj": inner, "up_proj": inner, "down_proj": hidden}
    columns = {"o_proj": s.q_size, "down_proj": inner}
    biased = {"qkv_proj": s.qkv_bias, "o_proj": s.o_bias, "gate_up_proj": s.mlp_bias, "down_proj": s.mlp_bias}
    before_attention, before_mlp = (
        Parameter(f"{prefix}{name}.weight", (TensorSpec(f"{prefix}{stored}.weight", (hidden,)),))
        for name, stored in zip(NORMS, norms, strict=True)
    )
    arrays = [before_attention]
    for joined, stored in _joined(structure).items():
        sizes = [(name, rows[name.rpartition(".")[2]], columns.get(name.rpartition(".")[2], hidden)) for name in stored]
        weights = tuple(TensorSpec(f"{prefix}{name}.weight", (n, k)) for name, n, k in sizes)
        arrays.append(Parameter(f"{prefix}{joined}.weight", weights))
        if biased[joined]:
            biases = tuple(TensorSpec(f"{prefix}{name}.bias", (n,)) for name, n, _ in sizes)
            arrays.append(Parameter(f"{prefix}{joined}.bias", biases))
    if s.qk_norm:
        arrays += [_single(f"{prefix}self_attn.{name}_norm.weight", (s.head_dim,)) for name in "qk"]
    if s.activation == "xielu":
        arrays.append(xielu_parameter(prefix + "xielu", prefix + "mlp.act_fn"))
    arrays.append(before_mlp)
    return arrays


def _joined(structure: LayerStructure) -> Mapping[str, tuple[str, ...]]:
    return JOINED if structure.mlp == "gated" else {**JOINED, "gate_up_proj": UP_ALONE}


def bind(model: ModelDefinition, arrays: Mapping[str, T]) -> DecoderWeights[T]:
    """Arrays by Parameter name -> typed weights."""
    head = EMBEDDING if model.tied else LM_HEAD
    return DecoderWeights(
        embedding=arrays[EMBEDDING],
        layers=tuple(bind_layer(layer, arrays) for layer in range(model.config.num_hidden_layers)),
        norm=arrays["model.norm.weight"],
        lm_head=arrays[head],
        embedding_scale=arrays.get(scale_name(EMBEDDING)),
        lm_head_scale=arrays.get(scale_name(head)),
    )


def bind_layer(layer: int, arrays: Mapping[str, T]) -> LayerWeights[T]:
    """The arrays of one layer by Parameter name -> typed weights."""
    prefix = f"model.layers.{layer}."
    return LayerWeights(
        input_norm=arrays[prefix + "input_layernorm.weight"],
        qkv=arrays[prefix + "qkv_proj.weight"],
        qkv_bias=arrays.get(prefix + "qkv_proj.bias"),
        q_norm=arrays.get(prefix + "self_attn.q_norm.weight"),
        k_norm=arrays.get(prefix + "self_attn.k_norm.weight"),
        o=arrays[prefix + "o_proj.weight"],
        o_bias=arrays.get(prefix + "o_proj.bias"),
        post_norm=arrays[prefix + "post_attention_layernorm.weight"],
        gate_up=arrays[prefix + "gate_up_proj.weight"],
        gate_up_bias=arrays.get(prefix + "gate_up_proj.bias"),
        down=arrays[prefix + "down_proj.weight"],
        down_bias=arrays.get(prefix + "down_proj.bias"),
        xielu=arrays.get(prefix + "xielu"),
        qkv_scale=arrays.get(prefix + "qkv_proj.weight_scale"),
        o_scale=arrays.get(prefix + "o_proj.weight_scale"),
        gate_up_scale=arrays.get(prefix + "gate_up_proj.weight_scale"),
        down_scale=arrays.get(prefix + "down_proj.weight_scale"),
    )


def forward(
    ops: Backend[T], model: ModelDefinition, weights: DecoderWeights[T], cache: KvCache, token_ids: Sequence[int]
) -> T:
    """Hidden states after the last layer, before the final norm: [T, D]. Room is reserved; nothing is committed."""
    layers = DecoderPass(ops, model.structure, cache)
    x = ops.embedding(weights.embedding, token_ids)  # [T, D]
    for index, layer in enumerate(weights.layers):
        x = layers.layer(index, layer, x)
    return x


def logits(ops: Backend[T], model: ModelDefinition, weights: DecoderWeights[T], hidden: T) -> T:
    """Final norm and output head: hidden [T, D] -> [T, V]."""
    x = ops.rms_norm(hidden, weights.norm, model.structure.rms_norm_eps)
    return ops.linear(x, weights.lm_head, None)


@dataclass(frozen=True, slots=True)
class DecoderPass(Generic[T]):
    """One pass of some tokens through the layers. The tokens come after the committed ones of `cache`."""

    ops: Backend[T]
    structure: LayerStructure
    cache: KvCache

    def layer(self, index: int, weights: LayerWeights[T], x: T) -> T:
        """One pre-norm layer on x [T, D], which is spent."""
        ops, eps = self.ops, self.structure.rms_norm_eps
        x = ops.add(x, self.attention(index, weights, ops.rms_norm(x, weights.input_norm, eps)))
        return ops.add(x, self.mlp(weights, ops.rms_norm(x, weights.post_norm, eps)))

    def attention(self, index: int, weights: LayerWeights[T], x: T) -> T:
        """Self-attention of x [T, D] -> [T, D]; its keys and values are written to the cache."""
        ops, start = self.ops, self.cache.length
        qkv = ops.linear(x, weights.qkv, weights.qkv_bias)  # [T, (H + 2K)·d]
        q, k, v = ops.split_qkv(qkv, self.structure)
        if weights.q_norm is not None and weights.k_norm is not None:
            q = ops.rms_norm(q, weights.q_norm, self.structure.rms_norm_eps)
            k = ops.rms_norm(k, weights.k_norm, self.structure.rms_norm_eps)
        ops.write_kv(self.cache, index, ops.rope(k, start), v)
        out = ops.attention(ops.rope(q, start), self.cache, index)  # [T, H·d]
        return ops.linear(out, weights.o, weights.o_bias)

    def mlp(self, weights: LayerWeights[T], x: T) -> T:
        """down(act(gate(x)) * up(x)), or down(act(up(x))) without a gate: x [T, D] -> [T, D]."""
        inner = self.ops.linear(x, weights.gate_up, weights.gate_up_bias)  # [T, 2F], plain [T, F]
        if weights.xielu is None:
            inner = self.ops.gated_activation(inner, self.structure.activation)
        else:
            inner = self.ops.xielu(inner, weights.xielu)
        return self.ops.linear(inner, weights.down, weights.down_bias)
