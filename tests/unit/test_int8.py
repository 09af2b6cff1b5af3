"""Rounding to INT8: the oracle's numbers bit for bit, and error compensation that helps where it should."""

from __future__ import annotations

import numpy as np
import pytest

from tests import int8_oracle as oracle
from tileinfer_core.compensate import BLOCK, compensation, round_compensated
from tileinfer_core.dtypes import BFLOAT16
from tileinfer_core.int8 import from_int8, relative_error, scales_of, to_int8


def weights(seed, rows, columns, scale=1.0):
    return (np.random.default_rng(seed).standard_normal((rows, columns)) * scale).astype(np.float32)


@pytest.mark.parametrize("group", [None, 16, 8])
@pytest.mark.parametrize(("rows", "columns"), [(1, 16), (7, 48), (16, 64), (3, 112)])
@pytest.mark.parametrize("scale", [1.0, 1e-6, 3e4])
def test_scales_numbers_and_restored_weights_are_the_oracles(rows, columns, group, scale):
    weight = weights(rows * columns, rows, columns, scale)
    weight[0, :8] = 0
    scales = scales_of(weight, group)
    q = to_int8(weight, scales)
    expected_q, expected_scales = oracle.quantise(weight, group)
    assert scales.dtype == BFLOAT16
    np.testing.assert_array_equal(scales.astype(np.float32), expected_scales)
    np.testing.assert_array_equal(q, expected_q)
    np.testing.assert_array_equal(from_int8(q, scales), oracle.dequantise(expected_q, expected_scales))


ODD = [0.0, -0.0, 1e-45, -1e-40, 2.0**-126, -3e38, 3.4e38, 127.0, -127.5, 1.0]


@pytest.mark.parametrize("group", [None, 1, 2, 4, 12, 24])
@pytest.mark.parametrize("turn", range(4))
def test_scales_of_odd_numbers_are_the_oracles(group, turn):
    """Signed zeros, subnormal and very large numbers at any place of a group; groups of any length."""
    weight = np.roll(np.array(ODD * 12, np.float32), turn).reshape(5, 24)
    weight[turn] = 0
    np.testing.assert_array_equal(scales_of(weight, group).astype(np.float32), oracle.quantise(weight, group)[1])


@pytest.mark.parametrize("group", [None, 4, 12])
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_a_number_that_is_not_finite_shows_in_its_scale(bad, group):
    for place in range(24):
        weight = np.full((2, 24), 3e38, np.float32)
        weight[1, place] = bad
        finite = np.isfinite(scales_of(weight, group).astype(np.float32))
        assert finite[0].all()
        assert not finite[1].all()


def test_halves_go_to_the_even_neighbour():
    scales = np.full((1, 1), 0.25, BFLOAT16)
    weight = np.array([[0.5, 1.5, 2.5, -0.5, -1.5, 3.5, 126.5, -126.5]], np.float32) / 4
    assert to_int8(weight, scales).tolist() == [[0, 2, 2, 0, -2, 4, 126, -126]]


@pytest.mark.parametrize("largest", [1.0, 0.1, 127.0, 2.0**-130, 3e38])
def test_minus_128_is_never_used(largest):
    weight = np.linspace(-largest, largest, 1001, dtype=np.float32)[None]
    q = to_int8(weight, scales_of(weight, None))
    assert q.min() >= -127
    assert q.max() <= 127


def test_rows_of_zeros_and_of_almost_zeros():
    weight = np.zeros((3, 16), np.float32)
    weight[1] = 1e-45  # below what a normal scale can tell from zero
    scales = scales_of(weight, None)
    assert scales.astype(np.float32).ravel().tolist() == [1.0, 2.0**-126, 1.0]
    assert not from_int8(to_int8(weight, scales), scales)[[0, 2]].any()
    assert relative_error(weight * 0, weight * 0) == 0


def test_no_quotient_passes_127():
    """BF16 rounds the scale up: rounded down it would clip the largest weight."""
    weight = weights(1, 500, 32)
    scales = scales_of(weight, None).astype(np.float32)
    assert (np.abs(weight) / scales <= 127).all()


# Compensation


def inputs(seed, tokens, columns):
    """Inputs that hang together, as a layer's do, with a few loud columns."""
    rng = np.random.default_rng(seed)
    mixed = rng.standard_normal((tokens, columns)) @ rng.standard_normal((columns, columns))
    mixed[:, :4] *= 20
    return mixed.astype(np.float32)


def hessian(x):
    return (x.T @ x).astype(np.float64)


@pytest.mark.parametrize("columns", [64, BLOCK, BLOCK + 48, 2 * BLOCK + 16])
@pytest.mark.parametrize("group", [None, 16])
def test_compensation_lowers_the_error_of_the_product(columns, group):
    x, weight = inputs(columns, 4 * columns, columns), weights(2, 40, columns)
    scales = scales_of(weight, group)
    plain = from_int8(to_int8(weight, scales), scales)
    q = round_compensated(weight, scales, compensation(hessian(x)))
    assert q.min() >= -127
    other = inputs(columns, 4 * columns, columns)  # the same kind of inputs
    error, before = (np.linalg.norm((w - weight) @ other.T) for w in (from_int8(q, scales), plain))
    assert error < 0.75 * before


def test_compensation_equals_its_definition():
    """One column after the other, with the factor from a plain inverse."""
    columns = 24
    x, weight = inputs(5, 100, columns), weights(6, 5, columns)
    h = hessian(x)
    upper, order = compensation(h)
    damped = h[np.ix_(order, order)] + 0.01 * np.diagonal(h).mean() * np.eye(columns)
    expected = np.linalg.cholesky(np.linalg.inv(damped)).T
    np.testing.assert_allclose(upper, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
    scales = scales_of(weight, None)
    left, q = weight[:, order].astype(np.float64), np.zeros(weight.shape, np.int8)
    for i in range(columns):
        rounded = np.clip(np.rint(left[:, i] / scales[:, 0].astype(np.float64)), -127, 127)
        q[:, order[i]] = rounded
        error = (left[:, i] - rounded * scales[:, 0].astype(np.float64)) / expected[i, i]
        left[:, i:] -= np.outer(error, expected[i, i:])
    assert (q == round_compensated(weight, scales, (upper, order))).mean() > 0.97  # near-ties may fall the other way


def test_without_inputs_compensation_is_rounding():
    weight = weights(7, 6, 32)
    scales = scales_of(weight, 16)
    factor = compensation(np.eye(32))
    np.testing.assert_array_equal(round_compensated(weight, scales, factor), to_int8(weight, scales))
    dead = compensation(np.zeros((32, 32)))
    np.testing.assert_array_equal(round_compensated(weight, scales, dead), to_int8(weight, scales))
