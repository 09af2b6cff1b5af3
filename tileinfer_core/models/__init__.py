"""The model types that TileInfer runs. Adding one is a file beside this one and a line in MODEL_TYPES.

The registry holds module names, not modules: config.py reads it to refuse a model without importing an array library.
A model's module exports CONFIG_RULES (models/rules.py), `layer_structure(config)` and `parameters(config, tied=…)`;
models/decoder.py has what they are made of. docs/adding_a_model.md shows one.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

MODEL_TYPES: Mapping[str, str] = MappingProxyType(
    {
        "apertus": "tileinfer_core.models.apertus",
        "apertus1p5": "tileinfer_core.models.apertus1p5",
        "apertus1p5_text": "tileinfer_core.models.apertus",
        "llama": "tileinfer_core.models.llama",
        "mistral": "tileinfer_core.models.mistral",
        "qwen2": "tileinfer_core.models.qwen2",
        "qwen3": "tileinfer_core.models.qwen3",
    }
)
