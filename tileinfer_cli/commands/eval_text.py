"""`tileinfer eval`: how well a model predicts a text, alone or against another model."""

from pathlib import Path
from typing import Annotated

import typer

from tileinfer_cli import evaluation
from tileinfer_cli.commandline import Cli
from tileinfer_cli.options import AgainstOption, JsonFlag, ModelFlags, QuietFlag
from tileinfer_cli.prompt import read_input

NAME = "eval"
SHORT = "perplexity of a text"
EXAMPLES = """
Examples:
  tileinfer eval book.txt
  tileinfer eval book.txt -m qwen3:0.6b --window 1024 --json
  tileinfer eval book.txt -m demo-int8 --against demo
"""


def run(
    cli: Cli,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A text, UTF-8 (- is stdin).", show_default=False)],
    *,
    where: ModelFlags,
    against: AgainstOption = None,
    window: Annotated[
        int | None,
        typer.Option(
            "--window", metavar="N", help="Tokens read at once. Without it: the context, or 1,024 with --against."
        ),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option("--tokens", metavar="N", help="Score the first N tokens. Without it: all.")
    ] = None,
    as_json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Measure the perplexity of a text: lower is better. With --against, also how far two models' predictions differ.

    The other model uses the same flags, but keeps its keys and values as its own folder says.
    """
    text = read_input(cli.streams, file) or ""
    limits = evaluation.Limits(window, tokens)
    if against is None:
        evaluation.score(cli, where, text, limits, as_json=as_json, quiet=quiet)
    else:
        evaluation.compare_models(cli, where, against, text, limits, as_json=as_json, quiet=quiet)
