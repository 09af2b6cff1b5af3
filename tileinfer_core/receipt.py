"""What a quantised model's receipt says: size before and after, the worst layers, and the loss on the bundled text.

The text (data/receipt_text.txt.gz) is prose of SQLite's documentation, which is in the public domain. The receipt lies
beside the weights as int8_receipt.json.
"""

from __future__ import annotations

import gzip
import math
from dataclasses import asdict, dataclass, fields
from importlib import resources
from typing import TYPE_CHECKING, Any

from tileinfer_core.compare import Comparison, compare
from tileinfer_core.engine import Engine, EngineOptions
from tileinfer_core.errors import ModelError, TileinferError
from tileinfer_core.jsonfile import read_json_object

if TYPE_CHECKING:
    from pathlib import Path

    from tileinfer_core.progress import OnProgress

RECEIPT_NAME = "int8_receipt.json"
TEXT_NAME = "SQLite documentation, the bundled text"
TOKENS = 2048
_LARGEST = 1e300


@dataclass(frozen=True, slots=True)
class QualityOptions:
    """How to measure: `backend` and `half_copies` as in EngineOptions, and how many `tokens` of the bundled text."""

    backend: str = "auto"
    tokens: int = TOKENS
    half_copies: bool = True


@dataclass(frozen=True, slots=True)
class Quality:
    """The loss. Perplexity and KL divergence as in compare.Comparison."""

    text: str
    tokens: int
    backend: str
    perplexity_before: float
    perplexity_after: float
    change: float
    mean_kl: float
    kl_99: float
    agreement: float


@dataclass(frozen=True, slots=True)
class TensorError:
    """Root mean square of a tensor's rounding error over that of its values."""

    name: str
    format: str
    relative_error: float


@dataclass(frozen=True, slots=True)
class Receipt:
    """`worst`: the tensors with the largest relative error. `not_measured` says why `quality` is None."""

    model: str
    revision: str | None
    recipe: str
    calibrated: bool
    bytes_before: int
    bytes_after: int
    bytes_per_weight: float
    worst: tuple[TensorError, ...]
    quality: Quality | None
    not_measured: str | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def read_receipt(folder: Path) -> dict[str, Any] | None:
    """The receipt of a model folder; None where there is none, or none that has what `Receipt` has."""
    try:
        table = read_json_object(folder / RECEIPT_NAME) if (folder / RECEIPT_NAME).is_file() else {}
    except ModelError:
        return None
    worst = table.get("worst")
    whole = (
        _has(table, Receipt)
        and isinstance(worst, list)
        and all(_has(error, TensorError) for error in worst)
        and (_has(table["quality"], Quality) or (table["quality"] is None and isinstance(table["not_measured"], str)))
    )
    return table if whole else None


_KINDS: dict[str, tuple[type, ...]] = {"str": (str,), "bool": (bool,), "int": (int,), "float": (int, float)}


def _has(table: object, kind: type[Receipt | Quality | TensorError]) -> bool:
    """Whether a JSON object has the plain fields of a dataclass, with numbers that are finite and not absurd."""
    if not isinstance(table, dict):
        return False
    for field in fields(kind):
        value = table.get(field.name)
        wanted = _KINDS.get(str(field.type))
        if field.name not in table or (wanted and not isinstance(value, wanted)):
            return False
        if isinstance(value, (int, float)) and not abs(value) <= _LARGEST:
            return False
    return True


def bundled_text() -> str:
    packed = resources.files("tileinfer_core").joinpath("data/receipt_text.txt.gz").read_bytes()
    return gzip.decompress(packed).decode()


def measure_quality(
    before: Path, after: Path, options: QualityOptions | None, on_progress: OnProgress
) -> Quality | str:
    """The loss between two model folders, or the reason why it could not be measured here."""
    if options is None:
        return "not asked for"
    names = []

    def load(folder: Path) -> Engine:
        wanted = EngineOptions(backend=options.backend, half_copies=options.half_copies)
        engine = Engine.load(folder, wanted, on_progress)
        names.append(engine.backend.name)
        return engine

    try:
        found = compare(
            lambda: load(before), lambda: load(after), bundled_text(), tokens=options.tokens, on_progress=on_progress
        )
    except TileinferError as error:
        return str(error)
    if not math.isfinite(found.perplexity + found.reference_perplexity + found.change + found.mean_kl):
        return f"perplexities beyond any number: {found.reference_nll:.0f} nats a token before, {found.nll:.0f} after"
    return _quality(found, names[-1])


def _quality(found: Comparison, backend: str) -> Quality:
    return Quality(
        text=TEXT_NAME,
        tokens=found.tokens,
        backend=backend,
        perplexity_before=found.reference_perplexity,
        perplexity_after=found.perplexity,
        change=found.change,
        mean_kl=found.mean_kl,
        kl_99=found.kl_99,
        agreement=found.agreement,
    )
