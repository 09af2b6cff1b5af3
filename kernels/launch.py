"""The one seam between a kernel's wrapper and whatever runs the kernel.

A wrapper checks its arrays, looks up its configuration for `launcher.arch`, computes the grid and calls
`launcher(kernel, grid, args)`. Who receives that call decides what happens:

    GpuLauncher          ct.launch on a CUDA stream, plain or with programmatic dependent launch (PDL)
    InterpreterLauncher  kernels.interpreter: block by block on NumPy arrays, with memory checks
    RecordingLauncher    kernels.specs: runs nothing, keeps (kernel, arguments), for compilation and for captured steps

Wrappers never ask which one they got. `launch` is the functional form beneath GpuLauncher: one kernel, one stream,
hints and dependent launch chosen at the call. docs/launching.md says what makes a launch compile.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Protocol

import cuda.tile as ct

if TYPE_CHECKING:
    from collections.abc import Sequence

    Grid = tuple[int, int, int]

FIRST_PDL_ARCH = 90
# Of the card that an architecture is best known by: A100, RTX 3090, RTX 4090, H100 and H200, B200, RTX 5090.
PROCESSORS = {"sm_80": 108, "sm_86": 82, "sm_89": 128, "sm_90": 132, "sm_100": 148, "sm_120": 170}


def processors_of(arch: str) -> int:
    """Multiprocessors, where no device says it."""
    return PROCESSORS.get(arch, 108)


@functools.cache
def supports_pdl(arch: str) -> bool:
    """Whether the target has programmatic dependent launch."""
    return int(arch.removeprefix("sm_").rstrip("abcdefghijklmnopqrstuvwxyz")) >= FIRST_PDL_ARCH


def launch(
    kernel: Any, grid: Grid, args: Sequence[Any], *, stream: int, arch: str, dependent: bool = False, **hints: int
) -> None:
    """Queue one launch.

    Args:
        stream: the raw pointer of any CUDA stream (cupy.cuda.Stream.ptr).
        dependent: programmatically dependent on the kernel before it in the stream, which it may then overlap: it must
            call `grid_dependency_control_wait` before it reads what that kernel wrote, and before it stores. Where the
            target has no such launch this is a plain one, whose order is the stream's.
        hints: occupancy, num_worker_warps, num_ctas, opt_level. Each set of hints is a kernel of its own.
    """
    if hints:
        kernel = with_hints(kernel, **hints)
    if dependent and supports_pdl(arch):
        ct.launch(stream, grid, kernel, tuple(args), programmatic_dependent_launch=True)
    else:
        ct.launch(stream, grid, kernel, tuple(args))


class Launcher(Protocol):
    """Runs or records one kernel launch.

    Attributes:
        arch: the target whose configuration row applies, such as "sm_90".
        pdl: whether kernels of this launcher are chained by programmatic dependent launch. Wrappers pass it to
            the kernel body as the constant PDL, so that one body serves both forms.
        processors: multiprocessors, for kernels whose blocks walk over several tiles each.
    """

    @property
    def arch(self) -> str: ...

    @property
    def pdl(self) -> bool: ...

    @property
    def processors(self) -> int: ...

    def check(self, kernel: Any, args: Sequence[Any]) -> None:
        """Refuse arrays that this launcher cannot reach.

        Raises:
            TypeError: an array is not where the launcher's kernels read.
        """

    def with_pdl(self, on: bool) -> Launcher:
        """The same launcher for one wrapper's launches, as dependent or as plain ones.

        Plain where the target has no dependent launch. Both kinds may follow each other in one stream.
        """

    def __call__(self, kernel: Any, grid: Grid, args: Sequence[Any]) -> None: ...


class GpuLauncher:
    """Launches on a CUDA stream. `stream` is the raw pointer (cupy.cuda.Stream.ptr)."""

    def __init__(self, stream: int, arch: str, *, pdl: bool, processors: int | None = None) -> None:
        if pdl and not supports_pdl(arch):
            raise ValueError(f"programmatic dependent launch needs sm_90 or newer, the device is {arch}")
        self.stream = stream
        self.arch = arch
        self.pdl = pdl
        self.processors = processors or processors_of(arch)

    def check(self, kernel: Any, args: Sequence[Any]) -> None:
        for arg in args:
            if hasattr(arg, "__array_interface__"):
                name = kernel._pyfunc.__name__  # noqa: SLF001
                raise TypeError(f"{name}: an argument of shape {arg.shape} is in host memory, expected a device array")

    def with_pdl(self, on: bool) -> GpuLauncher:
        pdl = on and supports_pdl(self.arch)
        return GpuLauncher(self.stream, self.arch, pdl=pdl, processors=self.processors)

    def __call__(self, kernel: Any, grid: Grid, args: Sequence[Any]) -> None:
        self.check(kernel, args)
        launch(kernel, grid, args, stream=self.stream, arch=self.arch, dependent=self.pdl)


class Together:
    """Several launches of one wrapper, none of which happens before all of them have passed every check."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._launches: list[tuple[Any, Grid, Sequence[Any]]] = []
        self.arch = launcher.arch
        self.pdl = launcher.pdl
        self.processors = launcher.processors

    def check(self, kernel: Any, args: Sequence[Any]) -> None:
        self._launcher.check(kernel, args)

    def with_pdl(self, on: bool) -> Launcher:
        return self._launcher.with_pdl(on)

    def __call__(self, kernel: Any, grid: Grid, args: Sequence[Any]) -> None:
        self.check(kernel, args)
        self._launches.append((kernel, grid, args))

    def launch(self) -> None:
        """All of them, in order."""
        for kernel, grid, args in self._launches:
            self._launcher(kernel, grid, args)


@functools.cache
def with_hints(kernel: Any, **hints: int) -> Any:
    """`kernel` with compiler hints (occupancy, num_worker_warps, …), made once per set of hints.

    `replace_hints` returns a kernel with an empty compilation cache, so calling it per launch would recompile.
    """
    return kernel.replace_hints(**hints) if hints else kernel


def address(array: Any) -> int:
    """Where an array starts: in device memory (CuPy), host memory (NumPy) or within its allocation (ArraySpec)."""
    if hasattr(array, "__array_interface__"):  # before `data`, which NumPy refuses to make for BF16
        return int(array.__array_interface__["data"][0])
    if hasattr(array, "data"):
        return int(array.data.ptr)
    return int(array.offset)


def check_array(what: str, array: Any, shape: tuple[int | None, ...], *dtypes: str, align: int = 1) -> None:
    """Refuse an array that the kernel would read wrongly, naming both the found and the expected.

    Args:
        what: "<op>: <argument>", the start of the message.
        array: anything with `shape`, `dtype` and `strides` or `flags` (NumPy, CuPy, a recorded spec).
        shape: the expected shape; None admits any length of at least 1.
        dtypes: NumPy names admitted ("bfloat16", "float32", …).
        align: bytes by which the address of the first element must be divisible. Kernels that load 16 bytes a thread
            or through TMA ask for 16: an unaligned array would be compiled for again, and read more slowly.

    Raises:
        ValueError: wrong rank, length, layout (arrays must be C-contiguous) or alignment.
        TypeError: no array, or wrong dtype.
    """
    if not hasattr(array, "dtype"):
        raise TypeError(f"{what} is of type {type(array).__name__}, expected an array of {' or '.join(dtypes)}")
    if str(array.dtype) not in dtypes:
        raise TypeError(f"{what} has dtype {array.dtype}, expected {' or '.join(dtypes)}")
    found = tuple(array.shape)
    fits = len(found) == len(shape) and 0 not in found
    if not fits or any(want not in (None, have) for have, want in zip(found, shape, strict=True)):
        expected = ", ".join("any" if n is None else str(n) for n in shape)
        raise ValueError(f"{what} has shape {found}, expected ({expected})")
    if not array.flags.c_contiguous:
        raise ValueError(f"{what} is not C-contiguous (strides {tuple(array.strides)} bytes)")
    if align > 1 and address(array) % align:
        raise ValueError(f"{what} starts at address {address(array):#x}, expected a multiple of {align} bytes")
