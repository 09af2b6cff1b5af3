"""How many threads BLAS may use, asked and set while it runs: OpenBLAS alone can be, which NumPy's wheels bring.

OpenBLAS's threads wait for each other by spinning. Where other programs keep a core busy, a thread that spins is put
to sleep for its whole time slice at every product: one token of SmolLM2-135M took 728 ms with two threads on two busy
cores, 17 ms with one thread, and 10 ms with two threads on idle cores. So the number must follow what else runs.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

_NAMES = ("scipy_openblas_{}_num_threads64_", "openblas_{}_num_threads64_", "openblas_{}_num_threads")


@dataclass(frozen=True, slots=True)
class BlasThreads:
    """`most` is what the library or OPENBLAS_NUM_THREADS chose at the start; `use(n)` holds until the next call."""

    most: int
    use: Callable[[int], None]


def find_blas_threads() -> BlasThreads | None:
    """None for a BLAS that is not OpenBLAS, or one that NumPy was not shipped with: it is left to its own rule."""
    for path in _libraries(Path(np.__file__).parent):
        try:
            library = ctypes.CDLL(str(path))
        except OSError:
            continue
        for name in _NAMES:
            get, put = (getattr(library, name.format(verb), None) for verb in ("get", "set"))
            if get is not None and put is not None:
                get.restype, put.argtypes, put.restype = ctypes.c_int, [ctypes.c_int], None
                return BlasThreads(max(1, get()), put)
    return None


def _libraries(package: Path) -> list[Path]:
    """Where the wheels of Linux, Windows and macOS keep it. Loading it again gives the one that NumPy uses."""
    folders = (package.parent / "numpy.libs", package / ".dylibs")
    return [path for folder in folders if folder.is_dir() for path in sorted(folder.glob("*openblas*"))]
