"""Times the products of a verify step with INT8 weights on a GPU, in CUDA graphs, beside other forms in the same run.

    python3 tests/bench/int8_tokens.py Qwen3-0.6B Qwen3-4B        # BF16 and INT8, one token and several
    python3 tests/bench/int8_tokens.py --scan Qwen3-4B            # each product's cut in the whole chain

Needs what decode_chain.py needs. All layers (`--layers 10` takes fewer) and the head, without embedding and attention.
INT8 steps make the attention's digits too. Weights are random bytes, every layer has its own.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from typing import Any

import cupy as cp

from kernels.compile import CompileError, compile_all
from kernels.digit_slices import digit_shapes, digit_slices, slices
from kernels.int8_tokens import Int8TokensConfig, linear_int8_tokens_config
from kernels.linear_int8_tokens import (
    linear_int8_tokens_norm,
    linear_int8_tokens_residual,
    linear_int8_tokens_swiglu,
    linear_int8_tokens_xielu,
)
from kernels.shapes import MODELS, ModelShape
from kernels.specs import RecordingLauncher
from kernels.tokens_join import tokens_square_slots
from tests.bench import decode_chain
from tests.bench.decode_chain import ARCH, BF16, EPS, LAUNCHER, Chain, _one, graph_us, noise
from tests.bench.int8_chain import Int8Chain, random_bytes

PRODUCTS = ("qkv", "o", "up", "down")
CUTS = [Int8TokensConfig(128), Int8TokensConfig(64, 128, 2), Int8TokensConfig(64, 512)]


class TokensChain:
    """One model's verify step in INT8. `recipe`: down product and head in groups of 64, as `quantize` makes them."""

    def __init__(self, m: ModelShape, *, recipe: bool) -> None:
        self.m = m
        self.groups = dict.fromkeys(("down", "lm_head"), 64) if recipe else {}
        self.layers = [[self._weight(p) for p in PRODUCTS] for _ in range(m.layers)]
        self.lm_head = self._weight("lm_head")
        self.overrides: dict[str, Int8TokensConfig] = {}
        self.nbytes = sum(w.nbytes for layer in self.layers for w, _ in layer) + self.lm_head[0].nbytes

    def _weight(self, product: str) -> tuple[Any, Any]:
        n, k = self.m.products[product]
        return random_bytes(n, k), cp.full((n, k // self.groups.get(product, k)), k**-0.5 / 74, dtype=cp.float32)

    def prepare(self, tokens: int) -> None:
        m = self.m

        def digits(k: int) -> tuple[Any, Any]:
            values, scales = digit_shapes(tokens, k)
            return random_bytes(*values), cp.full(scales, 1e-4, dtype=cp.float32)

        self.tokens, self.x, self.made, self.attended = (
            tokens,
            digits(m.hidden),
            digits(m.ffn),
            digits(m.attention_width),
        )
        self.sums = cp.full((tokens, tokens_square_slots(m.hidden)), 1e-3, dtype=cp.float32)
        self.stream = cp.full((tokens, m.hidden), 0.01, dtype=cp.float32)
        self.normed, self.attention = noise(tokens, m.hidden), noise(tokens, m.attention_width)
        self.gain, self.alphas = cp.ones((1, m.hidden), dtype=BF16), cp.asarray([0.8, 1.3], dtype=cp.float32)
        self.qkv, self.act = (cp.zeros((tokens, n), dtype=BF16) for n in (m.qkv_rows, m.ffn))
        self.logits = cp.zeros((tokens, m.vocab), dtype=cp.float32)
        self.parts = cp.zeros(max(slices(k) * tokens * n for n, k in m.products.values()), dtype=cp.float32)

    def config(self, product: str) -> Int8TokensConfig:
        n, k = self.m.products[product]
        c = self.overrides.get(product) or linear_int8_tokens_config(ARCH, n, k, self.groups.get(product))
        return replace(c, steps=c.steps if slices(k) % c.steps == 0 else 1)

    def step(self, go: Any = LAUNCHER, layers: int | None = None) -> None:
        c, parts = self.config, self.parts
        into = (self.stream, self.gain, self.normed, self.sums, self.x)
        for wq, wo, wu, wd in self.layers[:layers]:
            linear_int8_tokens_norm(go, self.x, self.sums, *wq, parts, self.qkv, eps=EPS, config=c("qkv"))
            digit_slices(go, self.attention, self.attended)
            linear_int8_tokens_residual(go, self.attended, *wo, parts, *into, config=c("o"))
            given = (go, self.x, self.sums, *wu, parts)
            if self.m.activation == "swiglu":
                linear_int8_tokens_swiglu(*given, self.act, self.made, eps=EPS, config=c("up"))
            else:
                linear_int8_tokens_xielu(*given, self.alphas, self.act, self.made, eps=EPS, config=c("up"))
            linear_int8_tokens_residual(go, self.made, *wd, parts, *into, config=c("down"))
        linear_int8_tokens_norm(go, self.x, self.sums, *self.lm_head, parts, self.logits, eps=EPS, config=c("lm_head"))


class Without:
    """A launcher that leaves out the kernels whose names start so."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names, self.arch, self.pdl = names, LAUNCHER.arch, LAUNCHER.pdl

    def check(self, kernel: Any, args: Any) -> None:
        LAUNCHER.check(kernel, args)

    def __call__(self, kernel: Any, grid: Any, args: Any) -> None:
        if not kernel._pyfunc.__name__.startswith(self.names):
            LAUNCHER(kernel, grid, args)


def compile_ahead(chain: TokensChain, tokens: tuple[int, ...], cuts: list[Int8TokensConfig]) -> None:
    """Everything that will be launched, on all cores."""
    recorder = RecordingLauncher(ARCH, pdl=LAUNCHER.pdl)
    for count in tokens:
        chain.prepare(count)
        for cut in (None, *cuts):
            chain.overrides = {} if cut is None else dict.fromkeys(chain.m.products, cut)
            chain.step(recorder, layers=1)
    chain.overrides = {}
    _compile(recorder)


def _compile(recorder: RecordingLauncher) -> None:
    for result in compile_all(recorder.records, ARCH, workers=os.cpu_count() or 2):
        if isinstance(result, CompileError):
            print(str(result)[:200], flush=True)


def show(what: str, us: float, one: float | None = None) -> None:
    print(f"{what:64s} {us:8.1f} us" + ("" if one is None else f", {us / one:.2f} x INT8 for one token"), flush=True)


def bench(name: str, m: ModelShape, tokens: tuple[int, ...]) -> None:
    one = _one_token(name, m)
    for label, recipe in (("a scale a row", False), ("down and head in groups of 64", True)):
        chain = TokensChain(m, recipe=recipe)
        compile_ahead(chain, tokens, [])
        for count in tokens:
            chain.prepare(count)
            show(f"{name} INT8, {label}, {count} tokens", graph_us(chain.step), one)
        _without(f"{name} INT8, {label}, {tokens[-1]} tokens", chain)
        del chain
        cp.get_default_memory_pool().free_all_blocks()
    _several_in_half(name, m, tokens, one)


def _without(what: str, chain: TokensChain) -> None:
    """What each kind of kernel adds to the step."""
    for kind in ("join", "digit", "linear"):
        launcher = Without((kind,))
        show(f"{what} without {kind}…", graph_us(lambda go=launcher: chain.step(go)))


def _one_token(name: str, m: ModelShape) -> float:
    chain = Int8Chain(m)
    recorder = RecordingLauncher(ARCH, pdl=LAUNCHER.pdl)
    chain.step(recorder, attention=False, layers=1)
    _compile(recorder)
    us = graph_us(lambda: chain.step(attention=False))
    show(f"{name} INT8, a scale a row, 1 token", us)
    return us


def _several_in_half(name: str, m: ModelShape, tokens: tuple[int, ...], one: float) -> None:
    chain = Chain(m)

    def step(count: int) -> None:
        for layer in chain.layers:
            for product, w in zip(PRODUCTS, layer, strict=True):
                _one(chain, product, w, count)
        _one(chain, "lm_head", chain.lm_head, count)

    recorder = RecordingLauncher(ARCH, pdl=LAUNCHER.pdl)
    try:
        decode_chain.LAUNCHER = recorder
        chain.fused(attention=False)
        step(tokens[0])
    finally:
        decode_chain.LAUNCHER = LAUNCHER
    _compile(recorder)
    show(f"{name} BF16, 1 token", graph_us(lambda: chain.fused(attention=False)), one)
    for count in tokens:
        show(f"{name} BF16, {count} tokens", graph_us(lambda n=count: step(n)), one)


def scan(name: str, m: ModelShape, tokens: tuple[int, ...]) -> None:
    """Each product's cut in the whole chain, the best one kept."""
    chain = TokensChain(m, recipe=True)
    compile_ahead(chain, tokens, CUTS)
    for count in tokens:
        chain.prepare(count)
        chain.overrides = {}
        best = graph_us(chain.step)
        show(f"{name}, {count} tokens before", best)
        for product in ("up", "down", "qkv", "o", "lm_head"):
            for cut in CUTS:
                before = dict(chain.overrides)
                chain.overrides[product] = cut
                us = graph_us(chain.step)
                cut_text = f"{cut.tile_n} x {cut.tile_k} x {cut.steps} at {cut.occupancy}"
                show(f"{name}, {count} tokens, {product:8s} {cut_text}", us)
                if us < best - 0.5:
                    best = us
                else:
                    chain.overrides = before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", choices=[[], *MODELS], help="names from kernels/shapes.py")
    parser.add_argument("--scan", action="store_true")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--tokens", type=int, nargs="*", default=[2, 4, 8])
    args = parser.parse_args()
    for name in args.models:
        cp.get_default_memory_pool().free_all_blocks()
        m = MODELS[name] if args.layers is None else replace(MODELS[name], layers=args.layers)
        (scan if args.scan else bench)(name, m, tuple(args.tokens))


if __name__ == "__main__":
    sys.exit(main())
