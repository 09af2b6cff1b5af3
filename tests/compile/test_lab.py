"""What the lab reads off compiled variants, on any machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kernels.cubin import nvdisasm, target
from kernels.lab.code import compile_probe, file_name
from kernels.lab.probe import find

if TYPE_CHECKING:
    from pathlib import Path

needs_nvdisasm = pytest.mark.skipif(nvdisasm() is None, reason="nvdisasm is not installed")


@needs_nvdisasm
def test_helpers_leave_no_trace(tmp_path: Path) -> None:
    [probe] = find(["helpers"])
    codes = compile_probe(probe, "sm_90", folder=tmp_path)
    # The Tile IR of the closure has its constant elsewhere. tileiras can make two codes of one Tile IR, so no letters.
    assert {code.variant for code in codes if code.ir != "A"} <= {"closure"}
    assert len({(code.instructions, code.registers) for code in codes}) == 1
    assert all(code.error is None and code.registers > 0 and code.stack_bytes == 0 for code in codes)
    assert all(code.tensor_core == {} and code.parameters == 6 for code in codes)
    folder = tmp_path / "three-nested-helpers"
    assert {path.suffix for path in folder.iterdir()} == {".cubin", ".sass", ".tileir"}
    assert "entry @nested_helpers" in (folder / "nested_helpers.tileir").read_text()
    assert "MUFU" in (folder / "nested_helpers.sass").read_text()
    assert target((folder / "nested_helpers.cubin").read_bytes()) == "sm_90"
    assert (tmp_path / "report.py").read_text().startswith(probe.path.read_text())


@needs_nvdisasm
@pytest.mark.parametrize("arch", ["sm_90", "sm_89"])
def test_a_narrow_product_falls_off_the_tensor_cores(arch: str) -> None:
    [probe] = find(["padding"])
    found = {code.variant: code for code in compile_probe(probe, arch)}
    assert found["R=16 on M"].tensor_core
    assert found["R=8 on N"].tensor_core
    assert found["R=8 on M"].tensor_core == {}
    assert found["R=4 on N"].tensor_core == {}
    assert found["R=8 on M"].local_loads
    assert len({code.letter for code in found.values()}) == 8


def test_parameters_are_counted() -> None:
    [probe] = find(["parameters"])
    for code in compile_probe(probe, "sm_80"):
        assert code.variant.startswith(f"{code.parameters} parameters")
        assert code.parameter_bytes >= 4 * code.parameters


def test_a_growing_table_compiles_three_times() -> None:
    """A length of 1, one that 16 divides, any other."""
    [probe] = find(["shapes"])
    assert [code.kernels for code in compile_probe(probe, "sm_90")] == [3, 1, 1]


def test_a_variant_that_does_not_compile_is_a_row(tmp_path: Path) -> None:
    [probe] = find(["helpers"])
    codes = compile_probe(probe, "sm_90", timeout=0.001, folder=tmp_path)
    fresh = [code for code in codes if code.error]
    assert all("timeout" in str(code.error) and code.letter == "" for code in fresh)


def test_dependent_variants_are_left_out_where_there_are_none() -> None:
    [probe] = find(["dependent_launch"])
    plain = ["4,096: plain launches", "1,024: plain launches"]
    assert [code.variant for code in compile_probe(probe, "sm_80")] == plain


def test_file_names() -> None:
    assert file_name("R=8 on M") == "R-8-on-M"
    assert file_name("../..") == "variant"
