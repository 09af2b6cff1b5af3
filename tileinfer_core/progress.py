"""What long work says about itself while it runs. It prints nothing: the command line decides what to show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Unit = Literal["bytes", "tokens", "tensors", "files", "kernels", "steps"]


@dataclass(frozen=True, slots=True)
class ProgressEvent:
    """`done` of `total` units of `task`; `total` is None while it is not known.

    `task` is a short phrase that starts with a verb ("download model.safetensors"). Events of one task come in
    order, `done` never falls, and the last one has done == total when the work is complete.
    """

    task: str
    done: int
    total: int | None
    unit: Unit


OnProgress = Callable[[ProgressEvent], None]


def silent(_event: ProgressEvent) -> None:
    """For callers that show nothing."""
