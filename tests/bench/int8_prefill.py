"""A prefill chunk's layers in INT8 on a GPU, by weights as they are stored and in half precision; beside BF16.

    python3 -m tests.bench.int8_prefill Qwen3-4B                        # 512 and 2,048 tokens, 12 layers
    python3 -m tests.bench.int8_prefill --tokens 64 --layers 36 Qwen3-4B
    python3 -m tests.bench.int8_prefill --block 2048 4096 16384 Qwen3-4B  # weights of a block of the dequantisation too
    python3 -m tests.bench.int8_prefill --tiles --tokens 64 128 256 512 1024 2048 Qwen3-4B  # the digits' products

Checked first: stores before the wait leave the chunk's stream as it was, bit for bit, over and over; the other
variants leave it close. Then microseconds a layer, all variants' graphs in turn: the engine's own plan, and others.
"without" leaves launches out: what is still to be won. Then kernels alone, a launch of each layer in a chain. Weights
are noise, every layer has its own.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np

from kernels.dequantise import DequantiseConfig, dequantise
from kernels.linear_prefill import LinearPrefillConfig
from kernels.shapes import MODELS
from kernels.specs import Recorded, RecordingLauncher
from tests.bench.int8_engine import config as config_of
from tests.bench.timing import Report, compile_records, medians
from tileinfer_core.backends.base import LoadOptions
from tileinfer_core.backends.cuda import ops
from tileinfer_core.backends.cuda.buffers import buffer_specs
from tileinfer_core.backends.cuda.census_steps import Step
from tileinfer_core.backends.cuda.census_times import prepare
from tileinfer_core.backends.cuda.gpu import GpuDevice
from tileinfer_core.backends.cuda.load import empty_runner
from tileinfer_core.backends.cuda.loader import random_weights
from tileinfer_core.backends.cuda.weights import COPIED, DigitLimits, Weight
from tileinfer_core.bench import BenchOptions
from tileinfer_core.config import ModelConfig
from tileinfer_core.errors import TileinferError
from tileinfer_core.models.define import define_model

if TYPE_CHECKING:
    from collections.abc import Sequence

say = Report("int8_prefill")
CHECKS = 20
CHUNK = 2048


@dataclass(frozen=True, eq=False)
class Variant:
    """What of the plan is as it is now. `copied`: products that have weights in half precision too, for chunks of any
    length or, with `own_limits`, as the table has it; `block`: weights of a dequantisation's block; `without`: kernels
    left out; `tiles`: of all products in digits, None for the table's; `half`: of those in half precision instead."""

    name: str
    norms: bool = True
    early: bool = True
    copied: tuple[str, ...] = ()
    own_limits: bool = False
    block: int = DequantiseConfig.weights
    without: tuple[str, ...] = ()
    tiles: LinearPrefillConfig | None = None
    half: bool = False


BEFORE = Variant("as stored, as it was: digits apart, dequantisation waits", norms=False, early=False)
WAITING = Variant("as stored, norms in digits", early=False)
STORED = Variant("as stored: digits, dequantisation early")
NOW = Variant("the engine's plan", copied=COPIED, own_limits=True)
VARIANTS = (
    BEFORE,
    WAITING,
    STORED,
    Variant("down in half precision", copied=COPIED[:1]),
    Variant("down and o in half precision", copied=COPIED[:2]),
    Variant("down, o and qkv in half precision", copied=COPIED[:3]),
    Variant("all in half precision", copied=COPIED),
    NOW,
    Variant("as stored, without dequantisation", without=("dequantise_kernel",)),
)


def _tiles(*rows: tuple[int, int, int, int, int, int, int, bool]) -> list[LinearPrefillConfig]:
    """From tile_m, tile_n, tile_k, group, warps, occupancy, latency, persistent."""
    return [
        LinearPrefillConfig(*row[:4], warps=row[4], occupancy=row[5], latency=row[6], persistent=row[7]) for row in rows
    ]


FORMS = ("", "_residual", "_swiglu", "_xielu")
DIGIT_TILES = _tiles(
    (128, 256, 64, 16, 8, 0, 8, True),
    (128, 256, 64, 16, 8, 0, 0, True),
    (128, 256, 64, 4, 8, 0, 8, True),
    (128, 256, 128, 16, 8, 0, 0, True),
    (128, 256, 128, 8, 8, 0, 0, True),
    (128, 256, 128, 16, 8, 0, 0, False),
    (128, 128, 128, 8, 0, 0, 0, True),
    (128, 128, 128, 16, 0, 0, 0, True),
    (128, 128, 128, 8, 0, 0, 0, False),
    (128, 128, 128, 8, 0, 2, 0, False),
    (128, 64, 128, 8, 0, 0, 0, True),
    (128, 64, 128, 8, 0, 2, 0, False),
    (64, 256, 128, 8, 0, 0, 0, True),
    (64, 128, 128, 8, 0, 0, 0, True),
    (64, 128, 128, 8, 0, 2, 0, False),
    (64, 64, 256, 8, 0, 0, 0, False),
    (64, 32, 256, 8, 0, 0, 0, False),
)
HALF_TILES = _tiles(
    (128, 256, 64, 16, 8, 0, 6, True),
    (128, 256, 64, 16, 8, 0, 4, True),
    (128, 256, 64, 16, 8, 0, 6, False),
    (128, 128, 64, 4, 0, 0, 6, False),
    (128, 128, 64, 8, 0, 2, 0, False),
    (128, 128, 64, 8, 0, 0, 0, False),
)


class VariantOps(ops.Ops):
    """The plan's vocabulary with some words as they were."""

    def __init__(self, variant: Variant, *args: Any) -> None:
        super().__init__(*args)
        self._variant = variant

    def norm_rows_for(self, x: Any, gain: Any, w: Any, b: Any) -> Any:
        return super().norm_rows_for(x, gain, w if self._variant.norms else Weight(w.values), b)

    def _scratch_is_free(self) -> bool:
        return self._variant.early and super()._scratch_is_free()

    def _product_config(self, family: str, x: Any, w: Any) -> LinearPrefillConfig:
        other = "digits" in family if self._variant.half else "digits" not in family
        chosen = None if other else self._variant.tiles
        return chosen or super()._product_config(family, x, w)


class Chunk:
    """One model's arrays, filled with noise, and the launches of its chunks."""

    def __init__(self, device: Any, name: str, recipe: str, layers: int) -> None:
        model = define_model(ModelConfig.from_dict({**config_of(name, recipe), "num_hidden_layers": layers}), tied=True)
        self.device, self.layers, self.structure = device, layers, model.structure
        self.runner, arrays = empty_runner(model, device, LoadOptions(CHUNK, CHUNK), "bfloat16")
        scratch = buffer_specs(model, device.arch, CHUNK, CHUNK, "bfloat16").get("rows_weight")
        if scratch is not None:  # beside copies the engine has none
            self.runner.buffers["rows_weight"] = device.empty(*scratch)
        random_weights(model, arrays, device)
        device.run(self.runner.plans.copies())
        device.copy_in(self.runner.buffers["token_ids"], np.arange(CHUNK, dtype=np.int32))
        prepare(self.runner, Step("prefill", CHUNK, CHUNK), BenchOptions().sampling)

    def launches(self, tokens: int, variant: Variant = NOW) -> list[Recorded]:
        device, plans = self.device, self.runner.plans

        def recorder() -> ops.Ops:
            return VariantOps(variant, RecordingLauncher(device.arch, pdl=device.pdl), self.structure)

        limits = plans._digit_limits if variant.own_limits else DigitLimits(0, 0, 0, 0)
        copies = {name: array for name, array in plans._copies.items() if name.split(".")[-2] in variant.copied}
        with (
            mock.patch.object(plans, "_copies", copies),
            mock.patch.object(plans, "_digit_limits", limits),
            mock.patch.object(plans, "_ops", recorder),
            mock.patch.object(ops, "dequantise", partial(dequantise, config=DequantiseConfig(variant.block))),
        ):
            return [record for record in plans.prefill(tokens) if record.name not in variant.without]

    def stream(self, launches: Sequence[Recorded], tokens: int) -> np.ndarray:
        """The residual stream after the chunk."""
        self.device.run(launches)
        return self.device.download(self.runner.buffers["rows_residual"][:tokens])


def check(chunk: Chunk, tokens: int) -> None:
    """Raises AssertionError."""
    want = chunk.stream(chunk.launches(tokens, WAITING), tokens)
    assert np.isfinite(want).all()
    launches = chunk.launches(tokens, STORED)
    for _ in range(CHECKS):
        np.testing.assert_array_equal(chunk.stream(launches, tokens), want)
    say(f"{tokens} tokens: early stores leave the same bits {CHECKS} times")
    for other in [variant for variant in VARIANTS if not variant.without]:
        found = chunk.stream(chunk.launches(tokens, other), tokens)
        difference = float(np.abs(found - want).max() / np.abs(want).max())
        assert difference < 0.05, (other.name, difference)
        say(f"{tokens} tokens: differs by {difference:.1e}: {other.name}")


def microseconds(device: Any, works: Sequence[Sequence[Recorded]]) -> list[float]:
    """Of each list of launches, captured once and replayed in turn."""
    graphs = []
    for work in works:
        device.run(work)  # loads every kernel
        graphs.append(device.record(work))
    return medians(device, graphs)


def time_layers(half: Chunk, int8: Chunk, tokens: int, variants: Sequence[Variant]) -> None:
    works = [half.launches(tokens)] + [int8.launches(tokens, variant) for variant in variants]
    found = microseconds(int8.device, works)
    for name, us in zip(["BF16", *(variant.name for variant in variants)], found, strict=True):
        share = 100 * found[0] / us
        say(f"{tokens:5d} tokens {us / int8.layers:8.1f} us a layer, {share:5.1f} % of BF16's speed: {name}")


def time_alone(half: Chunk, int8: Chunk, tokens: int) -> None:
    """Each kernel in a chain of its own over the layers, in BF16 and in INT8."""
    works: dict[str, list[Recorded]] = {}
    for name, chunk in (("BF16", half), ("INT8", int8)):
        for record in chunk.launches(tokens):
            shapes = [arg.shape for arg in record.args if hasattr(arg, "shape") and len(arg.shape) == 2]
            rows, columns = max(shapes, key=lambda shape: shape[0] * shape[1])
            works.setdefault(f"{name} {record.name}, {rows} x {columns}", []).append(record)
    found = microseconds(int8.device, list(works.values()))
    for (name, work), us in zip(works.items(), found, strict=True):
        say(f"{tokens:5d} tokens {us / int8.layers:8.2f} us a layer alone, {len(work):3d} launches: {name}")


def time_tiles(chunk: Chunk, tokens: int, family: str, tiles: Sequence[LinearPrefillConfig]) -> None:
    """Each kind of product, a chain over the layers, for the table's tiles and others."""
    variants = _trials(family, tiles)
    for form in FORMS:
        kinds: dict[tuple[int, ...], list[list[Recorded]]] = {}
        for number, variant in enumerate(variants):
            for record in chunk.launches(tokens, variant):
                if record.name == f"{family}{form}_kernel":
                    w = record.args[2 if "digits" in family else 1]
                    kinds.setdefault(w.shape, [[] for _ in variants])[number].append(record)
        for (rows, columns), works in kinds.items():
            able = [pair for pair in zip(variants, works, strict=True) if pair[1] and _runs(chunk, pair[1])]
            for (variant, work), us in zip(able, microseconds(chunk.device, [w for _, w in able]), strict=True):
                say(f"{tokens:5d} x {rows} x {columns} {us / len(work):8.1f} us {family}{form}: {variant.name}")


def _trials(family: str, tiles: Sequence[LinearPrefillConfig]) -> list[Variant]:
    half = "digits" not in family
    return [NOW] + [Variant(_named(config), tiles=config, half=half) for config in tiles]


def _named(tiles: LinearPrefillConfig) -> str:
    numbers = {**tiles.hints, "latency": tiles.latency}
    hints = "".join(f", {name} {value}" for name, value in numbers.items() if value) + ", persistent" * tiles.persistent
    return f"{tiles.tile_m}x{tiles.tile_n}x{tiles.tile_k}, group {tiles.group}{hints}"


def scan(half: Chunk, int8: Chunk, lengths: Sequence[int]) -> None:
    for chunk, family, tiles in (
        (half, "linear_prefill", HALF_TILES), (int8, "linear_prefill_digits", DIGIT_TILES),
    ):  # fmt: skip
        names = {f"{family}{form}_kernel" for form in FORMS}
        variants = _trials(family, tiles)
        records = [r for tokens in lengths for variant in variants for r in chunk.launches(tokens, variant)]
        compile_records([record for record in records if record.name in names])
        for tokens in lengths:
            time_tiles(chunk, tokens, family, tiles)


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
    variants = VARIANTS + tuple(Variant(f"as stored, blocks of {n} weights", block=n) for n in args.block)
    for name in args.models:
        int8 = Chunk(device, name, args.recipe, args.layers)
        half = Chunk(device, name, "bf16", args.layers)
        if args.tiles:
            scan(half, int8, args.tokens)
            continue
        works = [half.launches(tokens) for tokens in args.tokens]
        works += [int8.launches(tokens, variant) for tokens in args.tokens for variant in variants]
        compile_records([record for work in works for record in work])
        say(f"{name}, {args.layers} layers, {args.recipe} recipe")
        for tokens in args.tokens:
            try:
                check(int8, tokens)
            except AssertionError as error:
                failed = True
                say(f"{tokens} tokens: WRONG: {' '.join(str(error).split())[:300]}")
            time_layers(half, int8, tokens, variants)
            time_alone(half, int8, tokens)
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
