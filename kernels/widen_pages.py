"""Pages of an INT8 cache as half precision, into a scratch pool in the sequence's order.

Prefill's attention reads each page once for every tile of queries and every head of a group. Widening the bytes there
costs more than the products; here it is done once a page, in three bytes of traffic a number, and attention runs as
over a half-precision cache: page j of the scratch pool is page j of the sequence. scale · q is rounded to half
precision, a sixth of INT8's own error.

Refuses: head_dim other than 64 and 128, pages other than 64 slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cuda.tile as ct

from kernels.attention_int8 import page_tile
from kernels.int8_rows import WIDENED, from_int8
from kernels.launch import check_array
from kernels.notation import HALF, PAGE, Bool, Int
from kernels.paged_cache import check_pools, pool_specs, scale_specs
from kernels.specs import ArraySpec

if TYPE_CHECKING:
    from kernels.launch import Launcher
    from kernels.shapes import ModelShape

TILES = 4  # of a block: with more, a short prompt leaves multiprocessors idle
MOST_PAGES = 64  # blocks along the sequence, each of which takes every so many pages


@ct.kernel
def widen_pages_kernel(
    k_pool, v_pool, k_scales, v_scales, table, start, k_out, v_out, tokens, HKV: Int, D: Int, R: Int, N: Int, PDL: Bool
):
    """k_out[page j] = k_scales[page table[j]] · k_pool[page table[j]], v_out likewise, for 64 j < start + tokens.

    k_pool [pages HKV 64, D], v_pool [pages HKV D, 64] int8; k_scales [pages HKV 64, 1], v_scales [pages HKV, 64]
    float32, a value's by its column; table [entries], start [1] int32; k_out, v_out as the pools, half.
    Grid (blocks along the sequence, HKV, parts of a page of a head): N tiles of R rows of keys, or of as many values;
    the first half of the parts has the keys. float32, one rounding at the store.
    Other pages of the outputs are left alone, as are those past the outputs' or the table's end.
    """
    h, part = ct.bid(1), ct.bid(2)
    if PDL:
        ct.grid_dependency_control_launch_dependents()
    end = ct.load(start, index=(0,), shape=(), check_bounds=False).item() + tokens
    pages = ct.minimum(ct.minimum(ct.cdiv(end, PAGE), table.shape[0]), k_out.shape[0] // (HKV * PAGE))
    parts = ct.num_blocks(2) // 2
    if PDL:
        ct.grid_dependency_control_wait()
    for page in range(ct.bid(0), pages, ct.num_blocks(0)):
        row = ct.load(table, index=(page,), shape=(), check_bounds=False).item() * HKV + h
        into = page * HKV + h
        if part < parts:
            old, new = (row * parts + part) * N, (into * parts + part) * N
            keys = tuple(page_tile(k_pool, old + i, R, D) for i in ct.static_iter(range(N)))
            ks = tuple(page_tile(k_scales, old + i, R, 1) for i in ct.static_iter(range(N)))
            for i in ct.static_iter(range(N)):
                k = from_int8(keys[i], ks[i], k_out.dtype)
                ct.store(k_out, index=(new + i, 0), tile=k, allow_tma=False, check_bounds=False)
        else:
            old, new = (row * parts + part - parts) * N, (into * parts + part - parts) * N
            values = tuple(page_tile(v_pool, old + i, R * D // PAGE, PAGE) for i in ct.static_iter(range(N)))
            vs = page_tile(v_scales, row, 1, PAGE)
            for i in ct.static_iter(range(N)):
                v = from_int8(values[i], vs, v_out.dtype)
                ct.store(v_out, index=(new + i, 0), tile=v, allow_tma=False, check_bounds=False)


def widen_pages(
    launcher: Launcher, k_pool: Any, v_pool: Any, block_table: Any, start: Any, k_out: Any, v_out: Any,
    *, tokens: int, kv_heads: int, head_dim: int, scales: tuple[Any, Any],
) -> None:  # fmt: skip
    """Page j of the outputs = page block_table[j] of the INT8 pools in half precision, where 64 j < start + tokens.

    k_out [pages · kv_heads · 64, head_dim] and v_out [pages · kv_heads · head_dim, 64] need as many pages as the
    sequence; start: int32 [1] in device memory; scales: float32 [pages · kv_heads, 64] of the keys and of the values.

    Raises:
        ValueError, TypeError: an array's shape, layout, alignment or type is not what the kernel reads.
    """
    op = "widen_pages"
    if head_dim not in (64, 128):
        raise ValueError(f"{op}: head_dim is {head_dim}, expected 64 or 128")
    if kv_heads < 1 or tokens < 1:
        raise ValueError(f"{op}: {tokens} tokens and {kv_heads} KV heads, expected at least one of each")
    check_pools(op, k_pool, v_pool, block_table, kv_heads, head_dim, "int8", scales)
    check_array(f"{op}: start", start, (1,), "int32")
    check_array(f"{op}: k_out", k_out, (None, head_dim), *HALF, align=16)
    rows = int(k_out.shape[0])
    if rows % (kv_heads * PAGE):
        raise ValueError(f"{op}: k_out has {rows} rows, expected a multiple of {kv_heads} KV heads · {PAGE} slots")
    check_array(f"{op}: v_out", v_out, (rows // PAGE * head_dim, PAGE), str(k_out.dtype), align=16)
    ks, vs = scales
    arrays = (k_pool, v_pool, ks.reshape(ks.size, 1), vs, block_table, start, k_out, v_out)
    pages = min(rows // (kv_heads * PAGE), int(block_table.shape[0]), MOST_PAGES)
    parts = 2 * PAGE * head_dim // (WIDENED * TILES)
    constants = (kv_heads, head_dim, WIDENED // head_dim, TILES, launcher.pdl)
    launcher(widen_pages_kernel, (pages, kv_heads, parts), (*arrays, int(tokens), *constants))


def model_launches(launcher: Launcher, model: ModelShape, dtype: str) -> None:
    """A chunk of 512 tokens."""
    pools, out, scales = pool_specs(model, "int8"), pool_specs(model, dtype), scale_specs(model)
    heads = {"kv_heads": model.kv_heads, "head_dim": model.head_dim}
    place = ArraySpec(64, "int32"), ArraySpec(1, "int32")
    widen_pages(launcher, *pools, *place, *out, tokens=512, **heads, scales=scales)
