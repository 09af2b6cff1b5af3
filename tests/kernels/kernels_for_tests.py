"""A kernel for tests that need any."""

from __future__ import annotations

import cuda.tile as ct


@ct.kernel
def copy_kernel(x, y, N: ct.Constant[int], PDL: ct.Constant[int]):
    """y = x, in tiles of N."""
    i = ct.bid(0)
    if PDL:
        ct.grid_dependency_control_launch_dependents()
        ct.grid_dependency_control_wait()
    ct.store(y, index=(i,), tile=ct.load(x, index=(i,), shape=(N,)))
