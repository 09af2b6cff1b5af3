"""kernels/linear_prefill_int8.py: three forms of one product, a scale a row and groups, at sizes around tile edges."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kernels.linear_prefill import LinearPrefillConfig
from kernels.linear_prefill_int8 import (
    linear_prefill_int8,
    linear_prefill_int8_residual,
    linear_prefill_int8_swiglu,
)
from tests.reference import linear_prefill as reference
from tests.reference.int8 import dequantised, quantised
from tests.reference.random_arrays import normal
from tests.reference.tolerance import assert_close

SMALL = LinearPrefillConfig(tile_m=64, tile_n=64, tile_k=64, group=2)
# tokens, rows of the weight, K, columns of a scale: one tile less and more, a prime, K of SmolLM2 (576 = 9 * 64)
SIZES = [(1, 64, 64, None), (63, 66, 80, 16), (65, 130, 256, 128), (131, 258, 576, None), (17, 66, 576, 64)]


@pytest.fixture(params=["bfloat16", "float16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=SIZES, ids=str)
def case(request: pytest.FixtureRequest, machine: Any, dtype: str) -> tuple[Any, ...]:
    tokens, rows, k, group = request.param
    x, b = normal((tokens, k), dtype, seed=1), normal(rows, dtype, seed=3)
    w, scale = quantised(normal((rows, k), "float32", seed=2, scale=k**-0.5), group)
    return (machine.array(x), machine.array(w), machine.array(scale)), x, dequantised(w, scale), b


@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
class TestForms:
    def test_plain(self, machine: Any, case: Any, dtype: str, with_bias: bool) -> None:
        arrays, x, wide, b = case
        y = machine.empty((len(x), len(wide)), dtype)
        bias = machine.array(b) if with_bias else None
        linear_prefill_int8(machine.launcher, *arrays, y, config=SMALL, bias=bias)
        assert_close(machine.host(y), reference.product(x, wide, b if with_bias else None))

    def test_residual(self, machine: Any, case: Any, with_bias: bool) -> None:
        arrays, x, wide, b = case
        before = normal((len(x), len(wide)), "float32", seed=4)
        residual = machine.array(before)
        bias = machine.array(b) if with_bias else None
        linear_prefill_int8_residual(machine.launcher, *arrays, residual, config=SMALL, bias=bias)
        assert_close(machine.host(residual), reference.product(x, wide, b if with_bias else None) + before)

    @pytest.mark.parametrize("split", [False, True], ids=["interleaved", "split"])
    def test_swiglu(self, machine: Any, case: Any, dtype: str, with_bias: bool, split: bool) -> None:
        arrays, x, wide, b = case
        if split and x.shape[1] % SMALL.tile_k:
            pytest.skip("the split form needs whole K tiles")
        y = machine.empty((len(x), len(wide) // 2), dtype)
        bias = machine.array(b) if with_bias else None
        config = replace(SMALL, tile_n=32, split_gate=True) if split else SMALL
        linear_prefill_int8_swiglu(machine.launcher, *arrays, y, config=config, bias=bias)
        assert_close(machine.host(y), reference.swiglu(x, wide, b if with_bias else None))


def test_refusals(machine: Any) -> None:
    def array(*shape: int, dtype: str = "bfloat16") -> Any:
        return machine.zeros(shape, dtype)

    go, scale = machine.launcher, array(8, 1, dtype="float32")
    with pytest.raises(TypeError, match="w has dtype bfloat16, expected int8"):
        linear_prefill_int8(go, array(4, 64), array(8, 64), scale, array(4, 8), config=SMALL)
    with pytest.raises(ValueError, match="x has 64 columns, the weight expects 80"):
        linear_prefill_int8(go, array(4, 64), array(8, 80, dtype="int8"), scale, array(4, 8), config=SMALL)
    weight = array(9, 64, dtype="int8"), array(9, 1, dtype="float32")
    with pytest.raises(ValueError, match="gate and up rows in pairs"):
        linear_prefill_int8_swiglu(go, array(4, 64), *weight, array(4, 4), config=SMALL)
    weight = array(8, 80, dtype="int8"), scale
    with pytest.raises(ValueError, match="K is 80, expected a multiple of tile_k 64"):
        linear_prefill_int8_swiglu(go, array(4, 80), *weight, array(4, 4), config=replace(SMALL, split_gate=True))
