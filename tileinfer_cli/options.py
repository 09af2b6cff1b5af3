"""Every flag that more than one command has: its name, its default and its help text, written once.

A default of None means "not given": the value then comes from the config file, the model's own
generation_config.json or a documented default, in that order, and its origin is kept (settings.py, sampling.py).
Ranges are checked by the core, so that a flag, a config file and `/set` are refused by the same rule and words.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from tileinfer_cli.completion import models_here, models_to_pull

_MODEL, _QUANTIZE, _COMPILER, _PROMPT, _SAMPLING, _STOPPING, _THINKING, _OUTPUT = (
    "Model",
    "Quantization",
    "Compiler",
    "Prompt",
    "Sampling",
    "When to stop",
    "Thinking models",
    "Output",
)


class BackendName(enum.StrEnum):
    auto = "auto"
    cuda = "cuda"
    cpu = "cpu"


class KvFormat(enum.StrEnum):
    bf16 = "bf16"
    int8 = "int8"


class WeightFormat(enum.StrEnum):
    int8 = "int8"


class EmbeddingFormat(enum.StrEnum):
    int8 = "int8"
    bf16 = "bf16"


def _model_argument(text: str, names: Callable[[str], list[str]] = models_here) -> Any:
    return typer.Argument(metavar="MODEL", help=text, show_default=False, autocompletion=names)


ModelArgument = Annotated[str, _model_argument("Alias, ORG/NAME, folder or .gguf file.")]
PulledModelArgument = Annotated[str, _model_argument("Alias or ORG/NAME.", models_to_pull)]
StoredModelArgument = Annotated[str, _model_argument("Alias, ORG/NAME, or the .gguf file that a copy was made of.")]
ExaminedModelArgument = Annotated[
    str | None, _model_argument("Alias, ORG/NAME, folder or .gguf file. Without it: this machine.")
]
AgainstOption = Annotated[
    str | None,
    typer.Option("--against", metavar="MODEL", help="Another model to compare with.", autocompletion=models_here),
]
RandomWeightsOption = Annotated[
    Path | None,
    typer.Option(
        "--random-weights",
        metavar="CONFIG",
        help="A config.json, or a shape's name (Qwen3-4B), with made-up weights in place of a model.",
    ),
]
PromptArgument = Annotated[
    str | None, typer.Argument(metavar="PROMPT", help="The prompt; text on stdin follows it after a blank line.")
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.", rich_help_panel=_OUTPUT)]
QuietFlag = Annotated[
    bool, typer.Option("--quiet", "-q", help="Say nothing on stderr but warnings and errors.", rich_help_panel=_OUTPUT)
]
WorkersOption = Annotated[
    int | None, typer.Option("--workers", metavar="N", help="Compilers at a time. Without it: one a core, at most 8.")
]
LogprobsFlag = Annotated[
    bool,
    typer.Option("--logprobs", help="With --json: each new token with its log-probability.", rich_help_panel=_OUTPUT),
]
StatsFlag = Annotated[
    bool, typer.Option("--stats", help="Token counts, speeds and the seed on stderr.", rich_help_panel=_OUTPUT)
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        metavar="MODEL",
        help="Alias, ORG/NAME, folder or .gguf file. Without it: TILEINFER_MODEL, the config file, demo.",
        rich_help_panel=_MODEL,
        autocompletion=models_here,
    ),
]
BackendOption = Annotated[
    BackendName | None,
    typer.Option("--backend", help="Where the model runs. Without it: auto.", rich_help_panel=_MODEL),
]
ContextOption = Annotated[
    int | None,
    typer.Option(
        "--context",
        metavar="N",
        help="Tokens of context. Without it: the model's own, if that fits.",
        rich_help_panel=_MODEL,
    ),
]
KvOption = Annotated[
    KvFormat | None,
    typer.Option(
        "--kv",
        help="Keys and values: bf16, as the model has them, or int8, in half the memory. Without it: the model's own.",
        rich_help_panel=_MODEL,
    ),
]
HalfCopiesFlag = Annotated[
    bool | None,
    typer.Option(
        "--half-copies/--no-half-copies",
        help="On a GPU, INT8 weights in half precision too, in memory that is left over: prompts are faster.",
        rich_help_panel=_MODEL,
    ),
]
QuantizeOption = Annotated[
    WeightFormat | None,
    typer.Option("--quantize", help="Then make an INT8 model of it, MODEL-int8.", rich_help_panel=_QUANTIZE),
]
SystemOption = Annotated[
    str | None,
    typer.Option(
        "--system",
        "-s",
        metavar="TEXT",
        help='System prompt; "" sends an empty one in place of the template\'s own.',
        rich_help_panel=_PROMPT,
    ),
]
ThinkFlag = Annotated[
    bool | None,
    typer.Option("--think/--no-think", help="Ask the template for thinking, or for none.", rich_help_panel=_THINKING),
]


def _arch_option(otherwise: str) -> Any:
    text = f"Architecture, such as sm_90; may be repeated, or several with commas. Without it: {otherwise}."
    return typer.Option("--arch", metavar="SM_XX", help=text)


ArchOption = Annotated[list[str] | None, _arch_option("this machine's GPU")]
ArchToLookAtOption = Annotated[list[str] | None, _arch_option("this machine's GPU, else sm_90")]
ShapeOption = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        "-m",
        metavar="MODEL",
        help="Only the kernels of this model: a shape's name (Qwen3-4B), an alias or a model on disk; may be repeated.",
        autocompletion=models_here,
    ),
]


@dataclass(frozen=True)
class CompilerFlags:
    compiler_timeout_seconds: Annotated[
        float | None,
        typer.Option(
            "--compiler-timeout-seconds",
            metavar="S",
            help="Seconds that compiling one kernel may take.",
            rich_help_panel=_COMPILER,
        ),
    ] = None
    disk_cache: Annotated[
        bool | None,
        typer.Option("--disk-cache/--no-disk-cache", help="Keep compiled kernels, or none.", rich_help_panel=_COMPILER),
    ] = None
    cache_dir: Annotated[
        str | None,
        typer.Option("--cache-dir", metavar="DIR", help="Where compiled kernels are kept.", rich_help_panel=_COMPILER),
    ] = None
    cache_size_bytes: Annotated[
        int | None,
        typer.Option(
            "--cache-size-bytes",
            metavar="BYTES",
            help="The most that folder may hold; what was used longest ago goes first.",
            rich_help_panel=_COMPILER,
        ),
    ] = None


@dataclass(frozen=True)
class ModelFlags(CompilerFlags):
    model: ModelOption = None
    backend: BackendOption = None
    context: ContextOption = None
    kv: KvOption = None
    half_copies: HalfCopiesFlag = None


@dataclass(frozen=True)
class QuantizeFlags:
    group_size: Annotated[
        int | None,
        typer.Option(
            "--group-size",
            metavar="N",
            help="One scale for N columns everywhere; 0 for a row everywhere. Without it: a row, and groups of 64 in "
            "the layers that lose most.",
            rich_help_panel=_QUANTIZE,
        ),
    ] = None
    embedding: Annotated[
        EmbeddingFormat | None,
        typer.Option(
            "--embedding",
            help="Format of the embedding. Without it: int8 where it is the output head too; otherwise bf16, as the "
            "model has it, which is no slower. vLLM needs bf16.",
            rich_help_panel=_QUANTIZE,
        ),
    ] = None
    calibrate: Annotated[
        Path | None,
        typer.Option(
            "--calibrate",
            metavar="FILE",
            help="A text like yours: rounding errors are made to cancel on it. Slower, and closer to the original.",
            rich_help_panel=_QUANTIZE,
        ),
    ] = None
    eval_tokens: Annotated[
        int,
        typer.Option(
            "--eval-tokens",
            metavar="N",
            help="Tokens of the bundled text to measure the loss on; 0 is off.",
            rich_help_panel=_QUANTIZE,
        ),
    ] = 2048


@dataclass(frozen=True)
class PromptFlags:
    file: Annotated[
        Path | None,
        typer.Option(
            "--file", "-f", metavar="FILE", help="Read the prompt from FILE (- is stdin).", rich_help_panel=_PROMPT
        ),
    ] = None
    system: SystemOption = None
    raw: Annotated[
        bool,
        typer.Option("--raw", help="Complete the text as it is, without the chat template.", rich_help_panel=_PROMPT),
    ] = False


@dataclass(frozen=True)
class SamplingFlags:
    temperature: Annotated[
        float | None,
        typer.Option(
            "--temperature", "-t", metavar="X", help="How freely to choose; 0 is greedy.", rich_help_panel=_SAMPLING
        ),
    ] = None
    top_k: Annotated[
        int | None,
        typer.Option("--top-k", metavar="N", help="Keep the N likeliest tokens; 0 is off.", rich_help_panel=_SAMPLING),
    ] = None
    top_p: Annotated[
        float | None,
        typer.Option(
            "--top-p",
            metavar="P",
            help="Keep the likeliest that reach P together; 1 is off.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    min_p: Annotated[
        float | None,
        typer.Option(
            "--min-p", metavar="P", help="Drop tokens below P times the likeliest; 0 is off.", rich_help_panel=_SAMPLING
        ),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        typer.Option(
            "--repetition-penalty",
            metavar="X",
            help="Against tokens of prompt and answer; 1 is off.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    presence_penalty: Annotated[
        float | None,
        typer.Option(
            "--presence-penalty",
            metavar="X",
            help="Against tokens of the answer, once; 0 is off.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    frequency_penalty: Annotated[
        float | None,
        typer.Option(
            "--frequency-penalty",
            metavar="X",
            help="Against tokens of the answer, by count; 0 is off.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed", metavar="N", help="Repeat a run. Without it: drawn, and reported.", rich_help_panel=_SAMPLING
        ),
    ] = None


@dataclass(frozen=True)
class StopFlags:
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens",
            "-n",
            metavar="N",
            help="At most N new tokens. Without it: no limit.",
            rich_help_panel=_STOPPING,
        ),
    ] = None
    stop: Annotated[
        list[str] | None,
        typer.Option("--stop", metavar="TEXT", help="Stop before TEXT; may be repeated.", rich_help_panel=_STOPPING),
    ] = None
    ignore_eos: Annotated[
        bool,
        typer.Option("--ignore-eos", help="Go on after end-of-sequence tokens.", rich_help_panel=_STOPPING),
    ] = False


@dataclass(frozen=True)
class ThinkingFlags:
    think: ThinkFlag = None
    show_thinking: Annotated[
        bool | None,
        typer.Option(
            "--show-thinking/--hide-thinking",
            help="Show thinking, on stderr, or not. Without it: if stderr is a terminal.",
            rich_help_panel=_THINKING,
        ),
    ] = None
    think_budget: Annotated[
        int | None,
        typer.Option("--think-budget", metavar="N", help="End the thinking after N tokens.", rich_help_panel=_THINKING),
    ] = None
