"""Times prefill attention over the paged cache, against PyTorch's scaled_dot_product_attention on contiguous arrays.

    python3 tests/bench/prefill_attention.py [--scan]

Per line: tokens at a start, heads / KV heads, head size, microseconds, TFLOP/s (causal work counted once), distance
from SDPA's output. Needs CuPy, PyTorch, cuda-tile and tileiras.
"""

from __future__ import annotations

import argparse
from typing import Any

import cupy as cp
import numpy as np

from kernels.attention_prefill import PAGE, AttentionPrefillConfig, attention_prefill
from kernels.configs import config
from tests.bench.timing import (
    ARCH,
    BF16,
    LAUNCHER,
    Report,
    as_torch,
    compile_ahead,
    microseconds,
    random_half,
    torch_microseconds,
)

say = Report("prefill_attention")
# tokens, start, heads, KV heads, head size
SHAPES = [
    (4096, 0, 32, 8, 128),
    (4096, 0, 16, 8, 128),
    (4096, 0, 32, 8, 64),
    (512, 3584, 32, 8, 128),
    (64, 0, 32, 8, 128),
]
SCAN = [
    {"tile_q": 128, "warps": 8},
    {"tile_q": 128, "warps": 8, "ahead": False},
    {"tile_q": 64, "occupancy": 2},
    {"tile_q": 64, "occupancy": 2, "ahead": False},
    {"tile_q": 64, "occupancy": 3, "ahead": False},
    {"tile_q": 128, "occupancy": 2},
    {"tile_q": 128, "occupancy": 2, "ahead": False},
    {"tile_q": 128, "warps": 8, "latency": 2},
    {"tile_q": 128, "warps": 8, "latency": 6},
    {"tile_q": 256, "warps": 8, "ahead": False},
]


def sdpa(q: Any, k: Any, v: Any, start: int, group: int) -> tuple[Any, float | None]:
    """(output, microseconds): q [T, Hq, D], k, v [S, Hkv, D]. Timed where PyTorch's causal flag says the same."""
    import torch

    query = q.transpose(0, 1)[None].contiguous()
    keys, values = (a.transpose(0, 1)[None].repeat_interleave(group, 1).contiguous() for a in (k, v))
    mask = None
    if start:
        positions = torch.arange(k.shape[0], device="cuda")
        mask = positions[None] <= torch.arange(q.shape[0], device="cuda")[:, None] + start
    attend = torch.nn.functional.scaled_dot_product_attention
    out = attend(query, keys, values, attn_mask=mask, is_causal=mask is None)
    if mask is not None:
        return out[0].transpose(0, 1), None

    def causal(_: int) -> None:
        attend(query, keys, values, is_causal=True)

    return out[0].transpose(0, 1), torch_microseconds(causal, calls=4)


def bench(tokens: int, start: int, heads: int, kv_heads: int, dim: int, *, scan: bool) -> None:
    context = start + tokens
    pages = -(-context // PAGE)
    table = cp.asarray(np.random.default_rng(0).permutation(pages).astype(np.int32))
    k_pool, v_pool = random_half(pages * kv_heads * PAGE, dim), random_half(pages * kv_heads * dim, PAGE)
    q, out = random_half(tokens, heads * dim), cp.empty((tokens, heads * dim), BF16)
    order = cp.asnumpy(table).tolist()
    keys = as_torch(k_pool).view(pages, kv_heads, PAGE, dim)[order]
    values = as_torch(v_pool).view(pages, kv_heads, dim, PAGE)[order].transpose(2, 3)
    k, v = (a.transpose(1, 2).reshape(-1, kv_heads, dim)[:context] for a in (keys, values))
    expected, reference = sdpa(as_torch(q).view(tokens, heads, dim), k, v, start, heads // kv_heads)
    expected = expected.reshape(tokens, -1).float()
    flops = 4 * dim * heads * (tokens * start + tokens * (tokens + 1) / 2)
    name = f"{tokens} at {start}, {heads}/{kv_heads} heads of {dim}"
    if reference is not None:
        say(f"{name}: SDPA {reference:.0f} us, {flops / reference / 1e6:.0f} TFLOP/s")
    begin = cp.asarray([start], dtype=cp.int32)
    variants = [config("attention_prefill", ARCH, head_dim=dim), *(SCAN if scan else [])]

    def call(launcher: Any, tiles: dict[str, Any]) -> None:
        settings = AttentionPrefillConfig(**tiles)
        arrays = (q, k_pool, v_pool, table, begin, out)
        attention_prefill(launcher, *arrays, kv_heads=kv_heads, head_dim=dim, config=settings)

    compile_ahead(lambda launcher, tiles=tiles: call(launcher, tiles) for tiles in variants)
    for tiles in variants:
        out[...] = cp.float32(np.nan)
        us = microseconds(lambda _, tiles=tiles: call(LAUNCHER, tiles), calls=4)
        error = float((as_torch(out).float() - expected).norm() / expected.norm())
        rate, verdict = flops / us / 1e6, "" if error < 1e-2 else "WRONG "
        say(f"{name}: {us:.0f} us, {rate:.0f} TFLOP/s, error {error:.1e} {verdict}{tiles}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--scan", action="store_true", help="other tiles and hints for each shape")
    scan = parser.parse_args().scan
    for shape in SHAPES:
        bench(*shape, scan=scan)


if __name__ == "__main__":
    main()
