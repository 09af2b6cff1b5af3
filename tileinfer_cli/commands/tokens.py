"""`tileinfer tokens`: what a prompt becomes, after the template, before the model. Loads no weights."""

import re

from tileinfer_cli import opening, render
from tileinfer_cli.commandline import Cli
from tileinfer_cli.options import JsonFlag, ModelOption, PromptArgument, PromptFlags, ThinkFlag
from tileinfer_cli.prompt import read_prompt

NAME = "tokens"
SHORT = "token ids and pieces of a prompt"
EXAMPLES = """
Examples:
  tileinfer tokens "Hello, world"
  tileinfer tokens --raw -f story.txt --json | jq length
"""


def run(
    cli: Cli,
    prompt: PromptArgument = None,
    *,
    model: ModelOption = None,
    words: PromptFlags,
    think: ThinkFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Print the token ids and text pieces of a prompt, and how many there are."""
    opening.check_raw(words, think)
    text = read_prompt(cli.streams, prompt, words.file)
    settings = opening.load_settings()
    folder = opening.find_model(cli, settings, model)
    from tileinfer_core.prompting import PromptEncoder

    encoder = PromptEncoder.load(folder)
    ids = encoder.encode(opening.conversation(settings, words, text), think=think)
    tokenizer = encoder.tokenizer
    if as_json:
        render.print_json(cli.streams.out, [{"id": token, "text": tokenizer.piece(token)} for token in ids])
        return
    width = len(str(max(ids, default=0)))
    for token in ids:
        cli.streams.out.write(f"{token:>{width}}  {_quoted(tokenizer.piece_bytes(token))}\n")
    render.print_note(cli.streams.err, f"{len(ids):,} token{'' if len(ids) == 1 else 's'}")


def _quoted(piece: bytes) -> str:
    """As Python writes a string; bytes that are no whole character as \\xf0."""
    return re.sub(r"\\udc([89a-f][0-9a-f])", r"\\x\1", repr(piece.decode("utf-8", "surrogateescape")))
