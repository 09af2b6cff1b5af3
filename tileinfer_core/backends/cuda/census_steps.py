"""The steps that the census looks at, as the engine records them; also without a device, of arrays that are only
shapes.

    decode    one token: the engine's own plan for the context
    prefill   a chunk of tokens: the engine's own plan
    verify    2 to 8 tokens at once: verify_step.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from kernels.configs import noting
from kernels.digit_slices import MAX_TOKENS
from kernels.launch import processors_of, supports_pdl
from kernels.specs import ArraySpec
from tileinfer_core.backends.cuda import buffers as buf
from tileinfer_core.backends.cuda.device import DeviceMemory
from tileinfer_core.backends.cuda.interpreted import Done, numpy_dtype
from tileinfer_core.backends.cuda.load import empty_runner
from tileinfer_core.backends.cuda.verify_step import verify_step
from tileinfer_core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernels.specs import Recorded
    from tileinfer_core.backends.base import LoadOptions
    from tileinfer_core.backends.cuda.device import Array, Event, Graph, HostArray
    from tileinfer_core.backends.cuda.runner import CudaRunner
    from tileinfer_core.models.decoder import ModelDefinition

Kind = Literal["decode", "verify", "prefill"]
KINDS: tuple[Kind, ...] = ("decode", "verify", "prefill")


@dataclass(frozen=True)
class Step:
    """`tokens` at once; with them the sequence has `context` positions."""

    kind: Kind
    tokens: int
    context: int

    def __post_init__(self) -> None:
        most = {"decode": 1, "verify": MAX_TOKENS, "prefill": 2048}[self.kind]
        if not 1 <= self.tokens <= most:
            raise UsageError(f"a {self.kind} step takes 1 to {most:,} tokens, found {self.tokens:,}")
        if self.context < self.tokens:
            raise UsageError(f"a context of {self.context:,} can't hold the step's {self.tokens:,} tokens")


class ShapeDevice:
    """Device whose arrays have no memory: what is recorded with them can be compiled and counted, not run."""

    name = "no GPU"

    def __init__(self, arch: str, *, pdl: bool | None = None) -> None:
        self.arch = arch
        self.pdl = supports_pdl(arch) if pdl is None else pdl
        self.processors = processors_of(arch)
        self.compiled: list[str] = []

    def memory(self) -> DeviceMemory:
        return DeviceMemory(1 << 60, 1 << 60)

    def empty(self, shape: tuple[int, ...], dtype: str) -> Array:
        return ArraySpec(shape, dtype)

    zeros = empty

    def clear(self, array: Array) -> None: ...

    def pinned(self, shape: tuple[int, ...], dtype: str) -> HostArray:
        return np.zeros(shape, numpy_dtype(dtype))

    def copy_in(self, target: Array, source: HostArray) -> None: ...

    def copy_out(self, target: HostArray, source: Array) -> None: ...

    def copy(self, target: Array, source: Array) -> None: ...

    def download(self, source: Array) -> HostArray:
        raise NotImplementedError("there is nothing in it")

    def event(self) -> Event:
        return Done()

    def fetch(self, target: HostArray, source: Array) -> Event:  # noqa: ARG002 - the protocol's
        return Done()

    def run(self, step: Sequence[Recorded]) -> None:
        raise NotImplementedError("there is nothing to run it")

    def record(self, step: Sequence[Recorded], carveout: int | None = None) -> Graph:
        raise NotImplementedError("there is nothing to run it")

    def synchronize(self) -> None: ...

    def close(self) -> None: ...


def shape_runner(model: ModelDefinition, arch: str, options: LoadOptions, half: str = "bfloat16") -> CudaRunner:
    """A runner whose plans can be recorded on any machine. Raises UnsupportedModelError."""
    runner, _ = empty_runner(model, ShapeDevice(arch), options, half)
    return runner


def record_step(runner: CudaRunner, model: ModelDefinition, step: Step) -> list[Recorded]:
    """The step's launches, each with the configuration rows that were looked up for it."""
    with noting():
        if step.kind == "decode":
            return runner.plans.decode(runner.bucket_end(step.context))
        if step.kind == "prefill":
            return runner.plans.prefill(buf.padded_rows(step.tokens))
        return verify_step(runner, model, step.tokens)[0]


__all__ = ["KINDS", "Step", "record_step", "shape_runner"]
