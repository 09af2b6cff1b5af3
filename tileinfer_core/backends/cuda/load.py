"""From checked weight files to a Runner on the device: plan, take memory, then read weights while kernels compile."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from tileinfer_core.backends.cuda import buffers as buf
from tileinfer_core.backends.cuda.loader import (
    allocate,
    allocate_copies,
    load_weights,
    random_weights,
    storage_dtype,
)
from tileinfer_core.backends.cuda.memory import plan_memory
from tileinfer_core.backends.cuda.plan import refuse_formats, refuse_unsupported
from tileinfer_core.backends.cuda.runner import CudaRunner
from tileinfer_core.backends.cuda.warmup import KernelWarmup
from tileinfer_core.backends.cuda.weights import worth_a_copy
from tileinfer_core.errors import OutOfMemoryError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tileinfer_core.backends.base import LoadOptions
    from tileinfer_core.backends.cuda.device import Array, Device
    from tileinfer_core.backends.cuda.memory import MemoryPlan
    from tileinfer_core.models.decoder import ModelDefinition
    from tileinfer_core.progress import OnProgress
    from tileinfer_core.weights import WeightFiles

PREFILL_CHUNK = 2048  # rows: 4,096 x 4,096 products lose 2 % against 4,096 rows, and Ctrl-C waits 60 ms at 8B


def load_runner(
    model: ModelDefinition,
    files: WeightFiles | None,
    device: Device,
    options: LoadOptions,
    on_progress: OnProgress,
) -> CudaRunner:
    """`files` None fills the weights with noise, to time a shape.

    Raises:
        UnsupportedModelError: shapes that the kernels don't take.
        OutOfMemoryError: before anything is read, with the largest context that fits.
        BackendError: the compiler failed, or the device did.
    """
    half = "bfloat16" if files is None else storage_dtype(files)
    runner, arrays = empty_runner(model, device, options, half)
    warmup = KernelWarmup(runner.plans, runner.bucket_ends, device, runner.buffers["length"], runner.prefill_chunk)
    warmup.start()
    try:
        if files is None:
            random_weights(model, arrays, device)
        else:
            load_weights(model, files, arrays, device, on_progress)
        runner.compile_s = warmup.finish(on_progress)
        device.run(runner.plans.copies())
        if warmup.unkept is not None:
            runner.warn(warmup.unkept)
        runner.forget_warmup()
    except BaseException:
        warmup.cancel()
        raise
    return runner


def chunk_rows(model: ModelDefinition, options: LoadOptions) -> int:
    """Of a prefill step: no more than a context has."""
    return buf.padded_rows(min(options.prefill_chunk or PREFILL_CHUNK, options.context or model.config.max_context))


def empty_runner(
    model: ModelDefinition,
    device: Device,
    options: LoadOptions,
    half: str,
) -> tuple[CudaRunner, dict[str, Array]]:
    """A runner in the memory planned for it, and the parameters' arrays, not filled yet; `half` is the weights' type.

    Raises: as load_runner, for what needs no file and no compiler.
    """
    refuse_unsupported(model.structure)
    refuse_formats(model)
    chunk, kv = chunk_rows(model, options), options.kv

    def specs(tokens: int, copied: Sequence[str] = ()) -> dict[str, buf.Spec]:
        return buf.buffer_specs(model, device.arch, tokens, chunk, half, kv=kv, copied=copied)

    memory = plan_memory(
        model,
        asked=options.context,
        free=device.memory().free,
        item=buf.item_bytes(half),
        kv_item=1 if kv == "int8" else None,
        buffer_bytes=lambda tokens: buf.buffer_bytes(specs(tokens)),
    )
    arrays = allocate(model, device, half)

    def runner(plan: MemoryPlan) -> CudaRunner:
        copies = allocate_copies(model, device, half, plan.copied)
        wanted = specs(plan.context, plan.copied)
        return CudaRunner(model, device, arrays, memory=plan, specs=wanted, copies=copies, half=half, kv=kv)

    if options.half_copies:
        products, item = worth_a_copy(model, device.arch, chunk), buf.item_bytes(half)
        richer = memory.with_copies(model, products, item=item, device_bytes=device.memory().total)
        with contextlib.suppress(OutOfMemoryError):  # another program was faster, and nothing depends on copies
            return runner(richer), arrays
    return runner(memory), arrays
