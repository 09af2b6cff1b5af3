"""One loaded model: a prompt in, text events out. It keeps no conversation; session.py does."""

from __future__ import annotations

import contextlib
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tileinfer_core.answer_stream import AnswerStream
from tileinfer_core.backends.base import LoadOptions
from tileinfer_core.backends.select import BackendChoice, choose_backend, start_loading
from tileinfer_core.config import ModelConfig
from tileinfer_core.decode import Job, Tally, generate
from tileinfer_core.errors import ContextLengthError, UsageError
from tileinfer_core.generation_config import GenerationConfig
from tileinfer_core.models.define import define_from_files
from tileinfer_core.progress import OnProgress, silent
from tileinfer_core.prompting import Conversation, Prompt, PromptEncoder
from tileinfer_core.stopping import StopRules
from tileinfer_core.thinking import ThinkBudget
from tileinfer_core.weights import WeightFiles

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Iterator, Sequence

    from tileinfer_core.backends.base import Runner
    from tileinfer_core.chat_template import ChatTemplate
    from tileinfer_core.events import EventStream
    from tileinfer_core.kv_cache import KvCache
    from tileinfer_core.sampling import SamplingParams
    from tileinfer_core.store import ModelFolder
    from tileinfer_core.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How to load a model. `context` None takes the longest that model and memory allow.

    `prefill_chunk` tokens of a prompt go in one step; None takes what the backend does best. `kv` "int8" keeps keys and
    values in INT8, one scale for each token and head; "bf16" as the model has them; None leaves it to the folder.
    `half_copies`: on a GPU, INT8 weights in half precision too, for prompts, in memory that nothing else needs.
    """

    backend: str = "auto"
    context: int | None = None
    prefill_chunk: int | None = None
    kv: str | None = None
    half_copies: bool = True

    def for_loading(self, config: ModelConfig) -> LoadOptions:
        return LoadOptions(self.context, self.prefill_chunk, self.kv or config.kv or "bf16", self.half_copies)


@dataclass(frozen=True, slots=True)
class Request:
    """What one answer is asked to be. `max_tokens` None: until the model stops or the context is full.

    `think` reaches the chat template (None: its own default); `think_budget` closes the thinking after so many tokens.
    """

    sampling: SamplingParams
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    think: bool | None = None
    think_budget: int | None = None


@dataclass(frozen=True, slots=True)
class Engine:
    """Made by `load`. `warnings` are for the user; `backend` says which one runs and why."""

    folder: ModelFolder | Path
    config: ModelConfig
    generation: GenerationConfig
    encoder: PromptEncoder
    runner: Runner
    backend: BackendChoice
    context_length: int
    prefill_chunk: int
    load_s: float
    warnings: tuple[str, ...]

    @classmethod
    def load(
        cls, folder: ModelFolder | Path, options: EngineOptions | None = None, on_progress: OnProgress = silent
    ) -> Engine:
        """What can be refused is refused before anything waits for a weight.

        Raises:
            UsageError: a context longer than the model's.
            ModelError: damaged files, or a model that TileInfer can't run.
            BackendError: the backend can't run here, or there is not enough memory.
        """
        start = time.perf_counter()
        options = options or EngineOptions()
        path = folder if isinstance(folder, Path) else folder.path
        config = ModelConfig.load(path)
        context = _context(options.context, config)
        choice = choose_backend(options.backend)
        files = WeightFiles.open(path)
        model, warnings = define_from_files(config, files)
        loading = start_loading(choice, model, files, options.for_loading(config))
        try:
            with _short_turns():  # on the CPU, threads are reading the weights
                encoder = PromptEncoder.load(path, config)
                encoder.tokenizer.prepare()
                generation = GenerationConfig.load(path)
            runner = loading.finish(on_progress)
        except BaseException:
            loading.cancel()
            raise
        return cls(
            folder,
            config,
            generation,
            encoder,
            runner,
            choice,
            context_length=min(context, runner.context_limit or context),
            prefill_chunk=options.prefill_chunk or runner.prefill_chunk,
            load_s=time.perf_counter() - start,
            warnings=warnings,
        )

    @property
    def tokenizer(self) -> Tokenizer:
        return self.encoder.tokenizer

    @property
    def template(self) -> ChatTemplate | None:
        return self.encoder.template

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Every end-of-sequence id that generation_config, config or tokenizer names."""
        named = {*self.generation.eos_token_ids, *self.config.eos_token_ids, *self.tokenizer.eos_token_ids}
        return frozenset(named)

    def prompt_ids(
        self, conversation: Conversation, *, think: bool | None = None, date: dt.date | None = None
    ) -> Prompt:
        """The ids of messages by the chat template, or of a raw text. See PromptEncoder.encode for errors."""
        return self.encoder.encode(conversation, think=think, date=date)

    def new_cache(self) -> KvCache:
        """An empty cache for one sequence of up to `context_length` tokens."""
        return self.runner.new_cache(self.context_length)

    def generate(self, prompt: Sequence[int], request: Request, cache: KvCache | None = None) -> EventStream:
        """The events of one answer. What `cache` holds of the prompt already is not computed again.

        The request is checked here, not at the first event.

        Raises:
            ContextLengthError: the prompt leaves no room for one token; with both numbers.
            UsageError: an empty prompt, or a setting out of range.
        """
        return self.start(prompt, request, cache or self.new_cache())[1]

    def start(
        self, prompt: Sequence[int], request: Request, cache: KvCache, begun: Sequence[int] = ()
    ) -> tuple[Tally, EventStream]:
        """As `generate`, with the tally for a caller that must know how far an interrupted answer came.

        `begun` are the ids of an answer that was cut short: it goes on, and Finished has it whole.
        """
        prompt = Prompt.of(prompt)
        check_length(len(prompt) + len(begun), self.context_length, self.config)
        rules = StopRules(self.eos_token_ids, request.stop, request.max_tokens, request.ignore_eos)
        job = Job(
            runner=self.runner,
            cache=cache,
            prompt_ids=prompt.ids,
            sampling=request.sampling,
            valid_ids=self.tokenizer.valid_ids_mask,
            rules=rules,
            stream=AnswerStream(self.encoder, rules, prompt),
            budget=ThinkBudget(request.think_budget),
            closing_ids=self.encoder.closing_ids,
            prefill_chunk=self.prefill_chunk,
            load_s=self.load_s,
            begun=begun,
        )
        tally = Tally(job)
        return tally, generate(job, tally)

    def close(self) -> None:
        """Free the memory of the weights."""
        self.runner.close()


@contextlib.contextmanager
def _short_turns() -> Iterator[None]:
    """Python's threads wait 0.5 ms for each other in place of 5 ms: a thread that needs Python for a moment between
    long calls without it gets nearly all of its work done beside a thread that needs nothing else."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.0005)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def check_model(folder: ModelFolder | Path, options: EngineOptions) -> PromptEncoder:
    """What `Engine.load` would refuse without reading a weight is refused here. Returns the model's text side."""
    path = folder if isinstance(folder, Path) else folder.path
    config = ModelConfig.load(path)
    _context(options.context, config)
    choose_backend(options.backend)
    define_from_files(config, WeightFiles.open(path))
    GenerationConfig.load(path)
    return PromptEncoder.load(path, config)


def check_length(tokens: int, context_length: int, config: ModelConfig) -> None:
    """Raises ContextLengthError with both numbers where the prompt leaves no room for one token."""
    if tokens == 0:
        raise UsageError("the prompt is empty: there is nothing to continue")
    if tokens < context_length:
        return
    ways = ["shorten the prompt"]
    if context_length < config.max_context:
        ways.append(f"raise --context (this model allows {config.max_context:,})")
    else:
        ways.append("use a model with a longer context")
    raise ContextLengthError(
        f"the prompt has {tokens:,} tokens, the context holds {context_length:,} with the answer",
        hint=", or ".join(ways),
    )


def _context(asked: int | None, config: ModelConfig) -> int:
    if asked is None:
        return config.max_context
    if not 2 <= asked <= config.max_context:
        raise UsageError(f"--context must be from 2 to {config.max_context:,}, this model's longest, found {asked:,}")
    return asked
