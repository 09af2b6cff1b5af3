"""Causal attention of a chunk of new tokens over the paged KV cache, themselves included.

The chunk's keys and values are in the pages already, so a prefix can be continued: token i of the chunk stands at
position start + i and sees every position up to its own. One block owns TILE_Q tokens of one query head and walks the
pages of that head's KV head with an online soft-max; pages that the whole tile sees need no mask and run first.
Tiles at the end of the chunk see most pages and are launched first, so that the short ones fill the tail.

Keys and values of an INT8 cache are widened before it (kernels/widen_pages.py).

It refuses head sizes other than 64 and 128, and pages of other than 64 tokens. Pool memory past the context is read
and masked, so pools must hold finite numbers everywhere: zero them once when they are allocated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cuda.tile as ct

from kernels.configs import config as table_config
from kernels.launch import check_array, with_hints
from kernels.notation import HALF, LOG2E, PAGE, ZERO, Float, Int
from kernels.paged_cache import check_pools, pool_specs
from kernels.specs import ArraySpec

if TYPE_CHECKING:
    from kernels.launch import Launcher
    from kernels.shapes import ModelShape

MASKED_SCORE = -1.0e30  # finite: a tile's first maximum is never minus this, so no inf - inf


@dataclass(frozen=True)
class AttentionPrefillConfig:
    """Tile side, form and hints of one head size.

    tile_q: query tokens a block; ahead: compute the next page's scores before this page's soft-max, so that the tensor
    cores work meanwhile (more registers); warps, occupancy, latency: hints, 0 = the compiler's choice.
    """

    tile_q: int = 128
    ahead: bool = True
    warps: int = 0
    occupancy: int = 0
    latency: int = 0

    @property
    def hints(self) -> dict[str, int]:
        """What `replace_hints` takes; absent where the compiler chooses."""
        hints = {"num_worker_warps": self.warps, "occupancy": self.occupancy}
        return {name: value for name, value in hints.items() if value}


def page_scores(q, k_pool, row, latency, TILE_Q: Int, DIM: Int, WANTED: Int):
    """Scores [TILE_Q, PAGE] of the queries with the keys at tile row `row` of the pool; zeros where not WANTED."""
    if not WANTED:
        return ct.zeros((TILE_Q, PAGE), dtype=ct.float32)
    keys = ct.load(k_pool, index=(0, row), shape=(DIM, PAGE), order=(1, 0), latency=latency)
    return ct.mma(q, keys, ct.zeros((TILE_Q, PAGE), dtype=ct.float32))


def absorb(score, v_pool, row, latency, maximum, total, acc, half, SCALE: Float, DIM: Int):
    """One page of the online soft-max: (maximum, total, acc) with the page's scores and values taken in."""
    highest = ct.maximum(maximum, ct.max(score, axis=1, keepdims=True))
    decay = ct.exp2((maximum - highest) * SCALE)
    weights = ct.exp2(score * SCALE - highest * SCALE)
    values = ct.load(v_pool, index=(0, row), shape=(PAGE, DIM), order=(1, 0), latency=latency)
    total = total * decay + ct.sum(weights, axis=1, keepdims=True)
    return highest, total, ct.mma(weights.astype(half), values, acc * decay)


def pool_row(block_table, page, last_page, kv_head, KV_HEADS: Int):
    """Tile row in the pools of the sequence's page `page`; past the last page, that page again."""
    entry = ct.load(block_table, index=(ct.minimum(page, last_page),), shape=(), allow_tma=False).item()
    return entry * KV_HEADS + kv_head


@ct.kernel
def attention_prefill_kernel(
    q, k_pool, v_pool, block_table, start, out, SCALE: Float, GROUP: Int, KV_HEADS: Int, TILE_Q: Int, DIM: Int,
    AHEAD: Int, LATENCY: Int, PDL: Int,
):  # fmt: skip
    """out[i, h] = sum over positions j <= start + i of softmax_j(q[i, h] . k[j, h / GROUP] * scale) v[j, h / GROUP].

    q, out [T, Hq * DIM]; k_pool [pages * KV_HEADS * 64, DIM], row (page * KV_HEADS + kv_head) * 64 + slot; v_pool
    [pages * KV_HEADS * DIM, 64], row (page * KV_HEADS + kv_head) * DIM + d, column slot; all BF16 or all FP16;
    block_table [entries] int32; start [1] int32. SCALE is the score scale times log2(e).
    Grid (Hq, tiles of T): one block owns TILE_Q tokens of one query head.
    float32 scores, maxima and sums; weights rounded to the inputs' dtype before the product with V.
    Rows past T read 0 and are not stored. Pages past the last visible one are not read, nor their table entries.
    """
    head = ct.bid(0)
    tile = ct.num_blocks(1) - 1 - ct.bid(1)
    if PDL:
        ct.grid_dependency_control_launch_dependents()
        ct.grid_dependency_control_wait()
    latency = ct.static_eval(LATENCY or None)
    kv_head = head // GROUP
    begin = ct.load(start, index=(0,), shape=(), allow_tma=False).item()
    first = begin + tile * TILE_Q
    end = ct.minimum(first + TILE_Q, begin + q.shape[0])
    last_page = ct.minimum(ct.cdiv(end, PAGE), block_table.shape[0]) - 1
    queries = ct.load(q, index=(tile, head), shape=(TILE_Q, DIM), padding_mode=ZERO)
    last_visible = ct.arange(TILE_Q, dtype=ct.int32).reshape((TILE_Q, 1)) + first
    maximum = ct.full((TILE_Q, 1), MASKED_SCORE, dtype=ct.float32)
    total = ct.zeros((TILE_Q, 1), dtype=ct.float32)
    acc = ct.zeros((TILE_Q, DIM), dtype=ct.float32)
    row = pool_row(block_table, 0, last_page, kv_head, KV_HEADS)
    score = page_scores(queries, k_pool, row, latency, TILE_Q, DIM, AHEAD)
    unmasked = (first + 1) // PAGE  # pages that every query of the tile sees whole
    for page in range(unmasked):
        next_row = pool_row(block_table, page + AHEAD, last_page, kv_head, KV_HEADS)
        next_score = page_scores(queries, k_pool, next_row, latency, TILE_Q, DIM, 1)
        now, now_row = (score, row) if AHEAD else (next_score, next_row)
        maximum, total, acc = absorb(now, v_pool, now_row, latency, maximum, total, acc, q.dtype, SCALE, DIM)
        score, row = next_score, next_row
    for page in range(unmasked, last_page + 1):
        next_row = pool_row(block_table, page + AHEAD, last_page, kv_head, KV_HEADS)
        next_score = page_scores(queries, k_pool, next_row, latency, TILE_Q, DIM, 1)
        now, now_row = (score, row) if AHEAD else (next_score, next_row)
        position = ct.arange(PAGE, dtype=ct.int32).reshape((1, PAGE)) + page * PAGE
        now = ct.where(position <= last_visible, now, MASKED_SCORE)
        maximum, total, acc = absorb(now, v_pool, now_row, latency, maximum, total, acc, q.dtype, SCALE, DIM)
        score, row = next_score, next_row
    ct.store(out, index=(tile, head), tile=(acc / total).astype(out.dtype))


def attention_prefill(
    launcher: Launcher,
    q: Any,
    k_pool: Any,
    v_pool: Any,
    block_table: Any,
    start: Any,
    out: Any,
    *,
    kv_heads: int,
    head_dim: int,
    config: AttentionPrefillConfig,
    scale: float | None = None,
) -> None:
    """Attention of T tokens at positions start .. start + T - 1 over all positions up to their own.

    Args:
        q: [T, Hq * head_dim] after QK-norm and RoPE; out: the same shape. BF16 or FP16, as the pools.
        k_pool: [pages * kv_heads * 64, head_dim], the new tokens' rows written already.
        v_pool: [pages * kv_heads * head_dim, 64], their columns likewise.
        block_table: [entries] int32, entry p = pool page of positions 64 p .. 64 p + 63; at least up to the last token.
        start: [1] int32 in device memory.
        scale: score scale, by default head_dim ** -0.5.

    Raises:
        ValueError, TypeError: shape, dtype or layout.
    """
    if head_dim not in (64, 128):
        raise ValueError(f"attention_prefill: head_dim is {head_dim}, expected 64 or 128")
    check_array("attention_prefill: q", q, (None, None), *HALF, align=16)
    tokens, width = (int(n) for n in q.shape)
    if kv_heads < 1 or width % (head_dim * kv_heads):
        raise ValueError(
            f"attention_prefill: q has {width} columns, expected a multiple of {kv_heads} KV heads * {head_dim}"
        )
    dtype = str(q.dtype)
    check_pools("attention_prefill", k_pool, v_pool, block_table, kv_heads, head_dim, dtype)
    if tokens > int(block_table.shape[0]) * PAGE:
        raise ValueError(
            f"attention_prefill: {tokens} tokens, but block_table has {int(block_table.shape[0])} pages of {PAGE}"
        )
    check_array("attention_prefill: start", start, (1,), "int32")
    check_array("attention_prefill: out", out, (tokens, width), dtype, align=16)
    heads = width // head_dim
    log2_scale = (head_dim**-0.5 if scale is None else scale) * LOG2E
    if not (math.isfinite(log2_scale) and log2_scale > 0):
        raise ValueError(f"attention_prefill: scale is {scale}, expected a positive number")
    sizes = (heads // kv_heads, kv_heads, config.tile_q, head_dim)
    constants = (log2_scale, *sizes, int(config.ahead), config.latency, int(launcher.pdl))
    args = (q, k_pool, v_pool, block_table, start, out, *constants)
    launcher(with_hints(attention_prefill_kernel, **config.hints), (heads, -(-tokens // config.tile_q), 1), args)


def model_launches(launcher: Launcher, model: ModelShape, dtype: str) -> None:
    """A chunk of 512 tokens."""
    q = ArraySpec((512, model.attention_width), dtype)
    heads = {"kv_heads": model.kv_heads, "head_dim": model.head_dim}
    config = AttentionPrefillConfig(**table_config("attention_prefill", launcher.arch, head_dim=model.head_dim))
    arrays = (q, *pool_specs(model, dtype), ArraySpec(64, "int32"), ArraySpec(1, "int32"), q)
    attention_prefill(launcher, *arrays, **heads, config=config)
