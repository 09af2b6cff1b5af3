"""Keys and values of one sequence as NumPy arrays. Its pages follow each other, so a layer's past is one slice.

Layout per layer: keys and values [K, C', d], C' the capacity.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tileinfer_core.errors import OutOfMemoryError
from tileinfer_core.kv_cache import PAGE_SIZE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tileinfer_core.models.structure import LayerStructure

    Float32Array = np.ndarray[Any, np.dtype[np.float32]]

FIRST_PAGES = 4


class NumpyPages:
    """The PageStore of one sequence. Memory grows by doubling and stays until the sequence is dropped."""

    def __init__(self, structure: LayerStructure, layers: int, max_tokens: int) -> None:
        empty = (structure.num_key_value_heads, 0, structure.head_dim)
        self._max_pages = -(-max_tokens // PAGE_SIZE)
        self._pages = 0
        self.keys: list[Float32Array] = [np.empty(empty, np.float32) for _ in range(layers)]
        self.values: list[Float32Array] = [np.empty(empty, np.float32) for _ in range(layers)]

    def add_pages(self, block_table: Sequence[int], count: int) -> list[int]:
        used = len(block_table)
        wanted = used + count
        if wanted > self._pages:
            self._grow(min(max(wanted, 2 * self._pages, FIRST_PAGES), max(self._max_pages, wanted)))
        return list(range(used, wanted))

    def free_pages(self, pages: Sequence[int]) -> None:
        """Nothing to do: the memory serves the same sequence's next pages."""

    def _grow(self, pages: int) -> None:
        """Layer by layer, so that no more than one layer is held twice. Interrupted, it can be called again."""
        tokens = pages * PAGE_SIZE
        try:
            for layer in range(len(self.keys)):
                self.keys[layer] = _grown(self.keys[layer], tokens)
                self.values[layer] = _grown(self.values[layer], tokens)
        except MemoryError:
            raise OutOfMemoryError(
                f"no memory for the keys and values of {tokens:,} tokens; {self._pages * PAGE_SIZE:,} are held",
                hint="start a new conversation, or set a smaller --context",
            ) from None
        self._pages = pages


def _grown(held: Float32Array, tokens: int) -> Float32Array:
    kv_heads, count, head_dim = held.shape
    if count >= tokens:
        return held
    grown = np.empty((kv_heads, tokens, head_dim), np.float32)
    grown[:, :count] = held
    return grown
