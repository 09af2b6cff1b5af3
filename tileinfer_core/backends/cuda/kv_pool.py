"""Keys and values of all sequences on the device, in pages of 64 tokens, and a sequence's block table there.

One K and one V array per layer, as the kernels want them (docs/shapes.md):

    k[layer] [pages * K * 64, d]   row (page * K + head) * 64 + slot
    v[layer] [pages * K * d, 64]   row (page * K + head) * d + dimension: V is stored transposed

INT8 pools have int8 rows of the same shapes, and for each layer a pair of scale arrays, float32 [pages * K padded, 64].

All pages are taken when the model is loaded; a sequence grows by taking page numbers, so nothing moves and captured
graphs stay valid. Page 0 is scratch: table entries past a sequence's pages name it, rows of padding write there, and
kernels that read ahead of the sequence find finite numbers.

Ctrl-C may come between any two steps. A page is never with two owners then; one that is with none is found again when
pages run short.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import numpy as np

from kernels.paged_cache import padded
from tileinfer_core.errors import OutOfMemoryError
from tileinfer_core.kv_cache import PAGE_SIZE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tileinfer_core.backends.cuda.device import Array, Device
    from tileinfer_core.models.structure import LayerStructure

SCRATCH_PAGE = 0


def table_entries(pages: int) -> int:
    """Of a block table for sequences of at most `pages` pages."""
    return padded(pages + 1)


class KvPool:
    """The pages of one model. Zeroed once: masked slots are multiplied by 0, so they must hold finite numbers."""

    def __init__(self, device: Device, structure: LayerStructure, layers: int, pages: int, dtype: str) -> None:
        rows, head_dim = pages * structure.num_key_value_heads, structure.head_dim
        self.k: list[Array] = [device.zeros((rows * PAGE_SIZE, head_dim), dtype) for _ in range(layers)]
        self.v: list[Array] = [device.zeros((rows * head_dim, PAGE_SIZE), dtype) for _ in range(layers)]
        self.scales: list[tuple[Array, Array] | None] = [None] * layers
        if dtype == "int8":
            shape = (padded(rows), PAGE_SIZE)
            self.scales = [(device.zeros(shape, "float32"), device.zeros(shape, "float32")) for _ in range(layers)]
        self._pages, self._heads = pages, structure.num_key_value_heads
        self._free = list(range(pages - 1, SCRATCH_PAGE, -1))
        self.sequences: weakref.WeakSet[SequencePages] = weakref.WeakSet()

    @property
    def free_tokens(self) -> int:
        return len(self._free) * PAGE_SIZE

    def _find_lost(self) -> None:
        """Free is what no sequence holds."""
        held = {page for sequence in self.sequences for page in sequence.held}
        self._free = [page for page in range(self._pages - 1, SCRATCH_PAGE, -1) if page not in held]

    def clear_scratch(self, device: Device) -> None:
        scales = [array for pair in self.scales if pair for array in pair]
        slots, dimensions = PAGE_SIZE, self.k[0].shape[1]
        for arrays, rows in ((self.k, slots), (self.v, dimensions), (scales, 1)):
            for array in arrays:
                device.clear(array[: self._heads * rows])

    def take(self, count: int) -> list[int]:
        """Raises OutOfMemoryError."""
        if count > len(self._free):
            self._find_lost()
        if count > len(self._free):
            raise OutOfMemoryError(
                f"{count * PAGE_SIZE:,} more tokens asked for, the KV cache has room for {self.free_tokens:,}",
                hint="start a new conversation, or load the model with a larger --context",
            )
        return [self._free.pop() for _ in range(count)]

    def give_back(self, pages: Sequence[int]) -> None:
        self._free.extend(reversed(pages))


class SequencePages:
    """The PageStore of one sequence. Its pages go back to the pool with it."""

    def __init__(self, pool: KvPool) -> None:
        self._pool = pool
        self.held: list[int] = []
        pool.sequences.add(self)
        weakref.finalize(self, pool.give_back, self.held)

    def add_pages(self, block_table: Sequence[int], count: int) -> list[int]:
        if len(self.held) != len(block_table):  # an interrupt came between them: the rest is the pool's to find
            self.held[:] = block_table
        pages = self._pool.take(count)
        self.held += pages
        return pages

    def free_pages(self, pages: Sequence[int]) -> None:
        for page in pages:
            self.held.remove(page)
        self._pool.give_back(pages)


class BlockTable:
    """The block table of the sequence in work, on the device: fixed length, scratch past the sequence's pages."""

    def __init__(self, device: Device, pages: int) -> None:
        self.entries = table_entries(pages)
        self.array: Array = device.zeros((self.entries,), "int32")
        self._device = device
        self._host = device.pinned((self.entries,), "int32")
        self._written: list[int] | None = []  # what the device holds, without the scratch entries; None: not known

    def update(self, block_table: Sequence[int]) -> None:
        """Copy what has changed. Entries of pages that a sequence keeps are never rewritten."""
        held = self._written
        known = held is not None
        if held is None:  # an update was interrupted
            held = [SCRATCH_PAGE] * self.entries
        same = known and len(held) <= len(block_table) and list(block_table[: len(held)]) == held
        if same and len(held) == len(block_table):
            return
        first = len(held) if same else 0
        self._written = None
        if not same:
            self._device.synchronize()  # an earlier copy may still read the pinned entries
        stop = max(len(held), len(block_table))
        self._host[first:stop] = SCRATCH_PAGE
        self._host[first : len(block_table)] = np.asarray(block_table[first:], np.int32)
        self._device.copy_in(self.array[first:stop], self._host[first:stop])
        self._written = list(block_table)
