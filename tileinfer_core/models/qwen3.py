"""Qwen3, dense: Llama's layer with an RMS norm over every query and key head before the rotary embedding.

The head dimension is a field of its own (128 at every published size, and where it is absent), not hidden_size /
num_attention_heads. `attention_bias` puts biases on q, k, v and o; the MLP has none. A sliding window is in use only
where use_sliding_window says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tileinfer_core.models.decoder import base_structure, decoder_parameters
from tileinfer_core.models.rules import ConfigRules

if TYPE_CHECKING:
    from tileinfer_core.config import ModelConfig
    from tileinfer_core.models.structure import LayerStructure, Parameter

CONFIG_RULES = ConfigRules(
    defaults={"head_dim": 128, "num_key_value_heads": 32, "use_sliding_window": False, "max_window_layers": 28}
)


def layer_structure(config: ModelConfig) -> LayerStructure:
    biased = config.attention_bias
    return base_structure(config, qk_norm=True, qkv_bias=biased, o_bias=biased)


def parameters(config: ModelConfig, *, tied: bool) -> tuple[Parameter, ...]:
    return decoder_parameters(config, layer_structure(config), tied=tied)
