"""Times a decode step's kernels with INT8 weights on a GPU, in CUDA graphs, beside BF16 in the same run.

    python3 tests/bench/int8_chain.py Qwen3-0.6B Qwen3-4B      # without embedding and sampling: BF16, INT8, groups
    python3 tests/bench/int8_chain.py --attention               # attention + merge, INT8 and BF16 keys and values
    python3 tests/bench/int8_chain.py --attention --contexts 512 32768

Needs what decode_chain.py needs. Weights are random bytes, every layer has its own. "Roofline" is the weights' bytes
over the copy ceiling.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import cupy as cp
import numpy as np

from kernels.attention_decode import attention_config, attention_decode, workspace_floats
from kernels.carveout import step_carveout
from kernels.linear import linear_norm
from kernels.linear_int8 import (
    int8_square_slots,
    linear_int8_norm,
    linear_int8_residual,
    linear_int8_swiglu,
    linear_int8_xielu,
)
from kernels.shapes import MODELS, ModelShape
from kernels.specs import ArraySpec
from tests.bench.decode_chain import (
    ARCH,
    BF16,
    CONTEXT,
    EPS,
    LAUNCHER,
    Chain,
    StepBuffers,
    ceilings,
    graph_us,
    noise,
    rope_tables,
)  # fmt: skip
from tests.bench.timing import compile_ahead

DEFAULT = {"down": 64, "lm_head": 64}  # columns of a scale, as `tileinfer quantize` makes them


def random_bytes(*shape: int) -> Any:
    """int8 -127 … 127, repeated from 64 Mi numbers."""
    pattern = cp.random.randint(-127, 128, (1 << 26,), dtype=cp.int8)
    out = cp.empty(shape, dtype=cp.int8)
    flat = out.reshape(-1)
    for at in range(0, flat.size, pattern.size):
        flat[at : at + pattern.size] = pattern[: min(pattern.size, flat.size - at)]
    return out


class Int8Chain(StepBuffers):
    """One model's decode step in INT8: weights beside the buffers. `head` half leaves the output product in BF16."""

    def __init__(self, m: ModelShape, groups: dict[str, int] | None = None, *, head: str = "int8") -> None:
        super().__init__(m)
        self.groups = groups or {}
        self.layers = [[self._weight(p) for p in ("qkv", "o", "up", "down")] for _ in range(m.layers)]
        self.half_head = head != "int8"
        self.lm_head = (noise(*m.products["lm_head"]), None) if self.half_head else self._weight("lm_head")
        self.nbytes = sum(w.nbytes for layer in self.layers for w, _ in layer) + self.lm_head[0].nbytes
        self.sums = {p: cp.full((1, self.slots(p)), 1e-3, dtype=cp.float32) for p in ("o", "down")}

    def _weight(self, product: str) -> tuple[Any, Any]:
        n, k = self.m.products[product]
        return random_bytes(n, k), cp.full((n, k // self.groups.get(product, k)), k**-0.5 / 74, dtype=cp.float32)

    def slots(self, product: str) -> int:
        """Of the square sums."""
        return int8_square_slots(ARCH, *self.m.products[product], self.groups.get(product))

    def step(self, go: Any = LAUNCHER, *, attention: bool, layers: int | None = None) -> None:
        m = self.m
        o, down = self.sums["o"], self.sums["down"]
        for (wq, wo, wu, wd), (k_pool, v_pool) in list(zip(self.layers, self.pools, strict=True))[:layers]:
            linear_int8_norm(go, self.normed, down, *wq, self.qkv, eps=EPS)
            if attention:
                attention_decode(
                    go, self.qkv, self.head_gain, self.head_gain, self.cos, self.sin, k_pool, v_pool, self.table,
                    self.length, self.space, self.x, kv_heads=m.kv_heads, head_dim=m.head_dim, context=CONTEXT,
                )  # fmt: skip
            linear_int8_residual(go, self.x, *wo, self.stream, self.gain, self.normed, o)
            if m.activation == "swiglu":
                linear_int8_swiglu(go, self.normed, o, *wu, self.act, eps=EPS)
            else:
                linear_int8_xielu(go, self.normed, o, *wu, self.alphas, self.act, eps=EPS)
            linear_int8_residual(go, self.act, *wd, self.stream, self.gain, self.normed, down)
        if self.half_head:
            linear_norm(go, self.normed, down, self.lm_head[0], self.logits, eps=EPS)
        else:
            linear_int8_norm(go, self.normed, down, *self.lm_head, self.logits, eps=EPS)


def bench(name: str, ceiling: dict[str, float]) -> None:
    m = MODELS[name]
    _show_half(name, step_carveout(ARCH, m.hidden), ceiling)
    carveout = step_carveout(ARCH, m.hidden, int8=True)
    for label, groups, head in (
        ("INT8, as quantize makes it", DEFAULT, "int8"),
        ("INT8, a scale a row", None, "int8"),
        ("INT8, BF16 head", None, "half"),
    ):
        cp.get_default_memory_pool().free_all_blocks()
        chain = Int8Chain(m, groups, head=head)
        compile_ahead([lambda go, c=chain: c.step(go, attention=True, layers=1)])
        _show(name, [(label, chain.nbytes, lambda a, c=chain: c.step(attention=a))], carveout, ceiling)
        del chain


def _show_half(name: str, carveout: int | None, ceiling: dict[str, float]) -> None:
    chain = Chain(MODELS[name])
    _show(name, [("BF16", chain.nbytes, lambda a: chain.fused(attention=a))], carveout, ceiling)


def _show(name: str, forms: list[Any], carveout: int | None, ceiling: dict[str, float]) -> None:
    for label, nbytes, step in forms:
        for what, attention, cut in (
            ("no attention", False, None),
            ("attention", True, None),
            ("attention, carve-out", True, carveout),
        ):
            us = graph_us(lambda a=attention, s=step: s(a), cut)
            share = 100 * nbytes / us / 1e3 / ceiling["copy"]
            print(
                f"{name:14s} {label:22s} {what:22s} {us:8.1f} us {share:5.1f} % of roofline {1e6 / us:6.0f} tok/s",
                flush=True,
            )


def attention(ceiling: dict[str, float], contexts: list[int]) -> None:
    """Attention and merge alone, 32 query and 8 KV heads of 128, by the driver's carve-out and by the largest."""
    cases = [Attention(context, int8=int8) for context in contexts for int8 in (False, True)]
    compile_ahead([lambda go, c=case: c.launch(go, *c.specs()) for case in cases])
    for case in cases:
        times = case.times()
        share = 100 * case.nbytes / min(times) / 1e3 / ceiling["read"]
        print(
            f"attention, {case.context:6d} positions, {'INT8' if case.int8 else 'BF16'} "
            f"{times[0]:7.2f} us, all shared memory {times[1]:7.2f} us, {share:5.1f} % of read ceiling",
            flush=True,
        )
        cp.get_default_memory_pool().free_all_blocks()


class Attention:
    """Layers of attention and merge at one context, enough of them to leave the L2."""

    heads, kv, d = 32, 8, 128

    def __init__(self, context: int, *, int8: bool) -> None:
        self.context, self.int8, self.pages = context, int8, context // 64
        self.nbytes = 2 * context * self.kv * (self.d + 4 if int8 else 2 * self.d)
        self.layers = max(2, min(32, 200_000_000 // self.nbytes + 1))

    def specs(self) -> tuple[list[ArraySpec], tuple[ArraySpec, ArraySpec] | None]:
        """The arrays of a launch, and scales."""
        rows, width = self.pages * self.kv, (self.heads + 2 * self.kv) * self.d
        form = attention_config(ARCH, self.kv, self.context, int8=self.int8)
        kind = "int8" if self.int8 else "bfloat16"
        wanted = [
            ((1, width), "bfloat16"), ((1, self.d), "float32"), ((1, self.d), "float32"),
            ((self.context, self.d // 2), "float32"), ((self.context, self.d // 2), "float32"),
            ((rows * 64, self.d), kind), ((rows * self.d, 64), kind), ((-(-self.pages // 16) * 16,), "int32"),
            ((1,), "int32"), ((workspace_floats(form, self.heads, self.kv, self.d),), "float32"),
            ((1, self.heads * self.d), "bfloat16"),
        ]  # fmt: skip
        scale = ArraySpec((rows, 64), "float32")
        return [ArraySpec(*spec) for spec in wanted], (scale, scale) if self.int8 else None

    def launch(self, go: Any, arrays: Any, scales: Any) -> None:
        attention_decode(
            go, *arrays, kv_heads=self.kv, head_dim=self.d, context=self.context, scales=scales
        )  # fmt: skip

    def times(self) -> list[float]:
        """Microseconds a layer in four rounds over the layers."""
        specs, scales = self.specs()
        arrays = [cp.zeros(spec.shape, dtype=BF16 if spec.dtype == "bfloat16" else spec.dtype) for spec in specs]
        arrays[0], arrays[1], arrays[2] = noise(1, specs[0].shape[1], scale=1), *(cp.ones((1, self.d), "f4"),) * 2
        arrays[3:5] = rope_tables(self.context, self.d)
        table = np.random.default_rng(0).permutation(specs[7].shape[0]) % self.pages
        arrays[7], arrays[8] = cp.asarray(table, dtype=cp.int32), cp.asarray([self.context], dtype=cp.int32)
        make = random_bytes if self.int8 else noise
        pools = [[make(*spec.shape) for spec in specs[5:7]] for _ in range(self.layers)]
        scales = tuple(cp.full(spec.shape, 0.03, dtype=cp.float32) for spec in scales or ()) or None

        def step() -> None:
            for pair in pools * 4:
                self.launch(LAUNCHER, [*arrays[:5], *pair, *arrays[7:]], scales)

        return [graph_us(step, carveout) / 4 / self.layers for carveout in (None, 100)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", choices=[[], *MODELS], help="names from kernels/shapes.py")
    parser.add_argument("--attention", action="store_true")
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192, 32768])
    args = parser.parse_args()
    ceiling = ceilings()
    print(f"{ARCH}: copy {ceiling['copy']:.0f} GB/s, read {ceiling['read']:.0f} GB/s", flush=True)
    if args.attention:
        attention(ceiling, args.contexts)
    for name in args.models:
        cp.get_default_memory_pool().free_all_blocks()
        bench(name, ceiling)


if __name__ == "__main__":
    sys.exit(main())
