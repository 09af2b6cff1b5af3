"""What the device's memory can do, measured: a copy within it, and a matrix read once by the one-token product.

The reading kernel is the plain product of kernels/linear.py on a matrix far larger than the L2: no model's step can
read faster than that. Buffers are a GiB, or what is left beside the model, and hold noise: zeros can be faster.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from kernels.linear import linear
from kernels.specs import RecordingLauncher

if TYPE_CHECKING:
    from tileinfer_core.backends.cuda.device import Device, Graph

COLUMNS = 4096
BLOCK = 128  # rows
LARGEST = 1 << 30
REPEATS = 10
RUNS = 5


def measure_ceilings(device: Device) -> tuple[float, float]:
    """Bytes per second of a copy (read and written) and of a read-only stream; the best of RUNS."""
    rows = max(min(LARGEST, device.memory().free // 4) // (2 * COLUMNS) // BLOCK, 1) * BLOCK
    source, target = (device.zeros((rows, COLUMNS), "bfloat16") for _ in range(2))
    noise = np.random.default_rng(0).standard_normal((BLOCK, COLUMNS), np.float32).astype(source.dtype)
    for first in range(0, rows, BLOCK):
        device.copy_in(source[first : first + BLOCK], noise)
    x, y = device.zeros((1, COLUMNS), "bfloat16"), device.zeros((1, rows), "float32")
    launcher = RecordingLauncher(device.arch, pdl=device.pdl)
    linear(launcher, x, source, y)
    device.run(launcher.records)
    read = _seconds(device, device.record(launcher.records * REPEATS), 1)
    copy = _seconds(device, _Copy(device, target, source), REPEATS)
    return 2 * source.nbytes / copy, source.nbytes / (read / REPEATS)


class _Copy:
    """A copy within the device, as something to launch."""

    def __init__(self, device: Device, target: object, source: object) -> None:
        self._device, self._target, self._source = device, target, source

    def launch(self) -> None:
        self._device.copy(self._target, self._source)


def _seconds(device: Device, graph: Graph, repeats: int) -> float:
    """Of one launch, the best of RUNS."""
    times = []
    for _ in range(RUNS):
        device.synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            graph.launch()
        device.synchronize()
        times.append((time.perf_counter() - start) / repeats)
    return min(times)
