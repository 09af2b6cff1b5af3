"""Which backend runs a model, and the one place where a backend is imported.

The choice is made once, with its reason, and never changes silently afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from tileinfer_core.errors import BackendUnavailableError, UsageError
from tileinfer_core.settings import KV_FORMATS

if TYPE_CHECKING:
    from tileinfer_core.backends.base import Runner
    from tileinfer_core.models.decoder import ModelDefinition
    from tileinfer_core.progress import OnProgress
    from tileinfer_core.weights import WeightFiles

BackendName = Literal["cuda", "cpu"]
BackendRequest = Literal["auto", "cuda", "cpu"]


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """`reason` is a clause for the user, such as "asked for" or "no usable GPU: the driver shows none"."""

    name: BackendName
    reason: str
    has_gpu: bool = False  # there is a GPU; with "cpu", one that can't be used


def choose_backend(requested: str) -> BackendChoice:
    """Choose "cuda" or "cpu".

    "auto" takes the GPU when there is one that everything needed is there for, and says what is missing otherwise.

    Raises:
        UsageError: `requested` is none of auto, cuda, cpu.
        BackendUnavailableError: "cuda" was asked for and can't run. Only "auto" may fall back, and it says why.
    """
    from tileinfer_core.backends.cuda.probe import cuda_status  # noqa: PLC0415 - not for --help

    if requested not in get_args(BackendRequest):
        raise UsageError(f"--backend must be one of {', '.join(get_args(BackendRequest))}, found {requested!r}")
    if requested == "cpu":
        return BackendChoice("cpu", "asked for")
    status = cuda_status()
    if status.problem is None:
        name = status.gpu.name if status.gpu else "a GPU"
        return BackendChoice("cuda", name if requested == "auto" else "asked for", has_gpu=True)
    if requested == "auto":
        return BackendChoice("cpu", f"no usable GPU: {status.problem}", has_gpu=status.gpu is not None)
    cure = status.cure or "use --backend cpu"
    message = f"the CUDA backend can't run here: {status.problem}"
    raise BackendUnavailableError(message, hint=f"{cure}; `tileinfer doctor` has more")


def load_runner(
    choice: BackendChoice,
    model: ModelDefinition,
    files: WeightFiles | None,
    *,
    context: int | None,
    prefill_chunk: int | None,
    kv: str,
    on_progress: OnProgress,
) -> Runner:
    """Load the weights on the backend chosen; `files` None fills them with noise, for timing a shape.

    `context` is what the user asked for: a backend that plans its memory refuses one that does not fit, and without it
    finds the longest that does. `prefill_chunk` None is the backend's own choice. `kv` "int8" keeps keys and values in
    INT8, "bf16" as the model has them.

    Raises:
        UsageError: `kv` is neither.
        OutOfMemoryError, BackendUnavailableError, ModelError: what keeps it from running.
    """
    if kv not in KV_FORMATS:
        raise UsageError(f"--kv must be one of {', '.join(KV_FORMATS)}, found {kv!r}")
    if choice.name == "cuda":
        try:
            from tileinfer_core.backends.cuda import load  # noqa: PLC0415 - a backend is imported when chosen
            from tileinfer_core.backends.cuda.gpu import GpuDevice  # noqa: PLC0415
        except ImportError as error:  # installed, but not for this driver or this Python
            hint = "`tileinfer doctor` looks closer; --backend cpu runs without a GPU"
            raise BackendUnavailableError(f"the CUDA backend can't be imported: {error}", hint=hint) from error
        chunk = prefill_chunk or load.PREFILL_CHUNK
        return load.load_runner(
            model, files, GpuDevice(), context=context, prefill_chunk=chunk, kv=kv, on_progress=on_progress
        )
    from tileinfer_core.backends.numpy_backend import NumpyRunner  # noqa: PLC0415

    del context, prefill_chunk  # memory for keys and values grows as it is used
    if files is None:
        return NumpyRunner.with_noise(model, kv=kv)
    return NumpyRunner.load(model, files, on_progress, kv=kv)
