"""The checks at a wrapper's door, and arrays without memory that pass them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernels.launch import GpuLauncher, check_array, with_hints
from kernels.specs import ArraySpec, RecordingLauncher
from tests.kernels.kernels_for_tests import copy_kernel
from tests.reference.random_arrays import DTYPES


@pytest.mark.parametrize("make", [np.zeros, ArraySpec])
def test_array_that_fits(make: Any) -> None:
    check_array("op: x", make((2, 8), "float32"), (None, 8), "float32", "int32", align=16)


@pytest.mark.parametrize("make", [np.zeros, ArraySpec])
def test_arrays_that_do_not_fit(make: Any) -> None:
    x = make((2, 8), "float32")
    with pytest.raises(TypeError, match="op: x has dtype float32, expected int32 or int8"):
        check_array("op: x", x, (2, 8), "int32", "int8")
    with pytest.raises(ValueError, match=r"op: x has shape \(2, 8\), expected \(any, 4\)"):
        check_array("op: x", x, (None, 4), "float32")
    with pytest.raises(ValueError, match=r"op: x has shape \(2, 8\), expected \(any\)"):
        check_array("op: x", x, (None,), "float32")
    with pytest.raises(ValueError, match=r"op: x has shape \(0, 8\)"):
        check_array("op: x", x[:0], (None, 8), "float32")
    with pytest.raises(ValueError, match=r"op: x is not C-contiguous \(strides \(32, 4\) bytes\)"):
        check_array("op: x", x[:, :4], (2, 4), "float32")


def test_alignment() -> None:
    check_array("op: x", np.zeros(64, DTYPES["bfloat16"]), (64,), "bfloat16", align=16)
    x = ArraySpec(64, "float16")
    check_array("op: x", x[8:], (56,), "float16", align=16)
    with pytest.raises(ValueError, match="op: x starts at address 0x6, expected a multiple of 16 bytes"):
        check_array("op: x", x[3:], (61,), "float16", align=16)


def test_host_arrays_do_not_reach_a_gpu() -> None:
    launcher = GpuLauncher(0, "sm_90", pdl=True)
    with pytest.raises(TypeError, match=r"copy_kernel: an argument of shape \(4,\) is in host memory"):
        launcher(copy_kernel, (1, 1, 1), (np.zeros(4), np.zeros(4), 4, 1))


@pytest.mark.parametrize(
    "launcher", [lambda: GpuLauncher(0, "sm_89", pdl=True), lambda: RecordingLauncher("sm_86", pdl=True)]
)
def test_dependent_launch_needs_sm_90(launcher: Any) -> None:
    with pytest.raises(ValueError, match="needs sm_90 or newer"):
        launcher()


def test_one_kernel_per_set_of_hints() -> None:
    assert with_hints(copy_kernel) is copy_kernel
    assert with_hints(copy_kernel, occupancy=2) is with_hints(copy_kernel, occupancy=2)
    assert with_hints(copy_kernel, occupancy=2) is not with_hints(copy_kernel, occupancy=4)


@pytest.mark.parametrize(
    "view",
    [
        lambda a: a[1:3],
        lambda a: a[2],
        lambda a: a[:, 4:],
        lambda a: a.reshape(8, 4),
        lambda a: a.reshape((-1,)),
        lambda a: a[1].reshape(2, 4),
        lambda a: a[-1:, :],
    ],
)
def test_specs_behave_as_numpy_does(view: Any) -> None:
    array, spec = np.zeros((4, 8), "float32"), ArraySpec((4, 8), "float32")
    have, want = view(spec), view(array)
    assert (have.shape, have.strides, have.size, have.nbytes) == (want.shape, want.strides, want.size, want.nbytes)
    assert have.flags.c_contiguous == want.flags.c_contiguous
    assert have.offset == want.__array_interface__["data"][0] - array.__array_interface__["data"][0]
    assert have.dtype == want.dtype


def test_specs_refuse_what_they_cannot_follow() -> None:
    spec = ArraySpec((4, 8), "float32")
    with pytest.raises(ValueError, match=r"cannot reshape an array of shape \(4, 8\) into \(5, 8\)"):
        spec.reshape(5, 8)
    with pytest.raises(ValueError, match="step 1 only"):
        spec[::2]
    with pytest.raises(ValueError, match="unknown data type 'float31'"):
        ArraySpec(4, "float31")


def test_recorded_launches() -> None:
    launcher = RecordingLauncher("sm_90", pdl=True)
    spec = ArraySpec(64, "float32")
    launcher(with_hints(copy_kernel, occupancy=2), (4, 1, 1), (spec, spec, 16, 1))
    [record] = launcher.records
    assert (record.name, record.grid, record.hints) == ("copy_kernel", (4, 1, 1), (("occupancy", 2),))
    assert record.identity() != record.__class__(copy_kernel, (4, 1, 1), (spec, spec, 16, 1)).identity()
