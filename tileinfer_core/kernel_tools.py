"""The kernels as `tileinfer kernels list` and `kernels compile` see them: which there are, and what each compiles to.

Beside backends/cuda the only importer of `kernels`, and only inside functions: cuda-tile may not be installed. Nothing
here needs a GPU.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from tileinfer_core.aliases import DEMO, lookup, nearest
from tileinfer_core.cuda_probe import find_compiler, mismatched_packages, probe_driver
from tileinfer_core.errors import BackendUnavailableError, ModelNotFoundError, TileinferError, UsageError
from tileinfer_core.progress import OnProgress, ProgressEvent, silent

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kernels.catalogue import Entry, Model
    from kernels.compile import Compiled, CompileError
    from tileinfer_core.config import ModelConfig
    from tileinfer_core.store import Store

INSTALL = 'pip install "cuda-tile[tileiras]"'
MAX_WORKERS = 8
_DEMO_SHAPE = "SmolLM2-135M"


@dataclass(frozen=True, slots=True)
class KernelSummary:
    """One kernel of the catalogue. `variants`: how many specialisations the models need; `formula`: what it computes."""

    family: str
    kernel: str
    formula: str
    variants: int
    models: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """One kernel, compiled for one target.

    `spills` are stack bytes and local loads and stores together; `tensor_core` names the tensor-core instructions, ()
    where the kernel has no matrix product, None where nvdisasm is missing and they were not counted. `error` is set,
    and the numbers are 0, where it did not compile.
    """

    family: str
    kernel: str
    arch: str
    pdl: bool
    models: tuple[str, ...]
    hints: dict[str, Any]
    signature: str
    registers: int = 0
    shared_bytes: int = 0
    spills: int = 0
    tensor_core: tuple[str, ...] | None = ()
    cubin_bytes: int = 0
    seconds: float = 0.0
    cached: bool = False
    error: str | None = None
    hint: str | None = None


def this_gpu() -> str | None:
    """The architecture of this machine's first GPU, such as "sm_90"; None without one."""
    gpus = probe_driver().gpus
    return gpus[0].arch if gpus else None


def chosen_archs(asked: Iterable[str]) -> tuple[str, ...]:
    """Targets named one by one or with commas between them, each once; this machine's GPU where none is named.

    Raises:
        UsageError: naming what the compiler knows, nearest first; or that there is nothing to choose.
    """
    names = [name.strip() for text in asked for name in text.split(",") if name.strip()]
    if not names:
        found = this_gpu()
        if found is None:
            raise UsageError("no GPU here whose architecture to take", hint="name one: --arch sm_90")
        names = [found]
    return tuple(dict.fromkeys(_known_arch(name) for name in names))


def _known_arch(name: str) -> str:
    known = _architectures()
    if name in known:
        return name
    near = nearest(name, known)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known)}"
    raise UsageError(f"no architecture {name!r} that the kernels can be compiled for", hint=hint)


def _architectures() -> tuple[str, ...]:
    """What the compiler takes and the kernels have configurations for; without a compiler, what CI compiles."""
    configs, tested = _kernels("configs"), _kernels("compile").TARGETS
    compiler = find_compiler(os.environ)
    oldest = min(configs.number(arch) for arch in configs.targets())
    found = {*tested, *(compiler.architectures if compiler else ())}
    return tuple(sorted((arch for arch in found if configs.number(arch) >= oldest), key=configs.number))


def notes(archs: Iterable[str]) -> list[str]:
    """What to tell the user of targets whose configurations are an older architecture's."""
    tables = (_kernels("configs").table(arch) for arch in archs)
    return [table.note for table in tables if table.note]


def chosen_models(asked: Iterable[str], store: Store) -> list[Model] | None:
    """Shapes by their names ("Qwen3-4B"), or of any model on this disk; None where nothing is asked for: all shapes.

    Raises:
        UsageError: naming the shapes and models that the name resembles.
        ModelError: the model is here, and damaged or not supported.
    """
    found = [_model(name, store) for name in asked]
    return found or None


def _model(name: str, store: Store) -> Model:
    shapes = _kernels("shapes").MODELS
    by_name = {known.lower(): known for known in shapes}
    if name.lower() in by_name:
        known = by_name[name.lower()]
        return known, shapes[known], "bfloat16"
    try:
        folder = store.resolve(name)
    except ModelNotFoundError:
        return _famous(name, store, shapes)
    from tileinfer_core.config import ModelConfig

    config = ModelConfig.load(folder.path)
    return folder.name, shape_of(config), "float16" if config.dtype == "float16" else "bfloat16"


def _famous(name: str, store: Store, shapes: dict[str, Any]) -> Model:
    """A model that is not on this disk, by the name that its Hub id ends with."""
    model = lookup(name, store.aliases) or name
    tail = model.rpartition("/")[2].lower()
    ends = [known for known in shapes if tail == known.lower() or tail.startswith(known.lower() + "-instruct")]
    if model == DEMO:
        return DEMO, shapes[_DEMO_SHAPE], "float16"
    if ends:
        return model, shapes[ends[0]], "bfloat16"
    near = nearest(name, [*shapes, *store.known_names()])
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(shapes)}, and models on this disk"
    raise UsageError(f"no model {name!r} whose shapes are known", hint=hint)


def shape_of(config: ModelConfig) -> Any:
    """What the kernels depend on of a model, as kernels.shapes has it."""
    return _kernels("shapes").ModelShape(
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        ffn=config.intermediate_size,
        vocab=config.vocab_size,
        activation="xielu" if config.hidden_act == "xielu" else "swiglu",
        qk_norm=config.model_type in {"qwen3", "apertus"},
    )


def list_kernels(arch: str, models: Sequence[Model] | None = None) -> list[KernelSummary]:
    """Every kernel that runs on `arch`, by family."""
    found: dict[tuple[str, str], list[Entry]] = {}
    for entry in _entries(arch, models):
        found.setdefault((entry.family, entry.record.name), []).append(entry)
    return [
        KernelSummary(
            family.removeprefix("kernels."),
            kernel,
            _formula(entries[0]),
            len(entries),
            tuple(dict.fromkeys(model for entry in entries for model in entry.models)),
        )
        for (family, kernel), entries in found.items()
    ]


def _formula(entry: Entry) -> str:
    """The first sentence of the kernel's docstring."""
    text = entry.record.kernel._pyfunc.__doc__ or ""  # noqa: SLF001
    return " ".join(text.split("\n\n")[0].split())


def compile_kernels(
    archs: Sequence[str],
    models: Sequence[Model] | None = None,
    *,
    workers: int | None = None,
    timeout: float = 300,
    on_progress: OnProgress = silent,
) -> Iterator[CompiledKernel]:
    """Compile into cuda-tile's cache, yielding each kernel as it is done. One that fails is yielded with its error.

    Raises:
        BackendUnavailableError: there is no compiler, with the command that installs it.
        UsageError: a number out of range.
    """
    if workers is not None and not 1 <= workers <= 256:
        raise UsageError(f"--workers must be from 1 to 256, found {workers}")
    _require_compiler()
    entries = {arch: _entries(arch, models) for arch in archs}
    total, before = sum(map(len, entries.values())), 0
    count = workers or min(MAX_WORKERS, os.cpu_count() or 1)
    for arch, wanted in entries.items():
        by_record = {entry.record.identity(): entry for entry in wanted}
        task = f"compile for {arch}" if len(archs) == 1 else "compile"
        on_progress(ProgressEvent(task, before, total, "kernels"))
        results = _kernels("compile").compile_all(
            [entry.record for entry in wanted], arch, workers=count, timeout=timeout, disassemble="needed"
        )
        for done, result in enumerate(results, before + 1):
            yield _report(by_record[result.record.identity()], arch, result)
            on_progress(ProgressEvent(task, done, total, "kernels"))
        before += len(by_record)


def _report(entry: Entry, arch: str, result: Compiled | CompileError) -> CompiledKernel:
    record = entry.record
    about: tuple[Any, ...] = (entry.family.removeprefix("kernels."), record.name, arch, entry.pdl, entry.models)
    about += (dict(record.hints), record.signature().symbol)
    if isinstance(result, Exception):
        return CompiledKernel(*about, error=result.message, hint=result.hint)
    found = result.resources
    counted = found.instructions is not None
    return CompiledKernel(
        *about,
        registers=found.registers,
        shared_bytes=found.shared_bytes,
        spills=found.spills,
        tensor_core=tuple(found.tensor_core) if counted else None if result.uses_mma else (),
        cubin_bytes=result.cubin_bytes,
        seconds=result.seconds,
        cached=result.cached,
    )


def failure(results: Iterable[CompiledKernel]) -> TileinferError | None:
    """The error to end with where kernels did not compile: the first one's words, and how many there are."""
    failed = [result for result in results if result.error is not None]
    if not failed:
        return None
    first, others = failed[0], f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
    return TileinferError(f"{first.kernel} for {first.arch} did not compile{others}: {first.error}", hint=first.hint)


def _entries(arch: str, models: Sequence[Model] | None) -> list[Entry]:
    """Distinct kernels for one target.

    Raises:
        UsageError: a model has a shape that a kernel refuses.
    """
    try:
        return list(_kernels("catalogue").entries(arch, models=models))
    except ValueError as error:
        raise UsageError(f"the kernels don't take this model's shape: {error}") from error


def _require_compiler() -> None:
    if find_compiler(os.environ) is None:
        mismatch = mismatched_packages()
        found = f"its packages differ ({mismatch})" if mismatch else "not found"
        raise BackendUnavailableError(f"tileiras, the compiler of the kernels: {found}", hint=INSTALL)


def _kernels(module: str) -> Any:
    """A module of `kernels`.

    Raises:
        BackendUnavailableError: cuda-tile is missing or broken.
    """
    try:
        return import_module(f"kernels.{module}")
    except ImportError as error:
        raise BackendUnavailableError(f"the kernels need cuda-tile: {error}", hint=INSTALL) from error
