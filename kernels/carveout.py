"""One shared-memory carve-out for the kernels of a captured CUDA graph.

An SM splits 256 KiB between L1 and shared memory, and switches the split only when it is idle. Left alone, the driver
picks a split per kernel, so that in a chain of small kernels an SM may drain between two of them, and a large share for
shared memory leaves loads in flight less L1. What is best depends on the model's shapes: docs/kernels.md has the
measurements, configs/<arch>.json ("decode_step", "decode_step_int8") the choice.

Only ctypes on the driver library; nothing here is needed for correctness.
"""

from __future__ import annotations

import ctypes

from kernels import configs

_KERNEL_NODE = 0  # CU_GRAPH_NODE_TYPE_KERNEL
_PREFERRED_CARVEOUT = 14  # CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT


def step_carveout(
    arch: str, hidden: int, context: int = 512, *, int8: bool = False, int8_cache: bool = False
) -> int | None:
    """The percentage for a decode step of a model with this hidden length; None leaves the choice to the driver.

    Steps of INT8 weights have a family of their own. `context` is the longest that the step's graph serves: attention's
    loop over a long one wants room for two blocks' rings on an SM, which are larger for keys and values in INT8.
    """
    family = "decode_step_int8" if int8 else "decode_step"
    try:
        kv_bytes = 1 if int8_cache else 2
        found = configs.config(family, arch, hidden=hidden, context=context, kv_bytes=kv_bytes)["carveout"]
    except KeyError:
        return None
    return None if found is None else int(found)


def set_carveout(graph: int, percent: int) -> int:
    """Ask for a carve-out on every kernel node of a graph that is not instantiated yet.

    Args:
        graph: a CUgraph handle (what cudaStreamEndCapture returns).
        percent: of the largest shared memory; 0 asks for all of L1. A kernel that needs more gets what it needs.

    Returns:
        How many nodes took it.

    Raises:
        OSError: no CUDA driver.
        RuntimeError: the driver refused.
    """
    driver = ctypes.CDLL("libcuda.so.1")
    count = ctypes.c_size_t(0)
    handle = ctypes.c_void_p(graph)
    _check(driver.cuGraphGetNodes(handle, None, ctypes.byref(count)), "cuGraphGetNodes")
    nodes = (ctypes.c_void_p * count.value)()
    _check(driver.cuGraphGetNodes(handle, nodes, ctypes.byref(count)), "cuGraphGetNodes")
    return sum(_set(driver, ctypes.c_void_p(node), percent) for node in nodes)


def _set(driver: ctypes.CDLL, node: ctypes.c_void_p, percent: int) -> int:
    kind = ctypes.c_int(-1)
    _check(driver.cuGraphNodeGetType(node, ctypes.byref(kind)), "cuGraphNodeGetType")
    if kind.value != _KERNEL_NODE:
        return 0
    value = (ctypes.c_uint * 16)(percent)
    result = driver.cuGraphKernelNodeSetAttribute(node, _PREFERRED_CARVEOUT, ctypes.byref(value))
    _check(result, "cuGraphKernelNodeSetAttribute")
    return 1


def _check(result: int, call: str) -> None:
    if result:
        raise RuntimeError(f"{call} failed with CUDA driver error {result}")
