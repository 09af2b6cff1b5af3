"""Compiled code keeps the order of waiting, starting dependents and storing that kernels/dequantise.py rests on."""

from __future__ import annotations

import re

import pytest

from kernels.compile import compile_with_code
from kernels.cubin import nvdisasm, sass
from kernels.dequantise import dequantise
from kernels.linear_prefill import LinearPrefillConfig
from kernels.linear_prefill_digits import (
    linear_prefill_digits,
    linear_prefill_digits_residual,
    linear_prefill_digits_swiglu,
    linear_prefill_digits_xielu,
)
from kernels.specs import ArraySpec, RecordingLauncher

pytestmark = [
    pytest.mark.skipif(nvdisasm() is None, reason="nvdisasm is not installed"),
    pytest.mark.parametrize("arch", ["sm_90", "sm_100", "sm_120"]),
]
X = ArraySpec((1024, 1024), "int8"), ArraySpec((512, 1), "float32")
W = ArraySpec((1024, 1024), "int8"), ArraySpec((1024, 1), "float32")
OUTPUTS = {
    linear_prefill_digits: [ArraySpec((512, 1024), "bfloat16")],
    linear_prefill_digits_residual: [ArraySpec((512, 1024), "float32")],
    linear_prefill_digits_swiglu: [ArraySpec((512, 512), "bfloat16")],
    linear_prefill_digits_xielu: [ArraySpec(2, "float32"), ArraySpec((512, 1024), "bfloat16")],
}


def places(launcher: RecordingLauncher, arch: str, *names: str) -> list[list[int]]:
    """Lines of the disassembly that have each instruction, for the only launch."""
    [record] = launcher.records
    text = sass(compile_with_code(record, arch)[2])
    assert text is not None
    lines = text.splitlines()
    return [[i for i, line in enumerate(lines) if re.search(rf"\s{name}[ .]", line)] for name in names]


@pytest.mark.parametrize("op", list(OUTPUTS), ids=lambda op: op.__name__)
def test_products_in_digits_wait_before_they_start_their_dependents(arch: str, op: object) -> None:
    launcher = RecordingLauncher(arch, pdl=True)
    tiles = LinearPrefillConfig(128, 128, 128) if arch == "sm_90" else LinearPrefillConfig(128, 64, 64)
    op(launcher, *X, *W, *OUTPUTS[op], config=tiles)  # type: ignore[operator, index]
    waits, starts, barriers = places(launcher, arch, "ACQBULK", "PREEXIT", "BAR")
    assert len(waits) == len(starts) == 1
    assert any(waits[0] < barrier < starts[0] for barrier in barriers), "threads that have not waited may start them"


@pytest.mark.parametrize("early", [False, True])
def test_an_early_dequantisation_stores_before_its_wait(arch: str, early: bool) -> None:
    launcher = RecordingLauncher(arch, pdl=True)
    arrays = ArraySpec((2560, 9728), "int8"), ArraySpec((2560, 152), "float32"), ArraySpec((2560, 9728), "bfloat16")
    dequantise(launcher, *arrays, early=early)
    waits, starts, stores = places(launcher, arch, "ACQBULK", "PREEXIT", "STG")
    assert len(waits) == len(starts) == 1
    assert starts[0] < min(stores)
    assert max(stores) < waits[0] if early else waits[0] < min(stores)
