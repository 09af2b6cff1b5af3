"""Causal attention of a chunk of new tokens over the paged KV cache, themselves included.

The chunk's keys and values are in the pages already, so a prefix can be continued: token i of the chunk stands at
position start + i and sees every position up to its own. One block owns TILE_Q tokens of one query head and walks the
pages of that head's KV head with an online soft-max; pages that the whole tile sees need no mask and run first.
Tiles at the end of the chunk see most pages and are launched first, so that the short ones fill the tail.

It refuses head sizes other than 64 and 128, and pages of other than 64 tokens. Pool memory past the context is read
and masked, so pools must hold finite numbers everywhere: zero them once when they are allocated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cuda.tile as ct

from kernels.launch import check_array, with_hints

if TYPE_CHECKING:
    from kernels.launch import Launcher

CI = ct.Constant[int]
CF = ct.Constant[float]
ZERO = ct.PaddingMode.ZERO
PAGE = 64  # tokens; below 64 the products miss the tensor cores
MASKED_SCORE = -1.0e30  # finite: a tile's first maximum is never minus this, so no inf - inf
LOG2_E = 1.4426950408889634
HALF = ("bfloat16", "float16")


@dataclass(frozen=True)
class AttentionPrefillConfig:
    """tile_q: query tokens a block; pages: pages per step of the soft-max; warps, occupancy: hints, 0 = compiler's."""

    tile_q: int = 128
    pages: int = 1
    warps: int = 8
    occupancy: int = 0

    @property
    def hints(self) -> dict[str, int]:
        """What `replace_hints` takes; absent where the compiler chooses."""
        hints = {"num_worker_warps": self.warps, "occupancy": self.occupancy}
        return {name: value for name, value in hints.items() if value}


def attend(
    q, k_pool, v_pool, rows, first, last_visible, maximum, total, acc, SCALE: CF, TILE_Q: CI, DIM: CI, PAGES: CI, MASK: CI
):
    """One step of the online soft-max over PAGES pages. rows: their tile rows in the pools; first: first position."""
    scores = ()
    for i in ct.static_iter(range(PAGES)):
        keys = ct.load(k_pool, index=(0, rows[i]), shape=(DIM, PAGE), order=(1, 0))
        score = ct.mma(q, keys, ct.zeros((TILE_Q, PAGE), dtype=ct.float32))
        if MASK:
            position = ct.arange(PAGE, dtype=ct.int32).reshape((1, PAGE)) + (first + i * PAGE)
            score = ct.where(position <= last_visible, score, MASKED_SCORE)
        scores += (score,)
    highest = maximum
    for i in ct.static_iter(range(PAGES)):
        highest = ct.maximum(highest, ct.max(scores[i], axis=1, keepdims=True))
    decay = ct.exp2((maximum - highest) * SCALE)
    shift = highest * SCALE
    total, acc = total * decay, acc * decay
    for i in ct.static_iter(range(PAGES)):
        weights = ct.exp2(scores[i] * SCALE - shift)
        total = total + ct.sum(weights, axis=1, keepdims=True)
        values = ct.load(v_pool, index=(rows[i], 0), shape=(PAGE, DIM))
        acc = ct.mma(weights.astype(q.dtype), values, acc)
    return highest, total, acc


@ct.kernel
def attention_prefill_kernel(
    q, k_pool, v_pool, block_table, start, out, SCALE: CF, GROUP: CI, KV_HEADS: CI,
    TILE_Q: CI, DIM: CI, PAGES: CI, PDL: CI,
):  # fmt: skip
    """out[i, h] = sum over positions j <= start + i of softmax_j(q[i, h] . k[j, h / GROUP] * scale) v[j, h / GROUP].

    q, out [T, Hq * DIM]; k_pool, v_pool [pages * KV_HEADS * 64, DIM], row (page * KV_HEADS + kv_head) * 64 + slot, BF16 or
    FP16; block_table [pages of the sequence] int32; start [1] int32. SCALE is the score scale times log2(e).
    Grid (Hq, tiles of T): one block owns TILE_Q tokens of one query head.
    float32 scores, maxima and sums; weights rounded to the inputs' dtype before the product with V; one rounding at the end.
    Rows past T read 0 and are not stored. Pages past the last visible one are not read, nor their table entries.
    """
    head = ct.bid(0)
    tile = ct.num_blocks(1) - 1 - ct.bid(1)
    if PDL:
        ct.grid_dependency_control_launch_dependents()
        ct.grid_dependency_control_wait()
    begin = ct.load(start, index=(0,), shape=(), allow_tma=False).item()
    first = begin + tile * TILE_Q
    end = ct.minimum(first + TILE_Q, begin + q.shape[0])
    queries = ct.load(q, index=(tile, head), shape=(TILE_Q, DIM), padding_mode=ZERO)
    last_visible = ct.arange(TILE_Q, dtype=ct.int32).reshape((TILE_Q, 1)) + first
    maximum = ct.full((TILE_Q, 1), MASKED_SCORE, dtype=ct.float32)
    total = ct.zeros((TILE_Q, 1), dtype=ct.float32)
    acc = ct.zeros((TILE_Q, DIM), dtype=ct.float32)
    kv_head = head // GROUP
    last_page = ct.cdiv(end, PAGE) - 1
    unmasked = (first + 1) // (PAGE * PAGES)
    for step in range(unmasked):
        rows = table_rows(block_table, step * PAGES, last_page, kv_head, KV_HEADS, PAGES)
        maximum, total, acc = attend(
            queries, k_pool, v_pool, rows, 0, last_visible, maximum, total, acc, SCALE, TILE_Q, DIM, PAGES, 0
        )
    for step in range(unmasked, ct.cdiv(end, PAGE * PAGES)):
        rows = table_rows(block_table, step * PAGES, last_page, kv_head, KV_HEADS, PAGES)
        position = step * PAGES * PAGE
        maximum, total, acc = attend(
            queries, k_pool, v_pool, rows, position, last_visible, maximum, total, acc, SCALE, TILE_Q, DIM, PAGES, 1
        )
    ct.store(out, index=(tile, head), tile=(acc / total).astype(out.dtype))


def table_rows(block_table, page, last_page, kv_head, KV_HEADS: CI, PAGES: CI):
    """Tile rows in the pools of PAGES pages from `page` on; past the last page, that page again (it is masked)."""
    rows = ()
    for i in ct.static_iter(range(PAGES)):
        entry = ct.load(block_table, index=(ct.minimum(page + i, last_page),), shape=(), allow_tma=False).item()
        rows += (entry * KV_HEADS + kv_head,)
    return rows


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
        k_pool, v_pool: [pages * kv_heads * 64, head_dim], the new tokens' rows written already.
        block_table: [entries] int32, entry p = pool page of positions 64 p .. 64 p + 63; at least up to the last token.
        start: [1] int32 in device memory.
        scale: score scale, by default head_dim ** -0.5.

    Raises:
        ValueError, TypeError: shape, dtype or layout.
    """
    if head_dim not in (64, 128):
        raise ValueError(f"attention_prefill: head_dim is {head_dim}, expected 64 or 128")
    check_array("attention_prefill: q", q, (None, None), *HALF)
    tokens, width = (int(n) for n in q.shape)
    if width % (head_dim * kv_heads):
        raise ValueError(
            f"attention_prefill: q has {width} columns, expected a multiple of {kv_heads} KV heads * {head_dim}"
        )
    dtype = str(q.dtype)
    check_array("attention_prefill: k_pool", k_pool, (None, head_dim), dtype)
    check_array("attention_prefill: v_pool", v_pool, tuple(k_pool.shape), dtype)
    if int(k_pool.shape[0]) % (kv_heads * PAGE):
        raise ValueError(
            f"attention_prefill: k_pool has {int(k_pool.shape[0])} rows, expected a multiple of {kv_heads} heads * {PAGE}"
        )
    check_array("attention_prefill: block_table", block_table, (None,), "int32")
    if tokens > int(block_table.shape[0]) * PAGE:
        raise ValueError(
            f"attention_prefill: {tokens} tokens, but block_table has {int(block_table.shape[0])} pages of {PAGE}"
        )
    check_array("attention_prefill: start", start, (1,), "int32")
    check_array("attention_prefill: out", out, (tokens, width), dtype)
    heads = width // head_dim
    log2_scale = (head_dim**-0.5 if scale is None else scale) * LOG2_E
    if not (math.isfinite(log2_scale) and log2_scale > 0):
        raise ValueError(f"attention_prefill: scale is {scale}, expected a positive number")
    constants = (log2_scale, heads // kv_heads, kv_heads, config.tile_q, head_dim, config.pages, int(launcher.pdl))
    args = (q, k_pool, v_pool, block_table, start, out, *constants)
    launcher(with_hints(attention_prefill_kernel, **config.hints), (heads, -(-tokens // config.tile_q), 1), args)
