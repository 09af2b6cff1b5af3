"""Every array that the steps work in, named and sized in one table, allocated once and never resized.

Letters: T rows of a prefill chunk (padded to 64), D hidden size, H query and K key/value heads, d head dimension,
F feed-forward size, V vocabulary, C context. `half` is the weights' type. What a kernel family needs for itself comes
from that family (ops.py) under its own names.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from tileinfer_core.backends.cuda import ops
from tileinfer_core.backends.cuda.kv_pool import table_entries
from tileinfer_core.backends.cuda.memory import allocated, pages_for
from tileinfer_core.dtypes import BFLOAT16
from tileinfer_core.kv_cache import PAGE_SIZE
from tileinfer_core.models.decoder import JOINED
from tileinfer_core.models.rope import cos_sin, inverse_frequencies

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tileinfer_core.backends.cuda.device import Array, Device
    from tileinfer_core.models.decoder import ModelDefinition
    from tileinfer_core.models.structure import LayerStructure

Spec = tuple[tuple[int, ...], str]
ROW_STEP = 64  # prefill rows are padded to a multiple: one specialisation, and 16 real rows are slower than 64
RING = 64  # sampled ids on the device that the host has not read yet; it is one step behind
_ITEM = {"float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int8": 1}


def padded_rows(tokens: int) -> int:
    return -(-tokens // ROW_STEP) * ROW_STEP


def position_rows(context: int) -> int:
    """Rows of the rope tables: whole pages, and one more for the padding of a last chunk."""
    return (-(-context // PAGE_SIZE) + 1) * PAGE_SIZE


def buffer_specs(
    model: ModelDefinition,
    arch: str,
    context: int,
    chunk: int,
    half: str,
    *,
    kv: str = "bf16",
    copied: Sequence[str] = (),
) -> dict[str, Spec]:
    """Name -> shape and dtype. `kv` "int8": for a cache in INT8. `copied`: products that have half precision too."""
    s, vocab = model.structure, model.config.vocab_size
    rows = padded_rows(chunk)
    qkv, wide = s.q_size + 2 * s.kv_size, (position_rows(context), s.head_dim // 2)
    specs: dict[str, Spec] = {
        # prefill
        "token_ids": ((rows,), "int32"),
        "start": ((1,), "int32"),  # position of the chunk's first token
        "rows_residual": ((rows, s.hidden_size), "float32"),  # [T, D]
        "rows_normed": ((rows, s.hidden_size), half),  # [T, D]
        "rows_qkv": ((rows, qkv), half),  # [T, (H + 2K)·d]
        "rows_q": ((rows, s.q_size), half),  # [T, H·d] after QK-norm and RoPE
        "rows_attention": ((rows, s.q_size), half),  # [T, H·d]
        "rows_act": ((rows, s.intermediate_size), half),  # [T, F]
        # decode
        "length": ((1,), "int32"),  # tokens of the sequence with the one in work
        "residual": ((1, s.hidden_size), "float32"),
        "scaled": ((1, s.hidden_size), half),  # residual times the next norm's weight
        "qkv": ((1, qkv), half),
        "attention": ((1, s.q_size), half),
        "act": ((1, s.intermediate_size), half),
        # output
        "logits": ((1, vocab), "float32"),
        "sampled": ((1,), "int32"),
        "ring": ((2, RING), "int32"),  # ids, and the bits of their log-probabilities, at step % RING
        "token_state": ((vocab,), "int32"),
        "settings": ((8,), "float32"),
        "state": ((8,), "int32"),
        # positions
        "cos": (wide, "float32"),
        "sin": (wide, "float32"),
    }
    specs |= _int8_specs(model, rows, half, copied)
    if kv == "int8":
        specs |= _wide_specs(s, context, half)
    return specs | ops.workspace_specs(model, arch, context)


def _int8_specs(model: ModelDefinition, rows: int, half: str, copied: Sequence[str]) -> dict[str, Spec]:
    """What a chunk needs where layers are INT8: a product's input in digits, and weights with groups in half precision.

    Flat, for products of different widths.
    """
    by_row = [p.shape[1] for p in model.int8_weights(tuple(JOINED)) if not p.is_grouped]
    widened = [product for product in JOINED if product not in copied]
    grouped = [math.prod(p.shape) for p in model.int8_weights(widened) if p.is_grouped]
    specs: dict[str, Spec] = {}
    if by_row:
        specs |= {"rows_digits": ((2 * rows * max(by_row),), "int8"), "rows_digit_scales": ((rows, 1), "float32")}
    if grouped:
        specs["rows_weight"] = ((max(grouped),), half)
    return specs


def _wide_specs(s: LayerStructure, context: int, half: str) -> dict[str, Spec]:
    """A layer's keys and values in half precision, as pools that hold the sequence in order, and their block table."""
    pages = table_entries(pages_for(context))  # as the pool's table
    rows = pages * s.num_key_value_heads
    return {
        "wide_keys": ((rows * PAGE_SIZE, s.head_dim), half),
        "wide_values": ((rows * s.head_dim, PAGE_SIZE), half),
        "wide_table": ((pages,), "int32"),
    }


def buffer_bytes(specs: Mapping[str, Spec]) -> int:
    return sum(allocated(math.prod(shape) * _ITEM[dtype]) for shape, dtype in specs.values())


def allocate_buffers(device: Device, specs: Mapping[str, Spec]) -> dict[str, Array]:
    """Integers start at 0, so that no garbage is ever an index. Raises OutOfMemoryError."""
    return {
        name: device.zeros(shape, dtype) if dtype == "int32" or name.endswith("_sums") else device.empty(shape, dtype)
        for name, (shape, dtype) in specs.items()
    }


def fill_tables(device: Device, structure: LayerStructure, buffers: Mapping[str, Array]) -> None:
    """What no step writes."""
    inv_freq, scale = inverse_frequencies(structure.rope, structure.head_dim)
    cos, sin = cos_sin(inv_freq, scale, 0, buffers["cos"].shape[0])
    device.copy_in(buffers["cos"], cos)
    device.copy_in(buffers["sin"], sin)
    if "wide_table" in buffers:
        table = buffers["wide_table"]
        device.copy_in(table, np.arange(table.shape[0], dtype=np.int32))


def item_bytes(half: str) -> int:
    return BFLOAT16.itemsize if half == "bfloat16" else 2
