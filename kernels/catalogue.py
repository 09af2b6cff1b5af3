"""Every kernel with every shape it is used for: what `tileinfer kernels list|compile` and the compile tests go through.

A family module joins by being named in FAMILIES and defining

    def model_launches(launcher: Launcher, model: ModelShape, dtype: str) -> None

which calls the family's wrappers with ArraySpecs as a model of that shape, in that half-precision type, makes them:

    x, y = ArraySpec((512, model.hidden), "float32"), ArraySpec((512, model.hidden), dtype)
    rms_norm(launcher, x, ArraySpec((1, model.hidden), dtype), y, eps=1e-6)

A kernel with an mma must reach the tensor cores, and none may spill; a spill that is worth its price is stated in the
family's KNOWN_SPILLS = {("kernel_name", "sm_90"): (most, "reason")}, `most` in stack bytes plus LDL and STL.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from kernels.compile import TARGETS, Compiled, distinct
from kernels.configs import number
from kernels.shapes import ModelShape, variants
from kernels.specs import Recorded, RecordingLauncher

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

FAMILIES: tuple[str, ...] = (
    "kernels.activation",
    "kernels.argmax",
    "kernels.attention_decode",
    "kernels.attention_int8",
    "kernels.attention_prefill",
    "kernels.dequantise",
    "kernels.digit_slices",
    "kernels.digits",
    "kernels.embedding",
    "kernels.kv_write",
    "kernels.linear",
    "kernels.linear_int8",
    "kernels.linear_int8_tokens",
    "kernels.linear_prefill",
    "kernels.linear_prefill_digits",
    "kernels.linear_prefill_int8",
    "kernels.linear_split",
    "kernels.linear_tokens",
    "kernels.norm",
    "kernels.rope",
    "kernels.sampling",
    "kernels.tokens_join",
    "kernels.widen_pages",
)

# Shared memory one block may have, in bytes (CUDA programming guide, compute capabilities)
SHARED_LIMIT = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 103: 232_448, 120: 101_376}


Shape = tuple[str, ModelShape, str]  # name, shape, type of its weights


class Launches(Protocol):
    """A model that records its own launches, where more than a shape decides what they are."""

    @property
    def name(self) -> str: ...

    def records(self, arch: str, *, pdl: bool) -> list[Recorded]: ...


Model = Shape | Launches


@dataclass(frozen=True)
class Entry:
    """A kernel as recorded, with the family and models it came from."""

    family: str
    models: tuple[str, ...]
    pdl: bool
    record: Recorded


def entries(
    arch: str, *, models: Iterable[Model] | None = None, families: Iterable[str] = FAMILIES, pdl: bool | None = None
) -> Iterator[Entry]:
    """Distinct kernels for `arch`.

    Args:
        models: whose kernels to record; None means the shapes of kernels.shapes.variants().
        families: modules, such as "kernels.norm".
        pdl: the form under programmatic dependent launch, or the plain one; None is the engine's choice, which is the
            former wherever the target has it.
    """
    wanted = list[Model](variants()) if models is None else list(models)
    dependent = number(arch) >= 90 if pdl is None else pdl
    shapes = [model for model in wanted if isinstance(model, tuple)]
    others = [(model.name, model.records(arch, pdl=dependent)) for model in wanted if not isinstance(model, tuple)]
    for family in families:
        launches = _recorded(family, arch, shapes, pdl=dependent) + others
        own = [(name, [record for record in records if record.module == family]) for name, records in launches]
        yield from _record(family, own, pdl=dependent)


def _recorded(family: str, arch: str, shapes: list[Shape], *, pdl: bool) -> list[tuple[str, list[Recorded]]]:
    """The family's launches for each shape, and those of other families' kernels between them."""
    found = []
    module = importlib.import_module(family)
    for name, shape, dtype in shapes:
        launcher = RecordingLauncher(arch, pdl=pdl)
        module.model_launches(launcher, shape, dtype)
        found.append((name, launcher.records))
    return found


def _record(family: str, launches: list[tuple[str, list[Recorded]]], *, pdl: bool) -> Iterator[Entry]:
    """Each distinct kernel of the family once, with every model that uses it."""
    first: dict[Any, Recorded] = {}
    users: dict[Any, dict[str, None]] = {}
    for name, records in launches:
        for record in records:
            identity = record.identity()
            first.setdefault(identity, record)
            users.setdefault(identity, {})[name] = None
    for identity, record in first.items():
        yield Entry(family, tuple(users[identity]), pdl, record)


def records(arch: str, *, models: Iterable[Model] | None = None) -> list[Recorded]:
    """What to compile so that a model (or every known one) starts without a compiler."""
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


__all__ = ["FAMILIES", "TARGETS", "Entry", "Model", "entries", "faults", "records"]
