"""Apertus: pre-norm layers, QK-norm as in Qwen3, and an MLP without a gate, down(xIELU(up(x))).

xIELU has numbers of its own in every layer (models/xielu.py). The layer norms are called attention_layernorm and
feedforward_layernorm. `attention_bias` puts biases on q, k, v and o; the MLP has none. A config without a rope object
is refused: Transformers 4 reads that as unscaled positions, Transformers 5 as Llama 3's scaling by 8.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tileinfer_core.models.decoder import ROOT, base_structure, decoder_parameters
from tileinfer_core.models.rules import ConfigRules

if TYPE_CHECKING:
    from tileinfer_core.config import ModelConfig
    from tileinfer_core.models.structure import LayerStructure, Parameter

CONFIG_RULES = ConfigRules(
    activations={"xielu": "xielu"},
    fixed={"qk_norm": (True,), "mlp_bias": (False,)},
    needs_rope_object=True,
    cut_head=True,
)


def layer_structure(config: ModelConfig) -> LayerStructure:
    biased = config.attention_bias
    return base_structure(config, qk_norm=True, qkv_bias=biased, o_bias=biased, mlp="plain")


def parameters(config: ModelConfig, *, tied: bool, stored_in: str = ROOT) -> tuple[Parameter, ...]:
    norms = ("attention_layernorm", "feedforward_layernorm")
    return decoder_parameters(config, layer_structure(config), tied=tied, norms=norms, stored_in=stored_in)
