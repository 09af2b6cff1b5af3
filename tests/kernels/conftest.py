"""The machine that a kernel test runs on: the interpreter everywhere, and the same test on a GPU where there is one.

    def test_rms_norm(machine):
        x, y = machine.array(values), machine.empty((1, 576), "bfloat16")
        rms_norm(machine.launcher, x, …, y)
        assert_close(machine.host(y), reference)

Each test runs plain and, where it can, under programmatic dependent launch. On the interpreter, outputs of `empty`
count as memory that nothing wrote, and blocks run in a shuffled order.

`pytest -m gpu` runs the GPU's share alone. TILEINFER_TEST_ARCH=sm_80 interprets another architecture's configurations.
"""

from __future__ import annotations

import os
import zlib
from typing import Any

import numpy as np
import pytest

from kernels.interpreter import InterpreterLauncher, uninitialised, unwritten
from kernels.launch import GpuLauncher
from tests.reference.random_arrays import DTYPES


class InterpretedMachine:
    """NumPy arrays and the interpreter."""

    on_gpu = False

    def __init__(self, arch: str, *, pdl: bool, seed: int) -> None:
        self.arch = arch
        self.pdl = pdl
        self.launcher: Any = InterpreterLauncher(arch, pdl=pdl, shuffle_seed=seed)

    def array(self, values: Any, dtype: str | None = None) -> Any:
        """A copy of host values in the machine's memory."""
        return np.array(values, dtype=None if dtype is None else DTYPES[dtype])

    def empty(self, shape: int | tuple[int, ...], dtype: str) -> Any:
        """An output: reading an element before it is written is an error."""
        return uninitialised(shape, DTYPES[dtype])

    def zeros(self, shape: int | tuple[int, ...], dtype: str) -> Any:
        return np.zeros(shape, DTYPES[dtype])

    def host(self, array: Any, *, partly: bool = False) -> np.ndarray:
        """The values, after everything launched has finished. Every element must have been written, unless `partly`."""
        self.launcher.synchronize()
        holes = unwritten(array)
        if holes.any() and not partly:
            first = tuple(int(i) for i in np.argwhere(holes)[0])
            raise AssertionError(f"{holes.sum()} of {holes.size} elements were never written, the first at {first}")
        return array.copy()


class GpuMachine:
    """CuPy arrays and the first CUDA device."""

    on_gpu = True

    def __init__(self, *, pdl: bool) -> None:
        import cupy

        self._cupy = cupy
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._in_use: list[Any] = []  # CuPy gives freed memory away while a launch may still read it
        self.arch = gpu_arch()
        self.pdl = pdl
        self.launcher: Any = GpuLauncher(self._stream.ptr, self.arch, pdl=pdl, processors=3)

    def array(self, values: Any, dtype: str | None = None) -> Any:
        copy = self._cupy.asarray(np.array(values, dtype=None if dtype is None else DTYPES[dtype]))
        self._cupy.cuda.Device().synchronize()
        self._in_use.append(copy)
        return copy

    def empty(self, shape: int | tuple[int, ...], dtype: str) -> Any:
        """An output full of NaN, or of 0x5A bytes for integers."""
        kind = np.dtype(DTYPES[dtype])
        poison = (
            np.full(shape, np.nan).astype(kind) if kind.kind not in "iub" else np.full(shape, 0x5A5A5A5A).astype(kind)
        )
        return self.array(poison)

    def zeros(self, shape: int | tuple[int, ...], dtype: str) -> Any:
        return self.array(np.zeros(shape, DTYPES[dtype]))

    def host(self, array: Any, *, partly: bool = False) -> np.ndarray:
        del partly  # a NaN left over fails the comparison
        self._stream.synchronize()
        return self._cupy.asnumpy(array)


def gpu_arch() -> str | None:
    """Such as "sm_90", or None without CuPy or a device."""
    try:
        import cupy

        return f"sm_{cupy.cuda.Device(0).compute_capability}"
    except Exception:
        return None


def _machines() -> list[Any]:
    """Parameters of the fixture: what this host can run."""
    arch = os.environ.get("TILEINFER_TEST_ARCH", "sm_90")
    chained = [False, True] if int(arch.removeprefix("sm_")) >= 90 else [False]
    found = [pytest.param(("interpreter", arch, pdl), id=f"interpreter{'-pdl' * pdl}") for pdl in chained]
    device = gpu_arch()
    if device is not None:
        chained = [False, True] if int(device.removeprefix("sm_")) >= 90 else [False]
        found += [pytest.param(("gpu", device, pdl), id=f"gpu{'-pdl' * pdl}", marks=pytest.mark.gpu) for pdl in chained]
    return found


@pytest.fixture(params=_machines())
def machine(request: pytest.FixtureRequest) -> Any:
    kind, arch, pdl = request.param
    if kind == "gpu":
        return GpuMachine(pdl=pdl)
    return InterpretedMachine(arch, pdl=pdl, seed=zlib.crc32(request.node.nodeid.encode()))
