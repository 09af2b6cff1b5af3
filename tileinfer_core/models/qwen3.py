"""Qwen3, dense: Llama's layer with an RMS norm over every query and key head before the rotary embedding.

The head dimension is a field of its own (128 at every published size), not hidden_size / num_attention_heads.
The MLP has no biases.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tileinfer_core.models.decoder import base_structure, decoder_parameters

if TYPE_CHECKING:
    from tileinfer_core.config import ModelConfig
    from tileinfer_core.models.structure import LayerStructure, Parameter


def layer_structure(config: ModelConfig) -> LayerStructure:
    return base_structure(config, qk_norm=True, mlp_bias=False)


def parameters(config: ModelConfig, *, tied: bool) -> tuple[Parameter, ...]:
    return decoder_parameters(config, layer_structure(config), tied=tied)
