"""Keeps cuda-tile from importing PyTorch, which it does where it is installed, to know its data types.

TileInfer hands over no PyTorch tensors. The import costs 5 s of every start beside a PyTorch of CUDA, and a Ctrl-C that
falls into it is lost: the extension takes it for a failed import and goes on. A PyTorch that the program has imported
itself is left alone.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME = "torch"


@contextlib.contextmanager
def without_torch() -> Iterator[None]:
    """While this lasts, `import torch` fails as if it were not installed, unless it has been imported before."""
    modules: dict[str, Any] = sys.modules
    if NAME in modules:
        yield
        return
    modules[NAME] = None
    try:
        yield
    finally:
        if modules.get(NAME, ...) is None:
            del modules[NAME]
