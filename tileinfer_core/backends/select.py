"""Which backend runs a model, and the one place where a backend is imported.

The choice is made once, with its reason, and never changes silently afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from tileinfer_core.errors import BackendUnavailableError, UsageError
from tileinfer_core.settings import KV_FORMATS

if TYPE_CHECKING:
    from collections.abc import Callable

    from tileinfer_core.backends.base import LoadOptions, Runner
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


@dataclass(frozen=True, slots=True)
class RunnerLoad:
    """A runner on its way. On the CPU its weights are being read already; on a GPU `finish` does all the work.

    `finish` may raise OutOfMemoryError, BackendUnavailableError, ModelError. `cancel` returns at once.
    """

    finish: Callable[[OnProgress], Runner]
    cancel: Callable[[], None]


def load_runner(
    choice: BackendChoice,
    model: ModelDefinition,
    files: WeightFiles | None,
    options: LoadOptions,
    on_progress: OnProgress,
) -> Runner:
    """Load the weights on the backend chosen; `files` None fills them with noise, for timing a shape.

    For errors see `start_loading`.
    """
    if files is None and choice.name == "cpu":
        from tileinfer_core.backends.numpy_backend import NumpyRunner  # noqa: PLC0415

        return NumpyRunner.with_noise(model, kv=options.kv)
    return start_loading(choice, model, files, options).finish(on_progress)


def start_loading(
    choice: BackendChoice, model: ModelDefinition, files: WeightFiles | None, options: LoadOptions
) -> RunnerLoad:
    """Begin to load the weights on the backend chosen.

    Raises:
        UsageError: `kv` is no format.
        OutOfMemoryError, BackendUnavailableError: what keeps it from running.
    """
    if options.kv not in KV_FORMATS:
        raise UsageError(f"--kv must be one of {', '.join(KV_FORMATS)}, found {options.kv!r}")
    if choice.name == "cuda":
        return _start_cuda(model, files, options)
    assert files is not None  # noqa: S101 - noise needs no loading
    return _start_cpu(model, files, options.kv)


def _start_cuda(model: ModelDefinition, files: WeightFiles | None, options: LoadOptions) -> RunnerLoad:
    try:
        from tileinfer_core.backends.cuda import load  # noqa: PLC0415 - a backend is imported when chosen
        from tileinfer_core.backends.cuda.gpu import GpuDevice  # noqa: PLC0415
    except ImportError as error:  # installed, but not for this driver or this Python
        hint = "`tileinfer doctor` looks closer; --backend cpu runs without a GPU"
        raise BackendUnavailableError(f"the CUDA backend can't be imported: {error}", hint=hint) from error

    def finish(on_progress: OnProgress) -> Runner:
        return load.load_runner(model, files, GpuDevice(), options, on_progress)

    return RunnerLoad(finish, cancel=lambda: None)


def _start_cpu(model: ModelDefinition, files: WeightFiles, kv: str) -> RunnerLoad:
    """Memory for keys and values grows as it is used: there is nothing to plan."""
    from tileinfer_core.backends.numpy_weights import WeightLoad  # noqa: PLC0415

    weights = WeightLoad(model.parameters, files)

    def finish(on_progress: OnProgress) -> Runner:
        from tileinfer_core.backends.numpy_backend import NumpyRunner  # noqa: PLC0415

        return NumpyRunner(model, weights.finish(on_progress), kv=kv)

    return RunnerLoad(finish, weights.cancel)
