"""The steps that the census looks at, as the engine records them; also without a device, of arrays that are only
shapes.

    decode    one token: the engine's own plan for the context
    prefill   a chunk of tokens: the engine's own plan
    verify    2 to 8 tokens at once, as speculative decoding would check them: the products of several tokens, prefill's
              attention. The engine has no such step yet; its kernels do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from kernels.configs import noting
from kernels.embedding import embedding_decode
from kernels.launch import supports_pdl
from kernels.linear import MAX_TOKENS, linear_norm, linear_residual, linear_swiglu, square_slots
from kernels.specs import ArraySpec, RecordingLauncher
from tileinfer_core.backends.cuda import buffers as buf
from tileinfer_core.backends.cuda import ops
from tileinfer_core.backends.cuda.device import DeviceMemory
from tileinfer_core.backends.cuda.interpreted import Done, numpy_dtype
from tileinfer_core.backends.cuda.load import PREFILL_CHUNK, empty_runner
from tileinfer_core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kernels.specs import Recorded
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

    def __init__(self, arch: str) -> None:
        self.arch = arch
        self.pdl = supports_pdl(arch)
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


def shape_runner(model: ModelDefinition, arch: str, context: int, half: str = "bfloat16") -> CudaRunner:
    """A runner whose plans can be recorded on any machine. Raises UnsupportedModelError."""
    chunk = buf.padded_rows(min(PREFILL_CHUNK, context))
    runner, _ = empty_runner(model, ShapeDevice(arch), context=context, chunk=chunk, half=half, kv="bf16")
    return runner


def record_step(runner: CudaRunner, model: ModelDefinition, step: Step) -> list[Recorded]:
    """The step's launches, each with the configuration rows that were looked up for it."""
    with noting():
        if step.kind == "decode":
            return runner.plans.decode(next(end for end in runner.bucket_ends if end >= step.context))
        if step.kind == "prefill":
            return runner.plans.prefill(buf.padded_rows(step.tokens))
        return verify_step(runner, model, step.tokens)


def verify_step(runner: CudaRunner, model: ModelDefinition, tokens: int) -> list[Recorded]:
    """T tokens from `token_ids` at positions `start` … through all layers; logits [T, V] of each."""
    if model.structure.activation != "silu":
        raise UsageError(f"a verify step is made for SwiGLU, this model's activation is {model.structure.activation}")
    device, s, b, weights = runner.device, model.structure, runner.buffers, runner.plans.weights
    if weights.layers[0].qkv_scale is not None:
        raise UsageError("a verify step is made for BF16 weights, this model's are INT8")
    arrays = _verify_arrays(device, model, tokens, str(weights.lm_head.dtype))
    launcher = RecordingLauncher(device.arch, pdl=device.pdl)
    o = ops.Ops(launcher, s)
    norms = [ops.as_row(layer.input_norm) for layer in weights.layers[1:]] + [ops.as_row(weights.norm)]
    stream, normed, eps = arrays["stream"], arrays["normed"], s.rms_norm_eps
    sums = arrays["down_sums"]
    first = ops.as_row(weights.layers[0].input_norm)
    embedding_decode(launcher, b["token_ids"][:tokens], weights.embedding, first, stream, normed, sums)
    for index, (layer, next_norm) in enumerate(zip(weights.layers, norms, strict=True)):
        pages = (runner.pool.k[index], runner.pool.v[index], runner.plans.block_table, runner.pool.scales[index])
        linear_norm(launcher, normed, sums, layer.qkv, arrays["qkv"], eps=eps, bias=ops.as_row(layer.qkv_bias))
        o.rope_rows(arrays["qkv"], (layer.q_norm, layer.k_norm), b, pages, arrays["q"])
        o.attend_rows(arrays["q"], pages, b["start"], arrays["attention"])
        into = (stream, ops.as_row(layer.post_norm), normed, arrays["o_sums"])
        linear_residual(launcher, arrays["attention"], layer.o, *into, bias=ops.as_row(layer.o_bias))
        biases = ops.as_row(layer.gate_up_bias), ops.as_row(layer.down_bias)
        linear_swiglu(launcher, normed, arrays["o_sums"], layer.gate_up, arrays["act"], eps=eps, bias=biases[0])
        linear_residual(launcher, arrays["act"], layer.down, stream, next_norm, normed, sums, bias=biases[1])
    linear_norm(launcher, normed, sums, weights.lm_head, arrays["logits"], eps=eps)
    return o.records


def _verify_arrays(device: Any, model: ModelDefinition, tokens: int, half: str) -> Mapping[str, Array]:
    s = model.structure

    def slots(columns: int) -> int:
        return square_slots(device.arch, s.hidden_size, columns, tokens)

    return {
        "stream": device.zeros((tokens, s.hidden_size), "float32"),  # [T, D]
        "normed": device.zeros((tokens, s.hidden_size), half),  # [T, D]
        "o_sums": device.zeros((tokens, slots(s.q_size)), "float32"),
        "down_sums": device.zeros((tokens, slots(s.intermediate_size)), "float32"),
        "qkv": device.zeros((tokens, s.q_size + 2 * s.kv_size), half),  # [T, (H + 2K)·d]
        "q": device.zeros((tokens, s.q_size), half),  # [T, H·d]
        "attention": device.zeros((tokens, s.q_size), half),  # [T, H·d]
        "act": device.zeros((tokens, s.intermediate_size), half),  # [T, F]
        "logits": device.zeros((tokens, model.config.vocab_size), "float32"),  # [T, V]
    }


__all__ = ["KINDS", "Step", "record_step", "shape_runner", "verify_step"]
