"""What each way of rounding a model to INT8 costs: perplexity, KL divergence and agreement, on the NumPy backend.

    python tests/bench/int8_recipes.py FOLDER --text FILE --calibrate OTHER_FILE [--tokens 4096] [--only WORD]
    python tests/bench/int8_recipes.py FOLDER --text FILE --calibrate OTHER_FILE --activations

FOLDER is an unquantised model. Every linear layer and the head are rounded; a tied embedding is the head's own array.
The two texts must differ. Everything is measured in float32 arithmetic but for the rounding that a line names.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np

from tileinfer_core.backends.numpy_backend import NumpyRunner, through_int8
from tileinfer_core.compensate import compensation, round_compensated
from tileinfer_core.config import ModelConfig
from tileinfer_core.dtypes import BFLOAT16
from tileinfer_core.int8 import from_int8, scales_of, to_int8
from tileinfer_core.models.define import define_from_files
from tileinfer_core.progress import silent
from tileinfer_core.tokenizer import Tokenizer
from tileinfer_core.weights import WeightFiles

PRODUCTS = ("qkv", "o", "gate_up", "down")
WINDOW = 1024


def load(folder: Path, kv: str = "bf16") -> NumpyRunner:
    files = WeightFiles.open(folder)
    model, _ = define_from_files(ModelConfig.load(folder), files)
    return NumpyRunner.load(model, files, silent, kv=kv)


class Bench:
    def __init__(self, folder: Path, text: Path, calibrate: Path, tokens: int) -> None:
        self.runner = load(folder)
        self.model = self.runner._model
        tokenizer = Tokenizer.load(folder, self.model.config.vocab_size)
        self.ids = tokenizer.encode(text.read_text("utf-8"), special=False)[: tokens + 1]
        self.calibration = tokenizer.encode(calibrate.read_text("utf-8"), special=False)
        self.weights = self.matrices()
        self.plain = {name: array.copy() for name, array in self.weights.items()}
        self.base = list(self.log_probabilities())
        self.base_nll = self.nll(self.base)

    def matrices(self) -> dict[str, np.ndarray]:
        weights = self.runner._weights
        found = {
            f"{i}.{product}": getattr(layer, product) for i, layer in enumerate(weights.layers) for product in PRODUCTS
        }
        found["head"] = weights.lm_head
        if not self.model.tied:
            found["embedding"] = weights.embedding
        return found

    def log_probabilities(self):
        """log p [T, V] for each window; windows do not overlap."""
        for start in range(0, len(self.ids) - 1, WINDOW):
            ids = self.ids[start : start + WINDOW + 1]
            logits = self.runner.logits(self.runner.new_cache(len(ids)), ids[:-1])
            logits -= logits.max(axis=1, keepdims=True)
            logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True, dtype=np.float64)).astype(np.float32)
            yield ids[1:], logits

    def nll(self, windows) -> float:
        return float(np.concatenate([-logp[np.arange(len(ids)), ids] for ids, logp in windows]).mean(dtype=np.float64))

    def measure(self, name: str, bytes_a_weight: float | None, seconds: float = 0) -> None:
        nll, kl, agree = [], [], []
        for (ids, base), (_, mine) in zip(self.base, self.log_probabilities(), strict=True):
            nll.append(-mine[np.arange(len(ids)), ids])
            kl.append((np.exp(base) * (base - mine)).sum(axis=1, dtype=np.float64))
            agree.append(base.argmax(1) == mine.argmax(1))
        kls = np.concatenate(kl)
        change = np.expm1(np.concatenate(nll).mean(dtype=np.float64) - self.base_nll) * 100
        size = "" if bytes_a_weight is None else f"{bytes_a_weight:.3f}"
        print(
            f"| {name} | {size} | {change:+.2f} % | {kls.mean() * 1e3:.2f}e-3 | {np.quantile(kls, 0.99) * 1e3:.1f}e-3 "
            f"| {np.concatenate(agree).mean() * 100:.1f} % | {seconds:.0f} s |",
            flush=True,
        )

    def restore(self) -> None:
        for name, array in self.weights.items():
            np.copyto(array, self.plain[name])

    def hessians(self, tokens: int) -> dict[str, np.ndarray]:
        """Σ x·xᵀ of every product's inputs over the calibration text."""
        ops = self.runner._ops
        names = {id(array): name for name, array in self.weights.items()}
        found: dict[str, np.ndarray] = {}
        linear = ops.linear

        def listening(x, weight, bias):
            name = names[id(weight)]
            found[name] = found.get(name, 0) + (x.T @ x).astype(np.float64)
            return linear(x, weight, bias)

        ops.linear = listening
        for start in range(0, tokens, WINDOW):
            ids = self.calibration[start : start + WINDOW]
            self.runner.logits(self.runner.new_cache(len(ids)), ids)
        del ops.linear
        return found

    def quantise(self, groups, factors=None) -> float:
        """Round every matrix; `groups(name)` is None for a row, a size, or "bf16". Returns bytes a weight."""
        size = count = 0
        for name, array in self.weights.items():
            plain, group = self.plain[name], groups(name)
            count += plain.size
            if group == "bf16":
                np.copyto(array, plain)
                size += 2 * plain.size
                continue
            scales = scales_of(plain, group)
            if factors and name in factors:
                q = round_compensated(plain, scales, factors[name])
            else:
                q = to_int8(plain, scales)
            np.copyto(array, from_int8(q, scales))
            size += q.nbytes + scales.nbytes
        return size / count


def digits(x: np.ndarray, number: int) -> np.ndarray:
    """x [T, K] as `number` int8 digits with one scale for each token hold it: s · (128·hi + lo), and so on."""
    steps = {1: 127, 2: 127 * 128 + 63, 3: (127 * 128 + 63) * 128 + 63}[number]
    scale = np.abs(x).max(axis=1, keepdims=True).astype(np.float64) / steps
    scale[scale == 0] = 1
    return (np.rint(x / scale) * scale).astype(np.float32)


def decode_digits(x: np.ndarray) -> np.ndarray:
    """x [T, K] as a decode step's two digits hold it: whole multiples of a power of two, the largest below 2^14."""
    top = np.abs(x).max(axis=1, keepdims=True).astype(np.float64)
    scale = np.exp2(np.floor(np.log2(np.maximum(top, 2.0**-100))) - 13)
    return (np.rint(x / scale) * scale).astype(np.float32)


def half(x: np.ndarray) -> np.ndarray:
    """What is left of `x` in BF16."""
    return x.astype(BFLOAT16).astype(np.float32)


def sweep(bench: Bench, only: str, calibration_tokens: int) -> None:
    def rows(name):
        return None

    def head(size, layers=None):
        return lambda name: size if name in ("head", "embedding") else layers

    def product(size, *products, head_size=None):
        return lambda name: (
            size if name.split(".")[-1] in products else head_size if name in ("head", "embedding") else None
        )

    default = product(64, "down", head_size=64)
    recipes = {
        "a row": rows,
        "a row; head 64": head(64),
        "a row; head 32": head(32),
        "a row; head BF16": head("bf16"),
        "a row; down and head 64 (the default)": default,
        "a row; down 64, head 32": product(64, "down", head_size=32),
        "a row; qkv and head 64": product(64, "qkv", head_size=64),
        "a row; gate/up and head 64": product(64, "gate_up", head_size=64),
        "a row; down, qkv and head 64": product(64, "down", "qkv", head_size=64),
        "64": head(64, 64),
        "32": head(32, 32),
    }
    print("| recipe | bytes a weight | perplexity | mean KL | 99 % KL | top-1 | time |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    bench.measure("unquantised", None)
    for name, groups in recipes.items():
        if only in name and bench.weights["0.qkv"].shape[1] % 64 == 0:
            start = time.perf_counter()
            size = bench.quantise(groups)
            bench.measure(name, size, time.perf_counter() - start)
    bench.restore()
    start = time.perf_counter()
    factors = {name: compensation(hessian) for name, hessian in bench.hessians(calibration_tokens).items()}
    made = time.perf_counter() - start
    layers_only = {name: factor for name, factor in factors.items() if name != "head"}
    compensated = {
        "a row, compensated": (rows, factors),
        "a row; head 64 and not compensated, layers compensated": (head(64), layers_only),
        "a row; down and head 64, compensated (--calibrate)": (default, factors),
        "64, compensated": (head(64, 64), factors),
    }
    for name, (groups, chosen) in compensated.items():
        if only in name:
            start = time.perf_counter()
            size = bench.quantise(groups, chosen)
            bench.measure(name, size, made + time.perf_counter() - start)


def activations(bench: Bench) -> None:
    """On top of the default recipe: digits or BF16 for the activations, weights in BF16, INT8 keys and values."""

    def default(name):
        return 64 if name in ("head", "embedding") or name.endswith("down") else None

    bench.quantise(default)
    ops, linear = bench.runner._ops, bench.runner._ops.linear
    bench.base = list(bench.log_probabilities())
    bench.base_nll = bench.nll(bench.base)
    print("\n| against the same weights, everything else float32 | | perplexity | mean KL | 99 % KL | top-1 | |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for number in (1, 2, 3):
        ops.linear = lambda x, weight, bias, n=number: linear(digits(x, n), weight, bias)
        bench.measure(f"activations in {number} digit{'s' * (number > 1)}", None)
    ops.linear = lambda x, weight, bias: linear(decode_digits(x), weight, bias)
    bench.measure("activations in two digits by a power of two", None)
    ops.linear = lambda x, weight, bias: linear(half(x), weight, bias)
    bench.measure("activations in BF16", None)
    for name, array in bench.weights.items():
        if name not in ("head", "embedding"):
            np.copyto(array, half(array))
    bench.measure("activations and layers' weights in BF16", None)
    del ops.linear
    bench.measure("layers' weights in BF16", None)
    bench.quantise(default)
    ops._rounded_kv = True
    bench.measure("INT8 keys and values", None)
    write_kv = ops.write_kv
    ops._rounded_kv = False
    ops.write_kv = lambda cache, layer, k, v: write_kv(cache, layer, through_int8(k), v)
    bench.measure("INT8 keys", None)
    ops.write_kv = lambda cache, layer, k, v: write_kv(cache, layer, k, through_int8(v))
    bench.measure("INT8 values", None)
    del ops.write_kv


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--calibrate", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--calibration-tokens", type=int, default=4096)
    parser.add_argument("--only", default="", help="recipes whose name has this")
    parser.add_argument("--activations", action="store_true", help="digits, BF16 and INT8 KV in place of recipes")
    given = parser.parse_args()
    bench = Bench(given.folder, given.text, given.calibrate, given.tokens)
    print(f"{given.folder}: {len(bench.ids) - 1} tokens, perplexity {np.exp(bench.base_nll):.4f}\n")
    if given.activations:
        activations(bench)
    else:
        sweep(bench, given.only, given.calibration_tokens)


if __name__ == "__main__":
    main()
