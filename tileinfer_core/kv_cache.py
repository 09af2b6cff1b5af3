"""Bookkeeping of one sequence's keys and values: which tokens are in, on which pages. No arrays.

The memory belongs to the backend, which hands out pages of PAGE_SIZE tokens. A token counts only once its keys and
values are written in every layer (`commit`), so an interrupted step leaves nothing half-done: what it wrote lies
beyond `length` and is written over by the next one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from tileinfer_core.errors import ContextLengthError

if TYPE_CHECKING:
    from collections.abc import Sequence

PAGE_SIZE = 64


class PageStore(Protocol):
    """The backend's memory for keys and values."""

    def add_pages(self, block_table: Sequence[int], count: int) -> list[int]:
        """`count` new pages for the sequence that owns `block_table`; what is written stays where it is read.

        Raises:
            OutOfMemoryError: naming the tokens that would still fit.
        """

    def free_pages(self, pages: Sequence[int]) -> None:
        """Take pages back."""


class KvCache:
    """The tokens whose keys and values are held, in order, and the pages that hold them."""

    def __init__(self, store: PageStore, max_tokens: int) -> None:
        self.store = store
        self.max_tokens = max_tokens
        self._token_ids: list[int] = []
        self._block_table: list[int] = []

    @property
    def length(self) -> int:
        return len(self._token_ids)

    @property
    def token_ids(self) -> Sequence[int]:
        """The live list of committed ids: read it, never change it."""
        return self._token_ids

    @property
    def block_table(self) -> Sequence[int]:
        """Page id of every PAGE_SIZE tokens. The live list: read it, never change it."""
        return self._block_table

    @property
    def capacity(self) -> int:
        """Tokens that the pages at hand can hold."""
        return len(self._block_table) * PAGE_SIZE

    def reserve(self, count: int) -> None:
        """Make room for `count` tokens after the committed ones.

        Raises:
            ContextLengthError: more than max_tokens in all.
            OutOfMemoryError: the backend has no page left.
        """
        wanted = self.length + count
        if wanted > self.max_tokens:
            raise ContextLengthError(f"{wanted:,} tokens do not fit into a context of {self.max_tokens:,}")
        missing = -(-wanted // PAGE_SIZE) - len(self._block_table)
        if missing > 0:
            self._block_table += self.store.add_pages(self._block_table, missing)

    def commit(self, token_ids: Sequence[int]) -> None:
        """Count tokens whose keys and values are now written in every layer."""
        assert self.length + len(token_ids) <= self.capacity  # noqa: S101 - reserve comes first: our own bug
        self._token_ids += token_ids

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens; pages beyond them go back to the backend."""
        assert 0 <= length <= self.length  # noqa: S101 - our own bug
        del self._token_ids[length:]
        keep = -(-length // PAGE_SIZE)
        spare = self._block_table[keep:]
        del self._block_table[keep:]
        if spare:
            self.store.free_pages(spare)

    def common_prefix(self, token_ids: Sequence[int]) -> int:
        """How many leading ids of `token_ids` are held already."""
        count = 0
        for held, wanted in zip(self._token_ids, token_ids, strict=False):
            if held != wanted:
                break
            count += 1
        return count
