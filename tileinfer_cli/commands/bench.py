"""`tileinfer bench`: how fast a model runs here, and what share of the memory's speed that is."""

from typing import Annotated

import typer

from tileinfer_cli import benching
from tileinfer_cli.commandline import Cli
from tileinfer_cli.options import AgainstOption, JsonFlag, ModelFlags, QuietFlag, RandomWeightsOption

NAME = "bench"
SHORT = "speed of prefill and decoding"
EXAMPLES = """
Examples:
  tileinfer bench -m qwen3:4b
  tileinfer bench --prefill 512 --prefill 4096 --decode-at 512 --decode-at 32000
  tileinfer bench --random-weights Qwen3-4B --markdown
  tileinfer bench -m qwen3:4b-int8 --against qwen3:4b
"""
Lengths = list[int] | None


def run(
    cli: Cli,
    *,
    where: ModelFlags,
    random_weights: RandomWeightsOption = None,
    against: AgainstOption = None,
    prefill: Annotated[
        Lengths,
        typer.Option("--prefill", metavar="N", help="Tokens of a prompt to time; may be repeated. Without it: 512."),
    ] = None,
    decode_at: Annotated[
        Lengths,
        typer.Option(
            "--decode-at", metavar="N", help="Tokens of context to decode from; may be repeated. Without it: 512."
        ),
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", metavar="N", help="Tokens decoded in a run.")] = 64,
    repeat: Annotated[int, typer.Option("--repeat", metavar="N", help="Runs; the median counts.")] = 5,
    greedy: Annotated[bool, typer.Option("--greedy", help="Take the likeliest token, not a top-k 20 draw.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    as_json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Measure prefill, decoding, the first token, and the memory's own speed in the same run.

    With --against, a second model by the same flags, and how many times as fast the first is.
    """
    from tileinfer_core.bench import BenchOptions
    from tileinfer_core.sampling import SamplingParams

    base = BenchOptions(tokens=tokens, repetitions=repeat)
    options = BenchOptions(
        prefill=tuple(prefill or base.prefill),
        contexts=tuple(decode_at or base.contexts),
        tokens=tokens,
        repetitions=repeat,
        sampling=SamplingParams(temperature=0) if greedy else base.sampling,
    )
    models = benching.Models(where, random_weights, against)
    benching.run(cli, models, options, markdown=markdown, as_json=as_json, quiet=quiet)
