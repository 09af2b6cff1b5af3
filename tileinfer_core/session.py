"""A conversation with its KV cache. What the model has read stays read: only the ids that differ are computed again.

The history is always valid for a template that demands alternation: user, assistant, user, assistant … An answer that
is interrupted keeps what it said; if it said nothing, its question is taken back with it. The date that a template may
print is fixed when the session starts, so that midnight does not spoil the common prefix.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tileinfer_core.errors import DamagedModelError, UsageError
from tileinfer_core.events import Finished
from tileinfer_core.files import write_atomic
from tileinfer_core.jsonfile import read_json_object
from tileinfer_core.messages import Message

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tileinfer_core.decode import Tally
    from tileinfer_core.engine import Engine, Request
    from tileinfer_core.events import EventStream
    from tileinfer_core.prompting import Prompt

FILE_FORMAT = 1
KIND = "tileinfer session"
MAX_FILE_BYTES = 64 << 20


@dataclass(slots=True)
class SessionStats:
    """Sums over the answers of a session."""

    answers: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    completion_tokens: int = 0

    def add(self, finished: Finished) -> None:
        self.answers += 1
        self.prompt_tokens += finished.usage.prompt_tokens
        self.reused_tokens += finished.usage.reused_tokens
        self.completion_tokens += finished.usage.completion_tokens


@dataclass(slots=True)
class _Turn:
    """A question whose answer is being made. `finished` stays None when it is cut short.

    `replaced` is the exchange that comes back if nothing is said in its place. `thinking` is what an answer that goes
    on has thought before, where its ids do not tell.
    """

    question: str
    tally: Tally
    replaced: Sequence[Message] = ()
    thinking: str | None = None
    finished: Finished | None = None


class Session:
    """`messages` are the turns without the system prompt; `last` is the end of the last answer, interrupted or not.

    `system` None leaves a system prompt to the template; "" is an empty one.
    """

    def __init__(self, engine: Engine, system: str | None = None, *, date: dt.date | None = None) -> None:
        self.engine = engine
        self.system = system
        self.last: Finished | None = None
        self.stats = SessionStats()
        self._date = date or dt.datetime.now().astimezone().date()
        self._messages: list[Message] = []
        self._cache = engine.new_cache()
        self._turn: _Turn | None = None
        self._output_ids: list[int] | None = None  # of the last answer; None if it was not made here
        self._complete = False  # the last answer is known to have been ended by the model

    @property
    def messages(self) -> list[Message]:
        self._settle()
        return list(self._messages)

    @property
    def used_tokens(self) -> int:
        """Tokens that the conversation takes in the context, by the template, before the next question."""
        conversation = self._conversation()
        if not self._messages:
            return 0
        return len(self.engine.encoder.encode(conversation, date=self._date, add_generation_prompt=False))

    def send(self, text: str, request: Request) -> EventStream:
        """Ask, and get the events of the answer. A request that is refused leaves the session as it was.

        Raises:
            ContextLengthError: the conversation no longer fits; with both numbers.
            ModelError: the chat template refuses the conversation.
        """
        return self._ask(self._conversation(), text, request)

    @property
    def last_question(self) -> str | None:
        return self.messages[-2].content if self.messages else None

    def retry(self, request: Request, text: str | None = None) -> EventStream:
        """Ask the last question again, or `text` in its place. The old exchange is kept until something is said.

        Raises:
            UsageError: there is no answer to replace. Otherwise as `send`.
        """
        if not self.messages:
            raise UsageError("there is no answer to make again")
        *before, question, answer = self._conversation()
        events = self._ask(before, question.content if text is None else text, request, replaced=(question, answer))
        del self._messages[-2:]
        return events

    def go_on(self, request: Request) -> EventStream:
        """Go on with the last answer where it was cut short. The events have what is new, Finished the whole answer.

        Raises:
            UsageError: there is no answer, or the model has ended it itself. Otherwise as `send`.
        """
        if not self.messages:
            raise UsageError("there is no answer to go on with")
        if self._complete:
            raise UsageError("the last answer is complete: the model ended it itself", hint="/retry makes another one")
        *before, question, answer = self._conversation()
        prompt = self.engine.prompt_ids([*before, question], think=request.think, date=self._date)
        begun, thinking = self._output_ids, None
        if begun is None:
            begun, thinking = self._reread(prompt, answer), answer.thinking
        tally, events = self.engine.start(prompt, request, self._cache, begun)
        self._turn = _Turn(question.content, tally, (question, answer), thinking)
        del self._messages[-2:]
        return self._follow(self._turn, events)

    def _reread(self, prompt: Prompt, answer: Message) -> list[int]:
        """The ids of an answer of which only the text is known. Its thinking is over and left out."""
        closing = list(self.engine.encoder.closing_ids) if prompt.thinking_open else []
        return closing + self.engine.tokenizer.encode(answer.content, special=False, add_bos=False)

    def _ask(self, before: list[Message], text: str, request: Request, replaced: Sequence[Message] = ()) -> EventStream:
        conversation = [*before, Message("user", text)]
        prompt = self.engine.prompt_ids(conversation, think=request.think, date=self._date)
        tally, events = self.engine.start(prompt, request, self._cache)
        self._turn = _Turn(text, tally, replaced)
        return self._follow(self._turn, events)

    def _follow(self, turn: _Turn, events: EventStream) -> EventStream:
        try:
            with contextlib.closing(events):
                for event in events:
                    if isinstance(event, Finished):
                        turn.finished = event
                    yield event
        finally:
            if self._turn is turn:
                self._settle()

    def _settle(self) -> None:
        """Enter the turn at hand, whole or cut short, into the history."""
        turn, self._turn = self._turn, None
        if turn is None:
            return
        finished = turn.finished or turn.tally.finished("interrupted")
        self.last = finished
        self.stats.add(finished)
        if turn.finished or finished.text or finished.thinking:
            answer = Message("assistant", finished.text, finished.thinking or turn.thinking)
            self._messages += [Message("user", turn.question), answer]
            self._output_ids, self._complete = turn.tally.output_ids, finished.reason == "stop"
        else:
            self._messages += turn.replaced

    def undo(self) -> str | None:
        """Take back the last question and its answer; returns the question. None: there is none."""
        self._settle()
        if not self._messages:
            return None
        question = self._messages[-2].content
        del self._messages[-2:]
        self._output_ids, self._complete = None, False
        return question

    def clear(self) -> None:
        """Forget the conversation. The system prompt stays; the cache too, for the prefix it may share."""
        self._settle()
        self._messages.clear()

    def adopt(self, engine: Engine) -> None:
        """Go on with another model. It reads the conversation anew, by its own template."""
        self._settle()
        self.engine, self._cache = engine, engine.new_cache()
        self._output_ids = None

    def set_system(self, system: str | None) -> None:
        self._settle()
        self.system = system

    def prompt_text(self, *, think: bool | None = None) -> str:
        """The conversation as the model reads it, special tokens and all. Before the first question: an empty one."""
        conversation = self._conversation()
        if not self._messages:
            conversation.append(Message("user", ""))
        asked = not self._messages
        segments = self.engine.encoder.render(conversation, think=think, date=self._date, add_generation_prompt=asked)
        return "".join(segment.text for segment in segments)

    def _conversation(self) -> list[Message]:
        self._settle()
        system = [] if self.system is None else [Message("system", self.system)]
        return [*system, *self._messages]

    def save(self, path: Path) -> None:
        """Write the conversation as JSON.

        Raises:
            UsageError: a file is there that is no saved conversation: a slip of the keyboard must not cost it.
            DiskError: it can't be written.
        """
        self._settle()
        _refuse_to_overwrite(path)
        turns = [{"role": m.role, "content": m.content, "thinking": m.thinking} for m in self._messages]
        table = {
            "format": FILE_FORMAT,
            "kind": KIND,
            "model": self.engine.folder.name,
            "system": self.system,
            "messages": turns,
        }
        write_atomic(path, json.dumps(table, ensure_ascii=False, indent=1) + "\n")

    def load(self, path: Path) -> None:
        """Replace the conversation by a saved one. Its model need not be this one.

        Raises:
            UsageError: not a saved conversation; the session stays as it was.
        """
        try:
            table = read_json_object(path, max_bytes=MAX_FILE_BYTES)
        except DamagedModelError as error:
            raise UsageError(str(error)) from None
        system, messages = parse_session(table, str(path))
        self._settle()
        self.system, self._messages = system, messages
        self._output_ids, self._complete = None, False


def _refuse_to_overwrite(path: Path) -> None:
    if not path.exists() or (path.is_file() and path.stat().st_size == 0):
        return
    with contextlib.suppress(DamagedModelError):
        if read_json_object(path, max_bytes=MAX_FILE_BYTES).get("kind") == KIND:
            return
    raise UsageError(f"{path} is there and is no saved conversation", hint="choose another name, or delete it first")


def parse_session(table: dict[str, Any], where: str) -> tuple[str | None, list[Message]]:
    """System prompt and turns of a saved conversation. Raises UsageError."""
    if table.get("kind") != KIND or table.get("format") != FILE_FORMAT:
        raise UsageError(f"{where}: not a saved conversation of this version (format {FILE_FORMAT})")
    turns = table.get("messages")
    if not isinstance(turns, list):
        raise UsageError(f"{where}: messages must be a list")
    messages = [_parse_turn(turn, index, where) for index, turn in enumerate(turns)]
    if len(messages) % 2:
        raise UsageError(f"{where}: the last question has no answer")
    return _text(table.get("system"), f"{where}: system", optional=True), messages


def _parse_turn(turn: object, index: int, where: str) -> Message:
    place = f"{where}: message {index + 1}"
    role = "assistant" if index % 2 else "user"
    if not isinstance(turn, dict) or turn.get("role") != role:
        raise UsageError(f"{place} must have the role {role!r}: questions and answers take turns")
    content = _text(turn.get("content"), f"{place}: content", optional=False) or ""
    return Message(role, content, _text(turn.get("thinking"), f"{place}: thinking", optional=True))  # type: ignore[arg-type]


def _text(value: object, place: str, *, optional: bool) -> str | None:
    if value is None and optional:
        return None
    if not isinstance(value, str):
        raise UsageError(f"{place} must be a text, found {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{place} is not valid Unicode") from None
    return value
