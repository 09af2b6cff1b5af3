"""Products of 2 to 8 tokens in half precision against float64: shares of K, cuts, odd sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernels.linear_tokens import (
    COLUMNS,
    TokensConfig,
    cut,
    linear_tokens_norm,
    linear_tokens_residual,
    linear_tokens_swiglu,
    linear_tokens_xielu,
    part_floats,
)
from kernels.tokens_join import tokens_square_slots
from tests.reference import decode
from tests.reference.random_arrays import normal
from tests.reference.tolerance import assert_close

EPS = 1e-6
# tokens, rows, columns: even tiles; rows and columns that no tile divides; several shares, and an odd number of them
SHAPES = [(1, 64, 512), (2, 72, 576), (3, 130, 1536), (5, 66, 1048), (7, 64, 896), (8, 128, 1024), (8, 67, 160)]
CUTS = [
    TokensConfig(),
    TokensConfig(steps=1),
    TokensConfig(128, 64, 2),
    TokensConfig(64, 512, 1),
    TokensConfig(64, 64, 8, occupancy=2),
]


class Case:
    """A product's inputs on the machine; rows of x past the tokens are NaN, and what they become must go nowhere."""

    def __init__(self, machine: Any, tokens: int, n: int, k: int, dtype: str = "bfloat16") -> None:
        self.machine, self.tokens, self.n = machine, tokens, n
        self.exact = normal((tokens, k), dtype, seed=1)
        padded = np.full((COLUMNS, k), np.nan, self.exact.dtype)
        padded[:tokens] = self.exact
        self.weight = normal((n, k), dtype, seed=2, scale=k**-0.5)
        self.x, self.w = machine.array(padded), machine.array(self.weight)
        squares = self.exact.astype(np.float64) ** 2
        sums = np.zeros((tokens, 8), np.float32)
        for i, part in enumerate(np.array_split(squares, 5, axis=1)):
            sums[:, i] = part.sum(1)
        self.sums = machine.array(sums)
        self.norm = 1 / np.sqrt(squares.mean(1, keepdims=True) + EPS)
        self.product = decode.product(self.exact, self.weight)

    def parts(self, config: TokensConfig) -> Any:
        shares = cut(config, self.weight.shape[1])[1]
        return self.machine.empty((shares * self.tokens * self.n,), "float32")


@pytest.mark.parametrize(("tokens", "n", "k"), SHAPES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_linear_tokens_norm(machine: Any, tokens: int, n: int, k: int, dtype: str) -> None:
    c = Case(machine, tokens, n, k, dtype)
    y, parts = machine.empty((tokens, n), "float32"), c.parts(TokensConfig())
    linear_tokens_norm(machine.launcher, c.x, c.sums, c.w, parts, y, eps=EPS)
    assert_close(machine.host(y), c.product * c.norm)


@pytest.mark.parametrize("config", CUTS, ids=str)
@pytest.mark.parametrize("k", [2048, 1000])
def test_cuts_change_nothing(machine: Any, config: TokensConfig, k: int) -> None:
    c = Case(machine, 5, 130, k)
    y, bias = machine.empty((5, 130), "bfloat16"), normal((1, 130), "bfloat16", seed=3)
    into = (c.parts(config), y)
    linear_tokens_norm(machine.launcher, c.x, c.sums, c.w, *into, eps=EPS, bias=machine.array(bias), config=config)
    assert_close(machine.host(y), c.product * c.norm + bias.astype(np.float64))


@pytest.mark.parametrize("ffn", [520, 48])
@pytest.mark.parametrize("biased", [False, True])
def test_linear_tokens_swiglu(machine: Any, ffn: int, biased: bool) -> None:
    c = Case(machine, 3, 2 * ffn, 512)
    bias = normal((1, 2 * ffn), "bfloat16", seed=3) if biased else None
    act = machine.array(np.zeros((COLUMNS, ffn), c.exact.dtype))
    parts = c.parts(TokensConfig())
    given = None if bias is None else machine.array(bias)
    linear_tokens_swiglu(machine.launcher, c.x, c.sums, c.w, parts, act[:3], eps=EPS, bias=given)
    want = c.product * c.norm + (0 if bias is None else bias.astype(np.float64))
    assert_close(machine.host(act)[:3], decode.swiglu(want))
    assert not machine.host(act)[3:].any()


def test_linear_tokens_xielu(machine: Any) -> None:
    c, alphas = Case(machine, 4, 72, 512), np.array([0.8, 1.3], np.float32)
    y, parts = machine.empty((4, 72), "bfloat16"), c.parts(TokensConfig())
    linear_tokens_xielu(machine.launcher, c.x, c.sums, c.w, parts, machine.array(alphas), y, eps=EPS)
    assert_close(machine.host(y), decode.xielu(c.product * c.norm, alphas))


@pytest.mark.parametrize(("tokens", "n", "k"), [(2, 512, 512), (3, 40, 512), (8, 1032, 256)])
@pytest.mark.parametrize("biased", [False, True])
def test_linear_tokens_residual(machine: Any, tokens: int, n: int, k: int, biased: bool) -> None:
    c = Case(machine, tokens, n, k)
    stream, gain = normal((tokens, n), "float32", seed=3), normal((1, n), "float32", seed=4)
    bias = normal((1, n), "bfloat16", seed=5) if biased else None
    into, normed = machine.array(stream), machine.array(np.zeros((COLUMNS, n), c.exact.dtype))
    sums = machine.zeros((tokens, tokens_square_slots(n)), "float32")
    given = None if bias is None else machine.array(bias)
    rest = (into, machine.array(gain), normed[:tokens], sums)
    linear_tokens_residual(machine.launcher, c.x, c.w, c.parts(TokensConfig()), *rest, bias=given)
    want = stream + c.product + (0 if bias is None else bias.astype(np.float64))
    assert_close(machine.host(into), want)
    assert_close(machine.host(normed)[:tokens], want * gain)
    assert not machine.host(normed)[tokens:].any()
    assert_close(machine.host(sums).astype(np.float64).sum(1), (want**2).sum(1), "float32")


def test_shares_are_equal_and_not_too_many() -> None:
    assert cut(TokensConfig(), 9728) == (4, 19)
    assert cut(TokensConfig(), 576) == (1, 5)  # five tiles, the last half empty
    assert cut(TokensConfig(steps=1), 128 * 100) == (4, 25)
    assert part_floats("sm_90", 3, 64, 1024) == 2 * 3 * 64


def test_refusals(machine: Any) -> None:
    def array(*shape: int, dtype: str = "bfloat16") -> Any:
        return machine.zeros(shape, dtype)

    go, sums, parts = machine.launcher, array(3, 8, dtype="float32"), array(3 * 8, dtype="float32")
    with pytest.raises(ValueError, match=r"x has shape \(3, 64\), expected \(8, 64\)"):
        linear_tokens_norm(go, array(3, 64), sums, array(8, 64), parts, array(3, 8), eps=EPS)
    with pytest.raises(ValueError, match="9 tokens, at most 8 fit"):
        linear_tokens_norm(go, array(8, 64), array(9, 8, dtype="float32"), array(8, 64), parts, array(9, 8), eps=EPS)
    with pytest.raises(ValueError, match="60 columns, expected a multiple of 8"):
        linear_tokens_norm(go, array(8, 60), sums, array(8, 60), parts, array(3, 8), eps=EPS)
    with pytest.raises(ValueError, match="parts has 24 entries, expected 48: 1 shares of 3 tokens and 16 rows"):
        linear_tokens_norm(go, array(8, 64), sums, array(16, 64), parts, array(3, 16), eps=EPS)
    with pytest.raises(ValueError, match="w has 7 rows, expected gate and up rows in pairs"):
        linear_tokens_swiglu(go, array(8, 64), sums, array(7, 64), parts, array(3, 8), eps=EPS)
    rest = (array(3, 8, dtype="float32"), array(1, 8, dtype="float32"), array(2, 8), sums)
    with pytest.raises(ValueError, match=r"normed has shape \(2, 8\), expected \(3, 8\)"):
        linear_tokens_residual(go, array(8, 64), array(8, 64), parts, *rest)
