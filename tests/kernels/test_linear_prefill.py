"""kernels/linear_prefill.py: four forms of one product, at sizes around the tiles' edges."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kernels.linear_prefill import (
    LinearPrefillConfig,
    linear_prefill,
    linear_prefill_residual,
    linear_prefill_swiglu,
    linear_prefill_xielu,
)
from kernels.specs import ArraySpec, RecordingLauncher
from tests.reference import linear_prefill as reference
from tests.reference.random_arrays import normal
from tests.reference.tolerance import assert_close

SMALL = LinearPrefillConfig(tile_m=64, tile_n=64, tile_k=64, group=2)
LOOPS = replace(SMALL, persistent=True)  # the machines of these tests say that they have three multiprocessors
ALPHAS = np.array([0.8, 1.4], np.float32)
# tokens, rows of the weight, K: one tile less and more, a prime, K of SmolLM2 (576 = 9 * 64)
SIZES = [(1, 64, 64), (63, 66, 72), (65, 130, 200), (131, 258, 576)]


def inputs(size: tuple[int, int, int], dtype: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    tokens, rows, k = size
    return (
        normal((tokens, k), dtype, seed=1),
        normal((rows, k), dtype, seed=2, scale=k**-0.5),
        normal(rows, dtype, seed=3),
    )


@pytest.fixture(params=["bfloat16", "float16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[SMALL, LOOPS], ids=["grid", "persistent"])
def tiles(request: pytest.FixtureRequest) -> LinearPrefillConfig:
    return request.param


@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("size", SIZES, ids=str)
class TestForms:
    def test_plain(
        self, machine: Any, size: tuple[int, int, int], dtype: str, with_bias: bool, tiles: LinearPrefillConfig
    ) -> None:
        x, w, b = inputs(size, dtype)
        y = machine.empty((size[0], size[1]), dtype)
        bias = machine.array(b) if with_bias else None
        linear_prefill(machine.launcher, machine.array(x), machine.array(w), y, config=tiles, bias=bias)
        assert_close(machine.host(y), reference.product(x, w, b if with_bias else None))

    def test_residual(
        self, machine: Any, size: tuple[int, int, int], dtype: str, with_bias: bool, tiles: LinearPrefillConfig
    ) -> None:
        x, w, b = inputs(size, dtype)
        before = normal((size[0], size[1]), "float32", seed=4)
        residual = machine.array(before)
        bias = machine.array(b) if with_bias else None
        linear_prefill_residual(machine.launcher, machine.array(x), machine.array(w), residual, config=tiles, bias=bias)
        assert_close(machine.host(residual), reference.product(x, w, b if with_bias else None) + before)

    @pytest.mark.parametrize("split", [False, True], ids=["interleaved", "split"])
    def test_swiglu(
        self,
        machine: Any,
        size: tuple[int, int, int],
        dtype: str,
        with_bias: bool,
        split: bool,
        tiles: LinearPrefillConfig,
    ) -> None:
        if split and size[2] % tiles.tile_k:
            pytest.skip("the split form needs whole K tiles")
        x, w, b = inputs(size, dtype)
        y = machine.empty((size[0], size[1] // 2), dtype)
        bias = machine.array(b) if with_bias else None
        config = replace(tiles, tile_n=32, split_gate=True) if split else tiles
        linear_prefill_swiglu(machine.launcher, machine.array(x), machine.array(w), y, config=config, bias=bias)
        assert_close(machine.host(y), reference.swiglu(x, w, b if with_bias else None))

    def test_xielu(
        self, machine: Any, size: tuple[int, int, int], dtype: str, with_bias: bool, tiles: LinearPrefillConfig
    ) -> None:
        x, w, b = inputs(size, dtype)
        y = machine.empty((size[0], size[1]), dtype)
        bias = machine.array(b) if with_bias else None
        arrays = (machine.array(x), machine.array(w), machine.array(ALPHAS), y)
        linear_prefill_xielu(machine.launcher, *arrays, config=tiles, bias=bias)
        expected = reference.product(x, w, b if with_bias else None)
        assert_close(machine.host(y), reference.xielu(expected, ALPHAS))


@pytest.mark.parametrize("group", [1, 3, 8])
def test_every_tile_is_made_once(machine: Any, group: int, tiles: LinearPrefillConfig) -> None:
    """5 row tiles in groups of 1, 3 (a last group of 2) and 8 (larger than all): no tile is left out."""
    x, w, _ = inputs((300, 200, 64), "bfloat16")
    y = machine.empty((300, 200), "bfloat16")
    linear_prefill(machine.launcher, machine.array(x), machine.array(w), y, config=replace(tiles, group=group))
    assert_close(machine.host(y), reference.product(x, w))


def test_blocks_of_a_launch() -> None:
    """2,048 x 24,576 in tiles of 128 x 256: 1,536, twelve rounds of 132 multiprocessors, and of 128 too."""
    x, w = ArraySpec((2048, 64), "bfloat16"), ArraySpec((24576, 64), "bfloat16")
    tiles = LinearPrefillConfig(tile_m=128, tile_n=256)
    loops = replace(tiles, persistent=True)
    launcher, fewer = (RecordingLauncher("sm_90", pdl=True, processors=n) for n in (132, 114))
    assert tiles.blocks(x, w, launcher) == 1536
    assert loops.blocks(x, w, launcher) == 128
    assert loops.blocks(x, w, launcher.with_pdl(False)) == 1536
    assert loops.blocks(x, w, fewer) == 110
    assert replace(loops, occupancy=2).blocks(x, w, launcher) == 256
    assert loops.blocks(x, ArraySpec((256, 64), "bfloat16"), launcher) == 16


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4096, 4096, 4096), (500, 6144, 2560), (64, 12288, 4096), (16, 1024, 3072)], ids=str)
def test_configured_tiles_on_the_gpu(machine: Any, shape: tuple[int, int, int]) -> None:
    """The tiles that the table gives for real shapes, against float64 on a sample of rows and columns."""
    if not machine.on_gpu:
        pytest.skip("needs a GPU")
    from kernels.configs import config

    tokens, rows, k = shape
    x, w, _ = inputs(shape, "bfloat16")
    y = machine.empty((tokens, rows), "bfloat16")
    tiles = LinearPrefillConfig(**config("linear_prefill", machine.arch, tokens=tokens, n=rows, k=k))
    linear_prefill(machine.launcher, machine.array(x), machine.array(w), y, config=tiles)
    out, some = machine.host(y), slice(None, None, 7)
    assert not np.isnan(out.astype(np.float32)).any()
    assert_close(out[some, some], reference.product(x[some], w[some]))


class TestRefusals:
    """Both values in the message, before any launch."""

    def test_columns(self, machine: Any) -> None:
        x, w, y = (machine.zeros(shape, "bfloat16") for shape in ((4, 1024), (8, 2560), (4, 8)))
        with pytest.raises(ValueError, match="linear_prefill: x has 1024 columns, the weight expects 2560"):
            linear_prefill(machine.launcher, x, w, y, config=SMALL)

    def test_output_shape(self, machine: Any) -> None:
        x, w, y = (machine.zeros(shape, "bfloat16") for shape in ((4, 64), (8, 64), (4, 16)))
        with pytest.raises(ValueError, match=r"y has shape \(4, 16\), expected \(4, 8\)"):
            linear_prefill(machine.launcher, x, w, y, config=SMALL)

    def test_dtypes(self, machine: Any) -> None:
        x, w = machine.zeros((4, 64), "bfloat16"), machine.zeros((8, 64), "float16")
        with pytest.raises(TypeError, match="w has dtype float16, expected bfloat16"):
            linear_prefill(machine.launcher, x, w, machine.zeros((4, 8), "bfloat16"), config=SMALL)
        w = machine.zeros((8, 64), "bfloat16")
        with pytest.raises(TypeError, match="residual has dtype bfloat16, expected float32"):
            linear_prefill_residual(machine.launcher, x, w, machine.zeros((4, 8), "bfloat16"), config=SMALL)

    def test_layout(self, machine: Any) -> None:
        x, w = machine.zeros((64, 4), "bfloat16").T, machine.zeros((8, 64), "bfloat16")
        with pytest.raises(ValueError, match="x is not C-contiguous"):
            linear_prefill(machine.launcher, x, w, machine.zeros((4, 8), "bfloat16"), config=SMALL)

    def test_rows_of_sixteen_bytes(self, machine: Any) -> None:
        x, w, y = (machine.zeros(shape, "bfloat16") for shape in ((4, 68), (8, 68), (4, 8)))
        with pytest.raises(ValueError, match="x has 68 columns, expected a multiple of 8"):
            linear_prefill(machine.launcher, x, w, y, config=SMALL)

    def test_pairs_and_split(self, machine: Any) -> None:
        x, w = machine.zeros((4, 72), "bfloat16"), machine.zeros((7, 72), "bfloat16")
        with pytest.raises(ValueError, match="w has 7 rows, expected gate and up rows in pairs"):
            linear_prefill_swiglu(machine.launcher, x, w, machine.zeros((4, 3), "bfloat16"), config=SMALL)
        w, y = machine.zeros((8, 72), "bfloat16"), machine.zeros((4, 4), "bfloat16")
        with pytest.raises(ValueError, match="K is 72, expected a multiple of tile_k 64"):
            linear_prefill_swiglu(machine.launcher, x, w, y, config=replace(SMALL, split_gate=True))

    def test_bias(self, machine: Any) -> None:
        x, w, y = (machine.zeros(shape, "bfloat16") for shape in ((4, 64), (8, 64), (4, 8)))
        with pytest.raises(ValueError, match=r"bias has shape \(9,\), expected \(8\)"):
            linear_prefill(machine.launcher, x, w, y, config=SMALL, bias=machine.zeros(9, "bfloat16"))
