"""Prefill with INT8 weights: in digits, widened first, and widened inside the product, at sizes around tile edges."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kernels.dequantise import dequantise
from kernels.digits import token_digits
from kernels.linear_prefill import LinearPrefillConfig, linear_prefill_residual
from kernels.linear_prefill_digits import (
    linear_prefill_digits,
    linear_prefill_digits_residual,
    linear_prefill_digits_swiglu,
    linear_prefill_digits_xielu,
)
from kernels.linear_prefill_int8 import linear_prefill_int8_residual
from kernels.norm import rms_norm_digits
from tests.reference import decode
from tests.reference import linear_prefill as reference
from tests.reference.int8 import dequantised, quantised
from tests.reference.random_arrays import normal
from tests.reference.tolerance import assert_close

SMALL = LinearPrefillConfig(tile_m=64, tile_n=64, tile_k=64, group=2)
LOOPS = replace(SMALL, persistent=True)
ALPHAS = np.array([0.8, 1.4], np.float32)
# tokens, rows of the weight, K, columns of a scale: one tile less and more, a prime, K of SmolLM2 (576 = 9 * 64)
SIZES = [(1, 64, 64, None), (63, 66, 80, 16), (65, 130, 256, 128), (131, 258, 576, None), (17, 66, 576, 64)]
DIGIT_SIZES = [(8, 64, 64), (32, 66, 80), (40, 130, 256), (72, 258, 576)]


@pytest.fixture(params=["bfloat16", "float16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(("tokens", "rows", "k", "group"), SIZES)
def test_widened_inside(
    machine: Any, tokens: int, rows: int, k: int, group: int | None, dtype: str, with_bias: bool
) -> None:
    x, b = normal((tokens, k), dtype, seed=1), normal(rows, dtype, seed=3)
    w, scale = quantised(normal((rows, k), "float32", seed=2, scale=k**-0.5), group)
    before = normal((tokens, rows), "float32", seed=4)
    residual, bias = machine.array(before), machine.array(b) if with_bias else None
    arrays = machine.array(x), machine.array(w), machine.array(scale)
    linear_prefill_int8_residual(machine.launcher, *arrays, residual, config=SMALL, bias=bias)
    want = reference.product(x, dequantised(w, scale), b if with_bias else None)
    assert_close(machine.host(residual), want + before)


@pytest.mark.parametrize(
    ("rows", "k", "group"),
    [
        (16, 2048, 64), (9, 576, 64), (130, 80, 16), (8, 9728, 64), (3, 4096, 2048),
        (16, 2048, None), (9, 576, None), (130, 80, None), (5, 9728, None),
    ],
)  # fmt: skip
def test_dequantise(machine: Any, rows: int, k: int, group: int | None, dtype: str) -> None:
    w, scale = quantised(normal((rows, k), "float32", seed=2), group)
    out = machine.empty((rows, k), dtype)
    dequantise(machine.launcher, machine.array(w), machine.array(scale), out)
    np.testing.assert_array_equal(machine.host(out), dequantised(w, scale).astype(np.float32).astype(out.dtype))


def test_dequantise_while_the_product_before_runs(machine: Any) -> None:
    """As the engine launches it: behind a product in digits, then a reader of both."""
    d = Digits(machine, DIGIT_SIZES[1], "bfloat16")
    w, scale = quantised(normal((16, 2048), "float32", seed=2), 64)
    y, out = machine.empty(d.shape, "bfloat16"), machine.zeros((16, 2048), "bfloat16")
    weights = machine.array(w), machine.array(scale)
    for _ in range(2):  # the second time over what the first one left
        linear_prefill_digits(machine.launcher, *d.arrays, y, config=SMALL)
        dequantise(machine.launcher, *weights, out, early=True)
        residual = machine.array(np.zeros((d.shape[0], 16), np.float32))
        x = machine.array(normal((d.shape[0], 2048), "bfloat16", seed=5))
        linear_prefill_residual(machine.launcher, x, out, residual, config=SMALL)
    np.testing.assert_array_equal(machine.host(out), dequantised(w, scale).astype(np.float32).astype(out.dtype))
    assert_close(
        machine.host(residual), reference.product(normal((d.shape[0], 2048), "bfloat16", seed=5), machine.host(out))
    )
    assert_close(machine.host(y), reference.product(d.exact, d.wide))


@pytest.mark.parametrize(("tokens", "k"), [(8, 64), (24, 576), (16, 2560), (8, 9728)])
def test_token_digits(machine: Any, tokens: int, k: int, dtype: str) -> None:
    x = normal((tokens, k), dtype, seed=1)
    x[3] = 0
    digits, scales = machine.empty((2 * tokens, k), "int8"), machine.empty((tokens, 1), "float32")
    token_digits(machine.launcher, machine.array(x), digits, scales)
    found = machine.host(digits).reshape(-1, 2, 8, k).astype(np.float64)
    whole = (256 * found[:, 0] + found[:, 1]).reshape(tokens, k)
    top = np.abs(x.astype(np.float64)).max(1, keepdims=True)
    assert np.abs(whole).max() == 32512
    assert (np.abs(whole * machine.host(scales) - x.astype(np.float64)) <= 0.51 * top / 32512).all()
    assert not whole[3].any()


@pytest.mark.parametrize("gain_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("tokens", "k"), [(8, 64), (24, 576), (16, 2560), (8, 5120)])
def test_norm_in_digits(machine: Any, tokens: int, k: int, gain_dtype: str) -> None:
    """Against a norm in float64; where ε decides (a faint row), where nothing does (zeros), and a great number."""
    x, gain = normal((tokens, k), "float32", seed=1), normal((1, k), gain_dtype, seed=2)
    x[1] *= 1e-3
    x[3] = 0
    x[5, 7] = 3e4
    digits, scales = machine.empty((2 * tokens, k), "int8"), machine.empty((tokens, 1), "float32")
    rms_norm_digits(machine.launcher, machine.array(x), machine.array(gain), digits, scales, eps=1e-5)
    want = decode.rms_norm(x, gain, 1e-5)
    found = machine.host(digits).reshape(-1, 2, 8, k).astype(np.float64)
    whole = (256 * found[:, 0] + found[:, 1]).reshape(tokens, k)
    top = np.abs(want).max(1, keepdims=True)
    assert (np.abs(whole).max(1)[np.arange(tokens) != 3] == 32512).all()
    assert (np.abs(whole * machine.host(scales) - want) <= 0.51 * top / 32512 + 1e-6 * np.abs(want)).all()
    assert not whole[3].any()


class Digits:
    """A product's inputs in digits, and the wide ones they stand for."""

    def __init__(self, machine: Any, size: tuple[int, int, int], dtype: str) -> None:
        tokens, rows, k = size
        x, self.b = normal((tokens, k), dtype, seed=1), normal(rows, dtype, seed=3)
        w, scale = quantised(normal((rows, k), "float32", seed=2, scale=k**-0.5))
        digits, scales = machine.empty((2 * tokens, k), "int8"), machine.empty((tokens, 1), "float32")
        token_digits(machine.launcher, machine.array(x), digits, scales)
        self.arrays = digits, scales, machine.array(w), machine.array(scale)
        whole = machine.host(digits).reshape(-1, 2, 8, k).astype(np.float64)
        self.x = (256 * whole[:, 0] + whole[:, 1]).reshape(tokens, k) * machine.host(scales)
        self.wide, self.shape = dequantised(w, scale), (tokens, rows)
        self.exact = x


@pytest.mark.parametrize("tiles", [SMALL, LOOPS], ids=["grid", "persistent"])
@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("size", DIGIT_SIZES, ids=str)
class TestDigits:
    def test_plain(self, machine: Any, size: tuple[int, int, int], dtype: str, with_bias: bool, tiles: Any) -> None:
        d = Digits(machine, size, dtype)
        y, bias = machine.empty(d.shape, dtype), machine.array(d.b) if with_bias else None
        linear_prefill_digits(machine.launcher, *d.arrays, y, config=tiles, bias=bias)
        assert_close(machine.host(y), reference.product(d.exact, d.wide, d.b if with_bias else None))

    def test_residual(self, machine: Any, size: tuple[int, int, int], dtype: str, with_bias: bool, tiles: Any) -> None:
        d = Digits(machine, size, dtype)
        before, bias = normal(d.shape, "float32", seed=4), machine.array(d.b) if with_bias else None
        residual = machine.array(before)
        linear_prefill_digits_residual(machine.launcher, *d.arrays, residual, config=tiles, bias=bias)
        assert_close(machine.host(residual), reference.product(d.x, d.wide, d.b if with_bias else None) + before)

    def test_swiglu(self, machine: Any, size: tuple[int, int, int], dtype: str, with_bias: bool, tiles: Any) -> None:
        d = Digits(machine, size, dtype)
        y, bias = machine.empty((d.shape[0], d.shape[1] // 2), dtype), machine.array(d.b) if with_bias else None
        linear_prefill_digits_swiglu(machine.launcher, *d.arrays, y, config=tiles, bias=bias)
        assert_close(machine.host(y), reference.swiglu(d.x, d.wide, d.b if with_bias else None))

    def test_xielu(self, machine: Any, size: tuple[int, int, int], dtype: str, with_bias: bool, tiles: Any) -> None:
        d = Digits(machine, size, dtype)
        y, bias = machine.empty(d.shape, dtype), machine.array(d.b) if with_bias else None
        linear_prefill_digits_xielu(
            machine.launcher, *d.arrays, machine.array(ALPHAS), y, config=tiles, bias=bias
        )  # fmt: skip
        assert_close(
            machine.host(y), reference.xielu(reference.product(d.x, d.wide, d.b if with_bias else None), ALPHAS)
        )


def test_refusals(machine: Any) -> None:
    def array(*shape: int, dtype: str = "bfloat16") -> Any:
        return machine.zeros(shape, dtype)

    def weight(n: int, k: int, scales: int = 1) -> tuple[Any, Any]:
        return array(n, k, dtype="int8"), array(n, scales, dtype="float32")

    go = machine.launcher
    with pytest.raises(TypeError, match="w has dtype bfloat16, expected int8"):
        linear_prefill_int8_residual(go, array(4, 64), array(8, 64), weight(8, 64)[1], array(4, 8), config=SMALL)
    with pytest.raises(ValueError, match="x has 12 tokens of 64 columns, expected multiples of 8 and 16"):
        token_digits(go, array(12, 64), array(24, 64, dtype="int8"), array(12, 1, dtype="float32"))
    token = array(16, 64, dtype="int8"), array(8, 1, dtype="float32")
    with pytest.raises(ValueError, match="4 scales a row, expected one"):
        linear_prefill_digits(go, *token, *weight(8, 64, 4), array(8, 8), config=SMALL)
    with pytest.raises(ValueError, match="x has 64 columns, the weight expects 80"):
        linear_prefill_digits(go, *token, *weight(8, 80), array(8, 8), config=SMALL)
    with pytest.raises(ValueError, match="gate and up rows in pairs"):
        linear_prefill_digits_swiglu(go, *token, *weight(9, 64), array(8, 4), config=SMALL)
    with pytest.raises(ValueError, match=r"out has shape \(8, 80\), expected \(8, 64\)"):
        dequantise(go, *weight(8, 64), array(8, 80))
