"""Where a message comes from: a line editor on a terminal, plain lines elsewhere.

On a terminal Enter sends, Alt-Enter starts a new line, pasted text stays one message (bracketed paste), and the
history file survives. Ctrl-C clears the line, a second one in a row leaves; Ctrl-D on an empty line leaves.

In a pipe or a file each line is one message; lines between two lines of three double quotes are one message. Empty
lines are skipped. The prompt and everything the editor draws go to stderr: stdout has the answers alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
from typing import TYPE_CHECKING, Any, Protocol

from tileinfer_cli.patience import read_line
from tileinfer_cli.prompt import MAX_PROMPT_BYTES, decode_utf8
from tileinfer_cli.signals import ENDING
from tileinfer_core.errors import ContextLengthError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import CompleteEvent, Completer, Completion
    from prompt_toolkit.document import Document
    from prompt_toolkit.formatted_text import AnyFormattedText
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.output.vt100 import Vt100_Output

    from tileinfer_cli.terminal import Streams, TextStream

    # From a text to (where the word begins that is completed, what it may become).
    Complete = Callable[[str], Iterable[tuple[int, str]]]

PROMPT = "› "
BLOCK = '"""'
_LEAVE_HINT = "Ctrl-C again to leave"


class Reader(Protocol):
    """`interactive` readers have a person in front, who is told of an error and goes on."""

    interactive: bool

    def read(self) -> str | None:
        """The next message, never empty; None at the end. Raises KeyboardInterrupt to leave."""

    def edit(self, text: str) -> str | None:
        """The text as the person changed it; None if they gave up. UsageError where there is no editor."""


class LineReader:
    """Messages from a pipe, a file, or a terminal too plain for the editor."""

    def __init__(self, streams: Streams) -> None:
        self._source: Any = getattr(streams.stdin, "buffer", None)
        self.interactive = streams.stdin_is_terminal
        self._prompt_on = streams.err if self.interactive and streams.err.look.terminal else None
        self._leaving = False  # Ctrl-C was the last key

    def read(self) -> str | None:
        while True:
            try:
                text = self._message()
            except KeyboardInterrupt:
                if self._leaving or self._prompt_on is None:
                    raise
                self._leaving = True
                self._prompt_on.write(f"\n{_LEAVE_HINT}\n")
                continue
            self._leaving = False
            if text is None or text.strip():
                return text

    def edit(self, text: str) -> str | None:
        del text
        raise UsageError("/edit alone needs a terminal with a line editor", hint="/edit TEXT puts TEXT in its place")

    def _message(self) -> str | None:
        line = self._line()
        return self._block() if line is not None and line.strip() == BLOCK else line

    def _block(self) -> str:
        lines = []
        while (line := self._line()) is not None and line.strip() != BLOCK:
            lines.append(line)
        return "\n".join(lines)

    def _line(self) -> str | None:
        if self._source is None:
            return None
        if self._prompt_on is not None:
            self._prompt_on.write(PROMPT)
        data = read_line(self._source, MAX_PROMPT_BYTES + 1)
        if len(data) > MAX_PROMPT_BYTES:
            raise ContextLengthError(f"a line has more than {MAX_PROMPT_BYTES:,} bytes")
        return decode_utf8(data, "stdin").rstrip("\r\n") if data else None


class LineEditor:
    """prompt_toolkit, drawn on `canvas` (stderr if that is a terminal). `status` is shown while the line is empty."""

    interactive = True

    def __init__(
        self, canvas: TextStream, err: TextStream, history: Path, complete: Complete, status: Callable[[], str]
    ) -> None:
        self._status = status
        self._leaving = False  # Ctrl-C was the last key
        self._editing = False
        self._session = _new_session(canvas, open_history(history, err), complete, self)

    def placeholder(self) -> AnyFormattedText:
        """Shown after the prompt while the line is empty, and gone with the first key: nothing is left behind. A search
        (Ctrl-R) shows what it finds in an empty line."""
        from prompt_toolkit.application import get_app

        if get_app().is_done or get_app().layout.is_searching:
            return []
        return [("class:placeholder", _LEAVE_HINT if self._leaving else self._status())]

    def read(self) -> str | None:
        while True:
            self._leaving = False
            try:
                text = self._prompt("")
            except EOFError:
                return None
            if text.strip():
                return text

    def edit(self, text: str) -> str | None:
        """Ctrl-C, Ctrl-D or an empty line gives up."""
        self._editing = True
        try:
            text = self._prompt(text)
        except (EOFError, KeyboardInterrupt):
            return None
        finally:
            self._editing = False
        return text if text.strip() else None

    def _prompt(self, text: str) -> str:
        handlers = {number: signal.getsignal(number) for number in ENDING}
        try:
            text = self._session.prompt(PROMPT, default=text, pre_run=self._leave_on_signals)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)  # the event loop has put the default back
        if any("\ud800" <= char <= "\udfff" for char in text):
            raise UsageError("the message is not UTF-8 text")
        return text

    def _leave_on_signals(self) -> None:
        """An exception of a signal handler inside the event loop would leave the terminal in raw mode."""
        import asyncio

        loop, app = asyncio.get_running_loop(), self._session.app

        def leave(number: int) -> None:
            if not app.is_done:  # by another signal, or by Enter
                app.exit(exception=SystemExit(128 + number))

        for number in ENDING:
            if signal.getsignal(number) is not signal.SIG_IGN:
                with contextlib.suppress(NotImplementedError):  # Windows
                    loop.add_signal_handler(number, leave, number)

    def bindings(self) -> KeyBindings:
        from prompt_toolkit.filters import is_searching
        from prompt_toolkit.key_binding import KeyBindings

        keys, editing = KeyBindings(), ~is_searching  # a search has an Enter and a Ctrl-C of its own

        @keys.add("enter", filter=editing)
        def _send(event: Any) -> None:
            event.current_buffer.validate_and_handle()

        @keys.add("escape", "enter")
        def _new_line(event: Any) -> None:
            event.current_buffer.insert_text("\n")

        @keys.add("c-c", filter=editing)
        @keys.add("<sigint>", filter=editing)
        def _clear_or_leave(event: Any) -> None:
            if self._leaving or self._editing:
                event.app.exit(exception=KeyboardInterrupt())
            event.current_buffer.reset()
            self._leaving = True

        return keys

    def typed(self, _buffer: object) -> None:
        self._leaving = False


def canvas_of(streams: Streams) -> TextStream | None:
    """What a line editor can be drawn on, where a person types; None where lines have to do."""
    drawable = (stream for stream in (streams.err, streams.out) if stream.look.motion)
    return next(drawable, None) if streams.stdin_is_terminal else None


def new_reader(
    streams: Streams, canvas: TextStream | None, history: Path, complete: Complete, status: Callable[[], str]
) -> Reader:
    """The editor, drawn on `canvas` of canvas_of; plain lines where there is none."""
    if canvas is not None:
        return LineEditor(canvas, streams.err, history, complete, status)
    return LineReader(streams)


def _new_session(canvas: TextStream, history: History, complete: Complete, editor: LineEditor) -> PromptSession[str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.filters import Condition
    from prompt_toolkit.layout.processors import TabsProcessor
    from prompt_toolkit.shortcuts import CompleteStyle
    from prompt_toolkit.styles import Style

    session: PromptSession[str] = PromptSession(
        output=_new_output(canvas),
        history=history,
        multiline=True,
        key_bindings=editor.bindings(),
        completer=_new_completer(complete),
        complete_while_typing=False,
        complete_style=CompleteStyle.READLINE_LIKE,  # a menu would need rows kept free below the prompt
        input_processors=[TabsProcessor(char1=" ", char2=" ")],  # else ^I
        placeholder=editor.placeholder,
        prompt_continuation="  ",
        reserve_space_for_menu=0,
        style=Style.from_dict({"placeholder": "fg:ansibrightblack", "prompt": "bold"}),
        erase_when_done=False,
        enable_suspend=True,
        enable_history_search=Condition(lambda: False),
    )
    session.default_buffer.on_text_changed += editor.typed
    return session


def _new_output(canvas: TextStream) -> Vt100_Output:
    from prompt_toolkit.data_structures import Size
    from prompt_toolkit.output.color_depth import ColorDepth
    from prompt_toolkit.output.vt100 import Vt100_Output

    class Output(Vt100_Output):
        def disable_bracketed_paste(self) -> None:
            """Not between two prompts: keys_kept (terminal.py) does it at the end."""

    def canvas_size() -> Size:
        size = os.get_terminal_size(canvas.descriptor or 0)
        return Size(rows=size.lines or 24, columns=size.columns or 80)

    # No cursor position requests: a terminal that does not answer them delays the prompt, a slow one answers too late.
    return Output(
        canvas.file,  # type: ignore[arg-type]
        canvas_size,
        term=os.environ.get("TERM"),
        enable_cpr=False,
        default_color_depth=None if canvas.look.colour else ColorDepth.DEPTH_1_BIT,
    )


def _new_completer(complete: Complete) -> Completer:
    """Of what stands before the cursor in a message of one line."""
    from prompt_toolkit.completion import Completer, Completion

    class SlashCompleter(Completer):
        def get_completions(self, document: Document, _event: CompleteEvent) -> Iterator[Completion]:
            for start, word in complete(document.text_before_cursor):
                yield Completion(word, start_position=start - document.cursor_position)

    return SlashCompleter()


def open_history(path: Path, err: TextStream) -> History:
    """The history file, readable by its owner only. Where it can't be kept, the session has one in memory."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    from tileinfer_cli.render import print_warning

    class ForgivingHistory(FileHistory):
        def store_string(self, string: str) -> None:
            try:
                super().store_string(string)
            except OSError as error:
                print_warning(err, f"{path}: the history can't be kept: {error.strerror}")

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600))
    except OSError as error:
        print_warning(err, f"{path}: the history can't be kept: {error.strerror}")
        return InMemoryHistory()
    return ForgivingHistory(path)
