"""The INT8 cache: written by prefill and decode, read by decode's attention, against float64 on the same bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernels.attention_decode import AttentionConfig, attention_config, attention_decode, workspace_floats
from kernels.rope import qk_norm_rope_kv
from tests.reference import decode
from tests.reference.int8 import cached_int8, pools_of_int8, quantised_rows
from tests.reference.random_arrays import normal
from tests.reference.tolerance import assert_close

HEADS = [(9, 3, 64), (4, 4, 128), (4, 2, 128), (5, 1, 64), (14, 2, 64), (16, 2, 128)]
FORMS = {
    "page": AttentionConfig("page", 8),
    "page, apart": AttentionConfig("page", 8, apart=True),
    "loop": AttentionConfig("loop", 4, 4),
    "loop, pairs": AttentionConfig("loop", 4, 4, pages=2),
    "loop, pairs, apart": AttentionConfig("loop", 2, 4, pages=2, apart=True),
}
forms = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
STEP = 1.5 / 127  # of a row's largest number: one step, and half a one for a half-precision input that fell otherwise


def table_of(n: int, seed: int = 1) -> tuple[np.ndarray, int]:
    """A shuffled block table of at least 16 entries, and the pool's pages."""
    pages = -(-n // 64) + 3
    table = np.zeros(-(-max(pages, 8) // 16) * 16, np.int32)
    table[: pages - 3] = np.random.default_rng(seed).permutation(pages)[: pages - 3]
    return table, pages


def assert_nearest(cached: np.ndarray, values: np.ndarray) -> None:
    """Rows are whole steps of their scale, and the nearest; at a tie either, for a GPU rounds x · (1 / scale) once."""
    scale = quantised_rows(values)[1][..., None].astype(np.float64)
    steps = cached / scale
    np.testing.assert_allclose(steps, np.rint(steps), atol=1e-4)
    assert np.abs(steps - values.astype(np.float64) / scale).max() <= 0.5 + 1e-4


def run_decode(
    machine: Any, heads: int, kv_heads: int, d: int, n: int, config: AttentionConfig, dtype: str, *,
    cached: tuple[np.ndarray, np.ndarray] | None = None, norm: bool = True,
) -> None:  # fmt: skip
    """Token n over n - 1 cached keys and values, random ones unless given."""
    table, pages = table_of(n)
    old = cached or tuple(normal((n - 1, kv_heads, d), dtype, seed=s) for s in (1, 2))
    pools, scales, keys, values = pools_of_int8(*old, table, pages)
    qkv = normal((1, (heads + 2 * kv_heads) * d), dtype, seed=3)
    gains = [normal((1, d), "float32", seed=s, scale=0.2) + np.float32(1) if norm else None for s in (4, 5)]
    cos, sin = decode.rope_tables(max(n, 8), d)
    rows, at = qkv.reshape(1, -1, d), (cos[n - 1 :][:1], sin[n - 1 :][:1])
    k_new, v_new = decode.rotated(rows[:, heads : heads + kv_heads], gains[1], *at), rows[:, heads + kv_heads :]
    out, space = (
        machine.empty((1, heads * d), dtype),
        machine.empty(workspace_floats(config, heads, kv_heads, d), "float32"),
    )
    on_machine = [machine.array(a) for a in (*pools, *scales)]
    attention_decode(
        machine.launcher, machine.array(qkv), *(None if g is None else machine.array(g) for g in gains),
        machine.array(cos), machine.array(sin), *on_machine[:2], machine.array(table),
        machine.array(np.array([n], np.int32)), space, out, kv_heads=kv_heads, head_dim=d, context=n,
        scales=tuple(on_machine[2:]), config=config,
    )  # fmt: skip
    after = [machine.host(a) for a in on_machine]
    k_after, v_after = cached_int8(tuple(after[:2]), tuple(after[2:]), table, kv_heads, n)
    np.testing.assert_array_equal(k_after[:-1], keys)
    np.testing.assert_array_equal(v_after[:-1], values)
    assert np.abs(k_after[-1] - k_new[0]).max() < STEP * np.abs(k_new).max()
    assert_nearest(v_after[-1:], v_new)
    q = decode.rotated(rows[:, :heads], gains[0], *at)[0]
    assert_close(machine.host(out), decode.attention(q, k_after, v_after).reshape(1, -1))


@pytest.mark.parametrize("n", [1, 2, 64, 65, 129, 449])
@forms
def test_decode_contexts(machine: Any, n: int, form: AttentionConfig) -> None:
    run_decode(machine, 4, 2, 64, n, form, "bfloat16")


@pytest.mark.parametrize(("heads", "kv_heads", "d"), HEADS)
@forms
def test_decode_heads(machine: Any, heads: int, kv_heads: int, d: int, form: AttentionConfig) -> None:
    run_decode(machine, heads, kv_heads, d, 150, form, "float16" if d == 64 else "bfloat16", norm=heads != 9)


def ones(shape: tuple[int, ...]) -> np.ndarray:
    return np.ones(shape, np.float32)


HARD = {
    "one key wins": lambda keys, values: (keys * 8, values),
    "values of all sizes": lambda keys, values: (keys, values * np.exp(3 * keys[..., :1])),
    "most values are zeros": lambda keys, values: (keys, np.where(keys[..., :1] > 1, values, 0)),
    "values near zero": lambda keys, values: (keys, values * np.float32(1e-36)),
    "no value differs": lambda keys, values: (keys * 0, ones(values.shape)),  # the largest sums
    "no key differs": lambda keys, values: (ones(keys.shape), values),
    "tiny weights": lambda keys, values: (
        np.where(np.arange(len(keys))[:, None, None] % 64, -4 * ones(keys.shape), 4),
        values,
    ),
}


@pytest.mark.parametrize("case", HARD.values(), ids=HARD)
@forms
def test_decode_hard_numbers(machine: Any, case: Any, form: AttentionConfig) -> None:
    """In float16, whose tolerance is the smallest that an output has."""
    keys, values = (normal((448, 2, 64), "float32", seed=s) for s in (1, 2))
    run_decode(machine, 4, 2, 64, 449, form, "float16", cached=case(keys, values))


@pytest.mark.parametrize("pages", [0, 17])
def test_decode_refuses_steps_whose_sums_overflow(machine: Any, pages: int) -> None:
    with pytest.raises(ValueError, match=f"{pages} pages a step, expected 1 to 16, whose sums fit int32"):
        run_decode(machine, 4, 2, 64, 65, AttentionConfig("loop", 4, 4, pages=pages), "bfloat16")


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "n"), [(32, 512), (32, 1021), (32, 4097), (32, 32768), (64, 4097)])
def test_decode_at_full_size(machine: Any, heads: int, n: int) -> None:
    if not machine.on_gpu:
        pytest.skip("too large for the interpreter")
    run_decode(machine, heads, 8, 128, n, attention_config(machine.arch, 8, n, int8=True), "bfloat16")


@pytest.mark.parametrize(("heads", "kv_heads", "d"), [(9, 3, 64), (4, 2, 128)])
@pytest.mark.parametrize(("start", "tokens"), [(0, 1), (0, 64), (63, 2), (60, 70), (100, 17)])
def test_prefill_writes(machine: Any, heads: int, kv_heads: int, d: int, start: int, tokens: int) -> None:
    qkv = normal((tokens, (heads + 2 * kv_heads) * d), "bfloat16", seed=1)
    qkv[0, heads * d :] = 0  # the first token's keys and values: rows of zeros
    gains = [normal((1, d), "bfloat16", seed=s) for s in (2, 3)] if d == 128 else [None, None]
    n = start + tokens
    cos, sin = decode.rope_tables(n + 3, d)
    table, pages = table_of(n)
    old = [normal((start, kv_heads, d), "bfloat16", seed=s) for s in (4, 5)]
    pools, scales, old_keys, old_values = pools_of_int8(*old, table, pages)
    on_machine = [machine.array(a) for a in (*pools, *scales)]
    queries = machine.empty((tokens, heads * d), "bfloat16")
    qk_norm_rope_kv(
        machine.launcher, machine.array(qkv), *(None if g is None else machine.array(g) for g in gains),
        machine.array(cos), machine.array(sin), machine.array(np.array([start], np.int32)), machine.array(table),
        queries, *on_machine[:2], kv_heads=kv_heads, head_dim=d, scales=tuple(on_machine[2:]),
    )  # fmt: skip
    after = [machine.host(a) for a in on_machine]
    keys, values = cached_int8(tuple(after[:2]), tuple(after[2:]), table, kv_heads, n)
    np.testing.assert_array_equal(keys[:start], old_keys)
    np.testing.assert_array_equal(values[:start], old_values)
    rows = qkv.reshape(tokens, -1, d)
    want = decode.rotated(rows[:, heads : heads + kv_heads], gains[1], cos[start:n], sin[start:n])
    top = np.abs(want).max(-1, keepdims=True)
    assert (np.abs(keys[start:] - want) <= STEP * top).all()
    assert_nearest(values[start:], rows[:, heads + kv_heads :])
    assert not keys[start].any()
    assert not values[start].any()
