"""Embedding, RMSNorm, activations, rotation and KV write, as prefill and the start of a decode step use them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernels.activation import swiglu, xielu
from kernels.embedding import embedding, embedding_decode
from kernels.kv_write import kv_write
from kernels.norm import rms_norm
from kernels.rope import qk_norm_rope_kv, rope_queries
from tests.reference import decode
from tests.reference.int8 import dequantised, quantised
from tests.reference.random_arrays import DTYPES, integers, normal
from tests.reference.tolerance import assert_close


@pytest.mark.parametrize("hidden", [576, 1024, 2560])
def test_embedding(machine: Any, hidden: int) -> None:
    table, ids = normal((37, hidden), "bfloat16", seed=1), integers(5, 0, 37, seed=2)
    stream = machine.empty((5, hidden), "float32")
    embedding(machine.launcher, machine.array(ids), machine.array(table), stream)
    np.testing.assert_array_equal(machine.host(stream), table[ids].astype(np.float32))


@pytest.mark.parametrize(("hidden", "group"), [(576, None), (576, 64), (1024, 128), (2560, None), (2560, 32)])
def test_embedding_of_an_int8_table(machine: Any, hidden: int, group: int | None) -> None:
    table, scale = quantised(normal((37, hidden), "float32", seed=1), group)
    gain, ids = normal((1, hidden), "float32", seed=2), np.array([36], np.int32)
    arrays = machine.array(table), machine.array(scale)
    stream = machine.empty((1, hidden), "float32")
    embedding(machine.launcher, machine.array(ids), arrays[0], stream, scale=arrays[1])
    want = dequantised(table, scale)[ids]
    np.testing.assert_array_equal(machine.host(stream), want.astype(np.float32))
    stream, normed = machine.empty((1, hidden), "float32"), machine.empty((1, hidden), "bfloat16")
    sums = machine.empty((1, 16), "float32")
    into = (machine.array(gain), stream, normed, sums)
    embedding_decode(machine.launcher, machine.array(ids), arrays[0], *into, scale=arrays[1])
    np.testing.assert_array_equal(machine.host(stream), want.astype(np.float32))
    assert_close(machine.host(normed), want * gain)
    assert_close(machine.host(sums).sum(1), (want**2).sum(1))


@pytest.mark.parametrize(("hidden", "dtype"), [(576, "bfloat16"), (1024, "float16"), (2560, "bfloat16")])
@pytest.mark.parametrize("tokens", [1, 3])
def test_embedding_decode(machine: Any, hidden: int, dtype: str, tokens: int) -> None:
    table, gain = normal((37, hidden), dtype, seed=1), normal((1, hidden), "float32", seed=2)
    ids = np.array([36, -5, 99][:tokens], np.int32)  # ids outside read the table's ends
    stream, normed = machine.empty((tokens, hidden), "float32"), machine.empty((tokens, hidden), dtype)
    sums = machine.empty((tokens, 16), "float32")
    embedding_decode(
        machine.launcher, machine.array(ids), machine.array(table), machine.array(gain), stream, normed, sums
    )
    want = table[np.clip(ids, 0, 36)].astype(np.float64)
    np.testing.assert_array_equal(machine.host(stream), want.astype(np.float32))
    assert_close(machine.host(normed), want * gain)
    assert_close(machine.host(sums)[:, 0], (want**2).sum(1))
    assert not machine.host(sums)[:, 1:].any()


@pytest.mark.parametrize("width", [576, 1024, 2560, 40])
def test_rms_norm(machine: Any, width: int) -> None:
    x, gain = normal((3, width), "float32", seed=1), normal((1, width), "bfloat16", seed=2)
    y = machine.empty((3, width), "bfloat16")
    rms_norm(machine.launcher, machine.array(x), machine.array(gain), y, eps=1e-5)
    assert_close(machine.host(y), decode.rms_norm(x, gain, 1e-5))


def test_rms_norm_of_a_faint_row(machine: Any) -> None:
    """Where ε is as large as the mean square, it decides; a row of zeros stays one."""
    x = normal((2, 64), "float32", seed=1, scale=3e-3) * np.array([[1.0], [0.0]], np.float32)
    y = machine.empty((2, 64), "bfloat16")
    gain = normal((1, 64), "float32", seed=2)
    rms_norm(machine.launcher, machine.array(x), machine.array(gain), y, eps=1e-5)
    assert_close(machine.host(y), decode.rms_norm(x, gain, 1e-5))


@pytest.mark.parametrize("width", [1536, 40])
def test_swiglu(machine: Any, width: int) -> None:
    pairs, y = normal((3, 2 * width), "bfloat16", seed=1), machine.empty((3, width), "bfloat16")
    swiglu(machine.launcher, machine.array(pairs), y)
    assert_close(machine.host(y), decode.swiglu(pairs))


def test_xielu_near_zero_and_far(machine: Any) -> None:
    x = np.concatenate([np.linspace(-12, 12, 504), [0, -1e-7, 1e-7, -1e-3, 1e-3, -0.0149, -0.0151, 0.02]])
    x, alphas = x.reshape(2, 256).astype(DTYPES["float16"]), np.array([0.8, 1.3], np.float32)
    y = machine.empty(x.shape, "float16")
    xielu(machine.launcher, machine.array(x), machine.array(alphas), y)
    assert_close(machine.host(y), decode.xielu(x, alphas))
    small = np.abs(x) < 0.03
    assert_close(machine.host(y)[small], decode.xielu(x, alphas)[small])


@pytest.mark.parametrize(("heads", "kv_heads", "d"), [(9, 3, 64), (4, 2, 128), (14, 2, 64)])
@pytest.mark.parametrize(("start", "tokens"), [(0, 1), (0, 64), (63, 2), (60, 70), (100, 17), (64, 64)])
def test_rope_and_kv_write(machine: Any, heads: int, kv_heads: int, d: int, start: int, tokens: int) -> None:
    qkv = normal((tokens, (heads + 2 * kv_heads) * d), "bfloat16", seed=1)
    gains = [normal((1, d), "bfloat16", seed=s) for s in (2, 3)] if d == 128 else [None, None]
    cos, sin = decode.rope_tables(start + tokens + 3, d)
    pages, n = 8, start + tokens
    table = np.random.default_rng(1).permutation(pages)[:4].astype(np.int32)
    old = [normal((start, kv_heads, d), "bfloat16", seed=s) for s in (4, 5)]
    k_pool, v_pool = (machine.array(p) for p in decode.pools_of(*old, table, pages))
    queries = machine.empty((tokens, heads * d), "bfloat16")
    qk_norm_rope_kv(
        machine.launcher, machine.array(qkv), *(None if g is None else machine.array(g) for g in gains),
        machine.array(cos), machine.array(sin), machine.array(np.array([start], np.int32)), machine.array(table),
        queries, k_pool, v_pool, kv_heads=kv_heads, head_dim=d,
    )  # fmt: skip
    rows = qkv.reshape(tokens, -1, d)
    at = cos[start:n], sin[start:n]
    want = decode.rotated(rows[:, :heads], gains[0], *at)
    assert_close(machine.host(queries), want.reshape(tokens, -1))
    keys, values = decode.cached(machine.host(k_pool), machine.host(v_pool), table, kv_heads, n)
    assert_close(keys[start:], decode.rotated(rows[:, heads : heads + kv_heads], gains[1], *at))
    np.testing.assert_array_equal(values[start:], rows[:, heads + kv_heads :])
    np.testing.assert_array_equal(keys[:start], old[0])
    np.testing.assert_array_equal(values[:start], old[1])


def test_kv_write_drops_what_the_block_table_does_not_reach(machine: Any) -> None:
    qkv, table = normal((80, 3 * 64), "bfloat16", seed=1), np.array([2], np.int32)
    cos, sin = decode.rope_tables(128, 64)
    k_pool, v_pool = machine.zeros((4 * 64, 64), "bfloat16"), machine.zeros((4 * 64, 64), "bfloat16")
    start = machine.array(np.zeros(1, np.int32))
    kv_write(
        machine.launcher, machine.array(qkv), None, machine.array(cos), machine.array(sin), start, machine.array(table),
        k_pool, v_pool, kv_heads=1, head_dim=64,
    )  # fmt: skip
    written = np.abs(machine.host(k_pool).astype(np.float32)).reshape(4, -1).sum(1) > 0
    assert written.tolist() == [False, False, True, False]


def test_refusals(machine: Any) -> None:
    go, zeros = machine.launcher, machine.zeros
    with pytest.raises(ValueError, match="rms_norm: rows of 36 elements"):
        rms_norm(go, zeros((1, 36), "float32"), zeros((1, 36), "float32"), zeros((1, 36), "bfloat16"), eps=1e-6)
    with pytest.raises(TypeError, match="embedding: ids has dtype float32, expected int32"):
        embedding(go, zeros(3, "float32"), zeros((5, 64), "bfloat16"), zeros((3, 64), "float32"))
    tables = zeros((8, 48), "float32"), zeros((8, 48), "float32")
    start, qkv = zeros(1, "int32"), zeros((1, 3 * 96), "bfloat16")
    with pytest.raises(ValueError, match="head_dim is 96, expected 64 or 128"):
        rope_queries(go, qkv, None, *tables, start, zeros((1, 96), "bfloat16"), kv_heads=1, head_dim=96)
    with pytest.raises(ValueError, match=r"swiglu: gate_up has shape \(1, 64\), expected \(1, 128\)"):
        swiglu(go, zeros((1, 64), "bfloat16"), zeros((1, 64), "bfloat16"))
