"""A prefill chunk's layers in INT8 on a GPU, with and without what hides digits and dequantisation; beside BF16.

    python3 -m tests.bench.int8_prefill Qwen3-4B                        # 512 and 2,048 tokens, 12 layers
    python3 -m tests.bench.int8_prefill --tokens 64 --layers 36 Qwen3-4B
    python3 -m tests.bench.int8_prefill --block 2048 4096 16384 Qwen3-4B  # weights of a block of the dequantisation too
    python3 -m tests.bench.int8_prefill --tiles --tokens 64 128 256 512 1024 2048 Qwen3-4B  # the digits' products

Checked first: stores before the wait leave the chunk's stream as it was, bit for bit, over and over; norms straight in
digits leave it close. Then microseconds a layer, all variants' graphs in turn: the engine's own plan with its launches
as they are and as they were. "without" leaves launches out: what is still to be won. Then kernels alone, a launch of
each layer in a chain. Weights are noise, every layer has its own.
"""

from __future__ import annotations

import argparse
import os
import statistics
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import cupy
import numpy as np

from kernels.compile import CompileError, compile_all
from kernels.dequantise import DequantiseConfig, dequantise
from kernels.linear_prefill import LinearPrefillConfig
from kernels.shapes import MODELS
from kernels.specs import Recorded, RecordingLauncher
from tests.bench.int8_engine import config as config_of
from tests.bench.timing import Report
from tileinfer_core.backends.cuda import ops
from tileinfer_core.backends.cuda.census_steps import Step
from tileinfer_core.backends.cuda.census_times import prepare
from tileinfer_core.backends.cuda.gpu import GpuDevice
from tileinfer_core.backends.cuda.load import empty_runner
from tileinfer_core.backends.cuda.loader import random_weights
from tileinfer_core.bench import BenchOptions
from tileinfer_core.config import ModelConfig
from tileinfer_core.errors import TileinferError
from tileinfer_core.models.define import define_model

if TYPE_CHECKING:
    from collections.abc import Sequence

say = Report("int8_prefill")
ROUNDS, WARMUP, CHECKS = 15, 3, 20
CHUNK = 2048


@dataclass(frozen=True)
class Variant:
    """What of the plan is as it is now. `ahead`: share of down's weights widened behind o; `block`: weights of a
    dequantisation's block; `without`: kernels left out; `tiles`: of all products in digits, None for the table's."""

    name: str
    norms: bool = True
    early: bool = True
    ahead: float = ops.AHEAD
    block: int = DequantiseConfig.weights
    without: tuple[str, ...] = ()
    tiles: LinearPrefillConfig | None = None


BEFORE = Variant("as it was: digits apart, dequantisation waits", norms=False, early=False)
NOW = Variant("the engine's plan")
VARIANTS = (
    BEFORE,
    Variant("norms in digits", early=False),
    Variant("norms in digits, dequantisation early, all behind gate/up", ahead=0.0),
    Variant("norms in digits, dequantisation early, all behind o", ahead=1.0),
    NOW,
    Variant("the engine's plan without dequantisation", without=("dequantise_kernel",)),
    Variant("the engine's plan without the digits of o", without=("digits_kernel",)),
)


DIGIT_PRODUCTS = tuple(f"linear_prefill_digits{form}_kernel" for form in ("", "_residual", "_swiglu", "_xielu"))
TILES = [
    LinearPrefillConfig(m, n, k, group, warps=warps, occupancy=occupancy, latency=latency)
    for m, n, k, group, warps, occupancy, latency in [
        (128, 256, 128, 16, 8, 0, 0),
        (128, 256, 128, 8, 8, 0, 0),
        (128, 256, 128, 4, 8, 0, 0),
        (128, 256, 64, 16, 8, 0, 0),
        (128, 256, 64, 16, 8, 0, 8),
        (128, 128, 128, 8, 0, 0, 0),
        (128, 128, 128, 8, 8, 0, 0),
        (128, 128, 128, 8, 0, 2, 0),
        (128, 128, 64, 8, 0, 2, 0),
        (64, 256, 128, 8, 0, 0, 0),
        (64, 128, 128, 8, 0, 0, 0),
        (64, 128, 128, 8, 0, 2, 0),
        (64, 64, 128, 8, 0, 2, 0),
        (64, 64, 256, 8, 0, 0, 0),
        (64, 32, 256, 8, 0, 0, 0),
    ]
]


class VariantOps(ops.Ops):
    """The plan's vocabulary with some words as they were."""

    def __init__(self, variant: Variant, *args: Any) -> None:
        super().__init__(*args)
        self._variant = variant

    def norm_rows_for(self, x: Any, gain: Any, w: Any, b: Any) -> Any:
        return super().norm_rows_for(x, gain, w if self._variant.norms else (w[0], None), b)

    def _after_digits_product(self) -> bool:
        return self._variant.early and super()._after_digits_product()

    def _product_config(self, family: str, x: Any, w: Any) -> LinearPrefillConfig:
        chosen = self._variant.tiles if "digits" in family else None
        return chosen or super()._product_config(family, x, w)


class Chunk:
    """One model's arrays, filled with noise, and the launches of its chunks."""

    def __init__(self, device: Any, name: str, recipe: str, layers: int) -> None:
        model = define_model(ModelConfig.from_dict({**config_of(name, recipe), "num_hidden_layers": layers}), tied=True)
        self.device, self.layers, self.structure = device, layers, model.structure
        self.runner, arrays = empty_runner(model, device, context=CHUNK, chunk=CHUNK, half="bfloat16", kv="bf16")
        random_weights(model, arrays, device)
        device.copy_in(self.runner.buffers["token_ids"], np.arange(CHUNK, dtype=np.int32))
        prepare(self.runner, Step("prefill", CHUNK, CHUNK), BenchOptions().sampling)

    def launches(self, tokens: int, variant: Variant = NOW) -> list[Recorded]:
        device, plans = self.device, self.runner.plans

        def recorder() -> ops.Ops:
            return VariantOps(variant, RecordingLauncher(device.arch, pdl=device.pdl), self.structure)

        chosen = partial(dequantise, config=DequantiseConfig(variant.block))
        with (
            mock.patch.object(plans, "_ops", recorder),
            mock.patch.object(ops, "dequantise", chosen),
            mock.patch.object(ops, "AHEAD", variant.ahead),
        ):
            return [record for record in plans.prefill(tokens) if record.name not in variant.without]

    def stream(self, launches: Sequence[Recorded], tokens: int) -> np.ndarray:
        """The residual stream after the chunk."""
        self.device.run(launches)
        return self.device.download(self.runner.buffers["rows_residual"][:tokens])


def compile_ahead(arch: str, records: list[Recorded]) -> None:
    for result in compile_all(records, arch, workers=os.cpu_count() or 2):
        if isinstance(result, CompileError):
            say(str(result)[:300])


def check(chunk: Chunk, tokens: int) -> None:
    """Raises AssertionError."""
    want = chunk.stream(chunk.launches(tokens, VARIANTS[1]), tokens)
    for early in [variant for variant in VARIANTS if variant.early and not variant.without]:
        launches = chunk.launches(tokens, early)
        for _ in range(CHECKS):
            np.testing.assert_array_equal(chunk.stream(launches, tokens), want, err_msg=early.name)
    before = chunk.stream(chunk.launches(tokens, BEFORE), tokens)
    assert np.isfinite(want).all()
    difference = float(np.abs(want - before).max() / np.abs(before).max())
    assert difference < 0.05, difference
    say(f"{tokens} tokens: early stores leave the same bits {CHECKS} times; norms in digits differ by {difference:.1e}")


def microseconds(device: Any, works: Sequence[Sequence[Recorded]]) -> list[float]:
    """Of each list of launches, captured once and replayed in turn."""
    graphs = []
    for work in works:
        device.run(work)  # loads every kernel
        graphs.append(device.record(work))
    rounds = [[_replay(device, graph) for graph in graphs] for _ in range(WARMUP + ROUNDS)]
    return [statistics.median(times) for times in zip(*rounds[WARMUP:], strict=True)]


def _replay(device: Any, graph: Any) -> float:
    start, stop = cupy.cuda.Event(), cupy.cuda.Event()
    start.record(device.stream)
    graph.launch()
    stop.record(device.stream)
    stop.synchronize()
    return float(cupy.cuda.get_elapsed_time(start, stop)) * 1e3


def time_layers(half: Chunk, int8: Chunk, tokens: int, variants: Sequence[Variant]) -> None:
    works = [half.launches(tokens)] + [int8.launches(tokens, variant) for variant in variants]
    found = microseconds(int8.device, works)
    for name, us in zip(["BF16", *(variant.name for variant in variants)], found, strict=True):
        share = 100 * found[0] / us
        say(f"{tokens:5d} tokens {us / int8.layers:8.1f} us a layer, {share:5.1f} % of BF16's speed: {name}")


def time_alone(int8: Chunk, tokens: int, variants: Sequence[Variant]) -> None:
    """Kernels with little arithmetic, each kind in a chain of its own, after the layers they are in."""
    small = {"rms_norm_kernel", "rms_norm_digits_kernel", "digits_kernel", "dequantise_kernel"}
    works: dict[tuple[str, Any], list[Recorded]] = {}
    for variant in variants:
        for record in int8.launches(tokens, variant):
            if record.name in small:
                columns = max(int(arg.shape[-1]) for arg in record.args if hasattr(arg, "shape"))
                block = f", blocks of {variant.block}" if record.name == "dequantise_kernel" else ""
                works.setdefault((f"{record.name}, {columns} columns{block}", variant), []).append(record)
    once = {name: work for (name, _), work in works.items()}
    for (name, work), us in zip(once.items(), microseconds(int8.device, list(once.values())), strict=True):
        say(f"{tokens:5d} tokens {us / len(work):8.2f} us a launch alone  {name}")


def time_tiles(int8: Chunk, tokens: int) -> None:
    """Each kind of product in digits, a chain over the layers, for the table's tiles and others."""
    variants = [NOW] + [Variant(_named(tiles), tiles=tiles) for tiles in TILES]
    for kernel in DIGIT_PRODUCTS:
        works = [[r for r in int8.launches(tokens, variant) if r.name == kernel] for variant in variants]
        able = [(variant, work) for variant, work in zip(variants, works, strict=True) if work and _runs(int8, work)]
        for (variant, work), us in zip(able, microseconds(int8.device, [work for _, work in able]), strict=True):
            rows, columns = work[0].args[2].shape
            kind = kernel.removesuffix("_kernel")
            say(f"{tokens:5d} x {rows} x {columns} {us / len(work):8.1f} us {kind}: {variant.name}")


def _named(tiles: LinearPrefillConfig) -> str:
    hints = "".join(f", {name} {value}" for name, value in {**tiles.hints, "latency": tiles.latency}.items() if value)
    return f"{tiles.tile_m}x{tiles.tile_n}x{tiles.tile_k}, group {tiles.group}{hints}"


def scan(int8: Chunk, lengths: Sequence[int]) -> None:
    variants = [NOW] + [Variant("", tiles=tiles) for tiles in TILES]
    records = [r for tokens in lengths for variant in variants for r in int8.launches(tokens, variant)]
    compile_ahead(int8.device.arch, [record for record in records if record.name in DIGIT_PRODUCTS])
    for tokens in lengths:
        time_tiles(int8, tokens)


def _runs(chunk: Chunk, work: Sequence[Recorded]) -> bool:
    try:
        chunk.device.run(work[:1])
        chunk.device.synchronize()
    except TileinferError as error:
        say(f"  {str(error)[:200]}")
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", choices=list(MODELS))
    parser.add_argument("--tokens", type=int, nargs="*", default=[512, CHUNK], help="multiples of 64, up to 2048")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--recipe", default="default", choices=["default", "rows", "groups-of-128"])
    parser.add_argument("--tiles", action="store_true", help="only tiles of the products in digits")
    parser.add_argument("--block", type=int, nargs="*", default=[], help="weights of a block of the dequantisation")
    args = parser.parse_args()
    device, failed = GpuDevice(), False
    variants = VARIANTS + tuple(Variant(f"the engine's plan, blocks of {n} weights", block=n) for n in args.block)
    for name in args.models:
        int8 = Chunk(device, name, args.recipe, args.layers)
        if args.tiles:
            scan(int8, args.tokens)
            continue
        half = Chunk(device, name, "bf16", args.layers)
        works = [half.launches(tokens) for tokens in args.tokens]
        works += [int8.launches(tokens, variant) for tokens in args.tokens for variant in variants]
        compile_ahead(device.arch, [record for work in works for record in work])
        say(f"{name}, {args.layers} layers, {args.recipe} recipe")
        for tokens in args.tokens:
            try:
                check(int8, tokens)
            except AssertionError as error:
                failed = True
                say(f"{tokens} tokens: WRONG: {' '.join(str(error).split())[:300]}")
            time_layers(half, int8, tokens, variants)
            time_alone(int8, tokens, variants)
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
