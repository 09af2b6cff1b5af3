"""Which backend runs a model, and the one place where a backend is imported.

The choice is made once, with its reason, and never changes silently afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from tileinfer_core.errors import BackendUnavailableError, UsageError

if TYPE_CHECKING:
    from tileinfer_core.backends.base import Runner
    from tileinfer_core.models.decoder import ModelDefinition
    from tileinfer_core.progress import OnProgress
    from tileinfer_core.weights import WeightFiles

BackendName = Literal["cuda", "cpu"]
BackendRequest = Literal["auto", "cuda", "cpu"]


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """`reason` is a clause for the user, such as "asked for" or "no CUDA backend in this version"."""

    name: BackendName
    reason: str


def choose_backend(requested: str) -> BackendChoice:
    """Choose "cuda" or "cpu".

    Raises:
        UsageError: `requested` is none of auto, cuda, cpu.
        BackendUnavailableError: "cuda" was asked for and can't run. Only "auto" may fall back, and it says why.
    """
    if requested not in get_args(BackendRequest):
        raise UsageError(f"--backend must be one of {', '.join(get_args(BackendRequest))}, found {requested!r}")
    if requested == "cpu":
        return BackendChoice("cpu", "asked for")
    if requested == "auto":
        return BackendChoice("cpu", "the CUDA backend is not part of this version yet")
    raise BackendUnavailableError(
        "the CUDA backend is not part of this version of TileInfer yet",
        hint="use --backend cpu, or leave --backend at auto",
    )


def load_runner(
    choice: BackendChoice,
    model: ModelDefinition,
    files: WeightFiles,
    *,
    context: int,
    prefill_chunk: int,
    on_progress: OnProgress,
) -> Runner:
    """Load the weights on the backend chosen. `context` is the longest sequence that will be asked of it.

    Raises:
        OutOfMemoryError, BackendUnavailableError, ModelError: what keeps it from running.
    """
    from tileinfer_core.backends.numpy_backend import NumpyRunner  # noqa: PLC0415 - a backend is imported when chosen

    assert choice.name == "cpu"  # noqa: S101 - choose_backend gives nothing else in this version
    del context, prefill_chunk  # memory for keys and values grows as it is used
    return NumpyRunner.load(model, files, on_progress)
