"""Chooses the tiles of a model's one-token products on a GPU, each in the whole step of fused kernels.

    python3 tests/bench/tune_products.py Llama-3.2-1B SmolLM2-135M          # names from kernels/shapes.py

One product after the other, the one with the most bytes first: every tile that fits, then occupancies of the best. A
choice is kept if the step of LAYERS layers (no attention) gets faster by half a percent. Last, the carve-out of the
step with attention. Prints rows for configs/<arch>.json with the time of the product in a chain of itself.
"""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

import cupy as cp

from kernels.compile import CompileError, compile_all
from kernels.linear import LinearConfig, linear_config, linear_norm, linear_residual, linear_swiglu, linear_xielu
from kernels.shapes import MODELS
from kernels.specs import RecordingLauncher
from tests.bench import decode_chain
from tests.bench.decode_chain import ARCH, EPS, Chain, graph_us

if TYPE_CHECKING:
    from kernels.shapes import ModelShape

LAYERS = 10
PRODUCTS = ("up", "down", "qkv", "o", "lm_head")
OCCUPANCIES = (2, 3, 4, 6)
LEAST_GAIN = 0.005
CARVEOUTS = (None, 0, 8, 14, 28, 43)
REGISTERS = 32768  # elements a block may hold


def family(model: ModelShape, product: str) -> str:
    return {"up": f"linear_{model.activation}", "qkv": "linear_norm", "lm_head": "linear_norm"}.get(
        product, "linear_residual"
    )


def tiles(n: int, k: int) -> list[LinearConfig]:
    """Every (tile_n, tile_k) whose rows fit into registers and waste less than a quarter of their loads."""
    found = []
    for tile_k in (64, 256) if k < 1024 else (256, 512, 1024):
        row = -(-k // tile_k) * tile_k
        if row > 1.25 * k or row // tile_k > 24:
            continue
        found += [LinearConfig(t, tile_k) for t in (1, 2, 4, 8, 16) if 4096 <= t * row <= REGISTERS and t <= n]
    return found


class Tuner:
    """One model's chain, and the choice for each product."""

    def __init__(self, name: str) -> None:
        self.name, self.model = name, MODELS[name]
        self.chain = Chain(self.model)
        self.chain.layers, self.chain.pools = self.chain.layers[:LAYERS], self.chain.pools[:LAYERS]
        self.choice = {p: linear_config(ARCH, *self.model.products[p], family(self.model, p)) for p in PRODUCTS}

    def use(self, choice: dict[str, LinearConfig]) -> None:
        self.chain.overrides = choice
        self.chain.sums = {p: cp.full((1, self.chain._slots(p)), 1e-3, dtype=cp.float32) for p in ("o", "down")}

    def step(self) -> None:
        self.chain.fused(attention=False)

    def compile_ahead(self, trials: dict[str, list[LinearConfig]]) -> None:
        """Every trial's kernels, on all cores, into the cache that launches look in."""
        recorder, own = RecordingLauncher(ARCH, pdl=decode_chain.LAUNCHER.pdl), decode_chain.LAUNCHER
        layers, pools = self.chain.layers, self.chain.pools
        decode_chain.LAUNCHER, self.chain.layers, self.chain.pools = recorder, layers[:1], pools[:1]
        for product, configs in trials.items():
            for config in configs:
                self.use(self.choice | {product: config})
                self.step()
        decode_chain.LAUNCHER, self.chain.layers, self.chain.pools = own, layers, pools
        for result in compile_all(recorder.records, ARCH, workers=os.cpu_count() or 2):
            if isinstance(result, CompileError):
                print(str(result)[:200], flush=True)

    def time(self, choice: dict[str, LinearConfig]) -> float:
        self.use(choice)
        try:
            return graph_us(self.step, repeats=11)
        except Exception as error:  # a variant that does not run is a result too
            print(f"  {choice}: {type(error).__name__} {str(error)[:100]}")
            return float("inf")

    def tune(self) -> None:
        """Tiles of every product, then their occupancies."""
        start = best = self.time(self.choice)
        for what in (self._tiles, self._occupancies):
            trials = {product: what(product) for product in PRODUCTS}
            self.compile_ahead(trials)
            for product in PRODUCTS:
                times = {trial: self.time(self.choice | {product: trial}) for trial in trials[product]}
                found = min(times, key=times.__getitem__)
                if times[found] < best * (1 - LEAST_GAIN):
                    print(f"{self.name:13s} {product:8s} {self.choice[product]} -> {found}: {times[found]:.1f} us")
                    best, self.choice = times[found], self.choice | {product: found}
        print(f"{self.name:13s} {LAYERS} layers: {start:.1f} -> {self.time(self.choice):.1f} us", flush=True)

    def _tiles(self, product: str) -> list[LinearConfig]:
        return tiles(*self.model.products[product])

    def _occupancies(self, product: str) -> list[LinearConfig]:
        here = self.choice[product]
        return [LinearConfig(here.tile_n, here.tile_k, occupancy) for occupancy in OCCUPANCIES]

    def rows(self) -> None:
        self.use(self.choice)
        for product in PRODUCTS:
            n, k = self.model.products[product]
            config = self.choice[product]
            cut = {"tile_n": config.tile_n, "tile_k": config.tile_k}
            if config.occupancy is not None:
                cut["occupancy"] = config.occupancy
            us = round(self.alone(product), 2)
            row = {"when": {"n": n, "k": k}, "config": cut, "us": us, "chosen": "measured"}
            print(f"ROW {family(self.model, product)} {json.dumps(row)}", flush=True)

    def alone(self, product: str) -> float:
        """Microseconds of one product in a chain of itself over the layers' weights."""
        index = ("qkv", "o", "up", "down").index(product) if product != "lm_head" else 0
        chain = self.chain
        weights = [layer[index] for layer in chain.layers] if product != "lm_head" else [chain.lm_head] * 2
        return graph_us(lambda: [self._one(product, w) for w in weights]) / len(weights)

    def _one(self, product: str, w: Any) -> None:
        c, config, launcher = self.chain, self.choice[product], decode_chain.LAUNCHER
        o, down = c.sums["o"], c.sums["down"]
        if product in ("qkv", "lm_head"):
            out = c.qkv if product == "qkv" else c.logits
            linear_norm(launcher, c.normed, down, w, out, eps=EPS, config=config)
        elif product == "up" and self.model.activation == "swiglu":
            linear_swiglu(launcher, c.normed, o, w, c.act, eps=EPS, config=config)
        elif product == "up":
            linear_xielu(launcher, c.normed, o, w, c.alphas, c.act, eps=EPS, config=config)
        else:
            x, sums = (c.x, o) if product == "o" else (c.act, down)
            linear_residual(launcher, x, w, c.stream, c.gain, c.normed, sums, config=config)

    def carveouts(self) -> None:
        self.use(self.choice)
        for percent in CARVEOUTS:
            us = graph_us(lambda: self.chain.fused(attention=True), percent)
            print(f"{self.name:13s} carve-out {percent!s:5s} {us:8.1f} us with attention", flush=True)


def main() -> None:
    for name in sys.argv[1:]:
        cp.get_default_memory_pool().free_all_blocks()
        tuner = Tuner(name)
        tuner.tune()
        tuner.rows()
        tuner.carveouts()


if __name__ == "__main__":
    main()
