"""The paged KV cache at a wrapper's door: what arrays the kernels that read or write it accept.

    K pool [pages · kv_heads · 64, head_dim]   row (page · kv_heads + head) · 64 + slot
    V pool [pages · kv_heads · head_dim, 64]   transposed: row (page · kv_heads + head) · head_dim + i, column slot

An INT8 cache has int8 pools of the same shapes and two arrays of scales beside them, float32 [pages · kv_heads, 64]:
row page · kv_heads + head, column slot; a key is scale · its int8 row, a value likewise. They may be padded to a
multiple of 16 rows, so that the kernels have one form, whatever the number of pages.

Position p of the sequence is in slot p % 64 of page block_table[p // 64] (docs/shapes.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kernels.launch import check_array
from kernels.notation import HALF, PAGE
from kernels.specs import ArraySpec

if TYPE_CHECKING:
    from kernels.shapes import ModelShape

STEP = 16  # lengths that this divides are one specialisation of a kernel, whatever the number of pages


def padded(count: int) -> int:
    """Entries of a block table, or rows of scales, for `count` that count."""
    return -(-count // STEP) * STEP


def check_heads(op: str, qkv: Any, kv_heads: int, head_dim: int) -> tuple[int, int]:
    """Tokens and query heads of a joined QKV row."""
    if head_dim not in (64, 128):
        raise ValueError(f"{op}: head_dim is {head_dim}, expected 64 or 128")
    check_array(f"{op}: qkv", qkv, (None, None), *HALF, align=16)
    tokens, width = qkv.shape
    heads, rest = width // head_dim - 2 * kv_heads, width % head_dim
    if rest or kv_heads < 1 or heads < 1 or heads % kv_heads:
        raise ValueError(
            f"{op}: qkv has {width} columns, expected (heads + 2 · {kv_heads}) · {head_dim} with heads a multiple of "
            f"{kv_heads}"
        )
    return int(tokens), heads


def check_rope(op: str, cos: Any, sin: Any, start: Any, head_dim: int) -> None:
    check_array(f"{op}: cos", cos, (None, head_dim // 2), "float32", align=16)
    check_array(f"{op}: sin", sin, tuple(cos.shape), "float32", align=16)
    check_array(f"{op}: start", start, (1,), "int32")


def check_pools(
    op: str, k_pool: Any, v_pool: Any, block_table: Any, kv_heads: int, head_dim: int, half: str,
    scales: tuple[Any, Any] | None = None,
) -> None:  # fmt: skip
    """Pools of whole pages, with fewer than 2³¹ rows (elements may be more: addresses are 64-bit); int8 with scales."""
    half = half if scales is None else "int8"
    check_array(f"{op}: k_pool", k_pool, (None, head_dim), half, align=16)
    rows = int(k_pool.shape[0])
    if rows % (kv_heads * PAGE):
        raise ValueError(f"{op}: k_pool has {rows} rows, expected a multiple of {kv_heads} KV heads · {PAGE} slots")
    values = rows // PAGE * head_dim
    check_array(f"{op}: v_pool", v_pool, (values, PAGE), half, align=16)
    if max(rows, values) >= 1 << 31:
        raise ValueError(f"{op}: a pool has {max(rows, values)} rows, at most {(1 << 31) - 1} can be numbered")
    for name, scale in zip(("k_scales", "v_scales"), scales or (), strict=False):
        check_array(f"{op}: {name}", scale, (None, PAGE), "float32", align=16)
        heads = rows // PAGE
        if int(scale.shape[0]) not in (heads, padded(heads)):
            raise ValueError(f"{op}: {name} has {scale.shape[0]} rows, expected {heads}, or that padded to {STEP}")
    check_array(f"{op}: block_table", block_table, (None,), "int32")


def optional_gain(op: str, gain: Any, stand_in: Any, head_dim: int, half: str) -> Any:
    """The head norm's weight, or an array that the kernel never reads."""
    if gain is None:
        return stand_in
    check_array(f"{op}: gain", gain, (1, head_dim), half, "float32", align=16)
    return gain


def pool_specs(model: ModelShape, dtype: str) -> tuple[ArraySpec, ArraySpec]:
    """Keys and values of 64 pages, without memory."""
    pages = 64 * model.kv_heads
    return ArraySpec((pages * PAGE, model.head_dim), dtype), ArraySpec((pages * model.head_dim, PAGE), dtype)


def scale_specs(model: ModelShape) -> tuple[ArraySpec, ArraySpec]:
    """Scales of 64 pages of an INT8 cache, without memory."""
    scales = ArraySpec((64 * model.kv_heads, PAGE), "float32")
    return scales, scales
