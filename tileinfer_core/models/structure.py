"""What a model declares of itself, apart from any backend: its layer structure and its arrays.

A backend that plans ahead (fused kernels, captured graphs) chooses by LayerStructure, never by the model's name; a
backend that loads weights follows Parameter, which states as data what is joined.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from tileinfer_core.quantization import Int8
    from tileinfer_core.rope_config import RopeConfig
    from tileinfer_core.weights import TensorSpec


@dataclass(frozen=True, slots=True)
class LayerStructure:
    """One decoder layer; all layers of a model are alike.

    pre-norm: x += O(attention(norm(x))), then x += mlp(norm(x)). mlp "gated": down(act(gate(x)) * up(x)); "plain":
    down(act(up(x))). `qk_norm` is an RMS norm over head_dim of every query and key head, before the rotary embedding.
    """

    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope: RopeConfig
    qk_norm: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    activation: Literal["silu", "xielu"]
    mlp: Literal["gated", "plain"] = "gated"
    norm_placement: Literal["pre"] = "pre"

    @property
    def q_size(self) -> int:
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_key_value_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Parameter:
    """One array of the running model, made of the stored tensors `parts`.

    form "joined": along their first axis, in this order. "xielu": the numbers [α_p, α_n, β, ε] of models/xielu.py.
    `int8` is set for quantised weights, whose scales are the Parameter named scale_name(name), right behind it:
    weight[n, k] = scale[n, k // group_size] · int8[n, k].
    """

    name: str
    parts: tuple[TensorSpec, ...]
    form: Literal["joined", "xielu"] = "joined"
    int8: Int8 | None = None

    @property
    def is_scale(self) -> bool:
        return self.name.endswith(scale_name("weight"))

    @property
    def is_grouped(self) -> bool:
        """Whether it is INT8 with more than one scale a row."""
        return self.int8 is not None and self.int8.group(self.shape[1]) is not None

    @property
    def shape(self) -> tuple[int, ...]:
        if self.form == "xielu":
            return (4,)
        rows = sum(part.read_shape[0] for part in self.parts)
        return (rows, *self.parts[0].shape[1:])


def scale_name(weight: str) -> str:
    """The name of a weight's scales, stored or joined."""
    return weight + "_scale"
