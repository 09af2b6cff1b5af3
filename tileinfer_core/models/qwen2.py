"""Qwen2 and Qwen2.5, dense: Llama's layer with biases on q, k and v, always, and on nothing else.

A sliding window is in use only where use_sliding_window says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tileinfer_core.models.decoder import base_structure, decoder_parameters
from tileinfer_core.models.rules import ConfigRules

if TYPE_CHECKING:
    from tileinfer_core.config import ModelConfig
    from tileinfer_core.models.structure import LayerStructure, Parameter

CONFIG_RULES = ConfigRules(defaults={"num_key_value_heads": 32, "use_sliding_window": False, "max_window_layers": 28})


def layer_structure(config: ModelConfig) -> LayerStructure:
    return base_structure(config, qkv_bias=True)


def parameters(config: ModelConfig, *, tied: bool) -> tuple[Parameter, ...]:
    return decoder_parameters(config, layer_structure(config), tied=tied)
