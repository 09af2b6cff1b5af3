"""Bookkeeping of pages and tokens, on a store that counts."""

from __future__ import annotations

import pytest

from tileinfer_core.errors import ContextLengthError, OutOfMemoryError
from tileinfer_core.kv_cache import PAGE_SIZE, KvCache


class Pages:
    """Hands out pages in no particular order, as a pool on a device does, and has only `total` of them."""

    def __init__(self, total: int = 100) -> None:
        self.free = list(range(total))

    def add_pages(self, block_table, count):
        if count > len(self.free):
            raise OutOfMemoryError("no page left")
        return [self.free.pop() for _ in range(count)]

    def free_pages(self, pages):
        self.free += pages


def filled(count, *, total=100, max_tokens=6400):
    cache = KvCache(Pages(total), max_tokens)
    cache.reserve(count)
    cache.commit(list(range(count)))
    return cache


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (63, 1), (64, 1), (65, 2), (128, 2), (129, 3)])
def test_pages_are_taken_as_they_are_needed(tokens, pages):
    cache = filled(tokens)
    assert len(cache.block_table) == pages
    assert cache.capacity == pages * PAGE_SIZE
    assert cache.length == tokens


def test_a_reservation_is_not_a_token_and_can_be_repeated():
    cache = filled(60)
    cache.reserve(10)
    cache.reserve(10)
    assert (cache.length, len(cache.block_table)) == (60, 2)


def test_pages_stay_where_they_are_when_the_sequence_grows():
    cache = filled(200)
    before = list(cache.block_table)
    cache.reserve(500)
    assert list(cache.block_table)[:4] == before


@pytest.mark.parametrize(("length", "pages"), [(0, 0), (1, 1), (64, 1), (65, 2), (199, 4), (200, 4)])
def test_truncation_gives_back_the_pages_beyond(length, pages):
    cache = filled(200)
    cache.truncate(length)
    assert (cache.length, len(cache.block_table)) == (length, pages)
    assert len(cache.store.free) == 100 - pages
    assert len(set(cache.store.free) | set(cache.block_table)) == 100


def test_the_context_is_a_wall_and_nothing_is_taken_in_front_of_it():
    cache = filled(100, max_tokens=130)
    with pytest.raises(ContextLengthError, match="131 tokens do not fit into a context of 130"):
        cache.reserve(31)
    assert len(cache.block_table) == 2
    cache.reserve(30)


def test_a_store_without_pages_leaves_the_cache_as_it_was():
    cache = filled(100, total=2)
    with pytest.raises(OutOfMemoryError):
        cache.reserve(100)
    assert (cache.length, len(cache.block_table)) == (100, 2)
    cache.truncate(10)
    cache.reserve(100)


@pytest.mark.parametrize(
    ("ids", "common"), [([], 0), ([9], 0), ([0, 1, 2], 3), ([0, 1, 9, 3], 2), (list(range(150)), 100)]
)
def test_the_common_prefix_is_counted_in_ids(ids, common):
    assert filled(100).common_prefix(ids) == common
