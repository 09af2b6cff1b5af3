"""Pages: taken and given back by sequences, never moved, and mirrored in a block table of fixed length."""

from __future__ import annotations

import gc
from itertools import count

import numpy as np
import pytest

from tests.interrupts import interrupted
from tests.reference.tiny_models import VARIANTS
from tileinfer_core.backends.cuda.interpreted import InterpretedDevice
from tileinfer_core.backends.cuda.kv_pool import SCRATCH_PAGE, BlockTable, KvPool, SequencePages
from tileinfer_core.config import ModelConfig
from tileinfer_core.errors import ContextLengthError, OutOfMemoryError
from tileinfer_core.kv_cache import KvCache
from tileinfer_core.models.define import define_model

STRUCTURE = define_model(ModelConfig.from_dict(VARIANTS["qwen3-tied"]), tied=True).structure


@pytest.fixture
def pool():
    return KvPool(InterpretedDevice(), STRUCTURE, layers=2, pages=6, dtype="bfloat16")


def cache_of(pool, tokens=10_000):
    return KvCache(SequencePages(pool), tokens)


def grow(cache, tokens):
    cache.reserve(tokens)
    cache.commit(range(tokens))


def test_arrays_have_the_kernels_layout_and_are_zero(pool):
    assert pool.k[0].shape == (6 * 2 * 64, 32)
    assert pool.v[0].shape == (6 * 2 * 32, 64)
    assert not any(array.any() for array in (*pool.k, *pool.v))


def test_scales_of_an_int8_pool_have_rows_in_sixteens_and_only_the_scratch_page_is_cleared():
    device = InterpretedDevice()
    pool = KvPool(device, STRUCTURE, layers=1, pages=5, dtype="int8")  # two heads: ten rows
    arrays = (pool.k[0], pool.v[0], *pool.scales[0])
    assert [array.shape for array in arrays] == [(640, 32), (320, 64), (16, 64), (16, 64)]
    for array in arrays:
        array[:] = 1
    pool.clear_scratch(device)
    assert [int(array[:, 0].sum()) for array in arrays] == [640 - 2 * 64, 320 - 2 * 32, 14, 14]


def test_a_sequence_grows_by_pages_and_keeps_those_it_has(pool):
    cache = cache_of(pool)
    grow(cache, 64)
    first = list(cache.block_table)
    grow(cache, 1)
    assert list(cache.block_table[:1]) == first
    assert len(cache.block_table) == 2
    assert SCRATCH_PAGE not in cache.block_table


def test_sequences_never_share_a_page(pool):
    one, two = cache_of(pool), cache_of(pool)
    for _ in range(2):
        grow(one, 64)
        grow(two, 64)
    assert not set(one.block_table) & set(two.block_table)


def test_an_exhausted_pool_says_what_is_left_and_goes_on(pool):
    cache = cache_of(pool)
    grow(cache, 4 * 64)
    with pytest.raises(OutOfMemoryError, match="has room for 64"):
        cache.reserve(129)
    grow(cache, 64)
    assert cache.length == 320


def test_the_context_limit_is_another_error(pool):
    with pytest.raises(ContextLengthError):
        cache_of(pool, tokens=100).reserve(101)


def test_truncated_and_dropped_sequences_give_their_pages_back(pool):
    cache = cache_of(pool)
    grow(cache, 320)
    assert pool.free_tokens == 0
    cache.truncate(65)
    assert pool.free_tokens == 3 * 64
    del cache
    gc.collect()
    assert pool.free_tokens == 5 * 64
    assert sorted(pool.take(5)) == [1, 2, 3, 4, 5]


ACTIONS = {"grow": lambda cache: grow(cache, 128), "truncate": lambda cache: cache.truncate(10)}


@pytest.mark.parametrize("name", ACTIONS)
def test_an_interrupt_at_any_instruction_loses_no_page_and_gives_none_twice(name):
    for steps in count():
        pool = KvPool(InterpretedDevice(), STRUCTURE, layers=1, pages=6, dtype="bfloat16")
        cache, other = cache_of(pool), cache_of(pool)
        grow(cache, 128)
        grow(other, 64)
        came = interrupted(lambda cache=cache: ACTIONS[name](cache), steps, inside=("kv_pool.py", "kv_cache.py"))
        cache.truncate(1)
        grow(other, 64)
        grow(cache, 64)
        grow(other, 64)  # all five are in use: 2 and 3
        pages = [*cache.block_table, *other.block_table]
        assert sorted(pages) == [1, 2, 3, 4, 5], f"after {steps} instructions"
        if not came:
            break
    assert steps > 50


def test_an_interrupted_update_of_the_block_table_is_made_again():
    device = InterpretedDevice()
    for steps in count():
        table = BlockTable(device, 20)
        table.update([3, 1, 2])
        came = interrupted(lambda table=table: table.update([3, 1, 9, 4]), steps, inside=("kv_pool.py",))
        for pages in ([3, 1, 2], [3, 1]):
            table.update(pages)
            held = device.download(table.array).tolist()
            assert held == pages + [SCRATCH_PAGE] * (32 - len(pages)), f"after {steps} instructions"
        if not came:
            break
    assert steps > 50


def test_the_block_table_is_padded_to_16_and_ends_in_scratch():
    device = InterpretedDevice()
    table = BlockTable(device, 20)
    assert table.entries == 32
    for pages in ([3], [3, 1], [3, 1, 2], [3], [3, 7], [5, 7, 9], [], [4]):
        table.update(pages)
        assert device.download(table.array).tolist() == pages + [SCRATCH_PAGE] * (32 - len(pages))


def test_an_unchanged_block_table_is_not_copied_again():
    class Counting(InterpretedDevice):
        copies = 0

        def copy_in(self, target, source):
            self.copies += np.size(source)
            super().copy_in(target, source)

    device = Counting()
    table = BlockTable(device, 20)
    table.update([3, 1])
    table.update([3, 1])
    assert device.copies == 2
    table.update([3, 1, 4])
    assert device.copies == 3
