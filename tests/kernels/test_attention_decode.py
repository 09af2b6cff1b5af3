"""Decode attention against float64: contexts around page borders, every head layout, both forms, permuted pages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernels.attention_decode import AttentionConfig, attention_config, attention_decode, workspace_floats
from tests.reference import decode
from tests.reference.random_arrays import DTYPES, normal
from tests.reference.tolerance import assert_close

PAGE = AttentionConfig("page", 8)
LOOP = AttentionConfig("loop", 4, 4)
HEADS = [(9, 3, 64), (16, 8, 128), (32, 8, 64), (32, 8, 128), (14, 2, 64), (4, 4, 128), (16, 2, 64)]


class Call:
    """One attention_decode on random keys and values, and its reference."""

    def __init__(self, machine: Any, heads: int, kv_heads: int, d: int, n: int, dtype: str, norm: bool) -> None:
        self.machine, self.n, self.kv_heads, self.d = machine, n, kv_heads, d
        count = max(-(-n // 64), 1)
        self.pages = count + 3
        slots = -(-max(count, 12) // 16) * 16
        self.table = np.zeros(slots, np.int32)
        self.table[:count] = np.random.default_rng(n).permutation(self.pages)[:count]
        keys, values = (normal((n - 1, kv_heads, d), dtype, seed=s) for s in (1, 2))
        self.k_pool, self.v_pool = decode.pools_of(keys, values, self.table, self.pages)
        self.qkv = normal((1, (heads + 2 * kv_heads) * d), dtype, seed=3)
        gains = [normal((1, d), dtype, seed=s, scale=0.2) + DTYPES[dtype](1) for s in (4, 5)]
        self.gains = gains if norm else [None, None]
        self.cos, self.sin = decode.rope_tables(max(n, 8), d)
        rows = self.qkv.reshape(1, -1, d)
        at = self.cos[n - 1 :][:1], self.sin[n - 1 :][:1]
        self.k_new = decode.rotated(rows[:, heads : heads + kv_heads], self.gains[1], *at)
        self.v_new = rows[:, heads + kv_heads :]
        q = decode.rotated(rows[:, :heads], self.gains[0], *at)[0]
        all_keys = np.concatenate([keys.astype(np.float64), self.k_new.astype(DTYPES[dtype]).astype(np.float64)])
        all_values = np.concatenate([values.astype(np.float64), self.v_new.astype(np.float64)])
        self.want = decode.attention(q, all_keys, all_values).reshape(1, -1)

    def run(self, config: AttentionConfig) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Attention's output, and the pools after it."""
        m, heads = self.machine, self.want.shape[1] // self.d
        out = m.empty(self.want.shape, str(self.qkv.dtype))
        space = m.empty(workspace_floats(config, heads, self.kv_heads, self.d), "float32")
        k_pool, v_pool = m.array(self.k_pool), m.array(self.v_pool)
        gains = [None if g is None else m.array(g) for g in self.gains]
        attention_decode(
            m.launcher, m.array(self.qkv), *gains, m.array(self.cos), m.array(self.sin), k_pool, v_pool,
            m.array(self.table), m.array(np.array([self.n], np.int32)), space, out, kv_heads=self.kv_heads,
            head_dim=self.d, context=self.n, config=config,
        )  # fmt: skip
        return m.host(out), m.host(k_pool), m.host(v_pool)


@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 129, 449, 512])
@pytest.mark.parametrize("config", [PAGE, LOOP], ids=["page", "loop"])
def test_contexts(machine: Any, n: int, config: AttentionConfig) -> None:
    call = Call(machine, 4, 2, 64, n, "bfloat16", norm=True)
    out, k_pool, v_pool = call.run(config)
    assert_close(out, call.want)
    keys, values = decode.cached(k_pool, v_pool, call.table, call.kv_heads, n)
    assert_close(keys[-1:], call.k_new)
    np.testing.assert_array_equal(values[-1:], call.v_new)
    before = decode.cached(call.k_pool, call.v_pool, call.table, call.kv_heads, n)
    np.testing.assert_array_equal(keys[:-1], before[0][:-1])
    np.testing.assert_array_equal(values[:-1], before[1][:-1])


@pytest.mark.parametrize(("heads", "kv_heads", "d"), HEADS)
@pytest.mark.parametrize("config", [PAGE, LOOP], ids=["page", "loop"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_heads(machine: Any, heads: int, kv_heads: int, d: int, config: AttentionConfig, dtype: str) -> None:
    call = Call(machine, heads, kv_heads, d, 150, dtype, norm=dtype == "float16")
    assert_close(call.run(config)[0], call.want, "bfloat16" if dtype == "bfloat16" else "float16")


@pytest.mark.parametrize("splits", [1, 3, 5, 12])
@pytest.mark.parametrize("form", ["page", "loop"])
def test_any_number_of_splits(machine: Any, form: Any, splits: int) -> None:
    call = Call(machine, 4, 2, 64, min(splits, 3) * 64, "bfloat16", norm=True)
    assert_close(call.run(AttentionConfig(form, splits, 4 if form == "loop" else None))[0], call.want)


@pytest.mark.parametrize("n", [1, 63, 64, 65, 600, 1021, 4097])
def test_contexts_in_their_own_buckets(machine: Any, n: int) -> None:
    heads, kv_heads, d = (2, 1, 64) if not machine.on_gpu else (32, 8, 128)
    call = Call(machine, heads, kv_heads, d, n, "bfloat16", norm=True)
    assert_close(call.run(attention_config(machine.arch, kv_heads, n))[0], call.want)


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "kv_heads"), [(16, 8), (32, 8)])
@pytest.mark.parametrize("n", [1, 63, 64, 65, 511, 512, 513, 700, 1021, 2049, 32768])
def test_full_size(machine: Any, heads: int, kv_heads: int, n: int) -> None:
    if not machine.on_gpu:
        pytest.skip("too large for the interpreter")
    call = Call(machine, heads, kv_heads, 128, n, "bfloat16", norm=True)
    assert_close(call.run(attention_config(machine.arch, kv_heads, n))[0], call.want)


def test_refusals(machine: Any) -> None:
    call = Call(machine, 4, 2, 64, 100, "bfloat16", norm=True)
    with pytest.raises(ValueError, match="1 splits of one page hold 64 positions, not 100"):
        call.run(AttentionConfig("page", 1))
    for splits in (0, 7):
        with pytest.raises(ValueError, match=f"{splits} splits, expected a power of two or the sum of two"):
            call.run(AttentionConfig("loop", splits))
    with pytest.raises(ValueError, match=r"block_table has 16 entries, expected at least 32"):
        call.run(AttentionConfig("page", 32))
    call.gains[0] = None
    with pytest.raises(ValueError, match="expected on both or neither"):
        call.run(PAGE)
    call.gains = [None, None]
    call.v_pool = call.v_pool.reshape(-1, 128)
    with pytest.raises(ValueError, match="attention_decode: v_pool has shape"):
        call.run(PAGE)
    wide = Call(machine, 9, 1, 64, 3, "bfloat16", norm=False)
    with pytest.raises(ValueError, match="9 query heads a KV head, at most 8 fit"):
        wide.run(PAGE)
