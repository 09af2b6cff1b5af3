"""INT8 decode products against float64 on the same bytes: a scale a row and groups, even tiles and overhanging ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernels.int8_dot import Int8Config, linear_int8_rule
from kernels.linear_int8 import (
    int8_square_slots,
    linear_int8,
    linear_int8_norm,
    linear_int8_residual,
    linear_int8_swiglu,
    linear_int8_xielu,
)
from tests.reference import decode
from tests.reference.int8 import dequantised, quantised
from tests.reference.random_arrays import DTYPES, normal
from tests.reference.tolerance import assert_close

EPS = 1e-6
BFLOAT16 = DTYPES["bfloat16"]
ROWS = Int8Config(4, 256)  # for groups the rule takes digits, which are held to less than float32
# rows, columns, columns of a scale: tiles of 512, of 64 (SmolLM2), of 256; rows and columns that no tile divides
SHAPES = [
    (32, 1024, None),
    (24, 576, None),
    (12, 2560, 128),
    (9, 512, 64),
    (67, 256, None),
    (40, 896, None),
    (19, 80, 16),
    (12, 2048, 1024),
    (6, 4096, 2048),
]


def _slots(machine: Any, x: np.ndarray, slots: int = 8) -> Any:
    parts = np.zeros((1, slots), np.float32)
    for i, part in enumerate(np.array_split(x.astype(np.float64) ** 2, slots - 2, axis=1)):
        parts[:, i] = part.sum(1)
    return machine.array(parts)


def _weight(machine: Any, n: int, k: int, group: int | None, seed: int = 2) -> tuple[Any, Any, np.ndarray]:
    w, scale = quantised(normal((n, k), "float32", seed=seed, scale=k**-0.5), group)
    return machine.array(w), machine.array(scale), dequantised(w, scale)


@pytest.mark.parametrize(("n", "k", "group"), SHAPES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_linear_int8(machine: Any, n: int, k: int, group: int | None, dtype: str) -> None:
    x, (w, scale, wide) = normal((1, k), dtype, seed=1), _weight(machine, n, k, group)
    y = machine.empty((1, n), "float32")
    linear_int8(machine.launcher, machine.array(x), w, scale, y, config=None if group is None else ROWS)
    assert_close(machine.host(y), decode.product(x, wide))


@pytest.mark.parametrize("group", [None, 64])
def test_every_byte_and_a_sum_that_cancels(machine: Any, group: int | None) -> None:
    """All 256 values, and a token far from zero mean: what is taken off at the end is much larger than the result."""
    k = 512
    w = np.arange(16 * k).reshape(16, k).astype(np.uint8).view(np.int8)
    scale = np.linspace(0.5, 2, 16 * (k // (group or k)), dtype=np.float32).reshape(16, -1)
    x = (normal((1, k), "float32", seed=1) * 0.01 + 3).astype(np.float16)
    y = machine.empty((1, 16), "float32")
    linear_int8(machine.launcher, machine.array(x), machine.array(w), machine.array(scale), y, config=ROWS)
    assert_close(machine.host(y), decode.product(x, dequantised(w, scale)))


@pytest.mark.parametrize("group", [None, 128])
def test_linear_int8_norm_with_bias(machine: Any, group: int | None) -> None:
    n, k = 48, 512
    stream, gain = normal((1, k), "float32", seed=1), normal((1, k), "bfloat16", seed=2)
    normed = (stream * gain.astype(np.float32)).astype(gain.dtype)
    (w, scale, wide), bias = _weight(machine, n, k, group), normal((1, n), "bfloat16", seed=4)
    y = machine.empty((1, n), "bfloat16")
    sums = _slots(machine, stream)
    linear_int8_norm(
        machine.launcher, machine.array(normed), sums, w, scale, y, eps=EPS, bias=machine.array(bias)
    )  # fmt: skip
    inverse = 1 / np.sqrt((stream.astype(np.float64) ** 2).mean(1, keepdims=True) + EPS)
    assert_close(machine.host(y), decode.product(normed, wide) * inverse + bias.astype(np.float64))


@pytest.mark.parametrize(("ffn", "k", "group"), [(32, 1024, None), (48, 576, None), (17, 256, 64)])
def test_linear_int8_swiglu(machine: Any, ffn: int, k: int, group: int | None) -> None:
    normed, (w, scale, wide) = normal((1, k), "bfloat16", seed=1), _weight(machine, 2 * ffn, k, group)
    y = machine.empty((1, ffn), "bfloat16")
    linear_int8_swiglu(machine.launcher, machine.array(normed), _slots(machine, normed), w, scale, y, eps=EPS)
    inverse = 1 / np.sqrt((normed.astype(np.float64) ** 2).mean(1, keepdims=True) + EPS)
    assert_close(machine.host(y), decode.swiglu(decode.product(normed, wide) * inverse))


def test_linear_int8_swiglu_with_bias(machine: Any) -> None:
    normed, (w, scale, wide) = normal((1, 512), "bfloat16", seed=1), _weight(machine, 48, 512, None)
    bias, y = normal((1, 48), "bfloat16", seed=3), machine.empty((1, 24), "bfloat16")
    sums, b = _slots(machine, normed), machine.array(bias)
    linear_int8_swiglu(machine.launcher, machine.array(normed), sums, w, scale, y, eps=EPS, bias=b)
    inverse = 1 / np.sqrt((normed.astype(np.float64) ** 2).mean(1, keepdims=True) + EPS)
    assert_close(machine.host(y), decode.swiglu(decode.product(normed, wide) * inverse + bias.astype(np.float64)))


def test_linear_int8_xielu(machine: Any) -> None:
    normed, (w, scale, wide) = normal((1, 512), "bfloat16", seed=1), _weight(machine, 40, 512, None)
    alphas, y = np.array([0.8, 1.3], np.float32), machine.empty((1, 40), "bfloat16")
    sums = _slots(machine, normed)
    linear_int8_xielu(machine.launcher, machine.array(normed), sums, w, scale, machine.array(alphas), y, eps=EPS)
    inverse = 1 / np.sqrt((normed.astype(np.float64) ** 2).mean(1, keepdims=True) + EPS)
    assert_close(machine.host(y), decode.xielu(decode.product(normed, wide) * inverse, alphas))


@pytest.mark.parametrize(("n", "k", "group"), [(144, 576, None), (64, 2048, 128), (72, 1536, None)])
@pytest.mark.parametrize("biased", [False, True])
def test_linear_int8_residual(machine: Any, n: int, k: int, group: int | None, biased: bool) -> None:
    x, (w, scale, wide) = normal((1, k), "bfloat16", seed=1), _weight(machine, n, k, group)
    stream, gain = normal((1, n), "float32", seed=3), normal((1, n), "float32", seed=4)
    bias = normal((1, n), "bfloat16", seed=5) if biased else None
    device_stream, normed = machine.array(stream), machine.empty((1, n), "bfloat16")
    slots = int8_square_slots(machine.arch, n, k) if group is None else 16
    sums = machine.zeros((1, slots), "float32")
    linear_int8_residual(
        machine.launcher, machine.array(x), w, scale, device_stream, machine.array(gain), normed, sums,
        bias=None if bias is None else machine.array(bias), config=None if group is None else ROWS,
    )  # fmt: skip
    want = stream + decode.product(x, wide, bias)
    assert_close(machine.host(device_stream), want)
    assert_close(machine.host(normed), want * gain)
    assert_close(machine.host(sums).astype(np.float64).sum(1), (want**2).sum(1), "float32")


# rows, columns, columns of a scale; rows of a block. Loads of 512 columns for 4 rows, of 256 for more: odd and even
DIGITS = [(48, 1024, None, 16), (24, 768, None, 8), (20, 1024, None, 4), (19, 512, None, 8), (12, 1536, None, 4)]
DIGITS += [(64, 2560, None, 32), (32, 256, None, 32), (48, 512, 64, 16), (20, 1536, 64, 4), (24, 768, 128, 8)]
DIGITS += [(64, 512, 256, 32), (9, 1024, 512, 4)]


def in_digits(x: np.ndarray) -> np.ndarray:
    """x as the kernel multiplies it: whole multiples of a power of two, the largest below 2^14."""
    unit = np.float32(2) ** (13 - np.floor(np.log2(np.abs(x.astype(np.float64)).max())).astype(np.float32))
    return np.rint(x.astype(np.float32) * unit).astype(np.float64) / unit


@pytest.mark.parametrize(("n", "k", "group", "tile_n"), DIGITS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_digits(machine: Any, n: int, k: int, group: int | None, tile_n: int, dtype: str) -> None:
    """15 bits of the largest: between the tolerance of float32 and that of the half-precision result."""
    x, (w, scale, wide) = normal((1, k), dtype, seed=1), _weight(machine, n, k, group)
    y = machine.empty((1, n), "float32")
    config = Int8Config(tile_n, 64, form="digits")
    linear_int8(machine.launcher, machine.array(x), w, scale, y, config=config)
    assert_close(machine.host(y), decode.product(in_digits(x), wide))
    assert_close(machine.host(y), decode.product(x, wide), "float16")


@pytest.mark.parametrize("size", [1e-33, 1.0, 3e4])
def test_digits_of_tiny_and_huge_tokens(machine: Any, size: float) -> None:
    x, (w, scale, wide) = (normal((1, 512), "float32", seed=1) * size).astype(BFLOAT16), _weight(machine, 16, 512, None)
    y = machine.empty((1, 16), "float32")
    linear_int8(machine.launcher, machine.array(x), w, scale, y, config=Int8Config(16, 64, form="digits"))
    assert_close(machine.host(y) / size, decode.product(x.astype(np.float64) / size, wide), "float16")


def test_an_infinite_token_is_not_hidden(machine: Any) -> None:
    x, (w, scale, _) = normal((1, 512), "bfloat16", seed=1), _weight(machine, 16, 512, None)
    x[0, 7] = np.inf
    y = machine.empty((1, 16), "float32")
    linear_int8(machine.launcher, machine.array(x), w, scale, y, config=Int8Config(16, 64, form="digits"))
    assert not np.isfinite(machine.host(y)).any()


def test_digits_of_the_largest_sum_and_of_zeros(machine: Any) -> None:
    """All weights -128 or 127 and one size of x: int32 sums at their largest, exact."""
    k = 16384
    w = np.full((16, k), -128, np.int8)
    w[1::2] = 127
    for value in (1.0, -1.0, 0.0):
        x, y = np.full((1, k), value, np.float16), machine.empty((1, 16), "float32")
        arrays = machine.array(x), machine.array(w), machine.array(np.ones((16, 1), np.float32))
        linear_int8(machine.launcher, *arrays, y, config=Int8Config(16, 64, form="digits"))
        np.testing.assert_allclose(machine.host(y), decode.product(x, w), rtol=1e-6)


@pytest.mark.parametrize("act", ["norm", "swiglu", "residual"])
def test_digits_in_every_product(machine: Any, act: str) -> None:
    n, k, config = 32, 512, Int8Config(16, 64, form="digits")
    x, (w, scale, wide) = normal((1, k), "bfloat16", seed=1), _weight(machine, n, k, None)
    inverse = 1 / np.sqrt((x.astype(np.float64) ** 2).mean(1, keepdims=True) + EPS)
    go, given = machine.launcher, (machine.array(x), _slots(machine, x))
    y, half_y = machine.empty((1, n), "bfloat16"), machine.empty((1, n // 2), "bfloat16")
    if act == "norm":
        linear_int8_norm(go, *given, w, scale, y, eps=EPS, config=config)
        assert_close(machine.host(y), decode.product(x, wide) * inverse)
    elif act == "swiglu":
        linear_int8_swiglu(go, *given, w, scale, half_y, eps=EPS, config=config)
        assert_close(machine.host(half_y), decode.swiglu(decode.product(x, wide) * inverse))
    else:
        before, gain = normal((1, n), "float32", seed=3), normal((1, n), "float32", seed=4)
        stream, sums = machine.array(before), machine.zeros((1, 4), "float32")
        linear_int8_residual(go, given[0], w, scale, stream, machine.array(gain), y, sums, config=config)
        assert_close(machine.host(y), (before + decode.product(x, wide)) * gain)


@pytest.mark.parametrize("config", [Int8Config(4, 256, 4), Int8Config(2, 1024)])
@pytest.mark.parametrize("group", [None, 128])
def test_tiles_and_hints_change_nothing(machine: Any, config: Int8Config, group: int | None) -> None:
    x, (w, scale, wide) = normal((1, 1024), "bfloat16", seed=1), _weight(machine, 32, 1024, group)
    y = machine.empty((1, 32), "float32")
    linear_int8(machine.launcher, machine.array(x), w, scale, y, config=config)
    assert_close(machine.host(y), decode.product(x, wide))


@pytest.mark.parametrize("k", [576, 960, 1024, 1536, 2560, 9728, 12288, 14336, 17408])
def test_rule_fits_the_registers(k: int) -> None:
    config = linear_int8_rule(4096, k)
    assert config.tile_n * -(-k // config.tile_k) * config.tile_k <= 65536  # half a block's registers


def test_refusals(machine: Any) -> None:
    def array(*shape: int, dtype: str = "bfloat16") -> Any:
        return machine.zeros(shape, dtype)

    def weight(n: int, k: int, scales: int = 1) -> tuple[Any, Any]:
        return array(n, k, dtype="int8"), array(n, scales, dtype="float32")

    go = machine.launcher
    with pytest.raises(TypeError, match="linear_int8: w has dtype bfloat16, expected int8"):
        linear_int8(go, array(1, 64), array(8, 64), array(8, 1, dtype="float32"), array(1, 8))
    with pytest.raises(ValueError, match="x has 1024 columns, the weight expects 2560"):
        linear_int8(go, array(1, 1024), *weight(8, 2560), array(1, 8))
    with pytest.raises(ValueError, match="72 columns, expected a multiple of 16"):
        linear_int8(go, array(1, 72), *weight(8, 72), array(1, 8))
    with pytest.raises(ValueError, match="3 scales for 64 columns"):
        linear_int8(go, array(1, 64), *weight(8, 64, 3), array(1, 8))
    with pytest.raises(ValueError, match=r"scale has shape \(9, 1\), expected \(8, any\)"):
        linear_int8(go, array(1, 64), weight(8, 64)[0], weight(9, 64)[1], array(1, 8))
    with pytest.raises(ValueError, match=r"x has shape \(2, 64\), expected \(1, any\)"):
        linear_int8(go, array(2, 64), *weight(8, 64), array(2, 8))
    digits = Int8Config(8, 64, form="digits")
    with pytest.raises(ValueError, match="8 rows of 320 columns, expected 4, 8, 16 or 32 for digits"):
        linear_int8(go, array(1, 320), *weight(8, 320), array(1, 8), config=digits)
    with pytest.raises(ValueError, match="8 rows of 512 columns in groups of 32, expected 4, 8, 16 or 32 for"):
        linear_int8(go, array(1, 512), *weight(8, 512, 16), array(1, 8), config=digits)
    with pytest.raises(ValueError, match="132608 columns, the digits' int32 sums are exact up to 132104"):
        linear_int8(go, array(1, 132608), *weight(8, 132608), array(1, 8), config=digits)
    with pytest.raises(ValueError, match="square_sums has 4 entries a token, its 6 blocks need as many"):
        linear_int8_residual(
            go, array(1, 64), *weight(96, 64), array(1, 96, dtype="float32"), array(1, 96), array(1, 96),
            array(1, 4, dtype="float32"), config=Int8Config(8, 64),
        )  # fmt: skip
