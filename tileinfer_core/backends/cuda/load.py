"""From checked weight files to a Runner on the device: plan, take memory, then read weights while kernels compile."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tileinfer_core.backends.cuda import buffers as buf
from tileinfer_core.backends.cuda.loader import allocate, load_weights, random_weights, storage_dtype
from tileinfer_core.backends.cuda.memory import plan_memory
from tileinfer_core.backends.cuda.plan import refuse_formats, refuse_unsupported
from tileinfer_core.backends.cuda.runner import CudaRunner
from tileinfer_core.backends.cuda.warmup import KernelWarmup

if TYPE_CHECKING:
    from tileinfer_core.backends.cuda.device import Array, Device
    from tileinfer_core.models.decoder import ModelDefinition
    from tileinfer_core.progress import OnProgress
    from tileinfer_core.weights import WeightFiles

PREFILL_CHUNK = 2048  # rows: 4,096 x 4,096 products lose 2 % against 4,096 rows, and Ctrl-C waits 60 ms at 8B


def load_runner(
    model: ModelDefinition,
    files: WeightFiles | None,
    device: Device,
    *,
    context: int | None,
    on_progress: OnProgress,
    prefill_chunk: int = PREFILL_CHUNK,
    kv: str = "bf16",
) -> CudaRunner:
    """`files` None fills the weights with noise, to time a shape. `context` None: the model's own, cut to what fits.

    `kv` "int8" keeps keys and values in INT8; "bf16" in the weights' half-precision type.

    Raises:
        UnsupportedModelError: shapes that the kernels don't take.
        OutOfMemoryError: before anything is read, with the largest context that fits.
        BackendError: the compiler failed, or the device did.
    """
    half = "bfloat16" if files is None else storage_dtype(files)
    chunk = buf.padded_rows(min(prefill_chunk, context or model.config.max_context))
    runner, arrays = empty_runner(model, device, context=context, chunk=chunk, half=half, kv=kv)
    warmup = KernelWarmup(runner.plans, runner.bucket_ends, device, runner.buffers["length"], runner.prefill_chunk)
    warmup.start()
    try:
        if files is None:
            random_weights(model, arrays, device)
        else:
            load_weights(model, files, arrays, device, on_progress)
        runner.compile_s = warmup.finish(on_progress)
        if warmup.unkept is not None:
            runner.warn(warmup.unkept)
        runner.forget_warmup()
    except BaseException:
        warmup.cancel()
        raise
    return runner


def empty_runner(
    model: ModelDefinition, device: Device, *, context: int | None, chunk: int, half: str, kv: str
) -> tuple[CudaRunner, dict[str, Array]]:
    """A runner in the memory planned for it, and the parameters' arrays, not filled yet. `chunk` is padded.

    Raises: as load_runner, for what needs no file and no compiler.
    """
    refuse_unsupported(model.structure)
    refuse_formats(model)

    def specs(tokens: int) -> dict[str, buf.Spec]:
        return buf.buffer_specs(model, device.arch, tokens, chunk, half, kv=kv)

    memory = plan_memory(
        model,
        asked=context,
        free=device.memory().free,
        item=buf.item_bytes(half),
        kv_item=1 if kv == "int8" else None,
        buffer_bytes=lambda tokens: buf.buffer_bytes(specs(tokens)),
    )
    arrays = allocate(model, device, half)
    return CudaRunner(model, device, arrays, memory=memory, specs=specs(memory.context), half=half, kv=kv), arrays
