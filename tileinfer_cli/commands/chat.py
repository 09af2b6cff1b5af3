"""`tileinfer chat`: a conversation that keeps its KV cache."""

from dataclasses import asdict

from tileinfer_cli import opening, render
from tileinfer_cli.chat.editor import Reader, new_reader
from tileinfer_cli.chat.loop import Chat, run_chat
from tileinfer_cli.chat.slash import COMMANDS
from tileinfer_cli.chat.swap import Models
from tileinfer_cli.commandline import Cli
from tileinfer_cli.options import (
    ModelFlags,
    QuietFlag,
    SamplingFlags,
    StatsFlag,
    StopFlags,
    SystemOption,
    ThinkingFlags,
)

NAME = "chat"
SHORT = "talk with a model"
EXAMPLES = """
Examples:
  tileinfer chat
  tileinfer chat -m qwen3:0.6b --system "Answer in one sentence."
  tileinfer chat | tee answers.txt

On a terminal Enter sends and Alt-Enter starts a new line. In a pipe each line is one
message; lines between two lines of three double quotes are one message.
"""


def run(
    cli: Cli,
    *,
    where: ModelFlags,
    system: SystemOption = None,
    sampling: SamplingFlags,
    until: StopFlags,
    thinking: ThinkingFlags,
    stats: StatsFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Talk with a model. /help lists the commands of the conversation; Ctrl-D leaves."""
    streams = cli.streams
    streams.out.require()
    settings = opening.load_settings()
    models = Models(cli, where, settings, quiet)
    engine = models.open(where.model)
    opening.warn_of_no_switch(cli, engine, thinking.think)
    from tileinfer_core.session import Session

    session = Session(engine, opening.system_text(settings, system))
    flags = dict(asdict(sampling))
    chat = Chat(streams, session, settings, flags, until, thinking, models, stats=stats, quiet=quiet)
    chat.wanted()  # a setting out of range is refused before the first message
    reader: Reader = new_reader(streams, settings.history_path, [f"/{name}" for name in COMMANDS], chat.status)
    if reader.interactive and not quiet:
        render.print_note(streams.err, f"{engine.folder.name} · {engine.backend.name} ({engine.backend.reason})")
        render.print_note(streams.err, f"{engine.context_length:,} tokens of context · /help lists the commands")
        streams.err.write("\n")
    run_chat(chat, reader)
