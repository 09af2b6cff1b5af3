"""`tileinfer kernels explain`: the specialisations of a kernel, for models or in the cache, and what tells them apart.

Importing this file raises BackendUnavailableError where cuda-tile is missing or broken. Nothing is compiled, and
nothing here needs a GPU.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tileinfer_core.aliases import nearest as nearest_names
from tileinfer_core.errors import BackendUnavailableError, UsageError
from tileinfer_core.kernel_tools import require_compiler

try:
    from kernels import cache, catalogue
    from kernels.cubin_store import CubinStore
    from kernels.lab import explain
except ImportError as _error:
    raise BackendUnavailableError(
        f"the kernels need cuda-tile: {_error}", hint='pip install "cuda-tile[tileiras]"'
    ) from _error

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kernels.catalogue import Entry, Model


@dataclass(frozen=True, slots=True)
class ExplainedKernel:
    """One specialisation.

    `models` need it; () for a launch that was asked about, whose words are in `asked`. `kept`: it is in the cache, and
    would not be compiled. `differs` is what tells it from number `against` (from 1), () for the first.
    """

    number: int
    symbol: str
    hints: dict[str, Any]
    parameters: int
    models: tuple[str, ...]
    kept: bool
    against: int | None
    differs: tuple[str, ...]
    traits: tuple[dict[str, str], ...]
    asked: str | None = None
    same_as: int | None = None


@dataclass(frozen=True, slots=True)
class Explanation:
    """`others` are specialisations in the cache that no model of the catalogue needs: their symbols."""

    kernel: str
    arch: str
    formula: str
    arguments: tuple[str, ...]
    specialisations: tuple[ExplainedKernel, ...]
    launches: tuple[ExplainedKernel, ...]
    others: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def explain_kernel(
    name: str, arch: str, models: Sequence[Model] | None = None, launches: Iterable[str] = ()
) -> Explanation:
    """The specialisations of one kernel for one target; `launches` are more, as changes to the first.

    Raises:
        UsageError: no such kernel, or a launch that can't be understood.
        BackendUnavailableError: no tileiras.
    """
    wanted = _entries(name, arch, models)
    require_compiler()  # its version is part of what the cache is keyed by
    store = CubinStore.beside_cache(arch)
    known = [explain.specialisation(entry.record) for entry in wanted]
    found = [_explained(known, number, entry, store) for number, entry in enumerate(wanted, 1)]
    asked = [_asked(text, wanted, known, store) for text in launches]
    kernel = wanted[0].record.kernel
    return Explanation(
        kernel=known[0].kernel,
        arch=arch,
        formula=" ".join((kernel._pyfunc.__doc__ or "").split("\n\n")[0].split()),  # noqa: SLF001
        arguments=tuple(kernel._annotated_function.pysig.parameters),  # noqa: SLF001
        specialisations=tuple(found),
        launches=tuple(asked),
        others=_others(known[0].kernel, arch, {special.symbol for special in known}),
    )


def _entries(name: str, arch: str, models: Sequence[Model] | None) -> list[Entry]:
    every = list(catalogue.entries(arch, models=models))
    names = list(dict.fromkeys(entry.record.name for entry in every))
    chosen = name if name in names else f"{name}_kernel"
    found = [entry for entry in every if entry.record.name == chosen]
    if not found:
        near = nearest_names(name, names)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(names)}"
        raise UsageError(f"no kernel {name!r} for {arch}", hint=hint)
    return found


def _explained(known: list[explain.Specialisation], number: int, entry: Entry, store: CubinStore) -> ExplainedKernel:
    """Number `number`, from 1, against those before it."""
    special = known[number - 1]
    before = explain.nearest(special, known[: number - 1])
    differs = () if before is None else tuple(explain.differences(special, known[before]))
    return ExplainedKernel(
        number=number,
        symbol=special.symbol,
        hints=dict(special.hints),
        parameters=special.parameters,
        models=entry.models,
        kept=store.holds([entry.record]),
        against=None if before is None else before + 1,
        differs=differs,
        traits=tuple(asdict(trait) for trait in special.traits),
    )


def _asked(text: str, wanted: list[Entry], known: list[explain.Specialisation], store: CubinStore) -> ExplainedKernel:
    try:
        record = explain.changed(wanted[0].record, text)
        special = explain.specialisation(record)
    except (explain.LaunchTextError, TypeError, ValueError) as error:
        raise UsageError(f"--launch {text!r}: {error}") from None
    if (refusal := explain.refused(record)) is not None:
        raise UsageError(f"--launch {text!r}: {refusal}")
    nearest = explain.nearest(special, known)
    assert nearest is not None  # noqa: S101 - there is at least the base
    same = next((i + 1 for i, other in enumerate(known) if other.identity == special.identity), None)
    return ExplainedKernel(
        number=0,
        symbol=special.symbol,
        hints=dict(special.hints),
        parameters=special.parameters,
        models=(),
        kept=store.holds([record]),
        against=nearest + 1,
        differs=tuple(explain.differences(special, known[nearest])),
        traits=tuple(asdict(trait) for trait in special.traits),
        asked=text,
        same_as=same,
    )


def _others(kernel: str, arch: str, known: set[str]) -> tuple[str, ...]:
    folder = cache.cache_dir()
    if folder is None:
        return ()
    try:
        kept = cache.entries(folder)
    except (cache.UnreadableCacheError, OSError):
        return ()
    symbols = [entry.symbol for entry in kept if entry.kernel == kernel and entry.target == arch]
    return tuple(dict.fromkeys(symbol for symbol in symbols if symbol not in known))
