"""The model types that TileInfer runs. Adding one is a file beside this one and a line in MODEL_TYPES.

The registry holds module names, not modules: config.py reads it to refuse a model without importing an array library.
A model's module exports `layer_structure(config)` and `parameters(config)`; see models/decoder.py.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

MODEL_TYPES: Mapping[str, str] = MappingProxyType(
    {
        "llama": "tileinfer_core.models.llama",
        "qwen3": "tileinfer_core.models.qwen3",
    }
)
