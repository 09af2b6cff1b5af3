"""Times the variants of a probe on the first GPU, after holding them equal to each other there.

A variant's launches are captured as one CUDA graph, several times over, and replayed: GPU time from launch to
launch, with the gap between two kernels in it. The launch from Python is timed apart. Compiled code comes from the
cache, so nothing is compiled while anything is timed.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cupy
import numpy as np

from kernels.cubin_store import CubinStore
from kernels.lab.probe import LaunchError, ProbeError, compare, dtype_of, host_block
from kernels.launch import launch
from tileinfer_core.backends.cuda.gpu import GpuDevice, device_errors, elapsed_us
from tileinfer_core.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernels.lab.probe import Probe, Variant

WARMUP = 5
REPLAYS = 40
GRAPH_US = 300.0  # a graph repeats its launches up to this long, so that the events around it weigh little
MOST_REPEATS = 100
HOST_LAUNCHES, HOST_ROUNDS = 20, 25
# of the comparison, the launch, the compiler, and the device later; CuPy's are RuntimeErrors
FAILURES = (ProbeError, RuntimeError, ValueError, TypeError, LaunchError, BackendError)


@dataclass(frozen=True, slots=True)
class Times:
    """Microseconds of one launch, over `launches` of them after a warm-up; `launch` is what the host spends on one.

    `bits`: whether the result equals the group's first variant bit for bit; None for that first one. `error` is set,
    and the rest 0, where the variant does not run or differs by more than it may.
    """

    variant: str
    least: float = 0.0
    median: float = 0.0
    mean: float = 0.0
    launches: int = 0
    launch: float = 0.0
    bits: bool | None = None
    error: str | None = None


class ProbeTimer:
    """One GPU and one stream for any number of probes."""

    def __init__(self) -> None:
        device = GpuDevice()
        self.arch, self.name = device.arch, device.name
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._store = CubinStore.beside_cache(self.arch)

    def time(self, probe: Probe, on_done: Callable[[], None] = lambda: None) -> list[Times]:
        """Every variant that this GPU has, in the probe's order."""
        arrays = self._arrays(probe)
        first: dict[str, np.ndarray[Any, Any]] = {}
        found = []
        for variant in probe.variants(small=False):
            if variant.pdl and int(self.arch[3:]) < 90:
                continue
            found.append(self._checked(probe, variant, arrays, first))
            on_done()
        del arrays
        cupy.get_default_memory_pool().free_all_blocks()
        return found

    def _checked(
        self, probe: Probe, variant: Variant, arrays: dict[str, Any], first: dict[str, np.ndarray[Any, Any]]
    ) -> Times:
        try:
            bits = self._equal(probe, variant, arrays, first)
            return self._time(variant, arrays, bits)
        except FAILURES as error:
            return Times(variant.name, error=f"{type(error).__name__}: {str(error).strip()[:300]}")

    def _equal(
        self, probe: Probe, variant: Variant, arrays: dict[str, Any], first: dict[str, np.ndarray[Any, Any]]
    ) -> bool | None:
        """Run once and compare. The output is poisoned before, or filled anew where the variants also read it: what
        the variant before left there would be right."""
        _, dtype, fill = probe.arrays(small=False)[variant.out]
        if fill[0] == "out":
            self._poison(arrays[variant.out])
        else:
            self._fill(arrays[variant.out], dtype, fill)
        cupy.cuda.Device().synchronize()
        self._run(variant, arrays)
        with device_errors():
            self._stream.synchronize()
        out = cupy.asnumpy(arrays[variant.out])
        key = f"{variant.group} bits"
        picked = out.reshape(-1)[variant.pick] if isinstance(variant.pick, slice) else out[variant.pick]
        words = np.ascontiguousarray(picked).view(np.uint8)
        compare(probe.name, variant, out, first)
        before = first.setdefault(key, words)
        return None if before is words else bool(np.array_equal(before, words))

    def _poison(self, array: Any) -> None:
        """Every byte 0xFF, which is NaN in every floating type."""
        array.data.memset(0xFF, array.nbytes)

    def _run(self, variant: Variant, arrays: dict[str, Any]) -> None:
        for record in variant.record(arrays):
            self._store.install(record.kernel)
            x, y, z = record.grid
            launch(
                record.kernel,
                (x, y, z),
                record.args,
                stream=self._stream.ptr,
                arch=self.arch,
                dependent=bool(record.pdl),
            )

    def _time(self, variant: Variant, arrays: dict[str, Any], bits: bool | None) -> Times:
        once = self._replays(variant, arrays, 1, 3)
        repeats = max(1, min(MOST_REPEATS, int(GRAPH_US / max(min(once), 1.0))))
        times = [us / repeats / variant.count for us in self._replays(variant, arrays, repeats, REPLAYS)]
        return Times(
            variant.name,
            least=min(times),
            median=statistics.median(times),
            mean=statistics.fmean(times),
            launches=len(variant.steps) * repeats * REPLAYS,
            launch=self._host(variant, arrays),
            bits=bits,
        )

    def _replays(self, variant: Variant, arrays: dict[str, Any], repeats: int, count: int) -> list[float]:
        """Microseconds of each of `count` replays of a graph that has the launches `repeats` times."""
        with self._stream:
            graph = self._captured(variant, arrays, repeats)
            times = [elapsed_us(self._stream, lambda: graph.launch(self._stream)) for _ in range(WARMUP + count)]
        return times[WARMUP:]

    def _captured(self, variant: Variant, arrays: dict[str, Any], repeats: int) -> Any:
        """The graph. A launch that fails ends the capture, so that the next variant finds the stream free."""
        self._stream.begin_capture()
        try:
            for _ in range(repeats):
                self._run(variant, arrays)
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the error on its way has invalidated the capture
                self._stream.end_capture()
            raise
        return self._stream.end_capture()

    def _host(self, variant: Variant, arrays: dict[str, Any]) -> float:
        """Microseconds of Python's and the driver's work for one launch: the median of rounds, each of which finds an
        empty queue. A mean over all has other processes' moments in it."""
        records = variant.record(arrays)
        calls = [(record.kernel, (*record.grid,), record.args, bool(record.pdl)) for record in records]
        repeats = max(1, HOST_LAUNCHES // len(calls))
        spent = []
        for _ in range(HOST_ROUNDS):
            with device_errors():
                self._stream.synchronize()
            start = time.perf_counter()
            for _ in range(repeats):
                for kernel, (x, y, z), args, dependent in calls:
                    launch(kernel, (x, y, z), args, stream=self._stream.ptr, arch=self.arch, dependent=dependent)
            spent.append(time.perf_counter() - start)
        with device_errors():
            self._stream.synchronize()
        return statistics.median(spent) * 1e6 / repeats / len(calls)

    def _arrays(self, probe: Probe) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for name, (shape, dtype, fill) in probe.arrays(small=False).items():
            if fill[0] == "transposed":
                made[name] = cupy.asarray(np.ascontiguousarray(cupy.asnumpy(made[fill[1]]).T))
                continue
            made[name] = cupy.empty(shape, dtype_of(dtype))
            self._fill(made[name], dtype, fill)
        return made

    def _fill(self, array: Any, dtype: str, fill: tuple[Any, ...]) -> None:
        """Copies alone: CuPy's own kernels would need a compiler that nothing else here needs."""
        flat = array.reshape(-1)
        block = cupy.asarray(host_block(dtype, fill, flat.size))
        for at in range(0, flat.size, block.size):
            count = min(block.size, flat.size - at)
            self._copy(flat[at : at + count], block[:count])

    def _copy(self, target: Any, source: Any) -> None:
        target.data.copy_from_device(source.data, source.nbytes)
