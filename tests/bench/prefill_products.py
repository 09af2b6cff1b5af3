"""Times the prefill products against cuBLAS (through PyTorch) in the same run. Three weights in turn, past the L2.

    python3 tests/bench/prefill_products.py                 # three reference shapes, and a layer of an 8B model
    python3 tests/bench/prefill_products.py --scan          # other tiles and hints for each

Per line: form, tokens x rows x K, microseconds, TFLOP/s, share of cuBLAS. Needs CuPy, PyTorch, cuda-tile and tileiras.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import cupy as cp

from kernels.configs import config
from kernels.linear_prefill import (
    LinearPrefillConfig,
    linear_prefill,
    linear_prefill_residual,
    linear_prefill_swiglu,
)
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

say = Report("prefill_products")
PLAIN = [(4096, 4096, 4096), (4096, 12288, 4096), (512, 4096, 4096)]
# one layer of Qwen3-8B: form, rows, K
LAYER = [("", 6144, 4096), ("_residual", 4096, 4096), ("_swiglu", 24576, 4096), ("_residual", 4096, 12288)]
LARGE = [
    {"tile_m": m, "tile_n": n, "tile_k": 64, "group": g, "warps": 8, "latency": lat}
    for m, n, g, lat in [(128, 256, 8, 10), (128, 256, 16, 10), (128, 256, 8, 8), (128, 256, 8, 0), (128, 256, 32, 10)]
] + [{"tile_m": 256, "tile_n": 256, "tile_k": 64, "group": 8, "warps": 8, "ctas": 2, "latency": lat} for lat in (0, 10)]
MEDIUM = [
    {"tile_m": 128, "tile_n": 128, "tile_k": 64, "group": g, "latency": lat}
    for g, lat in [(8, 0), (4, 0), (2, 0), (1, 0), (4, 4), (4, 6), (4, 8), (4, 10)]
] + [
    {"tile_m": 128, "tile_n": 128, "tile_k": 64, "group": 4, "latency": 8, "warps": 8},
    {"tile_m": 128, "tile_n": 256, "tile_k": 64, "group": 8, "latency": 10, "warps": 8},
    {"tile_m": 128, "tile_n": 256, "tile_k": 64, "group": 4, "latency": 10, "warps": 8, "ctas": 2},
    {"tile_m": 64, "tile_n": 256, "tile_k": 64, "group": 8, "latency": 10},
    {"tile_m": 128, "tile_n": 128, "tile_k": 64, "group": 4, "latency": 5},
    {"tile_m": 128, "tile_n": 128, "tile_k": 64, "group": 4, "latency": 7},
    {"tile_m": 128, "tile_n": 128, "tile_k": 64, "group": 1, "latency": 6},
    {"tile_m": 128, "tile_n": 128, "tile_k": 64, "group": 2, "latency": 6},
    {"tile_m": 128, "tile_n": 128, "tile_k": 64, "group": 4, "latency": 6, "warps": 8},
    {"tile_m": 128, "tile_n": 128, "tile_k": 128, "group": 4, "latency": 2},
    {"tile_m": 128, "tile_n": 128, "tile_k": 128, "group": 4, "latency": 3},
    {"tile_m": 128, "tile_n": 128, "tile_k": 128, "group": 4, "latency": 3, "warps": 8},
    {"tile_m": 128, "tile_n": 128, "tile_k": 64, "group": 4, "latency": 6, "ctas": 2},
    {"tile_m": 256, "tile_n": 128, "tile_k": 64, "group": 2, "latency": 6, "ctas": 2, "warps": 8},
]
SMALL = [
    {"tile_m": 64, "tile_n": n, "tile_k": k, "group": 8, "latency": lat}
    for n, k, lat in [(32, 256, 0), (32, 128, 0), (64, 128, 0), (64, 64, 0), (64, 64, 10), (128, 64, 0), (128, 64, 10)]
]


@dataclass(frozen=True)
class Run:
    """One variant of one product: form "", "_residual" or "_swiglu"; shape (tokens, rows, K)."""

    form: str
    shape: tuple[int, int, int]
    tiles: dict[str, Any]
    configured: bool = False


class Bench:
    """Arrays of the largest shape; smaller ones are views of them."""

    def __init__(self) -> None:
        self.x = random_half(4096 * 12288)
        self.weights = [random_half(24576 * 4096, scale=0.02) for _ in range(3)]
        self.y = cp.empty(4096 * 24576, BF16)
        self.residual = cp.zeros(4096 * 4096, dtype=cp.float32)

    def cublas(self, tokens: int, rows: int, k: int) -> float:
        """Microseconds of the product alone, whatever follows it."""
        import torch

        x = as_torch(self.x[: tokens * k].reshape(tokens, k))
        weights = [as_torch(w[: rows * k].reshape(rows, k)) for w in self.weights]
        y = as_torch(self.y[: tokens * rows].reshape(tokens, rows))

        def product(i: int) -> None:
            torch.matmul(x, weights[i % 3].T, out=y)

        return torch_microseconds(product)

    def own(self, launcher: Any, run: Run, i: int = 0) -> None:
        """One launch of a variant, with weight i in turn."""
        tokens, rows, k = run.shape
        x = self.x[: tokens * k].reshape(tokens, k)
        w = self.weights[i % 3][: rows * k].reshape(rows, k)
        if run.form == "_residual":
            out = self.residual[: tokens * rows].reshape(tokens, rows)
        else:
            columns = rows // 2 if run.form == "_swiglu" else rows
            out = self.y[: tokens * columns].reshape(tokens, columns)
        op: Any = {"": linear_prefill, "_residual": linear_prefill_residual, "_swiglu": linear_prefill_swiglu}[run.form]
        op(launcher, x, w, out, config=LinearPrefillConfig(**run.tiles))

    def time(self, run: Run, reference: float) -> float:
        """Microseconds of a variant, and a line about it."""
        try:
            us = microseconds(lambda i: self.own(LAUNCHER, run, i))
        except Exception as error:  # a variant that does not compile or run is a result too
            say(f"  {run}: {type(error).__name__} {str(error)[:100]}")
            return float("inf")
        tokens, rows, k = run.shape
        rate, share = 2 * tokens * rows * k / us / 1e6, 100 * reference / us
        size = f"{tokens}x{rows}x{k}"
        chosen = " *" if run.configured else "  "
        say(f"{run.form or '_plain':9s} {size:16s}{chosen} {us:7.1f} us {rate:4.0f} TFLOP/s {share:4.0f} % {run.tiles}")
        return us


def runs(tokens: list[int], *, scan: bool) -> list[Run]:
    """The reference shapes, then a layer for each number of tokens; with `scan` every variant after the table's."""
    work = [("", shape) for shape in PLAIN]
    work += [(form, (count, rows, k)) for count in tokens for form, rows, k in LAYER]
    found = []
    for form, shape in work:
        tiles = config(f"linear_prefill{form}", ARCH, tokens=shape[0], n=shape[1], k=shape[2])
        found.append(Run(form, shape, tiles, configured=True))
        variants = SMALL if shape[0] <= 128 else MEDIUM if shape[0] <= 512 else MEDIUM[:2] + LARGE
        found += [Run(form, shape, variant) for variant in variants if scan]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--scan", action="store_true", help="other tiles and hints for each shape")
    parser.add_argument("--plain", type=int, help="only the reference shape of so many tokens and 4,096 rows")
    parser.add_argument("--tokens", type=int, nargs="*", default=[64, 128, 256, 512, 1024, 4096])
    arguments = parser.parse_args()
    bench, work = Bench(), runs(arguments.tokens, scan=arguments.scan)
    if arguments.plain:
        work = [run for run in work if run.form == "" and run.shape[:2] == (arguments.plain, 4096)]
    compile_ahead(lambda launcher, run=run: bench.own(launcher, run) for run in work)
    reference: dict[tuple[int, int, int], float] = {}
    layers: dict[int, float] = {}
    for run in work:
        if run.shape not in reference:
            reference[run.shape] = bench.cublas(*run.shape)
            say(f"cuBLAS    {'x'.join(str(n) for n in run.shape):16s}   {reference[run.shape]:7.1f} us")
        us = bench.time(run, reference[run.shape])
        if run.configured and run.shape not in PLAIN:
            layers[run.shape[0]] = layers.get(run.shape[0], 0) + us
    for tokens, us in layers.items():
        speed = tokens / us / 36e-6
        say(f"{tokens} tokens: {us:.0f} us of products a layer; 36 layers {36 * us / 1e3:.1f} ms, {speed:.0f} tok/s")


if __name__ == "__main__":
    main()
