"""The engine's whole decode step on a GPU: carve-outs at some contexts, tiles of attention and of INT8 products.

    python3 -m tests.bench.whole_step Qwen3-0.6B Qwen3-4B Qwen3-8B
    python3 -m tests.bench.whole_step --contexts 512 2000 --carveouts 14 28 43 58 -- Qwen3-4B
    python3 -m tests.bench.whole_step --weights int8 --kv int8 --attention --products --carveouts 58 -- Qwen3-4B

Weights are noise, INT8 in the default recipe; every layer has keys and values of its own. Microseconds a step,
embedding and sampling included, the graphs of a row in turn; the first is the engine's own.
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import replace
from typing import TYPE_CHECKING
from unittest import mock

import kernels.attention_decode as decode
from kernels import linear_int8
from kernels.attention_decode import AttentionConfig, attention_config, workspace_floats
from kernels.int8_digits import CHUNK
from kernels.int8_dot import Int8Config, linear_int8_config, takes_digits
from kernels.shapes import MODELS
from tests.bench.int8_chain import DEFAULT
from tests.bench.int8_engine import config as config_of
from tests.bench.timing import Report, compile_records, medians
from tileinfer_core.backends.base import LoadOptions
from tileinfer_core.backends.cuda.census_steps import Step
from tileinfer_core.backends.cuda.census_times import prepare
from tileinfer_core.backends.cuda.gpu import GpuDevice
from tileinfer_core.backends.cuda.load import empty_runner
from tileinfer_core.backends.cuda.loader import random_weights
from tileinfer_core.bench import BenchOptions
from tileinfer_core.config import ModelConfig
from tileinfer_core.models.define import define_model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernels.specs import Recorded

    Attentions = Sequence[Sequence[int]]
    Cuts = list[int]

say = Report("whole_step")
MOST_SPLITS = 96
TILES = ((32,), (3, 4), (1, 2), (1, 2, 4))  # splits, occupancy, pages, latency
SPARE = 256  # tokens: each replay adds one


# by columns of the product: rows of a block and occupancy
PRODUCTS: dict[int, list[tuple[int, int | None]]] = {
    1024: [(8, None), (16, None), (16, 6), (32, None), (32, 4)],
    2048: [(4, None), (8, None), (8, 6), (16, None), (16, 4)],
    2560: [(8, None), (8, 6), (16, 3), (16, 4), (16, 5), (32, None), (32, 2)],
    3072: [(4, None), (8, None), (8, 4), (8, 6)],
    4096: [(4, None), (8, None), (8, 4), (8, 6), (16, None), (16, 2), (16, 3)],
    9728: [(4, None), (4, 2), (4, 3), (4, 4)],
    12288: [(4, None), (4, 2), (4, 3), (4, 4)],
}


class WholeStep:
    """One model's decode step at contexts up to `longest`."""

    def __init__(self, device: GpuDevice, name: str, recipe: str, longest: int, kv: str) -> None:
        model = define_model(ModelConfig.from_dict(config_of(name, recipe)), tied=True)
        self._s, self._device, self._kv = model.structure, device, kv
        self.shape = MODELS[name]
        options = LoadOptions(longest + SPARE, 64, kv, half_copies=False)
        self._runner, arrays = empty_runner(model, device, options, "bfloat16")
        random_weights(model, arrays, device)
        self._runner.pool.clear_scratch(device)
        most = AttentionConfig("loop", MOST_SPLITS)
        floats = workspace_floats(most, self._s.num_attention_heads, self._s.num_key_value_heads, self._s.head_dim)
        self._runner.buffers["attention_floats"] = device.empty((floats,), "float32")

    def takes(self, product: str, config: Int8Config) -> bool:
        return takes_digits(config.tile_n, *self.shape.products[product], DEFAULT.get(product))

    def _slots(self, product: str) -> int:
        return linear_int8.int8_square_slots(self._device.arch, *self.shape.products[product], DEFAULT.get(product))

    def carveout(self, context: int) -> int | None:
        return self._runner.carveout(context)

    def own(self, context: int) -> AttentionConfig:
        kv_heads, int8 = self._s.num_key_value_heads, self._kv == "int8"
        return attention_config(self._device.arch, kv_heads, context, int8=int8)

    def launches(
        self, attention: AttentionConfig, context: int, product: str = "", tile: Int8Config | None = None
    ) -> list[Recorded]:
        """With another tile for one INT8 product, where one is named."""

        def config(arch: str, n: int, k: int, group: int | None = None, family: str = "linear_int8") -> Int8Config:
            own = tile is None or self.shape.products[product] != (n, k)
            return linear_int8_config(arch, n, k, group, family) if own else tile

        buffers = self._runner.buffers
        before = {name: buffers[name] for name in ("o_sums", "down_sums")}
        with (
            mock.patch.object(decode, "attention_config", return_value=attention),
            mock.patch.object(linear_int8, "linear_int8_config", config),
        ):
            if tile is not None and f"{product}_sums" in before:  # the blocks' sums of squares
                buffers[f"{product}_sums"] = self._device.zeros((1, self._slots(product)), "float32")
            found = self._runner.plans.decode(self._runner.bucket_end(context))
        buffers.update(before)
        return found

    def microseconds(self, step: list[Recorded], context: int, carveouts: list[int | None]) -> list[float]:
        """A step, by carve-out. Each replay is a token longer than the one before: nothing beside the context."""
        graphs = [self._device.record(step, percent) for percent in carveouts]
        prepare(self._runner, Step("decode", 1, context), BenchOptions().sampling)
        return medians(self._device, graphs)


def time_steps(step: WholeStep, context: int, tiles: Attentions, products: bool, carveouts: Cuts) -> None:
    own = step.own(context)
    trials: list[tuple[str, list[Recorded]]] = [("the engine's", step.launches(own, context))]
    for splits, occupancy, pages, latency in tiles:
        config = replace(own, splits=splits, occupancy=occupancy, pages=pages, latency=latency)
        name = f"attention: {splits} splits, occupancy {occupancy}, {pages} pages, latency {latency}"
        trials.append((name, step.launches(config, context)))
    for product in ("qkv", "o", "up", "down", "lm_head") if products else ():
        for rows, occupancy in PRODUCTS[step.shape.products[product][1]]:
            config = Int8Config(rows, CHUNK, occupancy, "digits")
            if step.takes(product, config):
                name = f"{product}: {rows} rows, occupancy {occupancy}"
                trials.append((name, step.launches(own, context, product, config)))
    compile_records([record for _, launches in trials for record in launches])
    cuts = [step.carveout(context), *carveouts, None]
    say(f"  {context:5d} positions, us by carve-out {', '.join(map(str, cuts))}")
    for name, launches in trials:
        say("  " + "".join(f"{us:8.1f}" for us in step.microseconds(launches, context, cuts)) + f"  {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", choices=list(MODELS))
    parser.add_argument("--contexts", type=int, nargs="+", default=[32000])
    parser.add_argument("--weights", nargs="+", choices=["bf16", "int8"], default=["bf16", "int8"])
    parser.add_argument("--kv", nargs="+", choices=["bf16", "int8"], default=["bf16", "int8"])
    parser.add_argument("--attention", action="store_true", help="tiles of the attention in its looping form too")
    parser.add_argument("--products", action="store_true", help="tiles of the INT8 products too, one at a time")
    parser.add_argument("--carveouts", type=int, nargs="+", default=[14, 28, 36, 43, 50, 54, 58, 62, 66, 72])
    args = parser.parse_args()
    device = GpuDevice()
    tiles = list(itertools.product(*TILES)) if args.attention else []
    for name, weights, kv in itertools.product(args.models, args.weights, args.kv):
        say(f"{name}: weights in {weights}, keys and values in {kv}")
        recipe = "default" if weights == "int8" else "bf16"
        step = WholeStep(device, name, recipe, max(args.contexts), kv)
        for context in args.contexts:
            time_steps(step, context, tiles, args.products and weights == "int8", args.carveouts)


if __name__ == "__main__":
    main()
