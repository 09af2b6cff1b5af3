"""Every kernel with every shape it is used for: what `tileinfer kernels list|compile` and the compile tests go through.

A family module joins by being named in FAMILIES and defining

    def compile_cases(arch: str) -> Iterator[Case]

where each Case (from kernels.specs) calls the family's wrapper with ArraySpecs:

    yield Case("Qwen3-4B", lambda launcher: rms_norm(launcher, ArraySpec((1, 2560), "bfloat16"), …))

A kernel with an mma must reach the tensor cores, and none may spill; a spill that is worth its price is stated in the
family's KNOWN_SPILLS = {("kernel_name", "sm_90"): (most, "reason")}, `most` in stack bytes plus LDL and STL.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kernels.compile import TARGETS, Compiled, distinct
from kernels.configs import number
from kernels.specs import Case, Recorded, RecordingLauncher

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

FAMILIES: tuple[str, ...] = (
    "kernels.activation",
    "kernels.argmax",
    "kernels.attention_decode",
    "kernels.attention_prefill",
    "kernels.embedding",
    "kernels.kv_write",
    "kernels.linear",
    "kernels.linear_prefill",
    "kernels.norm",
    "kernels.rope",
    "kernels.sampling",
)

# Shared memory one block may have, in bytes (CUDA programming guide, compute capabilities)
SHARED_LIMIT = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 103: 232_448, 120: 101_376}


@dataclass(frozen=True)
class Entry:
    """A kernel as recorded, with the family and models it came from."""

    family: str
    models: tuple[str, ...]
    pdl: bool
    record: Recorded


def entries(
    arch: str, *, models: Iterable[str] | None = None, families: Iterable[str] | None = None
) -> Iterator[Entry]:
    """Distinct kernels for `arch`: plain, and under programmatic dependent launch where the target has it.

    Args:
        models: only shapes of these models, and those of no one model; None means all.
        families: only these modules, such as "kernels.norm"; None means all.
    """
    wanted = None if models is None else {*models, ""}
    for family in FAMILIES if families is None else families:
        cases = [case for case in _cases(family, arch) if wanted is None or case.model in wanted]
        for pdl in (False, True) if number(arch) >= 90 else (False,):
            yield from _record(family, arch, cases, pdl=pdl)


def _cases(family: str, arch: str) -> list[Case]:
    return list(importlib.import_module(family).compile_cases(arch))


def _record(family: str, arch: str, cases: list[Case], *, pdl: bool) -> Iterator[Entry]:
    """Each distinct kernel once, with every model that uses it."""
    origin: list[tuple[str, Recorded]] = []
    for case in cases:
        launcher = RecordingLauncher(arch, pdl=pdl)
        case.launch(launcher)
        origin.extend((case.model, record) for record in launcher.records)
    models: dict[Any, dict[str, None]] = {}
    for model, record in origin:
        models.setdefault(record.identity(), {})[model] = None
    for record in distinct(record for _, record in origin):
        yield Entry(family, tuple(filter(None, models[record.identity()])), pdl, record)


def records(arch: str, *, models: Iterable[str] | None = None) -> list[Recorded]:
    """What to compile so that a model (or every model) starts without a compiler."""
    return distinct(entry.record for entry in entries(arch, models=models))


def faults(result: Compiled, family: str) -> list[str]:
    """What is wrong with a compiled kernel; empty when it is as it should be. Compile with disassemble="needed"."""
    found = result.resources
    known = getattr(importlib.import_module(family), "KNOWN_SPILLS", {})
    most, _ = known.get((result.kernel, result.arch), (0, ""))
    problems = []
    if result.uses_mma and not found.tensor_core:  # raises where the instructions were not counted
        problems.append("has an mma but no tensor-core instruction")
    if found.spills > most:
        problems.append(f"spills: {found.stack_bytes} stack bytes, {found.spills} with LDL and STL, {most} allowed")
    limit = SHARED_LIMIT.get(number(result.arch))
    if limit is not None and found.shared_bytes > limit:
        problems.append(f"needs {found.shared_bytes} bytes of shared memory, a block of {result.arch} has {limit}")
    return problems


__all__ = ["FAMILIES", "TARGETS", "Case", "Entry", "entries", "faults", "records"]
