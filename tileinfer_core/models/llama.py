"""Llama: Llama 2 and 3, SmolLM2, and everything else whose config.json says model_type "llama".

Pre-norm layers, grouped-query attention, rotary embedding, SwiGLU. `attention_bias` puts biases on q, k, v and o,
`mlp_bias` on gate, up and down.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tileinfer_core.models.decoder import base_structure, decoder_parameters
from tileinfer_core.models.rules import ConfigRules

if TYPE_CHECKING:
    from tileinfer_core.config import ModelConfig
    from tileinfer_core.models.structure import LayerStructure, Parameter

CONFIG_RULES = ConfigRules()


def layer_structure(config: ModelConfig) -> LayerStructure:
    biased = config.attention_bias
    return base_structure(config, qkv_bias=biased, o_bias=biased, mlp_bias=config.mlp_bias)


def parameters(config: ModelConfig, *, tied: bool) -> tuple[Parameter, ...]:
    return decoder_parameters(config, layer_structure(config), tied=tied)
