"""Decode products against float64, on every shape family: even tiles and overhanging ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernels.linear import LinearConfig, linear, linear_norm, linear_residual, linear_swiglu, linear_xielu, square_slots
from kernels.linear_split import LinearSplitConfig, linear_split, linear_split_residual, linear_split_rule
from tests.reference import decode
from tests.reference.random_arrays import normal
from tests.reference.tolerance import assert_close

EPS = 1e-6
# rows, columns: tiles of 256, of 64 (SmolLM2), of 1024; rows that no tile divides (an odd vocabulary's tail)
SHAPES = [(64, 1024), (48, 576), (24, 2560), (8, 3072), (67, 256), (40, 896), (19, 72)]


def _slots(machine: Any, x: np.ndarray, slots: int = 8) -> Any:
    """x's squares summed into `slots` parts, the last ones zero."""
    parts = np.zeros((x.shape[0], slots), np.float32)
    for i, part in enumerate(np.array_split(x.astype(np.float64) ** 2, slots - 2, axis=1)):
        parts[:, i] = part.sum(1)
    return machine.array(parts)


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_linear(machine: Any, n: int, k: int, dtype: str) -> None:
    x, w = normal((1, k), dtype, seed=1), normal((n, k), dtype, seed=2, scale=k**-0.5)
    y = machine.empty((1, n), "float32")
    linear(machine.launcher, machine.array(x), machine.array(w), y)
    assert_close(machine.host(y), decode.product(x, w))


def test_linear_norm_with_bias(machine: Any) -> None:
    n, k = 48, 512
    stream, gain = normal((1, k), "float32", seed=1), normal((1, k), "bfloat16", seed=2)
    w, bias = normal((n, k), "bfloat16", seed=3, scale=0.05), normal((1, n), "bfloat16", seed=4)
    normed = (stream * gain.astype(np.float32)).astype(gain.dtype)
    y = machine.empty((1, n), "bfloat16")
    sums = _slots(machine, stream)
    linear_norm(machine.launcher, machine.array(normed), sums, machine.array(w), y, eps=EPS, bias=machine.array(bias))
    scale = 1 / np.sqrt((stream.astype(np.float64) ** 2).mean(1, keepdims=True) + EPS)
    assert_close(machine.host(y), decode.product(normed, w) * scale + bias.astype(np.float64))


def test_epsilon_decides_where_the_stream_is_faint(machine: Any) -> None:
    normed, w = normal((1, 512), "bfloat16", seed=1, scale=1e-3), normal((48, 512), "bfloat16", seed=3, scale=0.05)
    y = machine.empty((1, 48), "float32")
    linear_norm(machine.launcher, machine.array(normed), _slots(machine, normed), machine.array(w), y, eps=1e-5)
    scale = 1 / np.sqrt((normed.astype(np.float64) ** 2).mean(1, keepdims=True) + 1e-5)
    assert_close(machine.host(y), decode.product(normed, w) * scale)


@pytest.mark.parametrize(("ffn", "k"), [(32, 1024), (96, 576), (17, 256)])
def test_linear_swiglu(machine: Any, ffn: int, k: int) -> None:
    normed, w = normal((1, k), "bfloat16", seed=1), normal((2 * ffn, k), "bfloat16", seed=2, scale=k**-0.5)
    y = machine.empty((1, ffn), "bfloat16")
    linear_swiglu(machine.launcher, machine.array(normed), _slots(machine, normed), machine.array(w), y, eps=EPS)
    scale = 1 / np.sqrt((normed.astype(np.float64) ** 2).mean(1, keepdims=True) + EPS)
    assert_close(machine.host(y), decode.swiglu(decode.product(normed, w) * scale))


def test_linear_swiglu_with_bias(machine: Any) -> None:
    normed, w = normal((1, 576), "bfloat16", seed=1), normal((40, 576), "bfloat16", seed=2, scale=0.04)
    bias, y = normal((1, 40), "bfloat16", seed=3), machine.empty((1, 20), "bfloat16")
    sums, arrays = _slots(machine, normed), (machine.array(w), y)
    linear_swiglu(machine.launcher, machine.array(normed), sums, *arrays, eps=EPS, bias=machine.array(bias))
    scale = 1 / np.sqrt((normed.astype(np.float64) ** 2).mean(1, keepdims=True) + EPS)
    assert_close(machine.host(y), decode.swiglu(decode.product(normed, w) * scale + bias.astype(np.float64)))


def test_linear_xielu(machine: Any) -> None:
    normed, w = normal((1, 512), "bfloat16", seed=1), normal((40, 512), "bfloat16", seed=2, scale=0.05)
    alphas, y = np.array([0.8, 1.3], np.float32), machine.empty((1, 40), "bfloat16")
    sums = _slots(machine, normed)
    linear_xielu(machine.launcher, machine.array(normed), sums, machine.array(w), machine.array(alphas), y, eps=EPS)
    scale = 1 / np.sqrt((normed.astype(np.float64) ** 2).mean(1, keepdims=True) + EPS)
    assert_close(machine.host(y), decode.xielu(decode.product(normed, w) * scale, alphas))


@pytest.mark.parametrize(("n", "k"), [(576, 576), (64, 2048), (72, 1536)])
@pytest.mark.parametrize("biased", [False, True])
def test_linear_residual(machine: Any, n: int, k: int, biased: bool) -> None:
    x, w = normal((1, k), "bfloat16", seed=1), normal((n, k), "bfloat16", seed=2, scale=k**-0.5)
    stream, gain = normal((1, n), "float32", seed=3), normal((1, n), "float32", seed=4)
    bias = normal((1, n), "bfloat16", seed=5) if biased else None
    device_stream, normed = machine.array(stream), machine.empty((1, n), "bfloat16")
    sums = machine.zeros((1, square_slots(machine.arch, n, k)), "float32")
    linear_residual(
        machine.launcher, machine.array(x), machine.array(w), device_stream, machine.array(gain), normed, sums,
        bias=None if bias is None else machine.array(bias),
    )  # fmt: skip
    want = stream + decode.product(x, w, bias)
    assert_close(machine.host(device_stream), want)
    assert_close(machine.host(normed), want * gain)
    assert_close(machine.host(sums).astype(np.float64).sum(1), (want**2).sum(1), "float32")


@pytest.mark.parametrize("config", [LinearConfig(4, 256, 4), LinearConfig(2, 512)])
def test_tiles_and_hints_change_nothing(machine: Any, config: LinearConfig) -> None:
    x, w = normal((1, 1024), "bfloat16", seed=1), normal((64, 1024), "bfloat16", seed=2, scale=0.03)
    y = machine.empty((1, 64), "float32")
    linear(machine.launcher, machine.array(x), machine.array(w), y, config=config)
    assert_close(machine.host(y), decode.product(x, w))


# rows, columns, cut: whole tiles; rows and columns that overhang; the widest row that one block could not hold
SPLITS = [
    (64, 2048, LinearSplitConfig(4, 8, 256, 64)),
    (67, 1000, LinearSplitConfig(2, 16, 128, 32)),
    (40, 72, LinearSplitConfig(2, 4, 64, 16)),
    (5, 32768, LinearSplitConfig(4, 1, 1024, 8)),
]


@pytest.mark.parametrize(("n", "k", "config"), SPLITS, ids=str)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
class TestSplitColumns:
    def arrays(self, machine: Any, n: int, k: int, config: LinearSplitConfig, biased: bool, dtype: str) -> Any:
        x, w = normal((1, k), dtype, seed=1), normal((n, k), dtype, seed=2, scale=k**-0.5)
        bias = normal((1, n), dtype, seed=3) if biased else None
        on_machine = machine.array(x), machine.array(w), machine.empty((config.splits, n), "float32")
        return on_machine, None if bias is None else machine.array(bias), decode.product(x, w, bias)

    def test_plain(self, machine: Any, n: int, k: int, config: LinearSplitConfig, biased: bool, dtype: str) -> None:
        arrays, bias, want = self.arrays(machine, n, k, config, biased, dtype)
        y = machine.empty((1, n), dtype)
        linear_split(machine.launcher, *arrays, y, bias=bias, config=config)
        assert_close(machine.host(y), want)

    def test_residual(self, machine: Any, n: int, k: int, config: LinearSplitConfig, biased: bool, dtype: str) -> None:
        arrays, bias, want = self.arrays(machine, n, k, config, biased, dtype)
        before, gain = normal((1, n), "float32", seed=4), normal((1, n), "float32", seed=5)
        stream, normed, sums = machine.array(before), machine.empty((1, n), dtype), machine.zeros((1, 8), "float32")
        rest = (stream, machine.array(gain), normed, sums)
        linear_split_residual(machine.launcher, *arrays, *rest, bias=bias, config=config)
        assert_close(machine.host(stream), want + before)
        assert_close(machine.host(normed), (want + before) * gain)
        assert_close(machine.host(sums).sum(1), ((want + before) ** 2).sum(1))


def test_refusals(machine: Any) -> None:
    def array(*shape: int, dtype: str = "bfloat16") -> Any:
        return machine.zeros(shape, dtype)

    go = machine.launcher
    with pytest.raises(ValueError, match="x has 1024 columns, the weight expects 2560"):
        linear(go, array(1, 1024), array(8, 2560), array(1, 8))
    with pytest.raises(TypeError, match="linear: x has dtype float16, expected bfloat16"):
        linear(go, array(1, 64, dtype="float16"), array(8, 64), array(1, 8))
    with pytest.raises(ValueError, match=r"linear: y has shape \(1, 9\), expected \(1, 8\)"):
        linear(go, array(1, 64), array(8, 64), array(1, 9))
    with pytest.raises(ValueError, match=r"linear: x has shape \(3, 64\), expected \(1, "):
        linear(go, array(3, 64), array(8, 64), array(3, 8))
    with pytest.raises(ValueError, match="60 columns, expected a multiple of 8"):
        linear(go, array(1, 60), array(8, 60), array(1, 8))
    with pytest.raises(ValueError, match="not C-contiguous"):
        linear(go, array(1, 64), array(64, 8).T, array(1, 8))
    with pytest.raises(ValueError, match="multiple of 16 bytes"):
        linear(go, array(65)[1:].reshape(1, 64), array(8, 64), array(1, 8))
    with pytest.raises(ValueError, match="square_sums has 6 entries a token, expected a power of two"):
        linear_norm(go, array(1, 64), array(1, 6, dtype="float32"), array(8, 64), array(1, 8), eps=EPS)
    parts = array(4, 8, dtype="float32")
    with pytest.raises(ValueError, match="72 columns are 2 tiles of 64, expected 4 equal shares"):
        linear_split(go, array(1, 72), array(8, 72), parts, array(1, 8), config=LinearSplitConfig(4, 4, 64))
    with pytest.raises(ValueError, match="square_sums has 4 entries a token, its 12 blocks need as many"):
        linear_residual(
            go, array(1, 64), array(96, 64), array(1, 96, dtype="float32"), array(1, 96), array(1, 96),
            array(1, 4, dtype="float32"), config=LinearConfig(8, 64),
        )  # fmt: skip


@pytest.mark.parametrize("k", [576, 896, 1536, 9728, 21504, 32768, 65536])
def test_split_rule(k: int) -> None:
    config = linear_split_rule(k)
    tiles = -(-k // config.tile_k)
    assert tiles % config.splits == 0
    assert config.tile_n * tiles // config.splits * config.tile_k <= 16384  # 32 KiB a block
    assert config.splits > 1
