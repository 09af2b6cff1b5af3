"""Writes model folders for tests: a config.json and a safetensors file, byte by byte, in any storage type."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.int8_oracle import quantise
from tests.reference.tiny_models import VARIANTS, _values, shapes, tensors
from tileinfer_core.backends.numpy_backend import NumpyRunner
from tileinfer_core.config import ModelConfig
from tileinfer_core.dtypes import BFLOAT16, SAFETENSORS_DTYPES, safetensors_name
from tileinfer_core.models.define import define_from_files
from tileinfer_core.progress import silent
from tileinfer_core.quantization import read_quantization
from tileinfer_core.weights import WeightFiles

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def write_safetensors(path: Path, arrays: Mapping[str, np.ndarray], dtype: str = "F32") -> None:
    """Arrays of float32 and float64 are stored as `dtype`, others as they are."""
    header, data, offset = {}, [], 0
    for name, array in arrays.items():
        stored = dtype if array.dtype in (np.float32, np.float64) else safetensors_name(array.dtype)
        raw = array.astype(SAFETENSORS_DTYPES[stored]).tobytes()
        header[name] = {"dtype": stored, "shape": list(array.shape), "data_offsets": [offset, offset + len(raw)]}
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


def quantization_config(groups: Mapping[str, int | None], **changes: Any) -> dict[str, Any]:
    """{target: group size, None for one scale a row} as config.json has it."""
    section = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": [],
        "config_groups": {
            f"group_{i}": {
                "targets": [target],
                "weights": {
                    "num_bits": 8,
                    "type": "int",
                    "symmetric": True,
                    "strategy": "group" if size else "channel",
                    "group_size": size,
                    "dynamic": False,
                },
                "input_activations": None,
                "output_activations": None,
            }
            for i, (target, size) in enumerate(groups.items())
        },
    }
    return section | changes


def packed_words(q: np.ndarray) -> np.ndarray:
    """int8 [N, K] -> int32 [N, K / 4], number by number: word = Σ (q[4·i + j] + 128) · 256^j."""
    words = np.zeros((q.shape[0], q.shape[1] // 4), np.int64)
    for n in range(words.shape[0]):
        for i in range(words.shape[1]):
            words[n, i] = sum((int(q[n, 4 * i + j]) + 128) << (8 * j) for j in range(4))
    return words.astype(np.uint32).view(np.int32)


def packed(stored: Mapping[str, np.ndarray], but: tuple[str, ...] = ()) -> dict[str, np.ndarray]:
    """The "pack-quantized" layout of tensors in the "int-quantized" one; modules named in `but` stay."""
    found = {}
    for name, array in stored.items():
        module = name.removesuffix(".weight")
        if array.dtype != np.int8 or module.endswith(but or ("!",)):
            found[name] = array
            continue
        found[module + ".weight_packed"] = packed_words(array)
        found[module + ".weight_shape"] = np.array(array.shape, np.int64)
    return found


def int8_tensors(
    arrays: Mapping[str, np.ndarray], layers: int | None, head: int | None, dtype: np.dtype = BFLOAT16
) -> dict[str, np.ndarray]:
    """Every matrix as int8 and scales, by the oracle; norms and biases as they are."""
    stored = {}
    for name, array in arrays.items():
        if array.ndim < 2:
            stored[name] = array
            continue
        size = head if name in ("model.embed_tokens.weight", "lm_head.weight") else layers
        stored[name], scales = quantise(array, size)
        stored[name + "_scale"] = scales.astype(dtype)
    return stored


def write_int8_variant(
    folder: Path,
    name: str,
    *,
    layers: int | None = None,
    head: int | None = None,
    dtype: str = "BF16",
    layout: str = "int-quantized",
) -> Path:
    """A tiny model with every matrix in INT8: `layers` and `head` are group sizes, None for one scale a row."""
    groups = {"Linear": layers, "model.embed_tokens": head, "lm_head": head}
    config = {**VARIANTS[name], "quantization_config": quantization_config(groups, format=layout)}
    stored = int8_tensors(tensors(name), layers, head)
    return write_checkpoint(folder, config, packed(stored) if layout == "pack-quantized" else stored, dtype)


def write_quantised(folder: Path, name: str, section: Mapping[str, Any], **changes: Any) -> Path:
    """A tiny model whose matrices have the formats of a quantization_config; `changes` replace fields of its config."""
    config = {**VARIANTS[name], **changes}
    wanted, stored = read_quantization(section, "config.json"), {}
    assert wanted is not None
    for tensor, shape in shapes(config).items():
        array = _values(f"{name}/{tensor}", shape)
        int8 = wanted.of(tensor.removesuffix(".weight")) if array.ndim == 2 else None
        if int8 is None:
            stored[tensor] = array
        else:
            stored[tensor], scales = quantise(array, int8.group_size)
            stored[f"{tensor}_scale"] = scales.astype(BFLOAT16)
    return write_checkpoint(folder, {**config, "quantization_config": dict(section)}, stored, "BF16")


def load_runner(folder: Path) -> NumpyRunner:
    model, _ = define_from_files(ModelConfig.load(folder), files := WeightFiles.open(folder))
    return NumpyRunner.load(model, files, silent)
