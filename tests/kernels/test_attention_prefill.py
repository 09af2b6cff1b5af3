"""kernels/attention_prefill.py: chunks of a prompt over a shuffled paged cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernels.attention_prefill import AttentionPrefillConfig, attention_prefill
from tests.reference.attention_prefill import PAGE, attention, fill_pools
from tests.reference.random_arrays import DTYPES, normal
from tests.reference.tolerance import assert_close

SMALL = AttentionPrefillConfig(tile_q=64, ahead=True)


def run(
    machine: Any,
    *,
    start: int,
    tokens: int,
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: str = "bfloat16",
    config: AttentionPrefillConfig = SMALL,
    scale: float | None = None,
    padding: int = 0,
    table_pages: int = 16,
) -> tuple[np.ndarray, np.ndarray]:
    """(output, reference). Slots past the context hold 7 and 9: finite, and wrong if they count."""
    context = start + tokens
    pages = -(-context // PAGE)
    table = np.zeros(max(table_pages, pages), np.int32)  # entries past the sequence: a scratch page
    table[:pages] = np.random.default_rng(5).permutation(pages) + 1
    k, v = (normal((context, kv_heads, dim), dtype, seed=seed) for seed in (1, 2))
    k_pool = np.full(((pages + 1) * kv_heads * PAGE, dim), 7).astype(DTYPES[dtype])
    v_pool = np.full(((pages + 1) * kv_heads * dim, PAGE), 9).astype(DTYPES[dtype])
    fill_pools(k_pool, v_pool, k, v, table)
    q = normal((tokens + padding, heads * dim), dtype, seed=3)
    out = machine.empty(q.shape, dtype)
    arrays = [machine.array(a) for a in (q, k_pool, v_pool, table, np.array([start], np.int32))]
    attention_prefill(machine.launcher, *arrays, out, kv_heads=kv_heads, head_dim=dim, config=config, scale=scale)
    rows = q[:tokens].reshape(tokens, heads, dim)
    expected = attention(rows, k, v, start, dim**-0.5 if scale is None else scale)
    return machine.host(out)[:tokens].reshape(rows.shape), expected


@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (16, 8), (32, 8), (14, 2)])
@pytest.mark.parametrize("dim", [64, 128])
def test_heads(machine: Any, heads: int, kv_heads: int, dim: int) -> None:
    assert_close(*run(machine, start=37, tokens=65, heads=heads, kv_heads=kv_heads, dim=dim))


@pytest.mark.parametrize("ahead", [True, False], ids=["ahead", "in turn"])
@pytest.mark.parametrize(
    ("start", "tokens"), [(0, 1), (0, 63), (0, 64), (0, 65), (0, 200), (1, 64), (63, 2), (64, 64), (100, 131)]
)
def test_chunks(machine: Any, start: int, tokens: int, ahead: bool) -> None:
    config = AttentionPrefillConfig(tile_q=64, ahead=ahead)
    assert_close(*run(machine, start=start, tokens=tokens, heads=2, kv_heads=1, dim=64, config=config))


@pytest.mark.parametrize("context", [1, 63, 64, 65, 1021, 4097])
def test_the_end_of_a_long_prompt(machine: Any, context: int) -> None:
    """Up to 70 tokens whose last one sees `context` positions."""
    tokens = min(context, 70)
    assert_close(*run(machine, start=context - tokens, tokens=tokens, heads=2, kv_heads=1, dim=128))


@pytest.mark.parametrize("tile_q", [64, 128])
def test_float16_and_tiles(machine: Any, tile_q: int) -> None:
    config = AttentionPrefillConfig(tile_q=tile_q)
    out, expected = run(machine, start=70, tokens=130, heads=2, kv_heads=2, dim=64, dtype="float16", config=config)
    assert_close(out, expected)


def test_continued_prefix_equals_one_shot(machine: Any) -> None:
    """The last 64 of 192 tokens as a chunk of their own, against the same rows of the whole prompt, to the bit."""
    table = np.array([2, 0, 1], np.int32)
    k, v = (normal((192, 1, 64), "bfloat16", seed=seed) for seed in (1, 2))
    k_pool, v_pool = np.zeros((192, 64), DTYPES["bfloat16"]), np.zeros((192, 64), DTYPES["bfloat16"])
    fill_pools(k_pool, v_pool, k, v, table)
    q = normal((192, 128), "bfloat16", seed=3)
    pools = [machine.array(a) for a in (k_pool, v_pool, table)]
    outs = []
    for start in (0, 128):
        out = machine.empty((192 - start, 128), "bfloat16")
        position = machine.array(np.array([start], np.int32))
        rows = machine.array(q[start:])
        attention_prefill(machine.launcher, rows, *pools, position, out, kv_heads=1, head_dim=64, config=SMALL)
        outs.append(machine.host(out))
    assert np.array_equal(outs[0][128:], outs[1])


def test_rows_of_padding_do_no_harm(machine: Any) -> None:
    """Rows past the chunk's end may stand past the block table's end: they are computed from its last page."""
    out, expected = run(machine, start=117, tokens=11, heads=2, kv_heads=1, dim=64, padding=53, table_pages=2)
    assert_close(out, expected)


def test_large_scores(machine: Any) -> None:
    """Scores of +-200 neither overflow nor lose the soft-max."""
    out, expected = run(machine, start=3, tokens=66, heads=2, kv_heads=1, dim=64, scale=8.0)
    assert_close(out, expected)


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "dim"), [(32, 128), (16, 128), (9, 64)])
@pytest.mark.parametrize(("start", "tokens"), [(0, 1021), (4097, 500), (1, 128)])
def test_configured_tiles_on_the_gpu(machine: Any, start: int, tokens: int, heads: int, dim: int) -> None:
    if not machine.on_gpu:
        pytest.skip("needs a GPU")
    from kernels.configs import config

    tiles = AttentionPrefillConfig(**config("attention_prefill", machine.arch, head_dim=dim))
    kv_heads = 3 if heads == 9 else 8
    assert_close(*run(machine, start=start, tokens=tokens, heads=heads, kv_heads=kv_heads, dim=dim, config=tiles))


class TestRefusals:
    def arrays(self, machine: Any) -> dict[str, Any]:
        return {
            "q": machine.zeros((4, 128), "bfloat16"),
            "k_pool": machine.zeros((128, 64), "bfloat16"),
            "v_pool": machine.zeros((128, 64), "bfloat16"),
            "block_table": machine.zeros(2, "int32"),
            "start": machine.zeros(1, "int32"),
            "out": machine.zeros((4, 128), "bfloat16"),
        }

    @pytest.mark.parametrize(
        ("name", "shape", "dtype", "error", "message"),
        [
            ("q", (4, 100), "bfloat16", ValueError, "q has 100 columns, expected a multiple of 1 KV heads"),
            ("q", (4, 128), "float32", TypeError, "q has dtype float32, expected bfloat16 or float16"),
            ("k_pool", (100, 64), "bfloat16", ValueError, "k_pool has 100 rows, expected a multiple of 1 KV heads"),
            ("k_pool", (128, 128), "bfloat16", ValueError, r"k_pool has shape \(128, 128\), expected \(any, 64\)"),
            ("v_pool", (64, 128), "bfloat16", ValueError, r"v_pool has shape \(64, 128\), expected \(128, 64\)"),
            ("block_table", (2,), "float32", TypeError, "block_table has dtype float32, expected int32"),
            ("out", (5, 128), "bfloat16", ValueError, r"out has shape \(5, 128\), expected \(4, 128\)"),
            ("q", (200, 128), "bfloat16", ValueError, "200 tokens, but block_table has 2 pages of 64"),
        ],
    )
    def test_both_values(
        self, machine: Any, name: str, shape: tuple[int, ...], dtype: str, error: type, message: str
    ) -> None:
        arrays = self.arrays(machine) | {name: machine.zeros(shape, dtype)}
        with pytest.raises(error, match=message):
            attention_prefill(machine.launcher, *arrays.values(), kv_heads=1, head_dim=64, config=SMALL)

    def test_head_dim(self, machine: Any) -> None:
        with pytest.raises(ValueError, match="head_dim is 80, expected 64 or 128"):
            attention_prefill(machine.launcher, *self.arrays(machine).values(), kv_heads=1, head_dim=80, config=SMALL)
