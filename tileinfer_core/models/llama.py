"""Llama: Llama 2 and 3, SmolLM2, and everything else whose config.json says model_type "llama".

Pre-norm layers, grouped-query attention, rotary embedding, SwiGLU. `attention_bias` puts biases on q, k, v and o,
`mlp_bias` on gate, up and down.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tileinfer_core.models.decoder import base_structure, decoder_parameters

if TYPE_CHECKING:
    from tileinfer_core.config import ModelConfig
    from tileinfer_core.models.structure import LayerStructure, Parameter


def layer_structure(config: ModelConfig) -> LayerStructure:
    return base_structure(config, qk_norm=False, mlp_bias=config.mlp_bias)


def parameters(config: ModelConfig, *, tied: bool) -> tuple[Parameter, ...]:
    return decoder_parameters(config, layer_structure(config), tied=tied)
