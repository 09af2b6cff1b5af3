"""The first CUDA device through CuPy: plain allocations, one stream for the steps, one for reading ids back.

Graphs are captured from the stream, so programmatic dependent launch edges are kept. Copies go through pinned memory;
nothing here uses managed memory. Graph destruction and memory follow Python's reference counts.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from typing import TYPE_CHECKING, Any

import cupy
import numpy as np

from kernels.carveout import set_carveout
from kernels.cubin_store import CubinStore
from kernels.launch import GpuLauncher, supports_pdl
from tileinfer_core.backends.cuda.device import DeviceMemory
from tileinfer_core.dtypes import BFLOAT16
from tileinfer_core.errors import BackendError, BackendUnavailableError, OutOfMemoryError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from kernels.specs import Recorded
    from tileinfer_core.backends.cuda.device import Array, Event, Graph, HostArray

runtime = cupy.cuda.runtime
HINT = "`tileinfer doctor` checks driver, compiler and CuPy; --backend cpu runs without them"
CAPTURE_RELAXED = 2  # a kernel that is loaded while capturing must not end the capture


@contextlib.contextmanager
def device_errors() -> Iterator[None]:
    """A kernel that fails does so later, at whatever call asks the device next."""
    try:
        yield
    except runtime.CUDARuntimeError as error:
        hint = "run again; if it repeats, report it with the output of `tileinfer doctor`"
        raise BackendError(f"the GPU stopped: {error}", hint=hint) from error


def elapsed_us(stream: Any, queue: Callable[[], Any]) -> float:
    """Microseconds on the stream from before what `queue` puts there to its end, which is waited for."""
    start, stop = cupy.cuda.Event(), cupy.cuda.Event()
    start.record(stream)
    queue()
    stop.record(stream)
    with device_errors():
        stop.synchronize()
    return float(cupy.cuda.get_elapsed_time(start, stop)) * 1e3


class GpuEvent:
    """A CUDA event without timing. Waiting sleeps in the driver, so Ctrl-C is seen when the step in flight ends."""

    def __init__(self, stream: Any) -> None:
        self._event = cupy.cuda.Event(disable_timing=True)
        self._event.record(stream)

    @property
    def event(self) -> Any:
        return self._event

    def wait(self) -> None:
        with device_errors():
            self._event.synchronize()


class CapturedGraph:
    """An instantiated CUDA graph. The arrays in its launches are kept alive with it."""

    def __init__(self, graph: int, stream: Any, step: Sequence[Recorded]) -> None:
        self._stream = stream
        self._step = tuple(step)
        try:
            self._executable = runtime.graphInstantiate(graph)
        finally:
            runtime.graphDestroy(graph)
        weakref.finalize(self, runtime.graphExecDestroy, self._executable)

    def launch(self) -> None:
        with device_errors():
            runtime.graphLaunch(self._executable, self._stream.ptr)


class GpuDevice:
    """Device on CUDA device `index`. Raises BackendError when a call fails that has no clearer name."""

    def __init__(self, index: int = 0) -> None:
        try:
            self._device = cupy.cuda.Device(index)
            self._device.use()
            properties = runtime.getDeviceProperties(index)
            self.arch = f"sm_{self._device.compute_capability}"
        except runtime.CUDARuntimeError as error:
            raise BackendUnavailableError(f"CuPy can't use the GPU: {error}", hint=HINT) from error
        self.name: str = properties["name"].decode()
        self.pdl = supports_pdl(self.arch)
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._readback = cupy.cuda.Stream(non_blocking=True)
        self.processors: int = properties["multiProcessorCount"]
        self._launcher = GpuLauncher(self._stream.ptr, self.arch, pdl=self.pdl, processors=self.processors)
        self.compiled: list[str] = []
        self._store = CubinStore.beside_cache(self.arch, self.compiled.append)

    @property
    def specialisations(self) -> Mapping[str, Sequence[str]]:
        """Kernel -> symbols of the forms that launches have loaded or compiled; docs/launching.md reads them."""
        return self._store.seen

    @property
    def stream(self) -> Any:
        """The stream of the steps (cupy.cuda.Stream), for who times them."""
        return self._stream

    def memory(self) -> DeviceMemory:
        return DeviceMemory(*self._device.mem_info)

    def empty(self, shape: tuple[int, ...], dtype: str) -> Array:
        kind = BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype)
        size = max(math.prod(shape) * kind.itemsize, 1)
        try:
            memory = cupy.cuda.Memory(size)
        except (cupy.cuda.memory.OutOfMemoryError, runtime.CUDARuntimeError) as error:
            free, total = (count / 2**20 for count in self._device.mem_info)
            raise OutOfMemoryError(
                f"{size / 2**20:,.0f} MiB asked for on {self.name}, {free:,.0f} of {total:,.0f} MiB are free",
                hint="set a smaller --context, or stop other programs that use the GPU",
            ) from error
        return cupy.ndarray(shape, dtype=kind, memptr=cupy.cuda.MemoryPointer(memory, 0))

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Array:
        array = self.empty(shape, dtype)
        self.clear(array)
        return array

    def clear(self, array: Array) -> None:
        with device_errors():
            array.data.memset_async(0, array.nbytes, self._stream)

    def pinned(self, shape: tuple[int, ...], dtype: str) -> HostArray:
        kind = BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype)
        size = max(math.prod(shape) * kind.itemsize, 1)
        with device_errors():
            memory = cupy.cuda.alloc_pinned_memory(size)
        return np.frombuffer(memory, np.uint8, size).view(kind)[: math.prod(shape)].reshape(shape)

    def copy_in(self, target: Array, source: HostArray) -> None:
        _copy((target.data.ptr, target), (source.ctypes.data, source), runtime.memcpyHostToDevice, self._stream)

    def copy_out(self, target: HostArray, source: Array) -> None:
        _copy((target.ctypes.data, target), (source.data.ptr, source), runtime.memcpyDeviceToHost, self._stream)

    def copy(self, target: Array, source: Array) -> None:
        _copy((target.data.ptr, target), (source.data.ptr, source), runtime.memcpyDeviceToDevice, self._stream)

    def download(self, source: Array) -> HostArray:
        self.synchronize()
        return np.asarray(cupy.asnumpy(source))

    def event(self) -> Event:
        return GpuEvent(self._stream)

    def fetch(self, target: HostArray, source: Array) -> Event:
        self._readback.wait_event(GpuEvent(self._stream).event)
        _copy((target.ctypes.data, target), (source.data.ptr, source), runtime.memcpyDeviceToHost, self._readback)
        return GpuEvent(self._readback)

    def run(self, step: Sequence[Recorded]) -> None:
        for launch in step:
            self._launch(launch)

    def _launch(self, launch: Recorded) -> None:
        try:
            self._store.install(launch.kernel)
            x, y, z = launch.grid
            same = launch.pdl is None or launch.pdl == self.pdl
            launcher = self._launcher if same else self._launcher.with_pdl(bool(launch.pdl))
            launcher(launch.kernel, (x, y, z), launch.args)
        except Exception as error:
            constants = [arg for arg in launch.args if isinstance(arg, (bool, int, float))]
            what = f"{launch.name} (grid {launch.grid}, constants {constants})"
            raise BackendError(
                f"the kernel {what} can't be launched on {self.name}: {str(error).strip() or type(error).__name__}",
                hint=HINT,
            ) from error

    def record(self, step: Sequence[Recorded], carveout: int | None = None) -> Graph:
        try:
            runtime.streamBeginCapture(self._stream.ptr, CAPTURE_RELAXED)  # Ctrl-C may come as soon as it has begun
            self.run(step)
            graph = runtime.streamEndCapture(self._stream.ptr)
        except BaseException:
            self._abandon_capture()
            raise
        if carveout is not None:
            set_carveout(graph, carveout)
        return CapturedGraph(graph, self._stream, step)

    def _abandon_capture(self) -> None:
        with contextlib.suppress(runtime.CUDARuntimeError):  # not begun, ended, or invalidated by the error on its way
            runtime.graphDestroy(runtime.streamEndCapture(self._stream.ptr))

    def synchronize(self) -> None:
        with device_errors():
            self._stream.synchronize()

    def close(self) -> None:
        self._readback.synchronize()
        self._stream.synchronize()


def _copy(to: tuple[int, Any], start: tuple[int, Any], kind: int, stream: Any) -> None:
    """(address, array) to (address, array): in one piece, or rows of equal length at each side's own pitch."""
    (target_at, target), (source_at, source) = to, start
    with device_errors():
        if target.flags.c_contiguous and source.flags.c_contiguous:
            runtime.memcpyAsync(target_at, source_at, source.nbytes, kind, stream.ptr)
            return
        width = source.itemsize * math.prod(source.shape[1:])
        pitches = target.strides[0], source.strides[0]
        runtime.memcpy2DAsync(target_at, pitches[0], source_at, pitches[1], width, len(source), kind, stream.ptr)
