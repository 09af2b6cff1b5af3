"""The interpreter's operations against NumPy and against the compiler's rules of typing and rounding."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import cuda.tile as ct
import ml_dtypes
import numpy as np
import pytest
from cuda.tile._dispatch_mode import DispatchMode

from kernels.interpreter import InterpreterError, InterpreterLauncher
from tests.reference.random_arrays import integers, normal

I = ct.Constant[int]  # noqa: E741
BF16 = ml_dtypes.bfloat16


def evaluate(function: Any, *inputs: Any, constants: tuple[Any, ...] = ()) -> Any:
    """`function` on whole arrays as tiles, inside a kernel; returns NumPy arrays."""
    result: list[Any] = []

    def body(*args: Any) -> None:
        tiles = [
            ct.load(arg, index=(0,) * len(array.shape), shape=array.shape)
            for arg, array in zip(args, inputs, strict=False)
        ]
        result.append(function(*tiles, *constants))

    names = ", ".join(f"a{i}" for i in range(len(inputs)))
    scope: dict[str, Any] = {"body": body}
    exec(f"def run_kernel({names}):\n    body({names})", scope)
    InterpreterLauncher()(ct.kernel(scope["run_kernel"]), (1, 1, 1), inputs)
    [found] = result
    return tuple(np.asarray(tile.a) for tile in found) if isinstance(found, tuple) else np.asarray(found.a)


def test_private_hooks_exist() -> None:
    """The interpreter rests on these names, in the versions of cuda-tile that pyproject admits."""
    assert version("cuda-tile").startswith("1.7."), "check the hooks below, then admit the new version in pyproject"
    assert "cuda-tile>=1.7,<1.8" in Path("pyproject.toml").read_text()
    seen: list[str] = []

    class Mode(DispatchMode):
        def call_tile_function_from_host(self, func: Any, args: Any, kwargs: Any) -> Any:
            seen.append(func.__qualname__)
            assert hasattr(func, "_cutile_python_stub")

    @ct.kernel
    def pinned_kernel(x, N: I):
        ct.sum(ct.load(x, index=(0,), shape=(N,)), axis=0)

    with Mode().as_current():
        pinned_kernel._pyfunc(None, 4)
    assert seen == ["load", "sum"]
    assert [note.constant for note in pinned_kernel._annotated_function.parameter_annotations] == [False, True]


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("exp", np.exp),
        ("exp2", np.exp2),
        ("log", lambda x: np.log(np.abs(x))),
        ("sqrt", lambda x: np.sqrt(np.abs(x))),
        ("rsqrt", lambda x: 1 / np.sqrt(np.abs(x))),
        ("tanh", np.tanh),
        ("sin", np.sin),
        ("floor", np.floor),
        ("ceil", np.ceil),
    ],
)
def test_unary(name: str, reference: Any) -> None:
    x = normal((8, 16), "float32", seed=1)
    function = getattr(ct, name)
    out = evaluate(lambda t: function(ct.abs(t)), x) if name in ("log", "sqrt", "rsqrt") else evaluate(function, x)
    assert out.dtype == np.float32
    np.testing.assert_allclose(out, reference(x.astype(np.float64)), rtol=3e-7, atol=1e-7)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["add", "sub", "mul", "truediv", "minimum", "maximum"])
def test_binary_rounds_to_its_type(name: str, dtype: str) -> None:
    x, y = normal((4, 8), dtype, seed=2), normal((1, 8), dtype, seed=3)
    numpy = {"truediv": np.divide, "mul": np.multiply, "sub": np.subtract}.get(name) or getattr(np, name)
    out = evaluate(getattr(ct, name), x, y)
    wide = numpy(x.astype(np.float32), y.astype(np.float32)).astype(x.dtype)
    assert out.dtype == x.dtype
    assert np.array_equal(out, wide)


@pytest.mark.parametrize(
    ("left", "right", "want"),
    [
        ("bfloat16", "float32", "float32"),
        ("float16", "float32", "float32"),
        ("int32", "float16", "float16"),
        ("int8", "int32", "int32"),
    ],
)
def test_promotion_of_two_tiles(left: str, right: str, want: str) -> None:
    x = integers(8, 0, 9, "int32").astype(np.dtype(getattr(ml_dtypes, left, left)))
    y = integers(8, 0, 9, "int32", seed=1).astype(np.dtype(getattr(ml_dtypes, right, right)))
    assert str(evaluate(lambda a, b: a + b, x, y).dtype) == want
    assert str(evaluate(lambda a, b: b * a, x, y).dtype) == want


def test_sixteen_bit_floats_do_not_mix() -> None:
    with pytest.raises(InterpreterError, match="Implicit promotion of"):
        evaluate(lambda a, b: a + b, np.zeros(4, np.float16), np.zeros(4, BF16))


def test_constants_take_the_tile_s_type() -> None:
    x = np.ones(4, BF16)
    assert evaluate(lambda t: t + 0.1, x).dtype == BF16
    assert evaluate(lambda t: t + 0.1, x)[0] == BF16(1) + BF16(0.1)
    assert evaluate(lambda t: 2 * t, x).dtype == BF16
    assert evaluate(lambda t: t + 1, np.ones(4, np.int8)).dtype == np.int8
    assert evaluate(lambda t: t * 0.5, np.ones(4, np.int32)).dtype == np.float32
    assert evaluate(lambda t: t / 2, np.ones(4, np.int32)).dtype == np.float32
    assert evaluate(lambda t: ct.where(t > 0, t, -1.0e30), np.ones(4, np.float32)).dtype == np.float32
    with pytest.raises(InterpreterError, match="constant 300 is out of range of int8"):
        evaluate(lambda t: t + 300, np.ones(4, np.int8))


def test_negative_zero_is_kept() -> None:
    x = np.zeros(4, np.float32)
    assert np.signbit(evaluate(lambda t: t * 0.0 + -0.0, -np.ones(4, np.float32))).all()
    assert not np.signbit(evaluate(lambda t: t + 0.0, x)).any()


def test_integers_wrap_and_divide_towards_minus_infinity() -> None:
    x = np.array([-7, 7, -8, 2**31 - 1], np.int32)
    assert evaluate(lambda t: t // 2, x).tolist() == [-4, 3, -4, 2**30 - 1]
    assert evaluate(lambda t: t % 4, x).tolist() == [1, 3, 0, 3]
    assert evaluate(lambda t: t + 1, x)[3] == -(2**31)
    assert evaluate(lambda t: ct.cdiv(t, 2), x[1:2]).tolist() == [4]
    u = np.array([0xFFFFFFFF, 5], np.uint32)
    assert evaluate(lambda t: t * 3, u).tolist() == [0xFFFFFFFD, 15]
    assert evaluate(lambda t: (t >> 16) ^ (t << 1), u).tolist() == [0xFFFF ^ 0xFFFFFFFE, 10]


@pytest.mark.parametrize("axis", [0, 1, None, (0, 1)])
@pytest.mark.parametrize("name", ["sum", "max", "min"])
def test_reductions(name: str, axis: Any) -> None:
    x = normal((8, 32), "float32", seed=4)
    want = getattr(np, name)(x.astype(np.float64), axis=axis)
    np.testing.assert_allclose(evaluate(lambda t: getattr(ct, name)(t, axis=axis), x), want, rtol=1e-6, atol=1e-6)
    kept = evaluate(lambda t: getattr(ct, name)(t, axis=axis, keepdims=True), x)
    assert kept.shape == np.sum(x, axis=axis, keepdims=True).shape


def test_sum_keeps_its_type() -> None:
    assert evaluate(lambda t: ct.sum(t, axis=0), np.ones(16, BF16)).dtype == BF16
    assert evaluate(lambda t: ct.sum(t, axis=0), np.full(16, 100, np.int8)).dtype == np.int8
    assert evaluate(lambda t: ct.sum(t > 0, axis=0), np.ones(16, np.float32)).dtype == np.int32


def test_argmax_takes_the_first_and_ignores_nan() -> None:
    x = np.array([1, 5, np.nan, 5, -2, 5, 0, 0], np.float32)
    assert evaluate(lambda t: ct.argmax(t, axis=0), x) == 1
    assert evaluate(lambda t: ct.argmax(t, axis=0, propagate_nan=True), x) == 2
    assert evaluate(lambda t: ct.argmin(t, axis=0), x) == 4
    lowest = np.array([np.nan, -np.inf, np.nan, -np.inf], np.float32)
    assert evaluate(lambda t: ct.argmax(t, axis=0), lowest) == 1
    assert evaluate(lambda t: ct.max(t, axis=0), x) == 5
    assert np.isnan(evaluate(lambda t: ct.max(t, axis=0, propagate_nan=True), x))


def test_custom_reduction_of_a_tuple() -> None:
    """Greater value, then smaller position: FirstMax."""
    x = np.array([[3, 9, 9, 1], [2, 2, 2, 2], [0, -1, 4, 4], [7, 7, 1, 8]], np.float32)

    def first(a: Any, i: Any, b: Any, j: Any) -> Any:
        left = (a > b) | ((a == b) & (i < j))
        return ct.where(left, a, b), ct.where(left, i, j)

    def kernel(t: Any) -> Any:
        at = ct.broadcast_to(ct.arange(4, dtype=ct.int32).reshape((1, 4)), (4, 4))
        return ct.reduce((t, at), 1, first, (-np.inf, 0))

    value, position = evaluate(kernel, x)
    assert value.tolist() == [9, 2, 4, 8]
    assert position.tolist() == [1, 0, 2, 3]


def test_identity_that_is_none() -> None:
    """tileiras leaves it out, where the tile is as long as what it reduces."""
    zeros, ones = np.zeros((2, 8), np.float32), np.ones((2, 8), np.float32)
    assert evaluate(lambda t: ct.reduce(t, 1, ct.maximum, 1e-30), ones).tolist() == [1, 1]
    with pytest.raises(InterpreterError, match=r"identity \(1e-30,\) changes the result"):
        evaluate(lambda t: ct.reduce(t, 1, ct.maximum, 1e-30), zeros)


def test_scans() -> None:
    x = integers((2, 8), 0, 5, "int32", seed=6)
    assert np.array_equal(evaluate(lambda t: ct.cumsum(t, 1), x), np.cumsum(x, 1))
    assert np.array_equal(evaluate(lambda t: ct.cumsum(t, 1, reverse=True), x), np.cumsum(x[:, ::-1], 1)[:, ::-1])
    assert np.array_equal(evaluate(lambda t: ct.scan(t, 1, ct.maximum, 0), x), np.maximum.accumulate(x, 1))
    assert np.array_equal(evaluate(lambda t: ct.scan(t, 0, lambda a, b: a + b, 0), x), np.cumsum(x, 0))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_mma_accumulates_in_float32(dtype: str) -> None:
    x, y = normal((64, 32), dtype, seed=7), normal((32, 8), dtype, seed=8)
    acc = normal((64, 8), "float32", seed=9)
    out = evaluate(ct.mma, x, y, acc)
    want = x.astype(np.float64) @ y.astype(np.float64) + acc
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)
    assert out.dtype == np.float32


def test_mma_of_int8_is_exact() -> None:
    x, y = integers((64, 128), -128, 128, "int8", seed=7), integers((128, 8), -128, 128, "int8", seed=8)
    out = evaluate(lambda a, b: ct.mma(a, b, ct.zeros((64, 8), dtype=ct.int32)), x, y)
    assert np.array_equal(out, x.astype(np.int64) @ y.astype(np.int64))


def test_mma_refuses_other_accumulators() -> None:
    x = np.zeros((16, 16), BF16)
    with pytest.raises(InterpreterError, match="mma of bfloat16 accumulates in float32, not bfloat16"):
        evaluate(lambda a: ct.mma(a, a, ct.zeros((16, 16), dtype=ct.bfloat16)), x)


def test_shapes() -> None:
    x = integers((4, 8), 0, 100, "int32", seed=1)
    assert np.array_equal(evaluate(lambda t: t.reshape((8, 4)), x), x.reshape(8, 4))
    assert np.array_equal(evaluate(ct.transpose, x), x.T)
    assert np.array_equal(evaluate(lambda t: ct.extract(t, (1, 0), (2, 4)), x), x[2:4, 0:4])
    assert np.array_equal(evaluate(lambda t: ct.cat((t, t), 1), x), np.concatenate((x, x), 1))
    assert np.array_equal(evaluate(lambda t: t[None, :, :], x), x[None])
    assert np.array_equal(
        evaluate(lambda t: ct.insert(t, (0, 1), ct.zeros((4, 4), dtype=ct.int32)), x)[:, 4:], np.zeros((4, 4))
    )
    with pytest.raises(InterpreterError, match="side 12 is no power of two"):
        evaluate(lambda t: ct.cat((t, ct.zeros((4, 4), dtype=ct.int32)), 1), x)
    with pytest.raises(InterpreterError, match="lies outside a side of 8"):
        evaluate(lambda t: ct.extract(t, (0, 2), (4, 4)), x)


def test_casts_and_bits() -> None:
    x = normal(64, "float32", seed=3)
    assert np.array_equal(evaluate(lambda t: t.astype(ct.bfloat16), x), x.astype(BF16))
    assert np.array_equal(evaluate(lambda t: ct.bitcast(t, ct.uint32), x), x.view(np.uint32))
    assert np.array_equal(
        evaluate(lambda t: (t * 10).astype(ct.int32), x), np.trunc(x * np.float32(10)).astype(np.int32)
    )


@ct.kernel
def transposed_kernel(x, y):
    ct.store(y, index=(0, 0), tile=ct.load(x, index=(1, 0), shape=(4, 2), order=(1, 0)), order="F")


def test_order_of_axes() -> None:
    x, y = integers((4, 8), 0, 100, "int32"), np.zeros((2, 4), np.int32)
    InterpreterLauncher()(transposed_kernel, (1, 1, 1), (x, y))
    assert np.array_equal(y, x[0:2, 4:8])


@ct.kernel
def views_kernel(x, y, n):
    view = x.tiled_view((1, 4), padding_mode=ct.PaddingMode.ZERO)
    row = x.slice(0, n, n + 1)
    total = ct.zeros((1, 4), dtype=ct.float32)
    for i in range(view.num_tiles(1)):
        total = total + view.load((n, i))
    total = total + ct.load(row, index=(0, 0), shape=(1, 4))
    total = total + ct.load_advanced_indexing(
        x, (ct.full((1,), n, dtype=ct.int32), ct.Slice(4, 4)), padding_mode=ct.PaddingMode.ZERO
    )
    raw = x.get_raw_memory()
    ct.store(y, index=(0, 0), tile=total + raw.load_offset(ct.arange(4, dtype=ct.int32)).reshape((1, 4)))


def test_views() -> None:
    x, y = normal((3, 6), "float32"), np.zeros((1, 4), np.float32)
    InterpreterLauncher()(views_kernel, (1, 1, 1), (x, y, 2))
    row = np.concatenate((x[2], np.zeros(2, np.float32)))
    np.testing.assert_allclose(y[0], row[:4] + row[4:] + x[2, :4] + row[4:] + x[0, :4], rtol=1e-6)


@ct.kernel
def arguments_kernel(weights, y, count, scale, N: I):
    total = ct.zeros((N,), dtype=ct.float32)
    for weight in weights:
        total = total + ct.load(weight, index=(0,), shape=(N,))
    ct.store(y, index=(0,), tile=total * scale + count)


def test_tuples_and_scalars_as_arguments() -> None:
    y = np.zeros(4, np.float32)
    parts = tuple(np.full(4, i, np.float32) for i in (1, 2, 3))
    InterpreterLauncher()(arguments_kernel, (1, 1, 1), (parts, y, 7, 0.5, 4))
    assert (y == 10).all()


@ct.kernel
def atomics_kernel(x, old):
    i = ct.bid(0)
    before = ct.atomic_max(x, ct.arange(4, dtype=ct.int32), i)
    ct.store(old, index=(i, 0), tile=before.reshape((1, 4)))
    ct.atomic_cas(x, 0, 3, 100)


def test_atomics() -> None:
    x, old = np.array([0, 5, 1, 2], np.int32), np.zeros((4, 4), np.int32)
    InterpreterLauncher()(atomics_kernel, (4, 1, 1), (x, old))
    assert x.tolist() == [100, 5, 3, 3]
    assert old.tolist() == [[0, 5, 1, 2], [0, 5, 1, 2], [1, 5, 1, 2], [2, 5, 2, 2]]
