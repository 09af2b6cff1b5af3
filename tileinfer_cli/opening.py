"""From flags and settings to a loaded model and a request: what every command that runs a model does first."""

from __future__ import annotations

import dataclasses
import enum
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tileinfer_cli.prompt import argument_text
from tileinfer_cli.render import Progress, print_warning
from tileinfer_core.errors import UsageError
from tileinfer_core.settings import Setting, Settings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tileinfer_cli.commandline import Cli
    from tileinfer_cli.options import CompilerFlags, ModelFlags, PromptFlags, StopFlags, ThinkingFlags
    from tileinfer_cli.terminal import Streams
    from tileinfer_core.backends.select import BackendChoice
    from tileinfer_core.bench import Loaded
    from tileinfer_core.compiler_settings import CompilerSettings
    from tileinfer_core.config import ModelConfig
    from tileinfer_core.engine import Engine, EngineOptions, Request
    from tileinfer_core.generation_config import GenerationConfig
    from tileinfer_core.messages import Message
    from tileinfer_core.store import ModelFolder, Store


def load_settings() -> Settings:
    return Settings.load(os.environ)


def open_store(settings: Settings) -> Store:
    from tileinfer_core.store import Store

    return Store.from_settings(settings)


def find_model(cli: Cli, settings: Settings, reference: str | None) -> ModelFolder:
    """The model of -m, else of the settings. A .gguf file is converted on its first use, which shows progress."""
    with Progress(cli.streams.err) as progress:
        return open_store(settings).resolve(reference if reference is not None else settings.model.value, progress)


def find_model_to_run(cli: Cli, settings: Settings, reference: str | None) -> ModelFolder:
    """As find_model; the disk begins to fetch its weights, which are needed in 0.1 s."""
    from tileinfer_core.read_ahead import read_ahead

    folder = find_model(cli, settings, reference)
    read_ahead(folder.path)
    return folder


def engine_options(flags: ModelFlags, settings: Settings) -> EngineOptions:
    from tileinfer_core.engine import EngineOptions

    set_compiler(flags, settings)
    return EngineOptions(
        backend=flags.backend.value if flags.backend else settings.backend.value,
        context=flags.context if flags.context is not None else settings.context.value,
        kv=flags.kv.value if flags.kv else settings.kv.value,
        half_copies=flags.half_copies if flags.half_copies is not None else settings.half_copies.value,
    )


def set_compiler(flags: CompilerFlags, settings: Settings) -> CompilerSettings:
    """Time limit and cache of the kernels' compiler, in the environment that it reads when it is imported."""
    from tileinfer_core.compiler_settings import NAMES, configure_compiler

    return configure_compiler(os.environ, {name: _chosen(name, flags, settings) for name in NAMES})


def _chosen(name: str, flags: CompilerFlags, settings: Settings) -> Setting[Any]:
    """The flag, else the setting of the same name."""
    value = getattr(flags, name)
    found: Setting[Any] = getattr(settings, name)
    if value is None:
        return found
    return Setting(value, ("--no-" if value is False else "--") + name.replace("_", "-"))


def load_engine(cli: Cli, folder: ModelFolder | Path, options: EngineOptions, *, quiet: bool) -> Engine:
    """Loads the model. Its warnings go to stderr."""
    from tileinfer_core.engine import Engine

    with Progress(cli.streams.err, quiet=quiet) as progress:
        engine = Engine.load(folder, options, progress)
    for warning in engine.warnings:
        print_warning(cli.streams.err, warning)
    _say_fallback(cli, options, engine.backend, quiet=quiet)
    return engine


def load_for_bench(
    cli: Cli, flags: ModelFlags, config: Path | None, *, quiet: bool, shape: ModelConfig | None = None
) -> tuple[str, Loaded]:
    """A name, and the model without its text side; `config` is a shape to fill with noise in place of a model.

    `shape` is what `config` names where that is no file.
    """
    from tileinfer_core.bench import load_for_bench as load

    settings = load_settings()
    options = engine_options(flags, settings)
    if config is None:
        folder = find_model(cli, settings, flags.model)
        name, path = folder.name, folder.path
    else:
        name, path = f"random weights, {config}", config
    noise = config is not None
    with Progress(cli.streams.err, quiet=quiet) as progress:
        loaded = load(path, options, noise=noise, shape=shape, on_progress=progress)
    for warning in loaded.warnings:
        print_warning(cli.streams.err, warning)
    _say_fallback(cli, options, loaded.backend, quiet=quiet)
    return name, loaded


def save_text(path: Path, text: str) -> None:
    """Raises DiskError."""
    from tileinfer_core.errors import DiskError
    from tileinfer_core.files import expanded

    try:
        expanded(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise DiskError(f"{path} can't be written: {error.strerror or error}") from error


def _say_fallback(cli: Cli, options: EngineOptions, backend: BackendChoice, *, quiet: bool) -> None:
    """Why `auto` took the CPU, where there is a GPU to miss; a machine without one need not be told each time."""
    if options.backend == "auto" and backend.name == "cpu" and backend.has_gpu and not quiet:
        print_warning(cli.streams.err, f"on the CPU: {backend.reason}; `tileinfer doctor` has the cure")


def refuse_long_prompt(
    folder: ModelFolder, options: EngineOptions, prompt: list[Message] | str, *, think: bool | None
) -> None:
    """A prompt that can't fit is refused before the weights are loaded. Short texts are not encoded twice for it."""
    from tileinfer_core.config import ModelConfig
    from tileinfer_core.engine import check_length
    from tileinfer_core.prompting import PromptEncoder

    config = ModelConfig.load(folder.path)
    context = options.context or config.max_context
    text = prompt if isinstance(prompt, str) else "".join(message.content for message in prompt)
    if len(text) >= context:
        check_length(len(PromptEncoder.load(folder, config).encode(prompt, think=think)), context, config)


@dataclass(frozen=True)
class Wanted:
    """A request, and where its settings came from."""

    request: Request
    sampling: Mapping[str, Setting[Any]]
    max_tokens: Setting[int | None]

    @property
    def seed_was_drawn(self) -> bool:
        """True where the run can be repeated only by someone who is told the seed."""
        return self.sampling["seed"].origin == "random" and self.sampling["temperature"].value > 0


def wanted(
    generation: GenerationConfig,
    settings: Settings,
    sampling: Mapping[str, float | int | None],
    until: StopFlags,
    thinking: ThinkingFlags,
) -> Wanted:
    """The request that flags, config file, model and defaults add up to, in that order of precedence."""
    from tileinfer_core.engine import Request
    from tileinfer_core.sampling import SamplingParams, resolve_sampling

    resolved = resolve_sampling(sampling, settings, generation)
    limit: Setting[int | None] = settings.max_tokens
    if until.max_tokens is not None:
        limit = Setting(until.max_tokens, "--max-tokens")
    request = Request(
        sampling=SamplingParams.from_settings(resolved),
        max_tokens=limit.value,
        stop=tuple(argument_text(text, "--stop") for text in until.stop or ()),
        ignore_eos=until.ignore_eos,
        think=thinking.think,
        think_budget=thinking.think_budget,
    )
    return Wanted(request, resolved, limit)


def check_raw(words: PromptFlags, think: bool | None) -> None:
    """Refuses flags that --raw would leave without effect."""
    given = {"--system": words.system is not None, "--think": think is True, "--no-think": think is False}
    for flag, present in given.items():
        if words.raw and present:
            raise UsageError(f"--raw skips the chat template, so {flag} would have no effect")


def check_logprobs(*, as_json: bool, logprobs: bool) -> None:
    """Refuses a flag that would have no effect."""
    if logprobs and not as_json:
        raise UsageError("--logprobs prints to the document of --json, so without it it would have no effect")


def conversation(settings: Settings, words: PromptFlags, text: str) -> list[Message] | str:
    """What to encode: the text itself with --raw, else a system prompt (if one is set) and the user's message."""
    if words.raw:
        return text
    from tileinfer_core.messages import Message

    system = system_text(settings, words.system)
    return [*([Message("system", system)] if system is not None else []), Message("user", text)]


def system_text(settings: Settings, flag: str | None) -> str | None:
    """The system prompt of --system, else of the config file; None leaves it to the template."""
    return settings.system.value if flag is None else argument_text(flag, "--system")


def warn_of_no_switch(cli: Cli, engine: Engine, think: bool | None) -> None:
    """--think can only ask the template; most have nothing to ask. --no-think gets what it wants from them."""
    if think and engine.template is not None and not engine.template.switches_thinking:
        print_warning(cli.streams.err, "this model's chat template has no switch for thinking: --think changes nothing")


def shows_thinking(streams: Streams, thinking: ThinkingFlags) -> bool:
    """Thinking goes to stderr: by default where someone sits in front of it."""
    return streams.err.look.terminal if thinking.show_thinking is None else thinking.show_thinking


def plain(value: Any) -> Any:
    """Core dataclasses as JSON has them: field for field, paths and enums as text."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {key: plain(item) for key, item in asdict(value).items()}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if isinstance(value, (Path, enum.Enum)):
        return str(value)
    return value
