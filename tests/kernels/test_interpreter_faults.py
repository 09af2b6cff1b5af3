"""Tiny kernels that each commit one fault, and must be caught by name."""

from __future__ import annotations

import cuda.tile as ct
import numpy as np
import pytest

from kernels.interpreter import initialise, uninitialised, unwritten
from tests.kernels.kernels_for_tests import branch_kernel, caught, floats, run

I = ct.Constant[int]  # noqa: E741


@ct.kernel
def copy_kernel(x, y, T: I, PAD: I):
    i = ct.bid(0)
    if PAD:
        tile = ct.load(x, index=(i,), shape=(T,), padding_mode=ct.PaddingMode.ZERO)
    else:
        tile = ct.load(x, index=(i,), shape=(T,))
    ct.store(y, index=(i,), tile=tile)


@ct.kernel
def sum_kernel(x, y, n, T: I, MASK: I):
    tile = ct.load(x, index=(0,), shape=(T,))
    if MASK:
        tile = ct.where(ct.arange(T, dtype=ct.int32) < n, tile, 0.0)
    ct.store(y, index=(0,), tile=ct.sum(tile, axis=0))


@ct.kernel
def padded_unchecked_kernel(x, y):
    zero = ct.PaddingMode.ZERO
    ct.store(y, index=(0,), tile=ct.load(x, index=(0,), shape=(4,), padding_mode=zero, check_bounds=False))


@ct.kernel
def unchecked_kernel(x, y, T: I, STORE: I):
    if STORE:
        ct.store(y, index=(0,), tile=ct.zeros((T,), dtype=ct.float32), check_bounds=False)
    else:
        ct.store(y, index=(0,), tile=ct.sum(ct.load(x, index=(0,), shape=(T,), check_bounds=False)))


@ct.kernel
def side_kernel(x, y, T: I):
    ct.store(y, index=(0,), tile=ct.sum(ct.load(x, index=(0,), shape=(T,)), axis=0))


@ct.kernel
def product_kernel(x, w, y, MASK: I):
    p = ct.load(x, index=(0, 0), shape=(16, 16))
    v = ct.load(w, index=(0, 0), shape=(16, 16))
    if MASK:
        v = ct.where(ct.arange(16, dtype=ct.int32).reshape((16, 1)) < 8, v, 0.0)
    ct.store(y, index=(0, 0), tile=ct.mma(p, v, ct.zeros((16, 16), dtype=ct.float32)))


@ct.kernel
def add_one_kernel(x, y):
    ct.store(y, index=(0,), tile=ct.load(x, index=(0,), shape=(4,)) + 1.0)


@ct.kernel
def index_kernel(x, y):
    at = ct.load(x, index=(0,), shape=())
    ct.store(y, index=(at,), tile=1.0)


@ct.kernel
def narrow_store_kernel(x, y):
    ct.store(y, index=(0,), tile=ct.load(x, index=(0,), shape=(4,)))


@ct.kernel
def gather_kernel(x, at, y, CHECK: I):
    where = ct.load(at, index=(0,), shape=(4,))
    ct.store(y, index=(0,), tile=ct.gather(x, where, check_bounds=bool(CHECK)))


@ct.kernel
def scatter_kernel(at, y):
    ct.scatter(y, ct.load(at, index=(0,), shape=(4,)), 1.0)


@ct.kernel
def unknown_kernel(y):
    ct.store(y, index=(0,), tile=ct.pack_to_bytes(ct.zeros((4,), dtype=ct.float32)))


@ct.kernel
def dynamic_shape_kernel(x, y):
    ct.store(y, index=(0,), tile=ct.sum(ct.arange(x.shape[0], dtype=ct.float32)))


@ct.kernel
def division_kernel(x, y, n):
    ct.store(y, index=(0,), tile=ct.load(x, index=(0,), shape=(4,)) // n)


def test_error_names_kernel_block_operation_array_and_line() -> None:
    with caught(
        r"copy_kernel, block \(2, 0, 0\): load of x\(8,\): tile \(2,\) of shape \(4,\).*\[at line \d+: tile = ct.load"
    ):
        run(copy_kernel, 3, floats(8), floats(8), 4, 1)


def test_store_wholly_out_of_bounds() -> None:
    with caught(r"store to y\(4,\)|store of y\(4,\): tile \(1,\) of shape \(4,\) lies wholly outside"):
        run(copy_kernel, 2, floats(8), floats(4), 4, 1)


def test_undetermined_padding_that_reaches_a_result() -> None:
    with caught("sum_kernel.*store to y.*undetermined.*load of x"):
        run(sum_kernel, 1, floats(5), floats(1), 5, 8, 0)


def test_undetermined_padding_that_is_masked() -> None:
    y = floats(1)
    run(sum_kernel, 1, floats(5), y, 5, 8, 1)
    assert y[0] == 10


def test_undetermined_padding_that_is_masked_one_too_few() -> None:
    with caught("undetermined"):
        run(sum_kernel, 1, floats(5), floats(1), 6, 8, 1)


def test_undetermined_padding_stored_out_of_bounds_is_no_fault() -> None:
    y = np.zeros(5, np.float32)
    run(copy_kernel, 2, floats(5), y, 4, 0)
    assert y.tolist() == floats(5).tolist()


def test_padding_mode_that_the_compiler_cannot_take() -> None:
    with caught("tileiras 13.4 fails on PaddingMode.ZERO beside check_bounds=False"):
        run(padded_unchecked_kernel, 1, floats(4), floats(4))


@pytest.mark.parametrize("store", [0, 1])
def test_check_bounds_false_that_lies(store: int) -> None:
    with caught("check_bounds=False, but the tile .* overhangs"):
        run(unchecked_kernel, 1, floats(5), floats(5), 8, store)


def test_side_that_is_no_power_of_two() -> None:
    with caught("side 6 is no power of two"):
        run(side_kernel, 1, floats(6), floats(1), 6)


def test_memory_nothing_wrote() -> None:
    x = uninitialised(8, np.float32)
    initialise(x[:5], floats(5))
    y = uninitialised(1, np.float32)
    with caught("undetermined.*load of x"):
        run(sum_kernel, 1, x, y, 8, 8, 1)
    assert unwritten(y).all()
    run(sum_kernel, 1, x, y, 5, 8, 1)
    assert y[0] == 10
    assert not unwritten(y).any()


def test_zero_times_unwritten_memory_is_no_zero() -> None:
    x = np.zeros((16, 16), np.float32)
    x[:, :8] = 1  # columns 8 and up meet the rows that nothing wrote
    w = uninitialised((16, 16), np.float32)
    initialise(w[:8], np.ones((8, 16), np.float32))
    with caught("store to y.*undetermined.*load of w"):
        run(product_kernel, 1, x, w, np.zeros((16, 16), np.float32), 0)
    y = np.zeros((16, 16), np.float32)
    run(product_kernel, 1, x, w, y, 1)
    assert (y == 8).all()


def test_arguments_that_share_memory() -> None:
    x = floats(8)
    with caught(r"store to y\(4,\): the argument x\(4,\) shares its memory"):
        run(add_one_kernel, 1, x[:4], x[2:6])
    run(add_one_kernel, 1, x[:4], x[4:])
    assert x[4:].tolist() == [1, 2, 3, 4]


def test_interleaved_views_share_no_memory() -> None:
    x = floats(8)
    run(add_one_kernel, 1, x[0::2], x[1::2])
    assert x.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


def test_undetermined_index_and_branch() -> None:
    with caught("an index reads an undetermined value"):
        run(index_kernel, 1, uninitialised(1, np.int32), floats(4))
    with caught("a branch reads an undetermined value"):
        run(branch_kernel, 1, uninitialised(1, np.float32), floats(4))


def test_store_that_would_round() -> None:
    with caught("float32 tile needs an astype"):
        run(narrow_store_kernel, 1, floats(4), np.zeros(4, np.float16))


def test_gather_out_of_bounds() -> None:
    at, y = np.array([0, 3, 4, -1], np.int32), floats(4)
    run(gather_kernel, 1, floats(4) + 1, at, y, 1)
    assert y.tolist() == [1, 4, 0, 0]
    with caught("check_bounds=False, but index .* lies outside"):
        run(gather_kernel, 1, floats(4), at, y, 0)


def test_scatter_to_one_element_twice() -> None:
    with caught("writes one element more than once"):
        run(scatter_kernel, 1, np.array([0, 1, 1, 2], np.int32), floats(4))


def test_unknown_operation_fails_by_name() -> None:
    with caught("operation pack_to_bytes is not interpreted"):
        run(unknown_kernel, 1, floats(4))


def test_shape_known_only_at_run_time() -> None:
    with caught("not made of compile-time constants"):
        run(dynamic_shape_kernel, 1, floats(4), floats(1))


def test_integer_division_by_zero() -> None:
    with caught("integer division by zero"):
        run(division_kernel, 1, np.arange(4, dtype=np.int32), np.arange(4, dtype=np.int32), 0)


@ct.kernel
def to_integer_kernel(x, y, MASK: I):
    x = ct.load(x, index=(0,), shape=(4,))
    whole = x.astype(ct.int32)
    ct.store(y, index=(0,), tile=ct.where(x < 100.0, whole, -1) if MASK else whole)


@ct.kernel
def shift_kernel(x, y):
    ct.store(y, index=(0,), tile=1 << ct.load(x, index=(0,), shape=(4,)))


@pytest.mark.parametrize("value", [np.nan, np.inf, 2.0**31, -(2.0**31) - 256])
def test_float_that_its_integer_cannot_hold(value: float) -> None:
    x, y = np.array([1.5, -2.5, value, 2.0**31 - 128], np.float32), np.zeros(4, np.int32)
    with caught("undetermined value .a cast to an integer"):
        run(to_integer_kernel, 1, x, y, 0)
    if value > 0:
        run(to_integer_kernel, 1, x, y, 1)
        assert y.tolist() == [1, -2, -1, -1]


def test_shift_by_too_many_bits() -> None:
    y = np.zeros(4, np.int32)
    run(shift_kernel, 1, np.array([0, 1, 5, 30], np.int32), y)
    assert y.tolist() == [1, 2, 32, 1 << 30]
    with caught("undetermined value .*shift"):
        run(shift_kernel, 1, np.array([0, 1, 5, 32], np.int32), y)


def test_wrong_number_of_arguments() -> None:
    with pytest.raises(TypeError, match="takes 4 arguments, got 3"):
        run(copy_kernel, 1, floats(4), floats(4), 4)


def test_checks_can_be_switched_off() -> None:
    y = floats(1)
    run(sum_kernel, 1, floats(5), y, 5, 8, 0, checks=False)
    assert np.isnan(y[0])
