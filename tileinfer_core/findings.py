"""One result of a check: what `doctor` says of the machine and `verify` of a model's files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "info", "warning", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """`detail` says what was found; `cure` is the command (or the step) that mends it, if one is needed."""

    name: str
    status: Status
    detail: str
    cure: str | None = None
