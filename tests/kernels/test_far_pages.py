"""Pools and arrays with more than 2³¹ elements, on a GPU: what lies far from the start is read and written right."""

from __future__ import annotations

from typing import Any

import cuda.tile as ct
import numpy as np
import pytest

from kernels.attention_decode import attention_config, attention_decode, workspace_floats
from kernels.attention_prefill import AttentionPrefillConfig, attention_prefill
from kernels.configs import config as table_config
from kernels.launch import GpuLauncher, launch, supports_pdl
from kernels.rope import qk_norm_rope_kv
from tests.kernels.conftest import gpu_arch
from tests.reference.random_arrays import DTYPES

pytestmark = pytest.mark.gpu
HEADS, KV_HEADS, DIM, PAGE = 16, 8, 128, 64
FAR_PAGES = 34_000  # of 65,536 keys' elements: 2.23e9
TOKENS = 500


@ct.kernel
def tail_kernel(x: ct.IndexedWithInt64, y, first: ct.ScalarInt64, N: ct.Constant[int]):
    """y = x[first : first + N]."""
    at = ct.arange(N, dtype=ct.int64) + first
    ct.store(y, index=(0,), tile=ct.gather(x, at))


@pytest.fixture
def cupy() -> Any:
    found = pytest.importorskip("cupy")
    if gpu_arch() is None:
        pytest.skip("no GPU")
    if found.cuda.Device().mem_info[0] < 16 << 30:
        pytest.skip("needs 16 GiB of free device memory")
    yield found
    found.get_default_memory_pool().free_all_blocks()


def arrays(cupy: Any, pages: int, chosen: list[int]) -> dict[str, Any]:
    """Two pools, and a table that names the chosen pages; the contents depend on the position alone."""
    rng = np.random.default_rng(3)
    half = DTYPES["bfloat16"]
    k = cupy.zeros((pages * KV_HEADS * PAGE, DIM), half)
    v = cupy.zeros((pages * KV_HEADS * DIM, PAGE), half)
    for page in chosen:
        keys = rng.standard_normal((KV_HEADS * PAGE, DIM), np.float32).astype(half)
        values = rng.standard_normal((KV_HEADS * DIM, PAGE), np.float32).astype(half)
        k[page * len(keys) : (page + 1) * len(keys)] = cupy.asarray(keys)
        v[page * len(values) : (page + 1) * len(values)] = cupy.asarray(values)
    table = np.zeros(16, np.int32)
    table[: len(chosen)] = chosen
    qkv = rng.standard_normal((1, (HEADS + 2 * KV_HEADS) * DIM), np.float32).astype(half)
    angles = rng.standard_normal((1024, DIM // 2), np.float32)
    found = {"k": k, "v": v, "table": table, "qkv": qkv, "cos": np.cos(angles), "sin": np.sin(angles)}
    return {name: cupy.asarray(value) for name, value in found.items()}


def attend(cupy: Any, found: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Decode attention at TOKENS positions, then prefill attention of the same query, and the page written."""
    arch = gpu_arch()
    assert arch is not None
    stream = cupy.cuda.Stream(non_blocking=True)
    launcher = GpuLauncher(stream.ptr, arch, pdl=supports_pdl(arch))
    config = attention_config(arch, KV_HEADS, 512)
    workspace = cupy.zeros(workspace_floats(config, HEADS, KV_HEADS, DIM), np.float32)
    length, start = cupy.asarray([TOKENS], np.int32), cupy.asarray([TOKENS - 1], np.int32)
    out, queries, again = (cupy.zeros((1, HEADS * DIM), found["qkv"].dtype) for _ in range(3))
    pools = found["k"], found["v"]
    cupy.cuda.Device().synchronize()
    place = (found["cos"], found["sin"], *pools, found["table"], length, workspace)
    attention_decode(launcher, found["qkv"], None, None, *place, out, kv_heads=KV_HEADS, head_dim=DIM, context=512)
    where = (found["cos"], found["sin"], start, found["table"])
    heads = {"kv_heads": KV_HEADS, "head_dim": DIM}
    qk_norm_rope_kv(launcher, found["qkv"], None, None, *where, queries, *pools, **heads, eps=1e-6)
    form = AttentionPrefillConfig(**table_config("attention_prefill", arch, head_dim=DIM))
    attention_prefill(launcher, queries, *pools, found["table"], start, again, config=form, **heads)
    stream.synchronize()
    return cupy.asnumpy(out).astype(np.float32), cupy.asnumpy(again).astype(np.float32)


def test_pages_past_two_to_the_thirty_first_element(cupy: Any) -> None:
    near = arrays(cupy, 16, list(range(3, 11)))
    far_pages = [FAR_PAGES - 2 - 7 * i for i in range(8)]  # all of them past element 2³¹
    assert far_pages[-1] * KV_HEADS * PAGE * DIM > 2**31
    far = arrays(cupy, FAR_PAGES, far_pages)
    assert far["k"].size > 2**31
    for wanted, found in zip(attend(cupy, near), attend(cupy, far), strict=True):
        assert np.isfinite(wanted).all()
        assert np.abs(wanted).max() > 0
        assert np.array_equal(wanted, found)
    for name, rows in (("k", KV_HEADS * PAGE), ("v", KV_HEADS * DIM)):
        wanted = near[name][(3 + 7) * rows : (3 + 8) * rows]
        found = far[name][far_pages[7] * rows : (far_pages[7] + 1) * rows]
        assert cupy.asnumpy(wanted.view(cupy.int16) == found.view(cupy.int16)).all()
    assert not cupy.asnumpy(far["k"][: 2 * KV_HEADS * PAGE].view(cupy.int16)).any()


def test_an_index_past_thirty_two_bits(cupy: Any) -> None:
    """One axis with more than 2³¹ elements needs the annotation IndexedWithInt64."""
    size = 2**31 + 4096
    x = cupy.zeros(size, np.int8)
    x[-1024:] = cupy.asarray(np.arange(1024) % 100, np.int8)
    y = cupy.zeros(1024, np.int8)
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    launch(tail_kernel, (1, 1, 1), (x, y, size - 1024, 1024), stream=stream.ptr, arch=str(gpu_arch()))
    stream.synchronize()
    assert np.array_equal(cupy.asnumpy(y), np.arange(1024) % 100)
