"""kernels/widen_pages.py: pages of an INT8 cache in half precision, to the last bit, and attention over them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernels.attention_prefill import AttentionPrefillConfig, attention_prefill
from kernels.configs import config
from kernels.specs import ArraySpec, RecordingLauncher
from kernels.widen_pages import MOST_PAGES, widen_pages
from tests.reference import attention_prefill as prefill_reference
from tests.reference.int8 import pools_of_int8, widened_pages
from tests.reference.random_arrays import DTYPES, normal
from tests.reference.tolerance import assert_close

UNTOUCHED = -7.0


def random_pools(pages: int, kv_heads: int, d: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Pools full of every int8, and scales of many sizes."""
    rng = np.random.default_rng(1)
    shapes = (pages * kv_heads * 64, d), (pages * kv_heads * d, 64)
    pools = [rng.integers(-128, 128, shape, np.int8) for shape in shapes]
    scales = [np.exp(rng.normal(-4, 2, (pages * kv_heads, 64))).astype(np.float32) for _ in shapes]
    return pools, scales


def run(
    machine: Any, kv_heads: int, d: int, start: int, tokens: int, *, dtype: str = "bfloat16", entries: int = 16,
    room: int = 9,
) -> None:  # fmt: skip
    """A shuffled table of `entries` and a scratch pool of `room` pages: whole pages equal the oracle's, or nothing."""
    table = np.random.default_rng(2).permutation(entries + 3)[:entries].astype(np.int32)
    pools, scales = random_pools(entries + 3, kv_heads, d)
    shapes = (room * kv_heads * 64, d), (room * kv_heads * d, 64)
    outs = [machine.array(np.full(shape, UNTOUCHED, DTYPES[dtype])) for shape in shapes]
    arrays = [machine.array(a) for a in (*pools, table, np.array([start], np.int32))]
    widen_pages(
        machine.launcher, *arrays, *outs, tokens=tokens, kv_heads=kv_heads, head_dim=d,
        scales=tuple(machine.array(s) for s in scales),
    )  # fmt: skip
    count = min(-(-(start + tokens) // 64), entries, room)
    for i, (pool, scale, out) in enumerate(zip(pools, scales, outs, strict=True)):
        found = machine.host(out).reshape(room, -1)
        want = widened_pages(pool, scale, table[:count], kv_heads, DTYPES[dtype], by_column=i == 1)
        want = want.reshape(count, -1)
        np.testing.assert_array_equal(found[:count], want)
        assert (found[count:] == UNTOUCHED).all()


@pytest.mark.parametrize(("kv_heads", "d"), [(3, 64), (1, 128), (8, 128)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_heads(machine: Any, kv_heads: int, d: int, dtype: str) -> None:
    run(machine, kv_heads, d, 70, 64, dtype=dtype)


@pytest.mark.parametrize(("start", "tokens"), [(0, 1), (0, 64), (0, 65), (63, 1), (63, 2), (128, 64), (300, 200)])
def test_pages_that_a_chunk_sees(machine: Any, start: int, tokens: int) -> None:
    run(machine, 2, 64, start, tokens)


@pytest.mark.parametrize(("entries", "room"), [(4, 9), (16, 3)])
def test_neither_table_nor_scratch_is_left(machine: Any, entries: int, room: int) -> None:
    run(machine, 1, 128, 500, 64, entries=entries, room=room)


def test_more_pages_than_blocks(machine: Any) -> None:
    run(machine, 1, 64, 64 * MOST_PAGES + 5, 64, entries=MOST_PAGES + 16, room=MOST_PAGES + 8)


def attend(
    machine: Any, heads: int, kv_heads: int, d: int, start: int, tokens: int, tiles: AttentionPrefillConfig
) -> None:
    """Widening, then attention, of two layers through one scratch pool."""
    n = start + tokens
    pages = -(-n // 64) + 3
    entries = -(-pages // 16) * 16
    table = np.zeros(entries, np.int32)
    table[: pages - 3] = np.random.default_rng(1).permutation(pages)[: pages - 3]
    place, order = machine.array(np.array([start], np.int32)), machine.array(np.arange(entries, dtype=np.int32))
    on_machine = machine.array(table)
    scratch = [
        machine.empty((pages * kv_heads * 64, d), "bfloat16"),
        machine.empty((pages * kv_heads * d, 64), "bfloat16"),
    ]
    shape, found = {"kv_heads": kv_heads, "head_dim": d}, []
    for layer in range(2):
        old = (normal((n, kv_heads, d), "bfloat16", seed=3 * layer + s) for s in (1, 2))
        pools, scales, keys, values = pools_of_int8(*old, table, pages)
        q = normal((tokens, heads * d), "bfloat16", seed=3 * layer + 3)
        out = machine.empty(q.shape, "bfloat16")
        pools, scales, queries = map(machine.array, pools), tuple(map(machine.array, scales)), machine.array(q)
        widen_pages(machine.launcher, *pools, on_machine, place, *scratch, tokens=tokens, scales=scales, **shape)
        attention_prefill(machine.launcher, queries, *scratch, order, place, out, config=tiles, **shape)
        want = prefill_reference.attention(q.reshape(tokens, heads, d), keys, values, start, d**-0.5)
        found.append((out, want))
    for out, want in found:
        assert_close(machine.host(out).reshape(want.shape), want)


@pytest.mark.parametrize(("heads", "kv_heads", "d"), [(9, 3, 64), (4, 2, 128), (14, 2, 64)])
@pytest.mark.parametrize(("start", "tokens"), [(0, 65), (63, 2), (100, 131)])
def test_attention(machine: Any, heads: int, kv_heads: int, d: int, start: int, tokens: int) -> None:
    attend(machine, heads, kv_heads, d, start, tokens, AttentionPrefillConfig(tile_q=64))


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "kv_heads", "d"), [(32, 8, 128), (9, 3, 64)])
@pytest.mark.parametrize(("start", "tokens"), [(1021, 300), (5000, 64)])
def test_attention_with_configured_tiles(
    machine: Any, heads: int, kv_heads: int, d: int, start: int, tokens: int
) -> None:
    if not machine.on_gpu:
        pytest.skip("needs a GPU")
    tiles = AttentionPrefillConfig(**config("attention_prefill", machine.arch, head_dim=d))
    attend(machine, heads, kv_heads, d, start, tokens, tiles)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 32}, "head_dim is 32, expected 64 or 128"),
        ({"tokens": 0}, "0 tokens and 2 KV heads, expected at least one of each"),
        ({"k_out": ArraySpec((192, 64), "bfloat16")}, "k_out has 192 rows, expected a multiple of 2 KV heads"),
        ({"v_out": ArraySpec((128, 64), "bfloat16")}, r"v_out has shape \(128, 64\), expected \(256, 64\)"),
    ],
)
def test_refusals(changes: dict[str, Any], message: str) -> None:
    pool, out = ArraySpec((256, 64), "int8"), ArraySpec((256, 64), "bfloat16")
    given = {"k_pool": pool, "v_pool": pool, "block_table": ArraySpec(16, "int32"), "start": ArraySpec(1, "int32")}
    given |= {"k_out": out, "v_out": out, "tokens": 3, "kv_heads": 2, "head_dim": 64}
    launcher = RecordingLauncher("sm_90")
    with pytest.raises(ValueError, match=message):
        widen_pages(launcher, **(given | changes), scales=(ArraySpec((4, 64), "float32"),) * 2)
    assert launcher.records == []
