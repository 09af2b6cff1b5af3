"""How fast a loaded model runs: prefill, decoding, first token, and what share of the memory's speed decoding reaches.

Everything goes through Runner, as an answer does, sampling included; only text and stop rules are left out. Each figure
is the median of several runs after a warm-up, with the fastest and the slowest beside it. The ceilings are measured in
the same run: a share of a number from another day or machine says nothing.

Bytes of a decoded token: every weight but an untied embedding table (one row of it), and the keys and values of the
context. That is a lower bound for what must move at batch 1.
"""

from __future__ import annotations

import statistics
import time
from contextlib import closing
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from tileinfer_core.backends.select import choose_backend, load_runner
from tileinfer_core.config import ModelConfig
from tileinfer_core.errors import UsageError
from tileinfer_core.jsonfile import read_json_object
from tileinfer_core.models.define import define_from_files, define_model
from tileinfer_core.progress import ProgressEvent, silent
from tileinfer_core.sampling import SamplingParams
from tileinfer_core.weights import WeightFiles

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tileinfer_core.backends.base import Runner
    from tileinfer_core.backends.select import BackendChoice
    from tileinfer_core.engine import EngineOptions
    from tileinfer_core.models.decoder import ModelDefinition
    from tileinfer_core.progress import OnProgress

FIRST_TOKEN_PROMPT = 16
CPU_CEILING_BYTES = 256 << 20
TASK = "measure"


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """`prefill`: prompt lengths; `contexts`: tokens already there when decoding starts; `tokens` decoded per run."""

    prefill: tuple[int, ...] = (512,)
    contexts: tuple[int, ...] = (512,)
    tokens: int = 64
    repetitions: int = 5
    warmup: int = 1
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(0.7, top_k=20, top_p=0.95, seed=1))


@dataclass(frozen=True, slots=True)
class Spread:
    """Of `runs` measurements."""

    median: float
    low: float
    high: float
    runs: int

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values), len(values))


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Bytes per second: a copy counts what it reads and what it writes; a read-only stream what it reads."""

    copy: float
    read: float


@dataclass(frozen=True, slots=True)
class PrefillResult:
    tokens: int
    tok_s: Spread


@dataclass(frozen=True, slots=True)
class DecodeResult:
    """`context` when the first timed token was made; `bytes_per_token` at the middle of the run."""

    context: int
    tok_s: Spread
    step_s: float
    bytes_per_token: int
    share_of_copy: float
    share_of_read: float


@dataclass(frozen=True, slots=True)
class BenchReport:
    backend: str
    device: str
    load_s: float
    compile_s: float
    first_token_s: Spread  # of a prompt of FIRST_TOKEN_PROMPT tokens, everything warm
    weight_bytes: int
    copy_bytes: int  # INT8 weights in half precision, besides
    ceilings: Ceilings
    prefill: tuple[PrefillResult, ...]
    decode: tuple[DecodeResult, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@runtime_checkable
class MeasuresItself(Protocol):
    """A runner whose memory is not the host's."""

    device_name: str

    def ceilings(self) -> tuple[float, float]:
        """Bytes per second of a copy (read + written) and of a read-only stream."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A runner to measure. It has no tokenizer: the ids are random."""

    runner: Runner
    model: ModelDefinition
    backend: BackendChoice
    load_s: float
    warnings: tuple[str, ...] = ()


def load_for_bench(
    path: Path,
    options: EngineOptions,
    *,
    noise: bool,
    shape: ModelConfig | None = None,
    on_progress: OnProgress = silent,
) -> Loaded:
    """A model's folder; with `noise` a config.json (or a folder with one) whose weights are made up.

    `shape` takes the config.json's place, for noise.

    Raises:
        ModelError, BackendError: as loading for an answer does.
    """
    start = time.perf_counter()
    file = path / "config.json" if path.is_dir() else path
    config = shape or ModelConfig.from_dict(read_json_object(file, max_bytes=4 << 20), str(file))
    choice = choose_backend(options.backend)
    files: WeightFiles | None = None
    warnings: tuple[str, ...] = ()
    if noise:
        model = define_model(config, tied=config.tie_word_embeddings)
    else:
        files = WeightFiles.open(path)
        model, warnings = define_from_files(config, files)
    runner = load_runner(choice, model, files, options.for_loading(config), on_progress)
    return Loaded(runner, model, choice, time.perf_counter() - start, warnings)


def run_bench(
    runner: Runner,
    model: ModelDefinition,
    options: BenchOptions,
    *,
    load_s: float = 0.0,
    on_progress: OnProgress = silent,
) -> BenchReport:
    """Measure `runner`.

    Raises:
        UsageError: a length that the model's or the device's context can't hold, or a count below 1.
    """
    _check(runner, model, options)
    bench = _Bench(runner, model, options, on_progress)
    own = runner if isinstance(runner, MeasuresItself) else None
    ceilings = Ceilings(*own.ceilings()) if own else cpu_ceilings()
    prefill = tuple(bench.prefill(tokens) for tokens in options.prefill)
    first_token = bench.first_token()
    decode = tuple(bench.decode(context, ceilings) for context in options.contexts)
    return BenchReport(
        backend=runner.backend_name,
        device=own.device_name if own else "CPU",
        load_s=load_s,
        compile_s=runner.compile_s,
        first_token_s=first_token,
        weight_bytes=runner.weight_bytes,
        copy_bytes=runner.copy_bytes,
        ceilings=ceilings,
        prefill=prefill,
        decode=decode,
    )


def _check(runner: Runner, model: ModelDefinition, options: BenchOptions) -> None:
    counts = {"--tokens": options.tokens - 1, "--repeat": options.repetitions}
    counts |= {"--prefill": min(options.prefill, default=1), "--decode-at": min(options.contexts, default=1)}
    for name, value in counts.items():
        if value < 1:
            least = 2 if name == "--tokens" else 1
            raise UsageError(f"{name} must be at least {least}, found {value + least - 1}")
    limit = min(model.config.max_context, runner.context_limit or model.config.max_context)
    longest = max(*options.prefill, *(context + options.tokens for context in options.contexts), FIRST_TOKEN_PROMPT, 0)
    if longest > limit:
        raise UsageError(f"{longest:,} tokens are asked for, the context holds {limit:,}", hint="ask for fewer")


class _Bench:
    """One runner under measurement; the ids are random, which no kernel cares about."""

    def __init__(self, runner: Runner, model: ModelDefinition, options: BenchOptions, on_progress: OnProgress) -> None:
        self._runner = runner
        self._model = model
        self._options = options
        self._on_progress = on_progress
        self._rng = np.random.default_rng(0)
        self._done = 0
        kinds = len(options.prefill) + 1 + len(options.contexts)
        self._total = kinds * (options.warmup + options.repetitions)

    def _ids(self, count: int) -> list[int]:
        return [int(i) for i in self._rng.integers(0, self._model.config.vocab_size, count)]

    def _repeat(self, measure: Callable[[], float]) -> Spread:
        values = []
        for run in range(self._options.warmup + self._options.repetitions):
            value = measure()
            if run >= self._options.warmup:
                values.append(value)
            self._done += 1
            self._on_progress(ProgressEvent(TASK, self._done, self._total, "tokens"))
        return Spread.of(values)

    def prefill(self, tokens: int) -> PrefillResult:
        def measure() -> float:
            cache = self._runner.new_cache(tokens)
            ids = self._ids(tokens)
            start = time.perf_counter()
            self._runner.prefill(cache, ids)
            return tokens / (time.perf_counter() - start)

        return PrefillResult(tokens, self._repeat(measure))

    def first_token(self) -> Spread:
        def measure() -> float:
            cache = self._runner.new_cache(FIRST_TOKEN_PROMPT + 2)
            ids = self._ids(FIRST_TOKEN_PROMPT)
            start = time.perf_counter()
            self._runner.prefill(cache, ids)
            with closing(self._runner.decode(cache, self._options.sampling, None, len(ids))) as steps:
                next(steps)
                return time.perf_counter() - start

        return self._repeat(measure)

    def decode(self, context: int, ceilings: Ceilings) -> DecodeResult:
        tokens = self._options.tokens
        cache = self._runner.new_cache(context + tokens)
        ids = self._ids(context)
        if context > 1:
            self._runner.prefill(cache, ids[:-1])

        def measure() -> float:
            cache.truncate(context - 1)
            self._runner.prefill(cache, ids[-1:])
            with closing(self._runner.decode(cache, self._options.sampling, None, context)) as steps:
                next(steps)
                start = time.perf_counter()
                for _ in range(tokens - 1):
                    next(steps)
                return (tokens - 1) / (time.perf_counter() - start)

        spread = self._repeat(measure)
        moved = decode_bytes(self._runner, context + tokens // 2)
        rate = moved * spread.median
        return DecodeResult(context, spread, 1 / spread.median, moved, rate / ceilings.copy, rate / ceilings.read)


def decode_bytes(runner: Runner, context: int) -> int:
    """The least that one decode step reads at `context` tokens."""
    return runner.step_weight_bytes + runner.kv_bytes_per_token * context


def cpu_ceilings() -> Ceilings:
    """A copy by NumPy on one thread; a matrix read through BLAS by as many as it takes."""
    rows = CPU_CEILING_BYTES // 4 // 4096
    source, target = np.ones((rows, 4096), np.float32), np.zeros((rows, 4096), np.float32)
    vector = np.ones(4096, np.float32)
    copy = _fastest(lambda: np.copyto(target, source))
    read = _fastest(lambda: np.dot(source, vector))
    return Ceilings(2 * source.nbytes / copy, source.nbytes / read)


def _fastest(action: Callable[[], object], runs: int = 5) -> float:
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return min(times)
