"""The scales of INT8 weights at a wrapper's door: W[n, k] = scale[n, k // G] · w[n, k].

One scale a row ([N, 1]) or one for each group of G neighbouring columns ([N, K / G]), float32. The kernels want G to be
a power of two from 16 up, so that a 16-byte load lies in one group.
"""

from __future__ import annotations

from typing import Any

from kernels.launch import check_array

LOAD = 16  # weights of one load; they lie in one thread


def supported_group(group: int | None) -> bool:
    """Whether the kernels take groups of this many columns; None is one scale a row."""
    return group is None or (group >= LOAD and group & (group - 1) == 0)


def check_int8(op: str, w: Any, scale: Any) -> tuple[int, int, int | None]:
    """Rows, columns, and columns of a group: None where a row has one scale.

    Raises:
        ValueError, TypeError: naming what was found and expected.
    """
    check_array(f"{op}: w", w, (None, None), "int8", align=16)
    n, k = (int(side) for side in w.shape)
    if k % LOAD:
        raise ValueError(f"{op}: the weight has {k} columns, expected a multiple of {LOAD} (16 bytes)")
    check_array(f"{op}: scale", scale, (n, None), "float32", align=16)
    groups = int(scale.shape[1])
    group = None if groups == 1 else k // groups
    if k % groups or not supported_group(group):
        raise ValueError(f"{op}: {groups} scales for {k} columns, expected one for each power of two from {LOAD} up")
    return n, k, group
