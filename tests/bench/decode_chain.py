"""Times the kernels of a decode step on a GPU, in CUDA graphs, against ceilings measured in the same run.

    python3 tests/bench/decode_chain.py Qwen3-0.6B Qwen3-4B      # whole chains: products, fused, with attention
    python3 tests/bench/decode_chain.py --attention             # attention + merge at 512 to 32,768 positions
    python3 tests/bench/decode_chain.py --products Qwen3-4B     # each product alone
    python3 tests/bench/decode_chain.py --tokens Qwen3-4B       # products for 1 to 8 tokens
    python3 tests/bench/decode_chain.py --carveouts Qwen3-4B    # the step under several shared-memory carve-outs

Needs CuPy, cuda-tile with tileiras, and the repository's root on PYTHONPATH; PyTorch's copy sets the copy ceiling where
it is there. Weights are random and every layer has its own, so nothing is read twice from the L2. "Roofline" is bytes
over the copy ceiling.
No sampling, no embedding: the engine's bench has those.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import cuda.tile as ct
import cupy as cp
import ml_dtypes
import numpy as np

from kernels.attention_decode import attention_config, attention_decode, workspace_floats
from kernels.carveout import set_carveout, step_carveout
from kernels.launch import GpuLauncher
from kernels.linear import (
    LinearConfig,
    linear,
    linear_config,
    linear_norm,
    linear_residual,
    linear_swiglu,
    linear_xielu,
    square_slots,
)
from kernels.linear_tokens import (
    COLUMNS,
    TokensConfig,
    linear_tokens_norm,
    linear_tokens_residual,
    linear_tokens_swiglu,
    linear_tokens_xielu,
)
from kernels.shapes import MODELS, ModelShape
from kernels.tokens_join import tokens_square_slots

BF16 = ml_dtypes.bfloat16
RUNTIME = cp.cuda.runtime
STREAM = cp.cuda.Stream(non_blocking=True)
ARCH = f"sm_{cp.cuda.Device(0).compute_capability}"
LAUNCHER = GpuLauncher(STREAM.ptr, ARCH, pdl=int(ARCH[3:]) >= 90)
EPS = 1e-6
CONTEXT = 512
Int = ct.Constant[int]


@ct.kernel
def read_kernel(a, y, TN: Int, TK: Int, NK: Int):
    i = ct.bid(0)
    tiles = tuple(
        ct.load(a, index=(i, k), shape=(TN, TK), allow_tma=False, check_bounds=False) for k in ct.static_iter(range(NK))
    )
    total = ct.zeros((TN, TK), dtype=ct.float32)
    for k in ct.static_iter(range(NK)):
        total = total + tiles[k].astype(ct.float32)
    ct.store(y, index=(i,), tile=ct.sum(ct.sum(total, axis=1), axis=0).reshape((1,)), allow_tma=False)


@ct.kernel
def copy_kernel(a, b, TN: Int, TK: Int, NK: Int):
    i = ct.bid(0)
    tiles = tuple(
        ct.load(a, index=(i, k), shape=(TN, TK), allow_tma=False, check_bounds=False) for k in ct.static_iter(range(NK))
    )
    for k in ct.static_iter(range(NK)):
        ct.store(b, index=(i, k), tile=tiles[k], allow_tma=False, check_bounds=False)


def graph_us(step: Any, carveout: int | None = None, repeats: int = 15) -> float:
    """Median microseconds of one replay of `step` as a CUDA graph."""
    cp.cuda.Device().synchronize()  # arrays are filled on CuPy's own stream
    with STREAM:
        step()
        STREAM.synchronize()
        RUNTIME.streamBeginCapture(STREAM.ptr, 1)
        step()
        graph = RUNTIME.streamEndCapture(STREAM.ptr)
        if carveout is not None:
            set_carveout(graph, carveout)
        executable = RUNTIME.graphInstantiate(graph)
        times = []
        for _ in range(repeats):
            start, stop = cp.cuda.Event(), cp.cuda.Event()
            start.record(STREAM)
            RUNTIME.graphLaunch(executable, STREAM.ptr)
            stop.record(STREAM)
            stop.synchronize()
            times.append(cp.cuda.get_elapsed_time(start, stop) * 1e3)
        RUNTIME.graphExecDestroy(executable)
        RUNTIME.graphDestroy(graph)
    return float(np.median(times[3:]))


def noise(*shape: int, scale: float = 0.02) -> Any:
    """Random BF16 [shape], repeated from 64 Mi numbers."""
    pattern = (cp.random.standard_normal(1 << 26, dtype=cp.float32) * scale).astype(BF16)
    flat = cp.empty(int(np.prod(shape)), dtype=BF16)
    for at in range(0, flat.size, pattern.size):
        flat[at : at + pattern.size] = pattern[: min(pattern.size, flat.size - at)]
    return flat.reshape(shape)


def ceilings() -> dict[str, float]:
    """GB/s of a copy (bytes read and written) and of a read-only stream over 2 GiB."""
    a = noise(1 << 18, 4096)
    b, y = cp.empty_like(a), cp.zeros(1 << 18, dtype=cp.float32)
    found = {"copy": 0.0, "read": 0.0}
    for rows in (2, 4, 8):
        grid = (a.shape[0] // rows, 1, 1)
        us = graph_us(lambda g=grid, r=rows: ct.launch(STREAM.ptr, g, read_kernel, (a, y, r, 1024, 4)))
        found["read"] = max(found["read"], a.nbytes / us / 1e3)
        us = graph_us(lambda g=grid, r=rows: ct.launch(STREAM.ptr, g, copy_kernel, (a, b, r, 1024, 4)))
        found["copy"] = max(found["copy"], 2 * a.nbytes / us / 1e3)
    try:
        import torch
    except ImportError:
        return found
    x = torch.randint(0, 1 << 30, (1 << 29,), dtype=torch.int32, device="cuda")
    z = torch.empty_like(x)
    ms = torch_ms(lambda: z.copy_(x), torch)
    found["copy"] = max(found["copy"], 2 * x.numel() * 4 / ms / 1e6)
    return found


def torch_ms(call: Any, torch: Any, repeats: int = 12) -> float:
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return float(np.median(times[2:]))


def rope_tables(positions: int, head_dim: int) -> tuple[Any, Any]:
    angle = np.arange(positions)[:, None] * 1e6 ** (-np.arange(head_dim // 2) / (head_dim // 2))
    return cp.asarray(np.cos(angle), dtype=cp.float32), cp.asarray(np.sin(angle), dtype=cp.float32)


class StepBuffers:
    """Caches and buffers of one model's decode step, whatever its weights are made of."""

    def __init__(self, m: ModelShape) -> None:
        self.m = m
        pages = -(-CONTEXT // 64)
        size = pages * m.kv_heads * 64 * m.head_dim
        self.pools = [
            (noise(size, scale=1).reshape(-1, m.head_dim), noise(size, scale=1).reshape(-1, 64))
            for _ in range(m.layers)
        ]
        self.table = cp.zeros(16, dtype=cp.int32)
        self.table[:pages] = cp.arange(pages)
        self.length = cp.asarray([CONTEXT], dtype=cp.int32)
        self.cos, self.sin = rope_tables(CONTEXT, m.head_dim)
        self.head_gain = cp.ones((1, m.head_dim), dtype=BF16) if m.qk_norm else None
        self.gain, self.alphas = cp.ones((1, m.hidden), dtype=BF16), cp.asarray([0.8, 1.3], dtype=cp.float32)
        self.qkv, self.x, self.act = (cp.zeros((1, n), dtype=BF16) for n in (m.qkv_rows, m.attention_width, m.ffn))
        self.stream = cp.full((1, m.hidden), 0.01, dtype=cp.float32)
        self.normed = cp.full((1, m.hidden), 0.01, dtype=BF16)
        self.logits = cp.zeros((1, m.vocab), dtype=cp.float32)
        config = attention_config(ARCH, m.kv_heads, CONTEXT)
        self.space = cp.zeros(workspace_floats(config, m.heads, m.kv_heads, m.head_dim), dtype=cp.float32)


class Chain(StepBuffers):
    """One model's decode step in BF16: its weights beside the buffers."""

    def __init__(self, m: ModelShape, overrides: dict[str, LinearConfig] | None = None) -> None:
        super().__init__(m)
        self.overrides = overrides or {}
        self.layers = [[noise(*m.products[p]) for p in ("qkv", "o", "up", "down")] for _ in range(m.layers)]
        self.lm_head = noise(*m.products["lm_head"])
        self.nbytes = sum(w.nbytes for layer in self.layers for w in layer) + self.lm_head.nbytes
        self.gate_up = cp.zeros((1, m.up_rows), dtype=BF16)
        self.sums = {p: cp.full((1, self._slots(p)), 1e-3, dtype=cp.float32) for p in ("o", "down")}

    def _slots(self, product: str) -> int:
        n, k = self.m.products[product]
        config = self.overrides.get(product)
        blocks = -(-n // config.tile_n) if config else 0
        return 1 << (blocks - 1).bit_length() if blocks else square_slots(ARCH, n, k)

    def products(self) -> None:
        """The bare products, each reading the one before."""
        m, c = self.m, self.overrides.get
        for wq, wo, wu, wd in self.layers:
            linear(
                LAUNCHER, self.normed, wq, self.qkv, config=c("qkv") or linear_config(ARCH, *wq.shape, "linear_norm")
            )
            attended = self.qkv[:, : m.attention_width]
            hidden = self.x[:, : m.hidden] if m.attention_width >= m.hidden else self.normed
            linear(LAUNCHER, attended, wo, hidden, config=c("o") or linear_config(ARCH, *wo.shape, "linear_residual"))
            linear(
                LAUNCHER, hidden, wu, self.gate_up, config=c("up") or linear_config(ARCH, *wu.shape, "linear_swiglu")
            )
            config = c("down") or linear_config(ARCH, *wd.shape, "linear_residual")
            linear(LAUNCHER, self.gate_up[:, : m.ffn], wd, self.normed, config=config)
        self.head()

    def head(self) -> None:
        config = self.overrides.get("lm_head")
        linear_norm(LAUNCHER, self.normed, self.sums["down"], self.lm_head, self.logits, eps=EPS, config=config)

    def fused(self, *, attention: bool) -> None:
        """The step's kernels but embedding and sampling, with or without attention."""
        m, c = self.m, self.overrides.get
        o, down = self.sums["o"], self.sums["down"]
        for (wq, wo, wu, wd), (k_pool, v_pool) in zip(self.layers, self.pools, strict=True):
            linear_norm(LAUNCHER, self.normed, down, wq, self.qkv, eps=EPS, config=c("qkv"))
            if attention:
                attention_decode(
                    LAUNCHER, self.qkv, self.head_gain, self.head_gain, self.cos, self.sin, k_pool, v_pool, self.table,
                    self.length, self.space, self.x, kv_heads=m.kv_heads, head_dim=m.head_dim, context=CONTEXT,
                )  # fmt: skip
            linear_residual(LAUNCHER, self.x, wo, self.stream, self.gain, self.normed, o, config=c("o"))
            if m.activation == "swiglu":
                linear_swiglu(LAUNCHER, self.normed, o, wu, self.act, eps=EPS, config=c("up"))
            else:
                linear_xielu(LAUNCHER, self.normed, o, wu, self.alphas, self.act, eps=EPS, config=c("up"))
            linear_residual(LAUNCHER, self.act, wd, self.stream, self.gain, self.normed, down, config=c("down"))
        self.head()


def bench_chain(name: str, ceiling: dict[str, float], found: dict[str, Any]) -> None:
    chain = Chain(MODELS[name])
    layers = chain.m.layers
    whole, carveout = f"with attention, context {CONTEXT}", step_carveout(ARCH, chain.m.hidden)
    times = {
        "products alone": graph_us(chain.products),
        "fused, no attention": graph_us(lambda: chain.fused(attention=False)),
        whole: graph_us(lambda: chain.fused(attention=True)),
    }
    if carveout is not None:
        times[f"{whole}, carve-out {carveout} %"] = graph_us(lambda: chain.fused(attention=True), carveout)
    for what, us in times.items():
        share = chain.nbytes / us / 1e3 / ceiling["copy"]
        print(f"{name:14s} {what:50s} {us:8.1f} us {100 * share:5.1f} % of roofline {1e6 / us:6.0f} tok/s")
        found[f"{name}, {what}"] = us
    attention = (min(us for what, us in times.items() if whole in what) - times["fused, no attention"]) / layers
    print(f"{name:14s} attention and merge, per layer in the chain {attention:.2f} us")


def bench_attention(ceiling: dict[str, float], found: dict[str, Any]) -> None:
    """Attention and merge alone, over enough layers to leave the L2."""
    kv, d = 8, 128
    for context in (512, 1024, 2048, 4096, 8192, 32768):
        nbytes, pages = 4 * context * kv * d, context // 64
        layers = max(2, min(32, 200_000_000 // nbytes + 1))
        pools = [(noise(pages * kv * 64, d, scale=1), noise(pages * kv * d, 64, scale=1)) for _ in range(layers)]
        for heads in (16, 32):
            us = graph_us(_attention_step(heads, kv, d, context, pools)) / 4 / layers
            share = 100 * nbytes / us / 1e3 / ceiling["read"]
            form = attention_config(ARCH, kv, context)
            what = f"attention {heads}/{kv} heads, {context} positions"
            print(f"{what:40s} {form.form} {form.splits:3d} splits {us:7.2f} us {share:5.1f} % of read ceiling")
            found[what] = us
        del pools
        cp.get_default_memory_pool().free_all_blocks()


def _attention_step(heads: int, kv: int, d: int, context: int, pools: list[Any]) -> Any:
    """Four rounds of attention and merge over the layers' pools."""
    pages = context // 64
    table = cp.asarray(np.random.default_rng(0).permutation(-(-pages // 16) * 16) % pages, dtype=cp.int32)
    cos, sin = rope_tables(context, d)
    length, gain = cp.asarray([context], dtype=cp.int32), cp.ones((1, d), dtype=BF16)
    space = cp.zeros(workspace_floats(attention_config(ARCH, kv, context), heads, kv, d), dtype=cp.float32)
    qkv, out = noise(1, (heads + 2 * kv) * d, scale=1), cp.zeros((1, heads * d), dtype=BF16)

    def step() -> None:
        for k_pool, v_pool in pools * 4:
            attention_decode(
                LAUNCHER, qkv, gain, gain, cos, sin, k_pool, v_pool, table, length, space, out, kv_heads=kv, head_dim=d,
                context=context,
            )  # fmt: skip

    return step


def bench_products(name: str, ceiling: dict[str, float], found: dict[str, Any]) -> None:
    """Each fused product in a chain of itself over all layers' weights."""
    chain = Chain(MODELS[name])
    m = chain.m
    for index, product in enumerate(("qkv", "o", "up", "down", "lm_head")):
        weights = [layer[index] for layer in chain.layers] if product != "lm_head" else [chain.lm_head] * 2
        us = graph_us(lambda p=product, ws=weights: [_one(chain, p, w) for w in ws]) / len(weights)
        n, k = m.products[product]
        share = 100 * weights[0].nbytes / us / 1e3 / ceiling["copy"]
        print(f"{name:14s} {product:8s} {n:6d} x {k:5d} {us:7.2f} us {share:5.1f} % of roofline")
        family = {"up": "linear_xielu" if m.activation == "xielu" else "linear_swiglu"}.get(product, "linear_norm")
        found[f"{family if product not in ('o', 'down') else 'linear_residual'} {n} {k}"] = us


def _one(chain: Chain, product: str, w: Any, tokens: int = 1, config: TokensConfig | None = None) -> None:
    """One fused product; `config` is for several tokens."""
    if tokens > 1:
        _several(chain, product, w, tokens, config)
        return
    m = chain.m
    b = _buffers(chain, tokens)
    if product in ("qkv", "lm_head"):
        linear_norm(LAUNCHER, b["normed"], b["down"], w, b[product], eps=EPS)
    elif product == "up" and m.activation == "swiglu":
        linear_swiglu(LAUNCHER, b["normed"], b["o"], w, b["act"], eps=EPS)
    elif product == "up":
        linear_xielu(LAUNCHER, b["normed"], b["o"], w, chain.alphas, b["act"], eps=EPS)
    else:
        x = b["x"] if product == "o" else b["act"]
        linear_residual(LAUNCHER, x, w, b["stream"], chain.gain, b["normed"], b[product])


def _several(chain: Chain, product: str, w: Any, tokens: int, config: TokensConfig | None) -> None:
    """The same for 2 to 8 tokens: two launches."""
    m, b = chain.m, _buffers(chain, tokens)
    parts, more = b["parts"], {"config": config}
    if product in ("qkv", "lm_head"):
        linear_tokens_norm(LAUNCHER, b["normed"], b["down"], w, parts, b[product], eps=EPS, **more)
    elif product == "up" and m.activation == "swiglu":
        linear_tokens_swiglu(LAUNCHER, b["normed"], b["o"], w, parts, b["act"][:tokens], eps=EPS, **more)
    elif product == "up":
        linear_tokens_xielu(LAUNCHER, b["normed"], b["o"], w, parts, chain.alphas, b["act"][:tokens], eps=EPS, **more)
    else:
        x = b["x"] if product == "o" else b["act"]
        into = (b["stream"], chain.gain, b["normed"][:tokens], b[product])
        linear_tokens_residual(LAUNCHER, x, w, parts, *into, **more)


def _buffers(chain: Chain, tokens: int) -> dict[str, Any]:
    cache = chain.__dict__.setdefault("_buffers", {})
    if tokens not in cache:
        m, rows = chain.m, 1 if tokens == 1 else COLUMNS
        slots = {
            p: square_slots(ARCH, *m.products[p]) if tokens == 1 else tokens_square_slots(m.hidden)
            for p in ("o", "down")
        }
        made = {p: cp.full((tokens, slots[p]), 1e-3, dtype=cp.float32) for p in slots}
        made |= {"normed": noise(rows, m.hidden), "qkv": noise(tokens, m.qkv_rows), "act": noise(rows, m.ffn)}
        made |= {"x": noise(rows, m.attention_width), "stream": cp.ones((tokens, m.hidden), dtype=cp.float32)}
        made["lm_head"] = cp.zeros((tokens, m.vocab), dtype=cp.float32)
        floats = max(-(-k // 64) * n for n, k in m.products.values()) * tokens
        made["parts"] = cp.zeros(min(floats, 1 << 28), dtype=cp.float32)
        cache[tokens] = made
    return cache[tokens]  # type: ignore[no-any-return]


CUTS = (TokensConfig(steps=2), TokensConfig(tile_k=256, steps=1), TokensConfig(tile_k=256, steps=2))
CUTS += (TokensConfig(128, 128, 1), TokensConfig(128, 128, 2), TokensConfig(steps=2, occupancy=5))


def bench_tokens(name: str, found: dict[str, Any]) -> None:
    """All products of a step for 1 to 8 tokens, without attention; by every cut for 4."""
    chain = Chain(MODELS[name])

    def step(tokens: int, config: TokensConfig | None = None) -> None:
        for layer in chain.layers:
            for product, w in zip(("qkv", "o", "up", "down"), layer, strict=True):
                _one(chain, product, w, tokens, config)
        _one(chain, "lm_head", chain.lm_head, tokens, config)

    one = graph_us(lambda: step(1))
    works = [(tokens, None) for tokens in (1, 2, 3, 4, 5, 6, 8)] + [(4, config) for config in CUTS]
    for tokens, config in works:
        us = graph_us(lambda t=tokens, c=config: step(t, c))
        words = f"{name:14s} {tokens} tokens {config or 'as configured'}"
        print(f"{words} {us:8.1f} us, {us / one:.2f} x one token", flush=True)
        found[words] = us


def bench_carveouts(name: str, found: dict[str, Any]) -> None:
    """The step with attention under one carve-out for all its kernels."""
    chain = Chain(MODELS[name])
    for percent in (None, 0, 4, 8, 14, 28, 43, 58):
        without, whole = (graph_us(lambda a=a: chain.fused(attention=a), percent) for a in (False, True))
        print(f"{name:14s} carve-out {percent!s:5s} {without:8.1f} us without attention, {whole:8.1f} us with it")
        found[f"{name}, carve-out {percent}"] = whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", choices=[[], *MODELS], help="names from kernels/shapes.py")
    parser.add_argument("--attention", action="store_true")
    parser.add_argument("--products", action="store_true")
    parser.add_argument("--tokens", action="store_true")
    parser.add_argument("--carveouts", action="store_true")
    parser.add_argument("--json", type=Path, help="write the numbers there")
    args = parser.parse_args()
    device = RUNTIME.getDeviceProperties(0)["name"].decode()
    ceiling = ceilings()
    print(f"{device}, {ARCH}: copy {ceiling['copy']:.0f} GB/s, read {ceiling['read']:.0f} GB/s")
    found: dict[str, Any] = {"gpu": device, **ceiling}
    for name in args.models:
        cp.get_default_memory_pool().free_all_blocks()
        if args.products:
            bench_products(name, ceiling, found)
        elif args.tokens:
            bench_tokens(name, found)
        elif args.carveouts:
            bench_carveouts(name, found)
        else:
            bench_chain(name, ceiling, found)
    if args.attention:
        bench_attention(ceiling, found)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
