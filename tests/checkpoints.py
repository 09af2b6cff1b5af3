"""Writes model folders for tests: a config.json and a safetensors file, byte by byte, in any storage type."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tests.reference.tiny_models import VARIANTS, tensors
from tileinfer_core.backends.numpy_backend import NumpyRunner
from tileinfer_core.config import ModelConfig
from tileinfer_core.dtypes import SAFETENSORS_DTYPES
from tileinfer_core.models.define import define_from_files
from tileinfer_core.progress import silent
from tileinfer_core.weights import WeightFiles

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import numpy as np


def write_safetensors(path: Path, arrays: Mapping[str, np.ndarray], dtype: str = "F32") -> None:
    header, data, offset = {}, [], 0
    for name, array in arrays.items():
        raw = array.astype(SAFETENSORS_DTYPES[dtype]).tobytes()
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [offset, offset + len(raw)]}
        data.append(raw)
        offset += len(raw)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data))


def write_checkpoint(
    folder: Path, config: Mapping[str, Any], arrays: Mapping[str, np.ndarray], dtype: str = "F32"
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", arrays, dtype)
    return folder


def write_variant(folder: Path, name: str, *, dtype: str = "F32", **changes: Any) -> Path:
    """A tiny model; `changes` replace fields of its config."""
    return write_checkpoint(folder, {**VARIANTS[name], **changes}, tensors(name), dtype)


def load_runner(folder: Path) -> NumpyRunner:
    model, _ = define_from_files(ModelConfig.load(folder), files := WeightFiles.open(folder))
    return NumpyRunner.load(model, files, silent)
