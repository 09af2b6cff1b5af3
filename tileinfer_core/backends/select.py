"""Which backend runs a model. The choice is made once, with its reason, and never changes silently afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from tileinfer_core.errors import BackendUnavailableError, UsageError

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
