"""What the engine launches for one model, on any machine: the plans that it warms up with, of arrays without memory."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from tileinfer_core.backends.base import LoadOptions
from tileinfer_core.backends.cuda.census_steps import ShapeDevice
from tileinfer_core.backends.cuda.load import chunk_rows, empty_runner
from tileinfer_core.backends.cuda.warmup import KernelWarmup
from tileinfer_core.backends.cuda.weights import worth_a_copy

if TYPE_CHECKING:
    from kernels.specs import Recorded
    from tileinfer_core.models.decoder import ModelDefinition

KEYS_AND_VALUES = ("bf16", "int8")


@dataclass(frozen=True, slots=True)
class EngineModel:
    """A model whose kernels its definition decides, product by product; as an entry of the catalogue's `models`."""

    name: str
    model: ModelDefinition
    half: str

    def records(self, arch: str, *, pdl: bool) -> list[Recorded]:
        """Launches of every distinct kernel, repeats among them: for keys and values in either form, and for a GPU with
        memory for copies in half precision or without.

        Raises:
            UnsupportedModelError: shapes or formats that the kernels don't take.
        """
        found: list[Recorded] = []
        choices = (False, True) if worth_a_copy(self.model, arch, chunk_rows(self.model, LoadOptions())) else (False,)
        for kv, half_copies in product(KEYS_AND_VALUES, choices):
            device = ShapeDevice(arch, pdl=pdl)
            runner, _ = empty_runner(self.model, device, LoadOptions(kv=kv, half_copies=half_copies), self.half)
            length = runner.buffers["length"]
            found += KernelWarmup(runner.plans, runner.bucket_ends, device, length, runner.prefill_chunk).records()
        return found
