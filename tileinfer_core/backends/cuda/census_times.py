"""When each kernel of a step ends, on a GPU, inside the captured graph and with dependent launch as the engine has it.

Kernels of one step overlap, and an event between two of them would tie them apart. So the step is cut: the graph of
the launches up to i takes until launch i is done, and what a kernel adds is the difference to the graph up to i - 1.
A graph begins a few launches and WINDOW_BYTES before its group of launches, not at the step's beginning: every kernel
differs by some 0.2 µs from replay to replay, and differences between graphs of two hundred of them are lost in that.
So the sum of the differences need not be the whole, which is measured for itself; that it is, is the method's test.

The graphs of a group are replayed in turn, so that no drift of the clocks falls between two of them. Before each
replay 256 MB are overwritten, so that weights come from memory. What a graph costs before its first kernel is measured
with copies of the first kernel and left out.

`alone` is a launch in a chain of its own kind, over all layers: the difference to its time in the step is the gap
before it, or, below zero, how much it overlaps the kernel before.
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from kernels.lab.census import StepShape, label, moved_bytes
from tileinfer_core.backends.cuda.gpu import elapsed_us

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kernels.specs import Recorded
    from tileinfer_core.backends.cuda.census_steps import Step
    from tileinfer_core.backends.cuda.device import Graph
    from tileinfer_core.backends.cuda.gpu import GpuDevice
    from tileinfer_core.backends.cuda.runner import CudaRunner
    from tileinfer_core.sampling import SamplingParams

WARMUP, REPLAYS, WHOLE_REPLAYS = 2, 31, 41
FLUSH_BYTES = 256 << 20
GROUP = 12  # launches
WINDOW_BYTES = 128 << 20  # twice the L2 of an H200: what was overwritten is gone from it
WINDOW_LAUNCHES = 6
COPIES = 10


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Microseconds. `added[i]` is what launch i adds to the step, `alone[i]` its time in a chain of its own kind.

    `whole` is the step measured for itself, before and after the cuts; `loop` is one of many steps without a pause.
    """

    added: tuple[float, ...]
    alone: tuple[float, ...]
    whole: float
    loop: float
    overhead: float


def prepare(runner: CudaRunner, step: Step, sampling: SamplingParams) -> None:
    """Pages of its own for every position, so that keys and values come from where an answer's would, and settings of
    the sampler, whose work depends on them."""
    runner.show_sampling(sampling)
    cache = runner.new_cache(step.context)
    cache.reserve(step.context)
    runner.show_pages(cache.block_table)
    runner.device.copy_in(runner.buffers["start"], np.full(1, step.context - step.tokens, np.int32))
    _set_length(runner, step)


def _set_length(runner: CudaRunner, step: Step, before: int = 0) -> None:
    """Each whole step adds one. `before`: how many are to come until the step's own context is reached."""
    runner.device.copy_in(runner.buffers["length"], np.full(1, max(step.context - before, step.tokens), np.int32))


class StepTimer:
    """Times the launches of one step."""

    def __init__(self, runner: CudaRunner, step: Step, on_done: Callable[[int], None] = lambda _: None) -> None:
        self._runner, self._step, self._on_done = runner, step, on_done
        self._device = cast("GpuDevice", runner.device)
        self._stream = self._device.stream
        self._flush = self._device.empty((FLUSH_BYTES,), "int8")
        self._carveout = runner.carveout(step.context) if step.kind == "decode" else None

    def time(self, launches: Sequence[Recorded]) -> StepTimes:
        self._device.run(launches)  # loads every kernel
        first = launches[0]
        single = self._us([first], REPLAYS)
        several = self._us([first] * (1 + COPIES), REPLAYS)
        overhead = single - (several - single) / COPIES
        before = self._us(launches, WHOLE_REPLAYS)
        added = [us for window in self._windows(launches) for us in self._added(launches, *window, overhead)]
        after = self._us(launches, WHOLE_REPLAYS)
        return StepTimes(
            added=tuple(added),
            alone=self._alone(launches),
            whole=statistics.mean((before, after)) - overhead,
            loop=self._loop(launches),
            overhead=overhead,
        )

    def _windows(self, launches: Sequence[Recorded]) -> Iterator[tuple[int, int, int]]:
        """(where its graphs begin, the first launch, the one after the last) of each group."""
        shape = StepShape(self._step.tokens, self._step.context)
        sizes = [moved_bytes(launch, shape) for launch in launches]
        for first in range(0, len(launches), GROUP):
            begin, moved = first, 0
            while begin > 0 and (moved < WINDOW_BYTES or first - begin < WINDOW_LAUNCHES):
                begin -= 1
                moved += sizes[begin]
            yield begin, first, min(first + GROUP, len(launches))

    def _added(
        self, launches: Sequence[Recorded], begin: int, first: int, stop: int, overhead: float
    ) -> Iterator[float]:
        """What each launch of a group adds. A graph of none is what comes before any kernel."""
        ends = range(first if first > begin else first + 1, stop + 1)
        graphs = [self._device.record(launches[begin:end], self._carveout) for end in ends]
        times = self._medians(graphs, REPLAYS)
        self._on_done(stop)
        for before, after in itertools.pairwise([overhead, *times] if first == begin else times):
            yield after - before

    def _us(self, launches: Sequence[Recorded], replays: int) -> float:
        return self._medians([self._device.record(launches, self._carveout)], replays)[0]

    def _medians(self, graphs: Sequence[Graph], replays: int) -> list[float]:
        """Of the graphs' replays, in turn."""
        rounds = [[self._replay(graph) for graph in graphs] for _ in range(WARMUP + replays)]
        return [float(statistics.median(times)) for times in zip(*rounds[WARMUP:], strict=True)]

    def _replay(self, graph: Graph) -> float:
        _set_length(self._runner, self._step)
        self._device.clear(self._flush)
        return elapsed_us(self._stream, graph.launch)

    def _alone(self, launches: Sequence[Recorded]) -> tuple[float, ...]:
        groups: dict[str, list[Recorded]] = defaultdict(list)
        for launch in launches:
            groups[label(launch)].append(launch)
        found: dict[str, float] = {}
        for name, members in groups.items():
            chain = members if len(members) > 1 else members * COPIES
            one = self._us(chain[:1], REPLAYS)
            found[name] = (self._us(chain, REPLAYS) - one) / (len(chain) - 1)
        return tuple(found[label(launch)] for launch in launches)

    def _loop(self, launches: Sequence[Recorded]) -> float:
        """The sequence grows up to the step's context, not past it: the graph and the pages are for no more."""
        graph = self._device.record(launches, self._carveout)
        _set_length(self._runner, self._step)
        graph.launch()
        _set_length(self._runner, self._step, before=WHOLE_REPLAYS - 1)

        def replays() -> None:
            for _ in range(WHOLE_REPLAYS):
                graph.launch()

        return elapsed_us(self._stream, replays) / WHOLE_REPLAYS


def matrix_rate(device: Any) -> float:
    """Operations per second of the engine's own product at 4,096 x 4,096 x 4,096: the bound of a long prefill."""
    from kernels.configs import configured  # noqa: PLC0415
    from kernels.linear_prefill import LinearPrefillConfig, linear_prefill  # noqa: PLC0415 - one step kind needs it
    from kernels.specs import RecordingLauncher  # noqa: PLC0415

    side, repeats = 4096, 10
    x, w, y = (device.zeros((side, side), "bfloat16") for _ in range(3))
    noise = np.random.default_rng(0).standard_normal((64, side), np.float32).astype(x.dtype)
    for array in (x, w):
        for first in range(0, side, len(noise)):
            device.copy_in(array[first : first + len(noise)], noise)
    launcher = RecordingLauncher(device.arch, pdl=device.pdl)
    config = configured(LinearPrefillConfig, "linear_prefill", device.arch, tokens=side, n=side, k=side)
    linear_prefill(launcher, x, w, y, config=config)
    device.run(launcher.records)
    graph = device.record(launcher.records * repeats)
    seconds = min(elapsed_us(device.stream, graph.launch) for _ in range(7)) * 1e-6 / repeats
    return float(2 * side**3 / seconds)
