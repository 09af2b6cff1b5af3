"""The fixture that kernel tests run on, with the simplest kernel there is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.kernels.kernels_for_tests import copy_kernel
from tests.reference.random_arrays import normal
from tests.reference.tolerance import assert_close, relative_error


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_copy(machine: Any, dtype: str) -> None:
    values = normal(64, dtype)
    x, y = machine.array(values), machine.empty(64, dtype)
    machine.launcher(copy_kernel, (4, 1, 1), (x, y, 16, int(machine.pdl)))
    assert_close(machine.host(y), values)


def test_output_left_unwritten(machine: Any) -> None:
    y = machine.empty(64, "float32")
    machine.launcher(copy_kernel, (3, 1, 1), (machine.zeros(64, "float32"), y, 16, int(machine.pdl)))
    if machine.on_gpu:  # a GPU does not know what was written: the poison shows it
        assert np.isnan(machine.host(y)[48:]).all()
        return
    with pytest.raises(AssertionError, match=r"16 of 64 elements were never written, the first at \(48,\)"):
        machine.host(y)
    assert np.isnan(machine.host(y, partly=True)[48:]).all()


def test_tolerance_lets_no_nan_pass() -> None:
    reference = np.ones(8)
    assert relative_error(np.full(8, 1.5), reference) == 0.5
    assert_close(np.full(8, 1 + 4e-5, np.float32), reference)
    with pytest.raises(AssertionError, match=r"relative error 6.00e-05, float32 allows 5e-05; at \(0,\)"):
        assert_close(np.full(8, 1 + 6e-5), reference, "float32")
    with pytest.raises(AssertionError, match="relative error nan"):
        assert_close(np.array([np.nan, 1], np.float32), np.ones(2))
    with pytest.raises(AssertionError, match="infinities or NaNs differ"):
        assert_close(np.array([1, 1], np.float32), np.array([1, -np.inf]))
    assert_close(np.array([1, -np.inf], np.float32), np.array([1, -np.inf]))
    with pytest.raises(AssertionError, match=r"shape \(2,\), the reference has \(3,\)"):
        assert_close(np.ones(2, np.float32), np.ones(3))
