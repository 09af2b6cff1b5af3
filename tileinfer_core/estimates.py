"""How much memory a model takes, from its config alone: weights and keys and values, in 16 bits and in INT8.

INT8 of a model that is quantised is what it has. Of others it is what `quantize` would write: every matrix one byte an
element, with a 16-bit scale for each row, or for each GROUP columns in the down products and the head. Norms and biases
stay as they are, as does an embedding that is not the head.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from tileinfer_core.models.decoder import EMBEDDING, LM_HEAD

if TYPE_CHECKING:
    from tileinfer_core.models.decoder import ModelDefinition
    from tileinfer_core.models.structure import Parameter

Weights = Literal["float32", "bf16", "int8"]
GROUP = 64


def weight_bytes(model: ModelDefinition, weights: Weights) -> int:
    """All arrays, each once: a tied head is the embedding."""
    item = 4 if weights == "float32" else 2
    if weights == "int8" and model.config.quantization is not None:
        return sum(math.prod(p.shape) * (1 if p.int8 else item) for p in model.parameters)
    total = 0
    for parameter in _numbers(model):
        elements = math.prod(parameter.shape)
        kept = len(parameter.shape) == 1 or (parameter.name == EMBEDDING and not model.tied)
        if weights != "int8" or kept:
            total += elements * item
            continue
        rows, columns = parameter.shape
        grouped = parameter.name in (EMBEDDING, LM_HEAD) or parameter.name.endswith("down_proj.weight")
        total += elements + rows * item * (-(-columns // GROUP) if grouped else 1)
    return total


def weight_count(model: ModelDefinition) -> int:
    """Stored numbers: what a model's name calls its size."""
    return sum(math.prod(parameter.shape) for parameter in _numbers(model))


def _numbers(model: ModelDefinition) -> list[Parameter]:
    """A quantised model's scales are no numbers of its own."""
    return [parameter for parameter in model.parameters if not parameter.is_scale]


def kv_bytes_per_token(model: ModelDefinition, weights: Weights) -> int:
    """Keys and values of one token in all layers, which stay in 16 bits beside INT8 weights."""
    return 2 * model.config.num_hidden_layers * model.structure.kv_size * (4 if weights == "float32" else 2)


def total_bytes(model: ModelDefinition, weights: Weights, context: int) -> int:
    """Weights, and the keys and values of a sequence."""
    return weight_bytes(model, weights) + context * kv_bytes_per_token(model, weights)
