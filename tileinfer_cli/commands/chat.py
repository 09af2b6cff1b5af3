"""`tileinfer chat`: a conversation that keeps its KV cache."""

from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

from tileinfer_cli import opening, render
from tileinfer_cli.chat import slash
from tileinfer_cli.chat.editor import canvas_of, new_reader
from tileinfer_cli.chat.loop import Chat, run_chat
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
from tileinfer_cli.terminal import keys_kept

if TYPE_CHECKING:
    from tileinfer_core.engine import Engine

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
    canvas = canvas_of(streams)
    with keys_kept(streams.stdin, canvas) if canvas is not None else nullcontext():
        engine = models.open(where.model)
        opening.warn_of_no_switch(cli, engine, thinking.think)
        from tileinfer_core.session import Session

        session = Session(engine, opening.system_text(settings, system))
        flags = dict(asdict(sampling))
        chat = Chat(streams, session, settings, flags, until, thinking, models, stats=stats, quiet=quiet)
        chat.wanted()  # a setting out of range is refused before the first message
        reader = new_reader(streams, canvas, settings.history_path, partial(slash.complete, chat), chat.status)
        if reader.interactive and not quiet:
            _greet(cli, engine)
        run_chat(chat, reader)


def _greet(cli: Cli, engine: "Engine") -> None:
    err = cli.streams.err
    render.print_note(err, f"{engine.folder.name} · {engine.backend.name} ({engine.backend.reason})")
    render.print_note(err, f"{engine.context_length:,} tokens of context · /help lists the commands")
    err.write("\n")
