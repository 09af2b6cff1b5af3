"""The checks at a wrapper's door, and arrays without memory that pass them."""

from __future__ import annotations

from typing import Any

import cuda.tile as ct
import numpy as np
import pytest

from kernels.interpreter import InterpreterError, InterpreterLauncher
from kernels.launch import GpuLauncher, check_array, launch, with_hints
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


@ct.kernel
def chained_kernel(x, y, N: ct.Constant[int], PDL: ct.Constant[bool]):
    """y = x + 1, as a dependent or as a plain launch."""
    if PDL:
        ct.grid_dependency_control_launch_dependents()
        ct.grid_dependency_control_wait()
    ct.store(y, index=(0,), tile=ct.load(x, index=(0,), shape=(N,)) + 1.0)


def chained(launcher: Any, x: Any, y: Any) -> None:
    """A wrapper: it asks its launcher, as all do."""
    launcher(chained_kernel, (1, 1, 1), (x, y, 16, launcher.pdl))


def test_dependent_launch_is_a_choice_for_each_launch() -> None:
    """Plain and dependent launches in one stream, recorded and interpreted; each body gets its own constant."""
    launcher = RecordingLauncher("sm_90", pdl=True)
    spec = ArraySpec(16, "float32")
    for on in (None, False, True):
        chained(launcher if on is None else launcher.with_pdl(on), spec, spec)
    assert [record.pdl for record in launcher.records] == [True, False, True]
    assert [record.args[-1] for record in launcher.records] == [True, False, True]

    interpreter = InterpreterLauncher("sm_90", pdl=True)
    arrays = [np.zeros(16, np.float32) for _ in range(5)]
    for i, on in enumerate((True, False, False, True)):
        chained(interpreter.with_pdl(on), arrays[i], arrays[i + 1])
    interpreter.synchronize()
    assert arrays[-1].tolist() == [4.0] * 16


def test_a_target_without_dependent_launch_gets_plain_ones() -> None:
    for make in (RecordingLauncher, InterpreterLauncher):
        launcher = make("sm_89").with_pdl(True)
        assert launcher.pdl is False
        with pytest.raises(ValueError, match="needs sm_90 or newer"):
            make("sm_89", pdl=True)
    assert GpuLauncher(0, "sm_80", pdl=False).with_pdl(True).pdl is False
    assert GpuLauncher(0, "sm_100", pdl=False).with_pdl(True).pdl is True


def test_a_plain_launch_waits_for_the_chain_before_it() -> None:
    """A dependent that forgets to wait is refused; the same body after a plain launch reads what is finished."""
    launcher = InterpreterLauncher("sm_90", pdl=True)
    x, y, z = (np.zeros(16, np.float32) for _ in range(3))
    chained(launcher, x, y)
    launcher.with_pdl(False)(chained_kernel, (1, 1, 1), (y, z, 16, False))
    assert z.tolist() == [2.0] * 16
    with pytest.raises(InterpreterError, match="wait"):
        launcher(chained_kernel, (1, 1, 1), (y, z, 16, False))


class TestLaunch:
    """The functional form, with cuda-tile's own launch taken away."""

    @pytest.fixture
    def launched(self, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
        found: list[Any] = []
        monkeypatch.setattr(
            ct,
            "launch",
            lambda stream, grid, kernel, args, programmatic_dependent_launch=False: found.append(
                (stream, grid, kernel, args, programmatic_dependent_launch)
            ),
        )
        return found

    def test_stream_hints_and_kind(self, launched: list[Any]) -> None:
        launch(chained_kernel, (2, 1, 1), [1, 2], stream=77, arch="sm_90", dependent=True, occupancy=4)
        [(stream, grid, kernel, args, dependent)] = launched
        assert (stream, grid, args, dependent) == (77, (2, 1, 1), (1, 2), True)
        assert kernel is with_hints(chained_kernel, occupancy=4)
        assert kernel._compiler_options.occupancy == 4

    @pytest.mark.parametrize(("arch", "dependent"), [("sm_89", True), ("sm_90", False)])
    def test_plain(self, arch: str, dependent: bool, launched: list[Any]) -> None:
        launch(chained_kernel, (1, 1, 1), (), stream=0, arch=arch, dependent=dependent)
        assert launched[0][-1] is False
        assert launched[0][2] is chained_kernel
