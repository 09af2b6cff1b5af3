"""`tileinfer kernels census`: the kernels of a real step in order, with what each moves, needs and takes.

Without a GPU, or for another architecture, everything but the times: the step is recorded with arrays that are only
shapes, and compiled.

Importing this file raises BackendUnavailableError where cuda-tile is missing or broken.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tileinfer_core.bench import BenchOptions
from tileinfer_core.compiler_settings import compiler_timeout
from tileinfer_core.config import ModelConfig
from tileinfer_core.errors import BackendError, BackendUnavailableError, ModelNotFoundError, UsageError
from tileinfer_core.jsonfile import read_json_object
from tileinfer_core.kernel_tools import MAX_WORKERS, famous_shape, require_compiler
from tileinfer_core.models.define import define_model
from tileinfer_core.progress import OnProgress, ProgressEvent, silent

try:
    from kernels.compile import CompileError, compile_all
    from kernels.lab.census import StepShape, moved_bytes, operations, rows_text
    from kernels.shapes import MODELS, ModelShape
    from tileinfer_core.backends.cuda.census_steps import KINDS, Step, record_step, shape_runner
except ImportError as _error:
    raise BackendUnavailableError(
        f"the kernels need cuda-tile: {_error}", hint='pip install "cuda-tile[tileiras]"'
    ) from _error

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernels.compile import Compiled
    from kernels.specs import Recorded
    from tileinfer_core.backends.base import LoadOptions
    from tileinfer_core.backends.cuda.census_times import StepTimes
    from tileinfer_core.backends.cuda.runner import CudaRunner
    from tileinfer_core.bench import Loaded
    from tileinfer_core.store import Store

_TASK = "time the launches"
NO_TIME = 0.05  # µs; below it a bandwidth says nothing


@dataclass(frozen=True, slots=True)
class CensusRow:
    """One launch. Times in microseconds, None without a GPU.

    `time_us` is what it adds to the step; `alone_us` its time in a chain of its own kind; `gap_us` the difference,
    which is negative where it overlaps the kernel before. `bound_us` is its bytes at the copy speed or, in a prefill,
    its operations at the matrix rate, whichever is longer; `share` the bound over the time.
    """

    index: int
    kernel: str
    grid: tuple[int, ...]
    bytes: int
    operations: int
    registers: int
    shared_bytes: int
    spills: int
    config: str
    time_us: float | None = None
    alone_us: float | None = None
    gap_us: float | None = None
    bound_us: float | None = None
    gb_s: float | None = None
    share: float | None = None


@dataclass(frozen=True, slots=True)
class Census:
    """`total_us`: the step measured for itself; `sum_us`: the rows' sum; `loop_us`: one of many without a pause."""

    model: str
    step: str
    tokens: int
    context: int
    arch: str
    gpu: str | None
    kernels: tuple[CensusRow, ...]
    total_us: float | None = None
    sum_us: float | None = None
    loop_us: float | None = None
    overhead_us: float | None = None
    copy_bytes_per_s: float | None = None
    operations_per_s: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def chosen_step(kind: str, tokens: int | None, context: int) -> Step:
    """Raises UsageError for a step that there isn't."""
    if kind not in KINDS:
        raise UsageError(f"--step must be one of {', '.join(KINDS)}, found {kind!r}")
    default = {"decode": 1, "verify": 4, "prefill": context}[kind]
    return Step(kind, tokens if tokens is not None else min(default, 2048), context)


def config_of(reference: str, store: Store) -> tuple[str, ModelConfig]:
    """A shape's name ("Qwen3-4B"), a config.json, or a model on this disk.

    Raises:
        ModelNotFoundError, UsageError, ModelError: what keeps it from being one.
    """
    known = next((name for name in MODELS if name.lower() == reference.lower()), None)
    if known is not None:
        return known, ModelConfig.from_dict(config_dict(MODELS[known]), known)
    path = Path(reference)
    file = path / "config.json" if path.is_dir() else path
    if file.is_file() and file.suffix == ".json":
        return str(reference), ModelConfig.from_dict(read_json_object(file, max_bytes=4 << 20), str(file))
    try:
        folder = store.resolve(reference)
    except ModelNotFoundError as error:
        if (famous := famous_shape(reference, store)) is not None:
            return famous, ModelConfig.from_dict(config_dict(MODELS[famous]), famous)
        raise ModelNotFoundError(
            f"{error}, nor a shape of that name", hint=f"known shapes: {', '.join(MODELS)}"
        ) from error
    return folder.name, ModelConfig.load(folder.path)


def config_dict(shape: ModelShape) -> dict[str, Any]:
    """As a config.json of that shape would have it: of a family that has its activation, norms and biases."""
    xielu = shape.activation == "xielu"
    family = "apertus" if xielu else "qwen3" if shape.qk_norm else "qwen2" if shape.qkv_bias else "llama"
    return {
        "model_type": family,
        "hidden_act": "xielu" if xielu else "silu",
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.ffn,
        "vocab_size": shape.vocab,
        "rms_norm_eps": shape.eps,
        "max_position_embeddings": 40960,
        "rope_theta": 1e6,
        "rope_scaling": {"rope_type": "default"},
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": True,
    }


def census_without_gpu(
    name: str,
    config: ModelConfig,
    arch: str,
    step: Step,
    load: LoadOptions,
    *,
    on_progress: OnProgress = silent,
) -> Census:
    """Everything but the times, of an engine so loaded. Raises BackendError, UnsupportedModelError."""
    require_compiler()
    model = define_model(config, tied=config.tie_word_embeddings)
    half = "float16" if config.dtype == "float16" else "bfloat16"
    runner = shape_runner(model, arch, replace(load, context=max(step.context, 2048)), half)
    launches = record_step(runner, model, step)
    rows = _rows(launches, step, _resources(launches, arch, on_progress))
    return Census(name, step.kind, step.tokens, step.context, arch, None, rows)


def census_on_gpu(name: str, loaded: Loaded, step: Step, *, on_progress: OnProgress = silent) -> Census:
    """A loaded model's step, timed. Raises BackendError."""
    runner: Any = loaded.runner
    if runner.backend_name != "cuda":
        raise BackendUnavailableError(
            f"a census times GPU kernels, and this is {runner.backend_name}: {loaded.backend.reason}",
            hint="--arch sm_90 gives everything but the times",
        )
    from tileinfer_core.backends.cuda.census_times import StepTimer, matrix_rate, prepare  # noqa: PLC0415 - has CuPy

    _check_room(runner, step)
    launches = record_step(runner, loaded.model, step)
    resources = _resources(launches, runner.device.arch, silent)
    copy, _ = runner.ceilings()
    rate = matrix_rate(runner.device) if step.kind == "prefill" else None
    prepare(runner, step, BenchOptions().sampling)
    total = len(launches)
    timer = StepTimer(runner, step, lambda done: on_progress(ProgressEvent(_TASK, done, total, "kernels")))
    times = timer.time(launches)
    return Census(
        name,
        step.kind,
        step.tokens,
        step.context,
        runner.device.arch,
        runner.device.name,
        _timed(_rows(launches, step, resources), times, copy, rate),
        total_us=times.whole,
        sum_us=sum(times.added),
        loop_us=times.loop,
        overhead_us=times.overhead,
        copy_bytes_per_s=copy,
        operations_per_s=rate,
    )


def _check_room(runner: CudaRunner, step: Step) -> None:
    if step.context > runner.context_limit:
        raise UsageError(
            f"a context of {step.context:,} is asked for, the model was loaded for {runner.context_limit:,}"
        )


def _resources(launches: Sequence[Recorded], arch: str, on_progress: OnProgress) -> dict[Any, Compiled]:
    """What each distinct kernel compiled to."""

    def show(done: int, total: int, _result: object) -> None:
        on_progress(ProgressEvent("compile kernels", done, total, "kernels"))

    workers = min(MAX_WORKERS, os.cpu_count() or 1)
    found: dict[Any, Compiled] = {}
    for result in compile_all(
        list(launches), arch, workers=workers, timeout=compiler_timeout(), disassemble="needed", on_progress=show
    ):
        if isinstance(result, CompileError):
            raise BackendError(f"the kernel {result}", hint=result.hint) from result
        found[result.record.identity()] = result
    return found


def _rows(launches: Sequence[Recorded], step: Step, resources: dict[Any, Compiled]) -> tuple[CensusRow, ...]:
    shape = StepShape(step.tokens, step.context)
    rows = []
    for index, launch in enumerate(launches):
        found = resources[launch.identity()].resources
        rows.append(
            CensusRow(
                index=index,
                kernel=launch.name,
                grid=launch.grid,
                bytes=moved_bytes(launch, shape),
                operations=operations(launch, shape),
                registers=found.registers,
                shared_bytes=found.shared_bytes,
                spills=found.spills,
                config=rows_text(launch),
            )
        )
    return tuple(rows)


def _timed(rows: tuple[CensusRow, ...], times: StepTimes, copy: float, rate: float | None) -> tuple[CensusRow, ...]:
    found = []
    for row, added, alone in zip(rows, times.added, times.alone, strict=True):
        bound = max(row.bytes / copy, row.operations / rate if rate else 0.0) * 1e6
        worth = added > NO_TIME
        timing = {
            "time_us": added,
            "alone_us": alone,
            "gap_us": added - alone,
            "bound_us": bound,
            "gb_s": row.bytes / added / 1e3 if worth else None,
            "share": bound / added if worth else None,
        }
        found.append(CensusRow(**{**asdict(row), **timing}))
    return tuple(found)


def picture(census: Census) -> str:
    """SVG."""
    from tileinfer_core.kernel_timeline import timeline  # noqa: PLC0415 - few ask for it

    return timeline(census)


def by_kind(census: Census) -> list[dict[str, Any]]:
    """Launches of one kernel with one grid, configuration and size together: counts and means, in order of the step."""
    groups: dict[Any, list[CensusRow]] = {}
    for row in census.kernels:
        groups.setdefault((row.kernel, row.grid, row.bytes, row.config), []).append(row)
    return [_mean(rows) for rows in groups.values()]


def _mean(rows: list[CensusRow]) -> dict[str, Any]:
    first, count = asdict(rows[0]), len(rows)
    timed = rows[0].time_us is not None
    for name in ("time_us", "alone_us", "gap_us") if timed else ():
        first[name] = sum(getattr(row, name) for row in rows) / count
    if timed:
        worth = first["time_us"] > NO_TIME
        first["gb_s"] = first["bytes"] / first["time_us"] / 1e3 if worth else None
        first["share"] = first["bound_us"] / first["time_us"] if worth else None
    return {"launches": count, **first}
