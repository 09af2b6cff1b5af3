"""Keys and values of a prefill chunk into the paged cache: head norm, rotation, and the transposition of V.

Layout (docs/shapes.md): K pool [pages · kv_heads · 64, head_dim], V pool [pages · kv_heads · head_dim, 64], transposed
because the decode product wants the keys' axis contiguous. Position p of the sequence is in slot p % 64 of page
block_table[p // 64].

A block owns one page of one KV head, reads what is there, replaces the slots that the chunk covers and writes the page
back whole: stores stay coalesced although chunks start anywhere, and no other block touches the page.

An INT8 cache takes rows of int8 with a float32 scale each (kernels/int8_rows.py). A scale needs its whole row, so a
block of that kernel has 32 whole keys or values.

Refuses: head_dim other than 64 and 128, pages other than 64 slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cuda.tile as ct

from kernels.int8_rows import as_int8, scale_of
from kernels.notation import PAGE, Bool, Float, Int
from kernels.paged_cache import check_heads, check_pools, check_rope, optional_gain, pool_specs, scale_specs
from kernels.rope_tiles import gain_halves, rotated
from kernels.specs import ArraySpec

if TYPE_CHECKING:
    from kernels.launch import Launcher
    from kernels.shapes import ModelShape

HALF_PAGE = 32


def _token_of(position, first, tokens):
    """Which token of the chunk stands at each position (0 where none does), and whether one does."""
    token = position - first
    inside = (token >= 0) & (token < tokens)
    return ct.where(inside, token, 0), inside


@ct.kernel
def kv_write_kernel(
    qkv, gain, cos, sin, start, table, k_pool, v_pool, HQ: Int, HKV: Int, D: Int, EPS: Float, NORM: Bool, PDL: Bool
):
    """k_pool[slot(p)] = RoPE(norm(k_t) · gain, p), v_pool[:, slot(p)] = v_t for p = start + t.

    qkv [T, (HQ + 2 HKV) D] half, gain [1, D], cos and sin [positions, D/2] float32, start [1] and table [pages] int32,
    k_pool [pages HKV 64, D], v_pool [pages HKV D, 64] half. Grid (pages the chunk can touch, HKV, 4): one page of one
    head; of it half of the keys (parts 0, 1) or of the values (2, 3), which halves the shared memory.
    float32 inside, one rounding at the store. Tokens outside the chunk are masked; pages past the table are left alone.
    """
    j, h, part = ct.bid(0), ct.bid(1), ct.bid(2)
    if PDL:
        ct.grid_dependency_control_launch_dependents()
    g0, g1 = gain_halves(gain, D, NORM)
    first = ct.load(start, index=(0,), shape=(), check_bounds=False).item()
    if PDL:
        ct.grid_dependency_control_wait()
    page = first // PAGE + j
    tokens = qkv.shape[0]
    if page * PAGE < first + tokens and page < table.shape[0]:
        row = ct.load(table, index=(page,), shape=(), check_bounds=False).item() * HKV + h
        half = ct.arange(D // 2, dtype=ct.int32).reshape((1, D // 2))
        if part < 2:
            position = page * PAGE + part * HALF_PAGE + ct.arange(HALF_PAGE, dtype=ct.int32).reshape((HALF_PAGE, 1))
            token, inside = _token_of(position, first, tokens)
            position = ct.minimum(position, cos.shape[0] - 1)
            c = ct.gather(cos, (position, half), check_bounds=False)
            s = ct.gather(sin, (position, half), check_bounds=False)
            k0 = ct.gather(qkv, (token, (HQ + h) * D + half), check_bounds=False)
            k1 = ct.gather(qkv, (token, (HQ + h) * D + D // 2 + half), check_bounds=False)
            a, b = rotated(k0, k1, g0, g1, c, s, D, EPS, NORM)
            at = row * 2 + part
            old0 = ct.load(k_pool, index=(at, 0), shape=(HALF_PAGE, D // 2), allow_tma=False, check_bounds=False)
            old1 = ct.load(k_pool, index=(at, 1), shape=(HALF_PAGE, D // 2), allow_tma=False, check_bounds=False)
            a, b = ct.where(inside, a.astype(k_pool.dtype), old0), ct.where(inside, b.astype(k_pool.dtype), old1)
            ct.store(k_pool, index=(at, 0), tile=a, allow_tma=False, check_bounds=False)
            ct.store(k_pool, index=(at, 1), tile=b, allow_tma=False, check_bounds=False)
        else:
            position = page * PAGE + ct.arange(PAGE, dtype=ct.int32).reshape((PAGE, 1))
            token, inside = _token_of(position, first, tokens)
            column = (HQ + HKV + h) * D + (part - 2) * (D // 2) + half
            v = ct.gather(qkv, (token, column), check_bounds=False)
            at = row * 2 + part - 2
            old = ct.load(v_pool, index=(at, 0), shape=(D // 2, PAGE), allow_tma=False, check_bounds=False)
            v = ct.where(ct.transpose(inside), ct.transpose(v), old)
            ct.store(v_pool, index=(at, 0), tile=v, allow_tma=False, check_bounds=False)


@ct.kernel
def kv_write_int8_kernel(
    qkv, gain, cos, sin, start, table, k_pool, v_pool, k_scales, v_scales, HQ: Int, HKV: Int, D: Int, EPS: Float,
    NORM: Bool, PDL: Bool,
):  # fmt: skip
    """kv_write_kernel into int8 pools: k_pool[slot(p)] = RoPE(norm(k_t) · gain, p) / s with s = k_scales[slot(p)].

    k_pool [pages HKV 64, D], v_pool [pages HKV D, 64] int8; k_scales, v_scales [pages HKV, 64] float32; the rest as
    there. Grid (pages the chunk can touch, HKV, 4): half of a page's keys (parts 0, 1) or of its values (2, 3).
    """
    j, h, part = ct.bid(0), ct.bid(1), ct.bid(2)
    if PDL:
        ct.grid_dependency_control_launch_dependents()
    g0, g1 = gain_halves(gain, D, NORM)
    first = ct.load(start, index=(0,), shape=(), check_bounds=False).item()
    if PDL:
        ct.grid_dependency_control_wait()
    page = first // PAGE + j
    tokens = qkv.shape[0]
    if page * PAGE < first + tokens and page < table.shape[0]:
        row = ct.load(table, index=(page,), shape=(), check_bounds=False).item() * HKV + h
        side = part % 2
        position = page * PAGE + side * HALF_PAGE + ct.arange(HALF_PAGE, dtype=ct.int32).reshape((HALF_PAGE, 1))
        token, inside = _token_of(position, first, tokens)
        line = ct.transpose(inside)
        if part < 2:
            half = ct.arange(D // 2, dtype=ct.int32).reshape((1, D // 2))
            position = ct.minimum(position, cos.shape[0] - 1)
            c = ct.gather(cos, (position, half), check_bounds=False)
            s = ct.gather(sin, (position, half), check_bounds=False)
            k0 = ct.gather(qkv, (token, (HQ + h) * D + half), check_bounds=False)
            k1 = ct.gather(qkv, (token, (HQ + h) * D + D // 2 + half), check_bounds=False)
            a, b = rotated(k0, k1, g0, g1, c, s, D, EPS, NORM)
            ks = scale_of(ct.max(ct.maximum(ct.abs(a), ct.abs(b)), axis=1, keepdims=True))
            at = row * 2 + side
            old0 = ct.load(k_pool, index=(at, 0), shape=(HALF_PAGE, D // 2), allow_tma=False, check_bounds=False)
            old1 = ct.load(k_pool, index=(at, 1), shape=(HALF_PAGE, D // 2), allow_tma=False, check_bounds=False)
            a, b = as_int8(a, ks).astype(ct.int8), as_int8(b, ks).astype(ct.int8)
            a, b = ct.where(inside, a, old0), ct.where(inside, b, old1)
            ct.store(k_pool, index=(at, 0), tile=a, allow_tma=False, check_bounds=False)
            ct.store(k_pool, index=(at, 1), tile=b, allow_tma=False, check_bounds=False)
            old = ct.load(k_scales, index=(row, side), shape=(1, HALF_PAGE), allow_tma=False, check_bounds=False)
            ks = ct.where(line, ct.transpose(ks), old)
            ct.store(k_scales, index=(row, side), tile=ks, allow_tma=False, check_bounds=False)
        else:
            column = (HQ + HKV + h) * D + ct.arange(D, dtype=ct.int32).reshape((1, D))
            v = ct.gather(qkv, (token, column), check_bounds=False).astype(ct.float32)
            vs = scale_of(ct.max(ct.abs(v), axis=1, keepdims=True))
            old_v = ct.load(v_pool, index=(row, side), shape=(D, HALF_PAGE), allow_tma=False, check_bounds=False)
            v = ct.where(line, ct.transpose(as_int8(v, vs).astype(ct.int8)), old_v)
            ct.store(v_pool, index=(row, side), tile=v, allow_tma=False, check_bounds=False)
            old = ct.load(v_scales, index=(row, side), shape=(1, HALF_PAGE), allow_tma=False, check_bounds=False)
            vs = ct.where(line, ct.transpose(vs), old)
            ct.store(v_scales, index=(row, side), tile=vs, allow_tma=False, check_bounds=False)


def kv_write(
    launcher: Launcher, qkv: Any, gain: Any, cos: Any, sin: Any, start: Any, block_table: Any, k_pool: Any, v_pool: Any,
    *, kv_heads: int, head_dim: int, eps: float = 1e-6, scales: tuple[Any, Any] | None = None,
) -> None:  # fmt: skip
    """Cache the keys and values of qkv [T, (heads + 2 kv_heads) · head_dim] at positions start … start + T - 1.

    gain [1, head_dim] or None; start: int32 [1] in device memory; scales: float32 [pages · kv_heads, 64] of the keys
    and of the values where the pools are int8. Positions past the block table's end are dropped.

    Raises:
        ValueError, TypeError: an array's shape, layout, alignment or type is not what the kernel reads.
    """
    op = "kv_write"
    tokens, heads = check_heads(op, qkv, kv_heads, head_dim)
    check_rope(op, cos, sin, start, head_dim)
    check_pools(op, k_pool, v_pool, block_table, kv_heads, head_dim, str(qkv.dtype), scales)
    gain_array = optional_gain(op, gain, cos, head_dim, str(qkv.dtype))
    args = (qkv, gain_array, cos, sin, start, block_table, k_pool, v_pool, *(scales or ()))
    constants = (heads, kv_heads, head_dim, float(eps), gain is not None, launcher.pdl)
    grid = (-(-(tokens + PAGE - 1) // PAGE), kv_heads, 4)
    launcher(kv_write_kernel if scales is None else kv_write_int8_kernel, grid, (*args, *constants))


def model_launches(launcher: Launcher, model: ModelShape, dtype: str) -> None:
    """A chunk of 512 tokens, into a half-precision cache and an INT8 one."""
    gain = ArraySpec((1, model.head_dim), "float32") if model.qk_norm else None
    cos, sin = (ArraySpec((4096, model.head_dim // 2), "float32") for _ in range(2))
    arrays = (ArraySpec((512, model.qkv_rows), dtype), gain, cos, sin, ArraySpec(1, "int32"), ArraySpec(64, "int32"))
    for scales in (None, scale_specs(model)):
        kv_write(
            launcher, *arrays, *pool_specs(model, dtype if scales is None else "int8"), kv_heads=model.kv_heads,
            head_dim=model.head_dim, eps=model.eps, scales=scales,
        )  # fmt: skip
