"""Kernels for tests that need any, and how the interpreter's own tests run theirs."""

from __future__ import annotations

from typing import Any

import cuda.tile as ct
import numpy as np
import pytest

from kernels.interpreter import InterpreterError, InterpreterLauncher


@ct.kernel
def copy_kernel(x, y, N: ct.Constant[int], PDL: ct.Constant[int]):
    """y = x, in tiles of N."""
    i = ct.bid(0)
    if PDL:
        ct.grid_dependency_control_launch_dependents()
        ct.grid_dependency_control_wait()
    ct.store(y, index=(i,), tile=ct.load(x, index=(i,), shape=(N,)))


@ct.kernel
def branch_kernel(x, y):
    if ct.load(x, index=(0,), shape=()) > 0:
        ct.store(y, index=(0,), tile=1.0)


def floats(n: int) -> np.ndarray:
    return np.arange(n, dtype=np.float32)


def run(kernel: Any, grid: int, *args: Any, **options: Any) -> None:
    InterpreterLauncher("sm_90", **options)(kernel, (grid, 1, 1), args)


def caught(match: str) -> Any:
    return pytest.raises(InterpreterError, match=match)
