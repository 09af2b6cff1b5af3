"""Where a decode step's time goes, kernel by kernel, on a GPU: `python tests/bench/step_account.py CONFIG [CONTEXT]`.

The step's launches are grouped by kernel and shapes. Each group is timed in two ways, both as CUDA graphs over all
layers, so that weights come from memory: `alone`, the group's launches as a chain of their own; `in step`, what the
whole step gains when the group is left out. The bound is the bytes of a launch's arrays over the copy speed measured in
the same run. Weights are noise.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cupy as cp
import numpy as np

from tileinfer_core.bench import load_for_bench
from tileinfer_core.engine import EngineOptions

if TYPE_CHECKING:
    from tileinfer_core.backends.cuda.gpu import GpuDevice

RUNS = 15


def graph_us(device: GpuDevice, step: list[Any], carveout: int | None) -> float:
    """Median microseconds of one replay."""
    graph, stream = device.record(step, carveout), device._stream
    times = []
    for _ in range(RUNS):
        start, stop = cp.cuda.Event(), cp.cuda.Event()
        start.record(stream)
        graph.launch()
        stop.record(stream)
        stop.synchronize()
        times.append(cp.cuda.get_elapsed_time(start, stop) * 1e3)
    return float(np.median(times[3:]))


def label(record: Any) -> str:
    """Kernel name and the shape of its first matrix."""
    shapes = [tuple(arg.shape) for arg in record.args if hasattr(arg, "shape") and len(arg.shape) == 2]
    largest = max(shapes, key=lambda shape: shape[0] * shape[1], default=())
    return f"{record.name} {'x'.join(map(str, largest))} grid {record.grid[0]}x{record.grid[1]}"


def weight_bytes(record: Any) -> int:
    """Of the first argument of a product; other kernels have no bound worth the name here."""
    first = record.args[0]
    return int(first.nbytes) if record.name.startswith("linear") else 0


def account(runner: Any, context: int) -> list[dict[str, Any]]:
    """One row per group, the longest first, and the whole step as the last."""
    device, carveout = runner.device, runner.carveout
    end = next(end for end in runner.bucket_ends if end >= context)
    runner.device.copy_in(runner.buffers["length"], np.full(1, context, np.int32))
    step = runner.plans.decode(end)
    copy, _ = runner.ceilings()
    device.run(step)
    whole = graph_us(device, step, carveout)
    groups: dict[str, list[Any]] = defaultdict(list)
    for record in step:
        groups[label(record)].append(record)
    rows = []
    for name, records in groups.items():
        left_out = {id(record) for record in records}
        without = graph_us(device, [record for record in step if id(record) not in left_out], carveout)
        count = len(records)
        row = {"kernel": name, "launches": count, "alone_us": graph_us(device, records, carveout) / count}
        row |= {"in_step_us": (whole - without) / count, "bound_us": weight_bytes(records[0]) / copy * 1e6}
        rows.append(row)
    rows.sort(key=lambda row: -row["in_step_us"] * row["launches"])
    total = {"kernel": "whole step", "launches": len(step), "alone_us": whole, "in_step_us": whole, "bound_us": 0.0}
    return [*rows, total]


def show(rows: list[dict[str, Any]]) -> None:
    print(f"{'kernel':60} {'launches':>8} {'alone us':>9} {'step us':>9} {'bound us':>9}")
    for row in rows:
        times = " ".join(f"{row[key]:9.2f}" for key in ("alone_us", "in_step_us", "bound_us"))
        print(f"{row['kernel']:60} {row['launches']:8} {times}")


def main() -> None:
    loaded = load_for_bench(Path(sys.argv[1]), EngineOptions("cuda"), noise=True)
    show(account(loaded.runner, int(sys.argv[2]) if len(sys.argv) > 2 else 512))


if __name__ == "__main__":
    main()
