"""The probes: every file stands alone, and its variants compute the same thing."""

from __future__ import annotations

import ast
import dataclasses
from types import SimpleNamespace
from typing import Any

import cuda.tile as ct
import numpy as np
import pytest

from kernels.interpreter import InterpreterLauncher
from kernels.lab import code, probe
from kernels.lab.probe import ProbeError, check, find, host_arrays, spec_arrays

NAMES = [each.name for each in find()]


@ct.kernel
def add_kernel(x, y, N: ct.Constant[int], MORE: ct.Constant[float]):
    ct.store(y, index=(0,), tile=ct.load(x, index=(0,), shape=(N,)) + MORE)


def made(*more: float, **about: Any) -> probe.Probe:
    """A probe with a variant for each number that is added."""
    module = SimpleNamespace(
        __doc__="Does it matter?\n\nNo.",
        arrays=lambda small: {"x": ((64,), "float32", ("normal", 1.0)), "y": ((64,), "float32", ("out",))},
        variants=lambda small: {
            f"{i}: {add}": {"steps": [(add_kernel, (1, 1, 1), ("x", "y", 64, add))], "out": "y", **about}
            for i, add in enumerate(more)
        },
    )
    [any_probe] = find(["helpers"])
    return dataclasses.replace(any_probe, name="made", module=module)


def test_the_choices_of_the_reference_have_probes() -> None:
    assert {"padding", "parameters", "shapes", "reductions", "topk", "int8_pieces", "tiles_3d"} <= set(NAMES)
    assert {"reduced_axis_first", "helpers", "dependent_launch", "tma", "warps", "language"} <= set(NAMES)
    assert {"hints_gemm", "hints_gemv", "hints_attention", "hints_verify"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_variants_are_equal(name: str) -> None:
    [each] = find([name])
    compared = check(each)
    groups = {variant.group for variant in each.variants(small=True)}
    assert compared == len(each.variants(small=True)) - len(groups)
    assert compared >= 2
    assert each.question.endswith("?")


@pytest.mark.parametrize("name", NAMES)
def test_a_probe_stands_alone(name: str) -> None:
    """cuda.tile and nothing else, so that the file can go into a bug report."""
    [each] = find([name])
    tree = ast.parse(each.path.read_text("utf-8"))
    imports = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert imports == ["import cuda.tile as ct"]
    compile(code.report(each), "report.py", "exec")


@pytest.mark.parametrize("name", NAMES)
def test_full_size_differs_in_shape_alone(name: str) -> None:
    """What is checked small is what is timed: the same variants, arrays and steps' kernels."""
    [each] = find([name])
    small, large = each.variants(small=True), each.variants(small=False)
    assert len(small) == len(large)
    assert list(each.arrays(small=True)) == list(each.arrays(small=False))
    for one, other in zip(small, large, strict=True):
        kernels = [kernel._pyfunc for kernel, _, _ in one.steps]
        assert set(kernels) == {kernel._pyfunc for kernel, _, _ in other.steps}
        assert (one.out, one.pdl) == (other.out, other.pdl)
        other.record(spec_arrays(each))  # every view lies within its array


def test_reductions_stay_finite_as_often_as_they_are_timed() -> None:
    """Each changes the numbers by its result, 256 times."""
    [each] = find(["reductions"])
    arrays = host_arrays(each, small=True)
    arrays["times"][0] = each.module.TIMES
    for variant in each.variants(small=True):
        if variant.name.startswith(("sum, ", "argmax")):
            for record in variant.record(arrays):
                InterpreterLauncher("sm_90")(record.kernel, record.grid, record.args)
            assert np.isfinite(arrays["y"][0]), variant.name


def test_variants_that_differ_are_refused() -> None:
    assert check(made(1.0, 1.0)) == 1
    with pytest.raises(ProbeError, match=r"made: '1: 1.5' differs by 0.5"):
        check(made(1.0, 1.5))
    assert check(made(1.0, 1.0005)) == 1  # within a thousandth of the largest value
    with pytest.raises(ProbeError, match="differs by"):
        check(made(1.0, 1.0005, tolerance=0))
    with pytest.raises(ProbeError, match="leaves 64 numbers unwritten"):
        check(made(1.0, float("nan")))


def test_names() -> None:
    assert [each.name for each in find(["hints"])] == ["hints_attention", "hints_gemm", "hints_gemv", "hints_verify"]
    assert [each.name for each in find(["tma"])] == ["tma"]
    with pytest.raises(KeyError, match="no probe 'nothing'; known: dependent_launch"):
        find(["nothing"])


def test_arrays_repeat_a_block_and_count_whole() -> None:
    [shapes] = find(["shapes"])
    arrays = host_arrays(shapes, small=True)
    assert arrays["table"].tolist() == list(range(48))
    assert arrays["lengths"][:12].tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
