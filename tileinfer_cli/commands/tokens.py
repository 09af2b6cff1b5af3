"""`tileinfer tokens`: what a prompt becomes, after the template, before the model. Loads no weights."""

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
    pieces = [{"id": token, "text": encoder.tokenizer.piece(token)} for token in ids]
    if as_json:
        render.print_json(cli.streams.out, pieces)
        return
    width = len(str(max(ids, default=0)))
    for piece in pieces:
        cli.streams.out.write(f"{piece['id']:>{width}}  {piece['text']!r}\n")
    render.print_note(cli.streams.err, f"{len(ids):,} token{'' if len(ids) == 1 else 's'}")
