"""A device made of NumPy arrays and the kernel interpreter: the whole engine without a GPU, for tests.

Slow by a factor of thousands, and stricter than a GPU: memory nothing wrote, races between blocks, aliasing and wrong
order under programmatic dependent launch stop it by name. A graph is its list of launches, replayed.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from kernels.interpreter import InterpreterLauncher, initialise, uninitialised
from tileinfer_core.backends.cuda.device import DeviceMemory
from tileinfer_core.dtypes import BFLOAT16
from tileinfer_core.errors import OutOfMemoryError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernels.specs import Recorded
    from tileinfer_core.backends.cuda.device import Array, Event, Graph, HostArray


def numpy_dtype(name: str) -> np.dtype[Any]:
    return BFLOAT16 if name == "bfloat16" else np.dtype(name)


class Done:
    """An event of a device on which everything is done at once."""

    def wait(self) -> None:
        pass


class ReplayedList:
    """A graph as the list of its launches."""

    def __init__(self, device: InterpretedDevice, step: Sequence[Recorded]) -> None:
        self._device = device
        self._step = tuple(step)

    def launch(self) -> None:
        self._device.replays += 1
        self._device.run(self._step)


class InterpretedDevice:
    """Device on NumPy. `memory_bytes` is what it pretends to have; `recorded` and `replays` count for tests."""

    name = "interpreter"

    def __init__(
        self, arch: str = "sm_90", *, pdl: bool = True, memory_bytes: int = 1 << 30, shuffle_seed: int | None = 0
    ) -> None:
        self.arch = arch
        self.pdl = pdl
        self.recorded = 0
        self.replays = 0
        self.compiled: list[str] = []
        self._launcher = InterpreterLauncher(arch, pdl=pdl, shuffle_seed=shuffle_seed)
        self.processors = self._launcher.processors
        self._total = memory_bytes
        self._used = 0

    def memory(self) -> DeviceMemory:
        return DeviceMemory(self._total - self._used, self._total)

    def empty(self, shape: tuple[int, ...], dtype: str) -> Array:
        self._take(shape, dtype)
        return uninitialised(shape, numpy_dtype(dtype))

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Array:
        self._take(shape, dtype)
        return np.zeros(shape, numpy_dtype(dtype))

    def _take(self, shape: tuple[int, ...], dtype: str) -> None:
        count = math.prod(shape) * numpy_dtype(dtype).itemsize
        if self._used + count > self._total:
            raise OutOfMemoryError(f"{count:,} bytes asked for, {self._total - self._used:,} of {self._total:,} left")
        self._used += count

    def clear(self, array: Array) -> None:
        self._launcher.synchronize()
        initialise(array, np.zeros((), array.dtype))

    def pinned(self, shape: tuple[int, ...], dtype: str) -> HostArray:
        return np.zeros(shape, numpy_dtype(dtype))

    def copy_in(self, target: Array, source: HostArray) -> None:
        self._launcher.synchronize()
        initialise(target, source.reshape(target.shape))

    def copy_out(self, target: HostArray, source: Array) -> None:
        target[...] = source

    def copy(self, target: Array, source: Array) -> None:
        self._launcher.synchronize()
        initialise(target, source.reshape(target.shape))

    def download(self, source: Array) -> HostArray:
        return np.array(source)

    def event(self) -> Event:
        return Done()

    def fetch(self, target: HostArray, source: Array) -> Event:
        self.copy_out(target, source)
        return Done()

    def run(self, step: Sequence[Recorded]) -> None:
        self._launcher.synchronize()
        for launch in step:
            same = launch.pdl is None or launch.pdl == self.pdl
            launcher = self._launcher if same else self._launcher.with_pdl(bool(launch.pdl))
            launcher(launch.kernel, launch.grid, launch.args)

    def record(self, step: Sequence[Recorded], carveout: int | None = None) -> Graph:  # noqa: ARG002 - the protocol's
        self.recorded += 1
        return ReplayedList(self, step)

    def synchronize(self) -> None:
        self._launcher.synchronize()

    def close(self) -> None:
        self._used = 0
