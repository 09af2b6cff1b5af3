"""What the timing scripts beside this share: graphs of repeated calls, random arrays, PyTorch's view of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cupy as cp
import ml_dtypes
import numpy as np

from kernels.compile import CompileError, compile_all
from kernels.launch import GpuLauncher
from kernels.specs import RecordingLauncher
from tileinfer_core.backends.cuda.gpu import elapsed_us

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kernels.specs import Recorded
    from tileinfer_core.backends.cuda.device import Graph
    from tileinfer_core.backends.cuda.gpu import GpuDevice

BF16 = np.dtype(ml_dtypes.bfloat16)
STREAM = cp.cuda.Stream(non_blocking=True)
ARCH = f"sm_{cp.cuda.Device(0).compute_capability}"
LAUNCHER = GpuLauncher(STREAM.ptr, ARCH, pdl=int(ARCH[3:]) >= 90)


def microseconds(call: Callable[[int], None], *, calls: int = 8, replays: int = 9) -> float:
    """Median time of call(i), i = 0 … calls - 1 captured in one graph; two replays of warm-up."""
    with STREAM:
        call(0)
        STREAM.synchronize()
        STREAM.begin_capture()
        for i in range(calls):
            call(i)
        graph = STREAM.end_capture()
        times = []
        for _ in range(replays + 2):
            start, stop = cp.cuda.Event(), cp.cuda.Event()
            start.record(STREAM)
            graph.launch(STREAM)
            stop.record(STREAM)
            stop.synchronize()
            times.append(cp.cuda.get_elapsed_time(start, stop) * 1e3 / calls)
    return float(np.median(times[2:]))


def compile_ahead(calls: Iterable[Callable[[Any], None]]) -> None:
    """Compile what the calls would launch, on all cores, into the cache that launches look in."""
    recorder = RecordingLauncher(ARCH, pdl=LAUNCHER.pdl)
    for call in calls:
        call(recorder)
    compile_records(recorder.records)


def compile_records(records: list[Recorded]) -> None:
    """The same for launches that are recorded already; what does not compile is printed."""
    for result in compile_all(records, ARCH, workers=os.cpu_count() or 2):
        if isinstance(result, CompileError):
            print(str(result)[:300], flush=True)


def medians(device: GpuDevice, graphs: Sequence[Graph], *, replays: int = 15, warmup: int = 3) -> list[float]:
    """Microseconds of each of the engine's graphs, replayed in turn."""
    rounds = [[elapsed_us(device.stream, graph.launch) for graph in graphs] for _ in range(warmup + replays)]
    return [float(np.median(times)) for times in zip(*rounds[warmup:], strict=True)]


def random_half(*shape: int, scale: float = 1.0) -> Any:
    """Normal BF16 numbers, made in pieces: the float32 of a whole weight would be twice its size."""
    out = cp.empty(shape, BF16)
    flat, piece = out.reshape(-1), 1 << 26
    for at in range(0, flat.size, piece):
        n = min(piece, flat.size - at)
        flat[at : at + n] = (cp.random.standard_normal(n, dtype=cp.float32) * scale).astype(BF16)
    cp.cuda.Device().synchronize()
    return out


def as_torch(array: Any) -> Any:
    """The same memory as a PyTorch BF16 tensor."""
    import torch

    return torch.as_tensor(array.view(cp.int16), device="cuda").view(torch.bfloat16)


def torch_microseconds(call: Callable[[int], None], *, calls: int = 8, replays: int = 9) -> float:
    """As `microseconds`, for PyTorch calls, in a graph of PyTorch's."""
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call(0)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(calls):
                call(i)
        times = []
        for _ in range(replays + 2):
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record(stream)
            graph.replay()
            stop.record(stream)
            stop.synchronize()
            times.append(start.elapsed_time(stop) * 1e3 / calls)
    return float(np.median(times[2:]))


class Report:
    """Prints lines, and keeps them in $OUT/<name>.txt where OUT is set."""

    def __init__(self, name: str) -> None:
        folder = os.environ.get("OUT")
        self._path = Path(folder, f"{name}.txt") if folder else None

    def __call__(self, *words: Any) -> None:
        line = " ".join(str(word) for word in words)
        print(line, flush=True)
        if self._path:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
