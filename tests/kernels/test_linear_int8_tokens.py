"""INT8 products of 1 to 8 tokens against float64 on the same bytes: slices, row scales and groups, odd sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernels import int8_tokens
from kernels.digit_slices import SLICE, columns, digit_shapes, digit_slices
from kernels.int8_tokens import MAX_COLUMNS, Int8TokensConfig
from kernels.linear_int8_tokens import (
    linear_int8_tokens,
    linear_int8_tokens_norm,
    linear_int8_tokens_residual,
    linear_int8_tokens_swiglu,
    linear_int8_tokens_xielu,
)
from kernels.tokens_join import tokens_square_slots
from tests.reference import decode
from tests.reference.int8 import dequantised, quantised
from tests.reference.random_arrays import normal
from tests.reference.tolerance import assert_close

EPS = 1e-6
SHARES = Int8TokensConfig()
WIDE = Int8TokensConfig(steps=2)
# tokens, rows, columns, columns of a scale: even tiles, rows and columns that nothing divides, a slice that hangs over
SHAPES = [
    (1, 64, 512, None),
    (2, 72, 576, None),
    (3, 130, 1536, 64),
    (4, 64, 1024, 1024),
    (5, 66, 1040, None),
    (7, 64, 576, 64),
    (8, 128, 1024, 128),
    (8, 67, 160, 32),
]


class Case:
    """A product's inputs on the machine, and the wide ones they stand for."""

    def __init__(
        self, machine: Any, tokens: int, n: int, k: int, group: int | None = None, dtype: str = "bfloat16"
    ) -> None:
        self.machine, self.tokens, self.n = machine, tokens, n
        self.exact = normal((tokens, k), dtype, seed=1)
        w, scale = quantised(normal((n, k), "float32", seed=2, scale=k**-0.5), group)
        self.w, self.scale, self.wide = machine.array(w), machine.array(scale), dequantised(w, scale)
        self.x = self.digits(k)
        digit_slices(machine.launcher, machine.array(self.exact), self.x)
        self.rounded = wide(machine, self.x, tokens)
        self.parts = machine.empty((-(-k // SLICE) * tokens * n,), "float32")

    def digits(self, k: int) -> tuple[Any, Any]:
        values, scales = digit_shapes(self.tokens, k)
        return self.machine.empty(values, "int8"), self.machine.empty(scales, "float32")

    def sums(self) -> tuple[Any, np.ndarray]:
        """Partial sums of the tokens' squares, and 1 / rms."""
        squares = self.exact.astype(np.float64) ** 2
        parts = np.zeros((self.tokens, 8), np.float32)
        for i, part in enumerate(np.array_split(squares, 5, axis=1)):
            parts[:, i] = part.sum(1)
        return self.machine.array(parts), 1 / np.sqrt(squares.mean(1, keepdims=True) + EPS)

    @property
    def arrays(self) -> tuple[Any, ...]:
        return self.w, self.scale, self.parts


def wide(machine: Any, digits: tuple[Any, Any], tokens: int) -> np.ndarray:
    """What digits stand for, float64 [T, K]."""
    found, scales = machine.host(digits[0], partly=True)[: 2 * tokens].astype(np.float64), machine.host(digits[1])
    whole = 128 * found[0::2] + found[1::2]
    return whole * np.repeat(scales.astype(np.float64), SLICE, axis=1)[:, : whole.shape[1]]


def assert_digits(found: np.ndarray, want: np.ndarray) -> None:
    """Within a half of the smallest step of each slice, and a little for float32."""
    for first in range(0, want.shape[1], SLICE):
        part = slice(first, first + SLICE)
        top = np.abs(want[:, part]).max(1, keepdims=True)
        assert (np.abs(found - want)[:, part] <= 0.6 * top / 16256 + 1e-6).all()


@pytest.mark.parametrize(("tokens", "k"), [(1, 64), (3, 512), (4, 576), (8, 2560)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_digits(machine: Any, tokens: int, k: int, dtype: str) -> None:
    x = normal((tokens, k), dtype, seed=1)
    x[0, :SLICE] = 0
    values, scales = digit_shapes(tokens, k)
    digits = machine.empty(values, "int8"), machine.empty(scales, "float32")
    digit_slices(machine.launcher, machine.array(x), digits)
    found = wide(machine, digits, tokens)
    assert_digits(found, x.astype(np.float64))
    assert not found[0, :SLICE].any()
    assert values[0] == columns(tokens) == (8 if tokens <= 4 else 16)


@pytest.mark.parametrize(("tokens", "n", "k", "group"), SHAPES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_linear_int8_tokens(machine: Any, tokens: int, n: int, k: int, group: int | None, dtype: str) -> None:
    c = Case(machine, tokens, n, k, group, dtype)
    y = machine.empty((tokens, n), "float32")
    linear_int8_tokens(machine.launcher, c.x, *c.arrays, y, config=SHARES)
    assert_close(machine.host(y), decode.product(c.rounded, c.wide))
    assert_close(machine.host(y), decode.product(c.exact, c.wide), "float16")  # 15 bits of a slice's largest


CUTS = [
    WIDE,
    Int8TokensConfig(128),
    Int8TokensConfig(64, 512),
    Int8TokensConfig(64, 32, 2, 2),
    Int8TokensConfig(64, 64, 4),
]


@pytest.mark.parametrize("config", CUTS, ids=str)
@pytest.mark.parametrize("group", [None, 64, 1024])
def test_cuts_change_nothing(machine: Any, config: Int8TokensConfig, group: int | None) -> None:
    c = Case(machine, 5, 130, 2048, group)
    y = machine.empty((5, 130), "float32")
    linear_int8_tokens(machine.launcher, c.x, *c.arrays, y, config=config)
    assert_close(machine.host(y), decode.product(c.rounded, c.wide))


@pytest.mark.parametrize("config", [SHARES, WIDE], ids=str)
@pytest.mark.parametrize("value", [1.0, -1.0, 0.0])
def test_the_largest_sums_are_exact(machine: Any, config: Int8TokensConfig, value: float) -> None:
    """All weights -128 or 127 and one size of x: whole numbers that float32 holds, whatever the values."""
    n, k = 64, 1024
    w = np.full((n, k), -128, np.int8)
    w[1::2] = 127
    x, y = np.full((2, k), value, np.float16), machine.empty((2, n), "float32")
    c = Case(machine, 2, n, k)
    digit_slices(machine.launcher, machine.array(x), c.x)
    ones = machine.array(np.ones((n, 1), np.float32))
    linear_int8_tokens(machine.launcher, c.x, machine.array(w), ones, c.parts, y, config=config)
    np.testing.assert_allclose(machine.host(y), decode.product(x, w), rtol=1e-6)
    assert SLICE <= MAX_COLUMNS


@pytest.mark.parametrize("group", [None, 64])
def test_norm_with_bias(machine: Any, group: int | None) -> None:
    c, bias = Case(machine, 6, 80, 1024, group), normal((1, 80), "bfloat16", seed=4)
    (sums, inverse), y = c.sums(), machine.empty((6, 80), "bfloat16")
    linear_int8_tokens_norm(machine.launcher, c.x, sums, *c.arrays, y, eps=EPS, bias=machine.array(bias))
    assert_close(machine.host(y), decode.product(c.exact, c.wide) * inverse + bias.astype(np.float64))


@pytest.mark.parametrize(("tokens", "ffn", "k"), [(2, 512, 512), (8, 48, 576), (5, 608, 512)])
@pytest.mark.parametrize("biased", [False, True])
def test_swiglu(machine: Any, tokens: int, ffn: int, k: int, biased: bool) -> None:
    c, bias = Case(machine, tokens, 2 * ffn, k), normal((1, 2 * ffn), "bfloat16", seed=3) if biased else None
    (sums, inverse), y, digits = c.sums(), machine.empty((tokens, ffn), "bfloat16"), c.digits(ffn)
    given = None if bias is None else machine.array(bias)
    linear_int8_tokens_swiglu(machine.launcher, c.x, sums, *c.arrays, y, digits, eps=EPS, bias=given)
    added = 0 if bias is None else bias.astype(np.float64)
    want = decode.swiglu(decode.product(c.rounded, c.wide) * inverse + added)
    assert_close(machine.host(y), want)
    assert_close(wide(machine, digits, tokens), want, "float16")
    assert_digits(wide(machine, digits, tokens), want)


def test_xielu(machine: Any) -> None:
    c, alphas = Case(machine, 3, 70, 512), np.array([0.8, 1.3], np.float32)
    (sums, inverse), y = c.sums(), machine.empty((3, 70), "bfloat16")
    given = machine.array(alphas)
    linear_int8_tokens_xielu(machine.launcher, c.x, sums, *c.arrays, given, y, None, eps=EPS)
    assert_close(machine.host(y), decode.xielu(decode.product(c.rounded, c.wide) * inverse, alphas))


@pytest.mark.parametrize(
    ("tokens", "n", "k", "group"), [(2, 576, 512, None), (8, 512, 1024, 64), (5, 1040, 576, None), (4, 64, 512, 128)]
)
@pytest.mark.parametrize("biased", [False, True])
def test_residual(machine: Any, tokens: int, n: int, k: int, group: int | None, biased: bool) -> None:
    c = Case(machine, tokens, n, k, group)
    before, gain = normal((tokens, n), "float32", seed=3), normal((1, n), "float32", seed=4)
    bias = normal((1, n), "bfloat16", seed=5) if biased else None
    stream, normed, digits = machine.array(before), machine.empty((tokens, n), "bfloat16"), c.digits(n)
    sums = machine.zeros((tokens, tokens_square_slots(n)), "float32")
    linear_int8_tokens_residual(
        machine.launcher, c.x, *c.arrays, stream, machine.array(gain), normed, sums, digits,
        bias=None if bias is None else machine.array(bias),
    )  # fmt: skip
    want = before + decode.product(c.rounded, c.wide, bias)
    assert_close(machine.host(stream), want)
    assert_close(machine.host(normed), want * gain)
    assert_close(machine.host(sums).astype(np.float64).sum(1), (want**2).sum(1), "float32")
    assert_digits(wide(machine, digits, tokens), want * gain)


def test_sums_that_float32_does_not_hold(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8_tokens, "MAX_COLUMNS", 511)
    c = Case(machine, 2, 64, 512)
    with pytest.raises(ValueError, match="512 columns a sum, which is a whole number of float32 up to 511"):
        linear_int8_tokens(machine.launcher, c.x, *c.arrays, machine.empty((2, 64), "float32"))


def test_refusals(machine: Any) -> None:
    def array(*shape: int, dtype: str = "bfloat16") -> Any:
        return machine.zeros(shape, dtype)

    def digits(tokens: int, k: int) -> tuple[Any, Any]:
        values, scales = digit_shapes(tokens, k)
        return array(*values, dtype="int8"), array(*scales, dtype="float32")

    def weight(n: int, k: int, scales: int = 1) -> tuple[Any, Any]:
        return array(n, k, dtype="int8"), array(n, scales, dtype="float32")

    go, x, parts = machine.launcher, digits(2, 512), array(4096, dtype="float32")
    with pytest.raises(TypeError, match="w has dtype bfloat16, expected int8"):
        linear_int8_tokens(go, x, array(64, 512), weight(64, 512)[1], parts, array(2, 64))
    with pytest.raises(ValueError, match=r"digits has shape \(8, 512\), expected \(8, 1024\)"):
        linear_int8_tokens(go, x, *weight(64, 1024), parts, array(2, 64))
    with pytest.raises(ValueError, match=r"digits has shape \(8, 512\), expected \(16, 512\)"):
        linear_int8_tokens(go, x, *weight(64, 512), parts, array(5, 64))
    with pytest.raises(ValueError, match="9 tokens of 512 columns, expected at most 8 of a multiple of 16"):
        linear_int8_tokens(go, x, *weight(64, 512), parts, array(9, 64))
    with pytest.raises(ValueError, match="scales of 16 columns, expected 32 or more"):
        linear_int8_tokens(go, x, *weight(64, 512, 32), parts, array(2, 64))
    with pytest.raises(ValueError, match="parts has 4096 entries, expected 8192: 1 shares of 2 tokens and 4096 rows"):
        linear_int8_tokens(go, x, *weight(4096, 512), parts, array(2, 4096))
    for wrong in (Int8TokensConfig(32), Int8TokensConfig(64, 1024), Int8TokensConfig(64, 128, 2)):
        with pytest.raises(ValueError, match="of 1 slices, expected 64 or 128 rows, a power of two from 32 to 512"):
            linear_int8_tokens(go, x, *weight(64, 512), parts, array(2, 64), config=wrong)
    sums = array(2, 4, dtype="float32")
    with pytest.raises(ValueError, match="w has 65 rows, expected gate and up rows in pairs"):
        linear_int8_tokens_swiglu(go, x, sums, *weight(65, 512), parts, array(2, 32), None, eps=EPS)
    stream, rows = array(2, 2560, dtype="float32"), array(2, 2560)
    into = (array(5120, dtype="float32"), stream, array(1, 2560), rows, sums, digits(2, 2560))
    with pytest.raises(ValueError, match="square_sums has 4 entries a token, its 5 blocks need as many"):
        linear_int8_tokens_residual(go, x, *weight(2560, 512), *into)
