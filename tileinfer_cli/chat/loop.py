"""The chat loop: read a message or a slash command, show the answer, and go on whatever happens.

In front of a person an error or Ctrl-C ends the turn and not the session. In a pipe the first error ends the run
with its exit code, as a script expects.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tileinfer_cli import opening
from tileinfer_cli.answer import AnswerView, print_ending, stats_text
from tileinfer_cli.render import print_error, print_note
from tileinfer_cli.terminal import keys_unseen
from tileinfer_core.errors import TileinferError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tileinfer_cli.chat.editor import Reader
    from tileinfer_cli.chat.swap import Models
    from tileinfer_cli.options import StopFlags, ThinkingFlags
    from tileinfer_cli.terminal import Streams
    from tileinfer_core.engine import Request
    from tileinfer_core.events import EventStream
    from tileinfer_core.session import Session
    from tileinfer_core.settings import Setting, Settings


@dataclass
class Chat:
    """One conversation at the terminal, and the settings of its next answer."""

    streams: Streams
    session: Session
    settings: Settings
    flags: dict[str, float | int | None]  # sampling, by name; /set writes here too
    until: StopFlags
    thinking: ThinkingFlags
    models: Models
    stats: bool = False
    quiet: bool = False
    set_here: set[str] = field(default_factory=set)  # names that /set has given a value
    leaving: bool = False
    edit: Callable[[str], str | None] | None = None  # the reader's, while run_chat runs

    def wanted(self) -> opening.Wanted:
        """The next answer's request. A seed that nobody fixed is drawn anew, so that /retry gives another answer."""
        engine = self.session.engine
        wanted = opening.wanted(engine.generation, self.settings, self.flags, self.until, self.thinking)
        sampling = {name: self._named(name, setting) for name, setting in wanted.sampling.items()}
        return replace(wanted, sampling=sampling, max_tokens=self._named("max_tokens", wanted.max_tokens))

    def _named(self, name: str, setting: Setting[Any]) -> Setting[Any]:
        return replace(setting, origin="/set") if name in self.set_here else setting

    def gauge(self) -> str:
        used, total = self.session.used_tokens, self.session.engine.context_length
        return f"{used:,} tokens used, {max(total - used, 0):,} left"

    def status(self) -> str:
        """The gauge, or why there is none: the template of another model may refuse the conversation."""
        try:
            return self.gauge()
        except TileinferError:
            return "the model's chat template refuses this conversation"

    def answer(self, text: str) -> None:
        """Sends one message and shows what comes back."""
        self._show(lambda request: self.session.send(text, request))

    def answer_again(self) -> None:
        """The last message once more; its old answer stays until the new one has said something."""
        self._show(self.session.retry)

    def answer_instead(self, text: str) -> None:
        """Another message in place of the last one."""
        self._show(lambda request: self.session.retry(request, text))

    def go_on(self) -> None:
        """More of the last answer, which was cut short."""
        self._show(self.session.go_on, begun=len(self.session.last_answer or ""))

    def _show(self, ask: Callable[[Request], EventStream], begun: int = 0) -> None:
        """`begun` characters of the answer are on the screen already."""
        wanted, before = self.wanted(), self.session.last

        def said() -> str:
            last = self.session.settled
            return "" if last is None or last is before else last.text[begun:]

        view = AnswerView(
            self.streams, show_thinking=opening.shows_thinking(self.streams, self.thinking), quiet=self.quiet
        )
        with keys_unseen(self.streams.stdin):
            finished = view.show(ask(wanted.request), said)
        print_ending(self.streams, finished, limit_origin=wanted.max_tokens.origin)
        if self.stats:
            print_note(self.streams.err, stats_text(finished))


def run_chat(chat: Chat, reader: Reader) -> None:
    """Until EOF, /exit, or Ctrl-C twice at the prompt (which raises KeyboardInterrupt)."""
    chat.edit = reader.edit
    while not chat.leaving:
        message = reader.read() if not reader.interactive else _read_patiently(chat, reader)
        if message is None:
            return
        try:
            take(chat, message)
        except KeyboardInterrupt:
            if not reader.interactive:
                raise
            print_note(chat.streams.err, "interrupted")
        except TileinferError as error:
            if not reader.interactive:
                raise
            chat.streams.err.end_line()
            print_error(chat.streams.err, str(error), error.hint)
        if reader.interactive:
            chat.streams.err.write("\n")


def _read_patiently(chat: Chat, reader: Reader) -> str | None:
    """A message that can't be used (not UTF-8, say) is a reason to ask again."""
    while True:
        try:
            return reader.read()
        except TileinferError as error:
            print_error(chat.streams.err, str(error), error.hint)


def take(chat: Chat, message: str) -> None:
    """A slash command is carried out; `//` starts a message with a slash; all else goes to the model."""
    from tileinfer_cli.chat import slash

    if message.startswith("//"):
        chat.answer(message[1:])
    elif slash.is_command(message):
        slash.carry_out(chat, message)
    else:
        chat.answer(message)
