"""A conversation with its KV cache. What the model has read stays read: only the ids that differ are computed again.

The history is always valid for a template that demands alternation: user, assistant, user, assistant … An answer that
is interrupted keeps what it said; if it said nothing, its question is taken back with it. The date that a template may
print is fixed when the session starts, so that midnight does not spoil the common prefix.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tileinfer_core.errors import DamagedModelError, UsageError
from tileinfer_core.events import Finished
from tileinfer_core.files import write_atomic
from tileinfer_core.jsonfile import read_json_object
from tileinfer_core.messages import Message

if TYPE_CHECKING:
    from pathlib import Path

    from tileinfer_core.decode import Tally
    from tileinfer_core.engine import Engine, Request
    from tileinfer_core.events import EventStream
    from tileinfer_core.kv_cache import KvCache
    from tileinfer_core.prompting import Prompt

FILE_FORMAT = 1
KIND = "tileinfer session"
MAX_FILE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class SessionStats:
    """Sums over the answers of a session."""

    answers: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    completion_tokens: int = 0

    def plus(self, finished: Finished) -> SessionStats:
        usage = finished.usage
        return SessionStats(
            self.answers + 1,
            self.prompt_tokens + usage.prompt_tokens,
            self.reused_tokens + usage.reused_tokens,
            self.completion_tokens + usage.completion_tokens,
        )


@dataclass(slots=True)
class _Turn:
    """A question whose answer is being made. `finished` stays None when it is cut short.

    `before` are the turns that it follows, `otherwise` those that there are if nothing is said: an exchange that it
    replaces is among them. `thinking` is what an answer that goes on has thought before, where its ids do not tell.
    """

    question: str
    tally: Tally
    before: tuple[Message, ...]
    otherwise: tuple[Message, ...]
    thinking: str | None = None
    finished: Finished | None = None

    @property
    def said_something(self) -> bool:
        """Since it was asked: an answer that goes on has a text before it has said anything."""
        if self.finished is not None:
            return True
        stream = self.tally.job.stream
        return self.tally.new_tokens > 0 and bool(stream.answer or stream.thinking)


@dataclass(frozen=True, slots=True)
class _State:
    """All that changes in a session, in one value that is replaced in one step. Ctrl-C comes between any two steps,
    and finds the session before a change or after it: no exchange is lost or there twice."""

    engine: Engine
    cache: KvCache
    system: str | None
    messages: tuple[Message, ...] = ()
    output_ids: tuple[int, ...] | None = None  # of the last answer; None if it was not made here
    complete: bool = False  # the last answer is known to have been ended by the model
    last: Finished | None = None
    stats: SessionStats = SessionStats()
    turn: _Turn | None = None


class Session:
    """`messages` are the turns without the system prompt; `last` is the end of the last answer, interrupted or not.

    `system` None leaves a system prompt to the template; "" is an empty one.
    """

    def __init__(self, engine: Engine, system: str | None = None, *, date: dt.date | None = None) -> None:
        self._date = date or dt.datetime.now().astimezone().date()
        self._now = _State(engine, engine.new_cache(), system)

    @property
    def engine(self) -> Engine:
        return self._now.engine

    @property
    def system(self) -> str | None:
        return self._now.system

    @property
    def last(self) -> Finished | None:
        return self._now.last

    @property
    def settled(self) -> Finished | None:
        """As `last`, with an answer that is being made counted as interrupted."""
        return self._settle().last

    @property
    def stats(self) -> SessionStats:
        return self._now.stats

    @property
    def messages(self) -> list[Message]:
        return list(self._settle().messages)

    @property
    def used_tokens(self) -> int:
        """Tokens that the conversation takes in the context, by the template, before the next question."""
        conversation = self._conversation()
        if not self._now.messages:
            return 0
        return len(self.engine.encoder.encode(conversation, date=self._date, add_generation_prompt=False))

    def send(self, text: str, request: Request) -> EventStream:
        """Ask, and get the events of the answer. A request that is refused leaves the session as it was.

        Raises:
            ContextLengthError: the conversation no longer fits; with both numbers.
            ModelError: the chat template refuses the conversation.
        """
        return self._ask(self._settle().messages, text, request)

    @property
    def last_question(self) -> str | None:
        messages = self._settle().messages
        return messages[-2].content if messages else None

    @property
    def last_answer(self) -> str | None:
        messages = self._settle().messages
        return messages[-1].content if messages else None

    def retry(self, request: Request, text: str | None = None) -> EventStream:
        """Ask the last question again, or `text` in its place. The old exchange is kept until something is said.

        Raises:
            UsageError: there is no answer to replace. Otherwise as `send`.
        """
        messages = self._settle().messages
        if not messages:
            raise UsageError("there is no answer to make again")
        *before, question, _answer = messages
        return self._ask(tuple(before), question.content if text is None else text, request)

    def go_on(self, request: Request) -> EventStream:
        """Go on with the last answer where it was cut short. The events have what is new, Finished the whole answer.

        Raises:
            UsageError: there is no answer, or the model has ended it itself. Otherwise as `send`.
        """
        now = self._settle()
        if not now.messages:
            raise UsageError("there is no answer to go on with")
        if now.complete:
            raise UsageError("the last answer is complete: the model ended it itself", hint="/retry makes another one")
        *before, question, answer = now.messages
        asked = [*self._system_message(), *before, question]
        prompt = self.engine.prompt_ids(asked, think=request.think, date=self._date)
        begun, thinking = now.output_ids, None
        if begun is None:
            begun, thinking = self._reread(prompt, answer), answer.thinking
        tally, events = self.engine.start(prompt, request, now.cache, begun)
        return self._follow(_Turn(question.content, tally, tuple(before), now.messages, thinking), events)

    def _reread(self, prompt: Prompt, answer: Message) -> tuple[int, ...]:
        """The ids of an answer of which only the text is known. Its thinking is over and left out."""
        closing = self.engine.encoder.closing_ids if prompt.thinking_open else ()
        return (*closing, *self.engine.tokenizer.encode(answer.content, special=False, add_bos=False))

    def _ask(self, before: tuple[Message, ...], text: str, request: Request) -> EventStream:
        conversation = [*self._system_message(), *before, Message("user", text)]
        prompt = self.engine.prompt_ids(conversation, think=request.think, date=self._date)
        tally, events = self.engine.start(prompt, request, self._now.cache)
        return self._follow(_Turn(text, tally, before, self._now.messages), events)

    def _follow(self, turn: _Turn, events: EventStream) -> EventStream:
        self._now = replace(self._now, turn=turn)
        return self._events_of(turn, events)

    def _events_of(self, turn: _Turn, events: EventStream) -> EventStream:
        try:
            with contextlib.closing(events):
                for event in events:
                    if isinstance(event, Finished):
                        turn.finished = event
                    yield event
        finally:
            if self._now.turn is turn:
                self._settle()

    def _settle(self) -> _State:
        """Enter the turn at hand, whole or cut short, into the history."""
        now, turn = self._now, self._now.turn
        if turn is None:
            return now
        finished = turn.finished or turn.tally.finished("interrupted")
        settled = replace(now, messages=turn.otherwise, last=finished, stats=now.stats.plus(finished), turn=None)
        if turn.said_something:
            answer = Message("assistant", finished.text, finished.thinking or turn.thinking)
            settled = replace(
                settled,
                messages=(*turn.before, Message("user", turn.question), answer),
                output_ids=tuple(turn.tally.output_ids),
                complete=finished.reason == "stop",
            )
        self._now = settled
        return settled

    def undo(self) -> str | None:
        """Take back the last question and its answer; returns the question. None: there is none."""
        now = self._settle()
        if not now.messages:
            return None
        self._now = replace(now, messages=now.messages[:-2], output_ids=None, complete=False)
        return now.messages[-2].content

    def clear(self) -> None:
        """Forget the conversation. The system prompt stays; the cache too, for the prefix it may share."""
        self._now = replace(self._settle(), messages=(), output_ids=None, complete=False)

    def adopt(self, engine: Engine) -> None:
        """Go on with another model. It reads the conversation anew, by its own template."""
        now = self._settle()
        self._now = replace(now, engine=engine, cache=engine.new_cache(), output_ids=None)

    def set_system(self, system: str | None) -> None:
        self._now = replace(self._settle(), system=system)

    def prompt_text(self, *, think: bool | None = None) -> str:
        """The conversation as the model reads it, special tokens and all. Before the first question: an empty one."""
        conversation = self._conversation()
        asked = not self._now.messages
        if asked:
            conversation.append(Message("user", ""))
        segments = self.engine.encoder.render(conversation, think=think, date=self._date, add_generation_prompt=asked)
        return "".join(segment.text for segment in segments)

    def _conversation(self) -> list[Message]:
        now = self._settle()
        return [*self._system_message(), *now.messages]

    def _system_message(self) -> list[Message]:
        return [] if self.system is None else [Message("system", self.system)]

    def save(self, path: Path) -> None:
        """Write the conversation as JSON.

        Raises:
            UsageError: a file is there that is no saved conversation: a slip of the keyboard must not cost it.
            DiskError: it can't be written.
        """
        messages = self._settle().messages
        _refuse_to_overwrite(path)
        turns = [{"role": m.role, "content": m.content, "thinking": m.thinking} for m in messages]
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
        now = self._settle()
        self._now = replace(now, system=system, messages=tuple(messages), output_ids=None, complete=False)


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
