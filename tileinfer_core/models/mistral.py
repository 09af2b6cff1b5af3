"""Mistral: Llama's layer without biases, and a sliding window where sliding_window is a number.

The window is honoured up to its length: a sequence that is no longer sees every token through it, so the context ends
there (4,096 tokens for Mistral 7B v0.1; v0.2 and later have none). An absent field is a window of 4,096 by the model
type's definition, a null is none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tileinfer_core.models.decoder import base_structure, decoder_parameters
from tileinfer_core.models.rules import ConfigRules

if TYPE_CHECKING:
    from tileinfer_core.config import ModelConfig
    from tileinfer_core.models.structure import LayerStructure, Parameter

CONFIG_RULES = ConfigRules(defaults={"sliding_window": 4096, "num_key_value_heads": 8})


def layer_structure(config: ModelConfig) -> LayerStructure:
    return base_structure(config)


def parameters(config: ModelConfig, *, tied: bool) -> tuple[Parameter, ...]:
    return decoder_parameters(config, layer_structure(config), tied=tied)
