"""From a config and the headers of the weight files to a model definition, with every mismatch said before loading."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

import numpy as np

from tileinfer_core.errors import DamagedModelError, UnsupportedModelError
from tileinfer_core.jsonfile import FETCH_AGAIN
from tileinfer_core.models import MODEL_TYPES
from tileinfer_core.models.decoder import LM_HEAD, ModelDefinition
from tileinfer_core.models.structure import scale_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tileinfer_core.config import ModelConfig
    from tileinfer_core.weights import WeightFiles

# Buffers that old exporters stored beside the weights. They follow from the config.
_STORED_BUFFERS = ("self_attn.rotary_emb.inv_freq",)


def define_model(config: ModelConfig, *, tied: bool) -> ModelDefinition:
    """The definition that the config alone gives."""
    module = importlib.import_module(MODEL_TYPES[config.model_type])
    return ModelDefinition(config, module.layer_structure(config), module.parameters(config, tied=tied), tied)


def define_from_files(config: ModelConfig, files: WeightFiles) -> tuple[ModelDefinition, tuple[str, ...]]:
    """The definition for these weight files, and warnings for the user.

    A tied model may store its lm_head all the same: an equal one is ignored, a different one is used and reported,
    which is what Transformers does.

    Raises:
        ModelError: tensors missing, unexpected, or of another shape or type than the config says, all at once.
    """
    tied, warnings = _tied(config, files)
    model = define_model(config, tied=tied)
    _check_head_dim(model, files)
    not_read = getattr(importlib.import_module(MODEL_TYPES[config.model_type]), "NOT_READ", ())
    ignored = [name for name in files.names if name.endswith(_STORED_BUFFERS) or name.startswith(not_read)]
    ignored += _zero_points(model, files)
    specs = [spec for parameter in model.parameters for spec in parameter.parts]
    files.check(specs, ignore=[*ignored, LM_HEAD, scale_name(LM_HEAD)] if tied else ignored)
    _refuse_bad_scales(model, files)
    return model, warnings


def _zero_points(model: ModelDefinition, files: WeightFiles) -> Iterator[str]:
    """The zero points that some writers store for symmetric weights. They must be zero."""
    for part in (part for parameter in model.parameters if parameter.int8 for part in parameter.parts):
        name = part.name + "_zero_point"
        if name in files.names:
            if files.read(name).any():
                raise UnsupportedModelError(f"{files.folder}: {name} is not zero: asymmetric weights are not supported")
            yield name


def _refuse_bad_scales(model: ModelDefinition, files: WeightFiles) -> None:
    """A scale that is not a number makes every token's logits NaN; here the tensor can still be named."""
    for part in (part for parameter in model.parameters if parameter.is_scale for part in parameter.parts):
        if not np.isfinite(files.read(part.name).astype(np.float32)).all():
            raise DamagedModelError(f"{files.folder}: {part.name} has values that are not finite")


def _tied(config: ModelConfig, files: WeightFiles) -> tuple[bool, tuple[str, ...]]:
    if not config.tie_word_embeddings:
        return False, ()
    embedding = define_model(config, tied=True).parameters[0].parts[0].name
    if LM_HEAD not in files.names or embedding not in files.names or _equal(files, LM_HEAD, embedding):
        return True, ()
    warning = (
        f"{files.folder}: config.json ties the output head to the embedding, but the files store a different "
        f"{LM_HEAD}; the stored one is used"
    )
    return False, (warning,)


def _equal(files: WeightFiles, left: str, right: str) -> bool:
    a, b = files.info(left), files.info(right)
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    rows = max(1, (1 << 22) // max(1, a.bytes // max(1, a.shape[0])))  # blocks of 4 MiB
    x, y = files.read(left), files.read(right)
    return all(x[i : i + rows].tobytes() == y[i : i + rows].tobytes() for i in range(0, a.shape[0], rows))


def _check_head_dim(model: ModelDefinition, files: WeightFiles) -> None:
    """Say it in terms of head_dim when q_proj contradicts the config; a bare shape mismatch would not tell why."""
    config = model.config
    name = next(p for p in model.parameters if p.name == "model.layers.0.qkv_proj.weight").parts[0].name
    if name not in files.names:
        return
    shape = files.info(name).shape
    if shape and shape[0] != config.q_size:
        raise DamagedModelError(
            f"{files.folder}: head_dim is {config.head_dim} by config.json ({config.num_attention_heads} heads, "
            f"{config.q_size} rows), but q_proj has {shape[0]} rows",
            hint=f"that would be head_dim {shape[0] / config.num_attention_heads:g}: set it there, or {FETCH_AGAIN}",
        )
