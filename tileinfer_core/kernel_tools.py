"""The kernels as `tileinfer kernels list` and `kernels compile` see them: which there are, and what each compiles to.

Beside backends/cuda the only importer of `kernels`. Importing this file raises BackendUnavailableError where cuda-tile
is missing or broken. Nothing here needs a GPU.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tileinfer_core.aliases import DEMO, lookup, nearest
from tileinfer_core.compiler_settings import MORE_TIME, compiler_timeout, timeout_text
from tileinfer_core.config import ModelConfig
from tileinfer_core.cuda_probe import compiler_path, find_compiler, mismatched_packages, probe_driver
from tileinfer_core.errors import (
    BackendUnavailableError,
    CompilerTimeoutError,
    DiskError,
    ModelNotFoundError,
    TileinferError,
    UsageError,
)
from tileinfer_core.models.define import define_from_files, define_model
from tileinfer_core.progress import OnProgress, ProgressEvent, silent
from tileinfer_core.weights import WeightFiles

INSTALL = 'pip install "cuda-tile[tileiras]"'
try:
    from kernels import cache, catalogue, configs
    from kernels.compile import TARGETS, CompileTimeoutError, compile_all
    from kernels.cubin import TENSOR_CORE
    from kernels.cubin_store import CubinStore
    from kernels.shapes import MODELS, ModelShape
    from tileinfer_core.backends.cuda.ahead import EngineModel
    from tileinfer_core.backends.cuda.loader import storage_dtype
    from tileinfer_core.backends.cuda.plan import refuse_formats, refuse_unsupported
except ImportError as _error:
    raise BackendUnavailableError(f"the kernels need cuda-tile: {_error}", hint=INSTALL) from _error

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kernels.catalogue import Entry, Model
    from kernels.compile import Compiled, CompileError
    from tileinfer_core.store import ModelFolder, Store

MAX_WORKERS = 8
_DEMO_SHAPE = "SmolLM2-135M"
_TASK = "compile kernels"


@dataclass(frozen=True, slots=True)
class KernelSummary:
    """One kernel of the catalogue. `variants`: specialisations that the models need; `formula`: what it computes."""

    family: str
    kernel: str
    formula: str
    variants: int
    models: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """One kernel, compiled for one target.

    `spills` are stack bytes and local loads and stores together; `tensor_core` names the tensor-core instructions, ()
    where the kernel has no matrix product, None where no opcode tells and nvdisasm is missing. `error` is set,
    and the numbers are 0, where it did not compile. `path` is the file that the engine will look for, None where the
    cache is off; `unkept` says why it could not be written.
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
    timed_out: bool = False
    path: str | None = None
    unkept: str | None = None


def this_gpu() -> str | None:
    """The architecture of this machine's first GPU, such as "sm_90"; None without one."""
    gpus = probe_driver(with_smi=False).gpus
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
    compiler = find_compiler(os.environ)
    oldest = min(configs.number(arch) for arch in configs.targets())
    found = {*TARGETS, *(compiler.architectures if compiler else ())}
    return tuple(sorted((arch for arch in found if configs.number(arch) >= oldest), key=configs.number))


def notes(archs: Iterable[str]) -> list[str]:
    """What to tell the user of targets whose configurations are an older architecture's."""
    tables = (configs.table(arch) for arch in archs)
    return [table.note for table in tables if table.note]


def chosen_models(asked: Iterable[str], store: Store) -> list[Model] | None:
    """Shapes by their names ("Qwen3-4B"), or of any model on this disk; None where nothing is asked for: all shapes.

    Of a quantised model on this disk it is what the engine launches for it.

    Raises:
        UsageError: naming the shapes and models that the name resembles.
        ModelError: the model is here, and damaged or not supported by the GPU engine.
    """
    found = [_model(name, store) for name in asked]
    return found or None


def _model(name: str, store: Store) -> Model:
    known = next((known for known in MODELS if known.lower() == name.lower()), None)
    if known is not None:
        return known, MODELS[known], "bfloat16"
    try:
        folder = store.resolve(name)
    except ModelNotFoundError:
        return _famous(name, store)
    config = ModelConfig.load(folder.path)
    if config.quantization is not None:
        return _quantised(folder)
    return folder.name, shape_of(config), "float16" if config.dtype == "float16" else "bfloat16"


def _quantised(folder: ModelFolder) -> EngineModel:
    """Its products have formats of their own, one by one, so that a shape does not say which kernels they are."""
    files = WeightFiles.open(folder.path)
    model, _ = define_from_files(ModelConfig.load(folder.path), files)
    refuse_unsupported(model.structure)
    refuse_formats(model)
    return EngineModel(folder.name, model, storage_dtype(files))


def _famous(name: str, store: Store) -> Model:
    """A model that is not on this disk, by the name that its Hub id ends with."""
    shape = famous_shape(name, store)
    if shape is not None:
        model = lookup(name, store.aliases) or name
        return model, MODELS[shape], "float16" if model == DEMO else "bfloat16"
    near = nearest(name, [*MODELS, *store.known_names()])
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(MODELS)}, and models on this disk"
    raise UsageError(f"no model {name!r} whose shapes are known", hint=hint)


def famous_shape(name: str, store: Store) -> str | None:
    """The shape of a model that need not be on this disk: an alias, or the name that its Hub id ends with."""
    model = lookup(name, store.aliases) or name
    tail = model.rpartition("/")[2].lower()
    ends = [known for known in MODELS if tail == known.lower() or tail.startswith(known.lower() + "-instruct")]
    return _DEMO_SHAPE if model == DEMO else next(iter(ends), None)


def shape_of(config: ModelConfig) -> ModelShape:
    """What the kernels depend on of a model, as kernels.shapes has it.

    Raises:
        UnsupportedModelError: a shape that the GPU engine refuses.
    """
    structure = define_model(config, tied=config.tie_word_embeddings).structure
    refuse_unsupported(structure)
    return ModelShape(
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        ffn=config.intermediate_size,
        vocab=config.vocab_size,
        activation="swiglu" if structure.activation == "silu" else structure.activation,
        qk_norm=structure.qk_norm,
        eps=structure.rms_norm_eps,
        qkv_bias=structure.qkv_bias,
        o_bias=structure.o_bias,
        mlp_bias=structure.mlp_bias,
    )


def list_kernels(arch: str, models: Sequence[Model] | None = None) -> list[KernelSummary]:
    """Every kernel that runs on `arch`, by family."""
    found: dict[tuple[str, str], list[Entry]] = {}
    for entry in catalogue.entries(arch, models=models):
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
    timeout: float | None = None,
    on_progress: OnProgress = silent,
) -> Iterator[CompiledKernel]:
    """Compile into cuda-tile's cache, yielding each kernel as it is done. One that fails is yielded with its error.

    `timeout` None is the setting's. What is compiled here is found by the engine, which then starts no compiler.

    Raises:
        BackendUnavailableError: there is no compiler, with the command that installs it.
        UsageError: a number out of range.
    """
    timeout = compiler_timeout() if timeout is None else timeout
    if workers is not None and not 1 <= workers <= 256:
        raise UsageError(f"--workers must be from 1 to 256, found {workers}")
    require_compiler()
    wanted = {arch: _distinct(catalogue.entries(arch, models=models)) for arch in archs}
    total, before = sum(map(len, wanted.values())), 0
    count = workers or min(MAX_WORKERS, os.cpu_count() or 1)
    for arch, by_record in wanted.items():
        on_progress(ProgressEvent(_TASK, before, total, "kernels"))
        records = [entry.record for entry in by_record.values()]
        results = compile_all(records, arch, workers=count, timeout=timeout, disassemble="needed")
        for done, result in enumerate(results, before + 1):
            assert result.record is not None  # noqa: S101 - compile_all names what it compiled
            yield _report(by_record[result.record.identity()], arch, result, timeout)
            on_progress(ProgressEvent(_TASK, done, total, "kernels"))
        before += len(by_record)


def _distinct(entries: Iterable[Entry]) -> dict[tuple[Any, ...], Entry]:
    """By record: two families may launch one kernel, as both attentions do their merge."""
    found: dict[tuple[Any, ...], Entry] = {}
    for entry in entries:
        found.setdefault(entry.record.identity(), entry)
    return found


def _report(entry: Entry, arch: str, result: Compiled | CompileError, timeout: float) -> CompiledKernel:
    record = entry.record
    about: dict[str, Any] = {
        "family": entry.family.removeprefix("kernels."),
        "kernel": record.name,
        "arch": arch,
        "pdl": entry.pdl,
        "models": entry.models,
        "hints": dict(record.hints),
        "signature": record.signature().symbol,
    }
    if isinstance(result, CompileTimeoutError):
        text = timeout_text(record.name, arch, timeout)
        return CompiledKernel(**about, error=text, hint=MORE_TIME, timed_out=True)
    if isinstance(result, Exception):
        return CompiledKernel(**about, error=result.message, hint=result.hint)
    found = result.resources
    counted = found.instructions is not None or bool(found.by_opcode.keys() & set(TENSOR_CORE))
    path = CubinStore.beside_cache(arch).path(record.kernel, result.symbol)
    return CompiledKernel(
        **about,
        path=None if path is None else str(path),
        unkept=result.unkept,
        registers=found.registers,
        shared_bytes=found.shared_bytes,
        spills=found.spills,
        tensor_core=tuple(found.tensor_core) if counted else None if result.uses_mma else (),
        cubin_bytes=result.cubin_bytes,
        seconds=result.seconds,
        cached=result.cached,
    )


def failure(results: Sequence[CompiledKernel]) -> TileinferError | None:
    """The error to end with: the first kernel's that did not compile, else that some could not be kept."""
    failed = [result for result in results if result.error is not None]
    if not failed:
        return _not_kept(results)
    first, others = failed[0], f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
    if first.timed_out:
        return CompilerTimeoutError(f"{first.error}{others}", hint=first.hint)
    return TileinferError(f"{first.kernel} for {first.arch} did not compile{others}: {first.error}", hint=first.hint)


def _not_kept(results: Sequence[CompiledKernel]) -> DiskError | None:
    """What was compiled ahead and is not there now would be compiled again: for want of room, or by the size limit."""
    gone = [result for result in results if result.path is not None and not Path(result.path).exists()]
    if not gone:
        return None
    where, reason = Path(str(gone[0].path)).parent.parent, next((r.unkept for r in gone if r.unkept), None)
    what = f"{len(gone)} of {len(results)} compiled kernels are not kept in {where}"
    if reason is not None:
        return DiskError(f"{what}: {reason}", hint="--cache-dir names another folder")
    if 2 * sum(result.cubin_bytes for result in results) <= cache.size_limit():  # each lies there twice
        return DiskError(f"{what}: another process has removed them", hint="compile them again")
    limit = f"the limit of {cache.size_limit():,} bytes is too small"
    return DiskError(f"{what}: {limit}", hint="--cache-size-bytes sets it")


def require_compiler() -> None:
    if compiler_path(os.environ)[0] is None:
        mismatch = mismatched_packages()
        found = f"its packages differ ({mismatch})" if mismatch else "not found"
        raise BackendUnavailableError(f"tileiras, the compiler of the kernels: {found}", hint=INSTALL)
