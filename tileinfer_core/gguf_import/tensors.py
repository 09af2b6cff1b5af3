"""The weights of a GGUF file, renamed, dequantised and written to one safetensors file in bounded memory.

    quantised types → float16, or bfloat16 for a tensor whose values pass float16's 65,504
    F16, BF16, F32  → as they are

llama files store the rows of q and k with the two halves of each head interleaved (llama.cpp rotates neighbouring
pairs, Transformers rotates halves); that order is undone here. qwen2 and qwen3 files keep the original order.
Dequantisation is the `gguf` package's, a few rows at a time, so that the float32 copy stays small.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from gguf import quants
from gguf.constants import GGMLQuantizationType

from tileinfer_core.dtypes import BFLOAT16, safetensors_name
from tileinfer_core.errors import DamagedModelError, UnsupportedModelError
from tileinfer_core.progress import ProgressEvent

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from tileinfer_core.gguf_import.container import GgufFile, GgufTensor
    from tileinfer_core.progress import OnProgress

    Array = np.ndarray[Any, np.dtype[Any]]

PIECE_ELEMENTS = 1 << 21  # 8 MiB of float32 at a time; larger pieces fall out of the cache and are no faster
_F16_MAX = 65504.0

_KEPT: Mapping[GGMLQuantizationType, np.dtype[Any]] = {
    GGMLQuantizationType.F32: np.dtype("<f4"),
    GGMLQuantizationType.F16: np.dtype("<f2"),
    GGMLQuantizationType.BF16: BFLOAT16,
}
_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_WITH_BIAS = {"attn_q", "attn_k", "attn_v", "attn_output"}
_NORMS = {"attn_norm", "ffn_norm"}
_QWEN3_ONLY = {"attn_q_norm", "attn_k_norm"}


@dataclass(frozen=True, slots=True)
class Target:
    """One tensor of the new file. `heads` is set where rows must be put back in order."""

    name: str
    source: GgufTensor
    dtype: np.dtype[Any]
    heads: int | None

    @property
    def bytes(self) -> int:
        return int(np.prod(self.source.shape)) * self.dtype.itemsize


def plan(gguf: GgufFile, config: Mapping[str, Any]) -> list[Target]:
    """What becomes of each tensor; every tensor of the model must be there, with its shape, and none beside it.

    Raises:
        DamagedModelError: tensors missing or of another shape than the keys of the file say.
        UnsupportedModelError: tensors that the architecture does not have, or a type that can't be dequantised.
    """
    expected = expected_tensors(config)
    ignored = {"rope_freqs.weight"}
    missing = [name for name in expected if name not in gguf.tensors]
    unexpected = sorted(gguf.tensors.keys() - expected.keys() - ignored)
    if missing:
        raise DamagedModelError(f"{gguf.path}: {len(missing)} tensors are missing: {', '.join(missing[:4])}")
    if unexpected:
        raise UnsupportedModelError(
            f"{gguf.path}: {len(unexpected)} tensors unknown to {config['model_type']}: {', '.join(unexpected[:4])}"
        )
    for name, (_, shape) in expected.items():
        if gguf.tensors[name].shape != shape:
            found = list(gguf.tensors[name].shape)
            raise DamagedModelError(f"{gguf.path}: the tensor {name} has shape {found}, expected {list(shape)}")
    return [_target(gguf, config, name, new_name) for name, (new_name, _) in expected.items()]


def expected_tensors(config: Mapping[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """{name in GGUF: (name in safetensors, shape)} for a model of this config."""
    hidden, middle = config["hidden_size"], config["intermediate_size"]
    q_size = config["num_attention_heads"] * config["head_dim"]
    kv_size = config["num_key_value_heads"] * config["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm": (hidden,),
        "attn_q": (q_size, hidden),
        "attn_k": (kv_size, hidden),
        "attn_v": (kv_size, hidden),
        "attn_output": (hidden, q_size),
        "ffn_norm": (hidden,),
        "ffn_gate": (middle, hidden),
        "ffn_up": (middle, hidden),
        "ffn_down": (hidden, middle),
    }
    if config["model_type"] == "qwen3":
        shapes |= dict.fromkeys(sorted(_QWEN3_ONLY), (config["head_dim"],))
    qwen2 = config["model_type"] == "qwen2"  # its output product has no bias, though q, k and v have
    vocab: tuple[int, ...] = (config["vocab_size"], hidden)
    expected: dict[str, tuple[str, tuple[int, ...]]] = {"token_embd.weight": (_OUTSIDE["token_embd.weight"], vocab)}
    for layer in range(config["num_hidden_layers"]):
        for name, shape in shapes.items():
            new_name = f"model.layers.{layer}.{_IN_LAYER[name]}"
            expected[f"blk.{layer}.{name}.weight"] = (f"{new_name}.weight", shape)
            if config["attention_bias"] and name in _WITH_BIAS and not (qwen2 and name == "attn_output"):
                expected[f"blk.{layer}.{name}.bias"] = (f"{new_name}.bias", shape[:1])
    expected["output_norm.weight"] = (_OUTSIDE["output_norm.weight"], (hidden,))
    if not config["tie_word_embeddings"]:
        expected["output.weight"] = (_OUTSIDE["output.weight"], vocab)
    return expected


def _target(gguf: GgufFile, config: Mapping[str, Any], name: str, new_name: str) -> Target:
    source = gguf.tensors[name]
    dtype = _KEPT.get(source.type, np.dtype("<f2"))
    if source.type not in _KEPT:
        _check_can_dequantise(gguf, source)
    heads = None
    if config["model_type"] == "llama" and (match := re.search(r"attn_([qk])\.", name)):
        heads = config["num_attention_heads" if match[1] == "q" else "num_key_value_heads"]
    return Target(new_name, source, dtype, heads)


def _check_can_dequantise(gguf: GgufFile, tensor: GgufTensor) -> None:
    empty = np.zeros((1, quants.quant_shape_to_byte_shape((1, tensor.shape[-1]), tensor.type)[-1]), np.uint8)
    try:
        quants.dequantize(empty, tensor.type)
    except NotImplementedError:
        raise UnsupportedModelError(
            f"{gguf.path}: the tensor {tensor.name} has the type {tensor.type.name}, which can't be dequantised"
        ) from None


def write(gguf: GgufFile, targets: list[Target], path: Path, on_progress: OnProgress) -> list[str]:
    """Write the safetensors file; returns a note for each tensor that could not be float16.

    The header is written twice, because only the data tell whether float16 holds it: float16 and bfloat16 take the
    same bytes, so the offsets stay and padding absorbs the longer name.
    """
    wide: set[str] = set()
    header_bytes = len(_header(targets, {target.name for target in targets}))
    total = sum(target.bytes for target in targets)
    done = 0
    source: Array = np.memmap(gguf.path, dtype=np.uint8, mode="r")
    with path.open("wb") as file:
        file.write(bytes(8 + header_bytes))
        for target in targets:
            start = file.tell()
            if not _write_tensor(file, gguf, target, source, target.dtype):
                file.seek(start)
                _write_tensor(file, gguf, target, source, BFLOAT16)
                wide.add(target.name)
            done += target.bytes
            on_progress(ProgressEvent("convert weights", done, total, "bytes"))
        file.seek(0)
        file.write(header_bytes.to_bytes(8, "little") + _header(targets, wide).ljust(header_bytes))
        file.flush()
        os.fsync(file.fileno())
    return [f"{name}: stored as bfloat16, its values pass float16's 65,504" for name in sorted(wide)]


def _header(targets: list[Target], wide: set[str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for target in targets:
        dtype = BFLOAT16 if target.name in wide and target.dtype == np.float16 else target.dtype
        entries[target.name] = {
            "dtype": safetensors_name(dtype),
            "shape": list(target.source.shape),
            "data_offsets": [offset, offset + target.bytes],
        }
        offset += target.bytes
    raw = json.dumps(entries, separators=(",", ":")).encode()
    return raw.ljust(-(-len(raw) // 8) * 8)  # so that the data start at a multiple of 8


def _write_tensor(file: Any, gguf: GgufFile, target: Target, source: Array, dtype: np.dtype[Any]) -> bool:
    """False when a quantised tensor has values that `dtype` can't hold; then nothing useful was written."""
    quantised = target.source.type not in _KEPT
    for piece in pieces(target, source):
        if quantised:
            largest = float(np.abs(piece).max())
            if not np.isfinite(largest):
                raise DamagedModelError(f"{gguf.path}: the tensor {target.source.name} has values that are not numbers")
            if dtype == np.float16 and largest > _F16_MAX:
                return False
        file.write(np.ascontiguousarray(piece.astype(dtype, copy=False)).view(np.uint8).data)
    return True


def pieces(target: Target, source: Array) -> Iterator[Array]:
    """The tensor in its final row order, some whole rows (of whole heads, if reordered) at a time.

    Quantised types come as float32, the others in their own type.
    """
    tensor = target.source
    shape = tensor.shape if len(tensor.shape) > 1 else (1, *tensor.shape)  # [rows, columns]
    if len(shape) != 2:
        raise UnsupportedModelError(f"the tensor {tensor.name} has {len(shape)} dimensions, expected 1 or 2")
    raw = source[tensor.offset : tensor.offset + tensor.bytes].reshape(shape[0], -1)  # [rows, bytes of a row]
    rows_per_head = shape[0] // target.heads if target.heads and len(tensor.shape) > 1 else 1
    step = max(1, PIECE_ELEMENTS // (shape[1] * rows_per_head)) * rows_per_head
    for start in range(0, shape[0], step):
        block = raw[start : start + step]
        values = block.view(_KEPT[tensor.type]) if tensor.type in _KEPT else quants.dequantize(block, tensor.type)
        if target.heads and len(tensor.shape) == 1:
            yield unpermute(values.reshape(-1, 1), target.heads).reshape(1, -1)
        elif target.heads:
            yield unpermute(values, len(values) // rows_per_head)
        else:
            yield values


def unpermute(rows: Array, heads: int) -> Array:
    """Undo llama.cpp's order: within a head, rows (0, half, 1, half + 1, …) go back to (0, 1, …, half, half + 1, …)."""
    half = len(rows) // heads // 2
    return rows.reshape(heads, half, 2, -1).swapaxes(1, 2).reshape(rows.shape)
