"""What the engine asks of a device: memory, copies in stream order, and steps recorded once and replayed.

Everything runs in one stream, in the order it was asked for. Arrays are the device's own type (CuPy or NumPy); dtypes
are NumPy names. A "step" is a list of kernel launches with their arguments (`kernels.specs.Recorded`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from kernels.specs import Recorded

    HostArray = np.ndarray[Any, np.dtype[Any]]

Array = Any  # cupy.ndarray, numpy.ndarray, or kernels.specs.ArraySpec while only the shapes matter


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes."""

    free: int
    total: int


class Event(Protocol):
    """A point in the stream."""

    def wait(self) -> None:
        """Block the host until the stream has passed it."""


class Graph(Protocol):
    """A step that was recorded."""

    def launch(self) -> None:
        """Queue all its launches."""


class Device(Protocol):
    """One device and its stream."""

    @property
    def name(self) -> str: ...

    @property
    def arch(self) -> str:
        """Such as "sm_90"."""

    @property
    def pdl(self) -> bool:
        """Whether kernels are chained by programmatic dependent launch."""

    @property
    def processors(self) -> int:
        """Multiprocessors."""

    @property
    def compiled(self) -> Sequence[str]:
        """Symbols of the kernels that launches had to compile, in order."""

    def memory(self) -> DeviceMemory: ...

    def empty(self, shape: tuple[int, ...], dtype: str) -> Array:
        """Memory with arbitrary contents, C-contiguous, aligned to 256 bytes. Raises OutOfMemoryError."""

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Array:
        """Raises OutOfMemoryError."""

    def clear(self, array: Array) -> None:
        """Set all bytes to 0, in stream order."""

    def pinned(self, shape: tuple[int, ...], dtype: str) -> HostArray:
        """Host memory that the device copies from and to directly."""

    def copy_in(self, target: Array, source: HostArray) -> None:
        """Queue a copy to the device. Rows of `target` may be strided.

        A pinned source must stay as it is until the copy is done; any other may be changed at once.
        """

    def copy_out(self, target: HostArray, source: Array) -> None:
        """Queue a copy to pinned memory."""

    def copy(self, target: Array, source: Array) -> None:
        """Queue a copy within the device; both contiguous."""

    def download(self, source: Array) -> HostArray:
        """Wait for everything queued and return a host copy."""

    def event(self) -> Event:
        """Mark this point of the stream."""

    def fetch(self, target: HostArray, source: Array) -> Event:
        """Copy to pinned memory once the work queued so far is done, beside the work queued after it.

        The rows of `source` may be strided. Nothing queued after may overwrite it before the event has been waited for.
        """

    def run(self, step: Sequence[Recorded]) -> None:
        """Queue the launches one by one."""

    def record(self, step: Sequence[Recorded], carveout: int | None = None) -> Graph:
        """Make a graph of them. Nothing runs. `carveout`: percent of shared memory, a hint (kernels/carveout.py)."""

    def synchronize(self) -> None: ...

    def close(self) -> None:
        """Wait, and give back what the device object itself holds."""
