"""A model's chat template: messages in, one prompt out, cut into the template's own text and the messages'.

The template is the file chat_template.jinja, else `chat_template` in tokenizer_config.json (a text, or a list of named
ones); further named ones are additional_chat_templates/*.jinja. A folder without any has no chat template, and none is
made up. A template that fails is an error, never replaced by another.

System prompt: no system message leaves the template to itself, and many bring a default then; an empty one
(`--system ""`) is passed as a system message without text, which in most templates replaces the default by an empty
turn; any other text is passed as it is.

Thinking: `think` True or False reaches the template as `enable_thinking` and `thinking`; None leaves both undefined.
What an assistant thought goes in as `reasoning_content` (and `thinking`), and the template keeps it or drops it. Where
a message brings it inside its content, as files from elsewhere do, it is taken out first for templates that would.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jinja2 import Template
from jinja2.exceptions import TemplateSyntaxError

from tileinfer_core.errors import DamagedModelError, ModelError
from tileinfer_core.files import FileTooLargeError, read_small
from tileinfer_core.jsonfile import read_json_object
from tileinfer_core.template_marks import mark_segments
from tileinfer_core.template_sandbox import RefusedConversationError, TemplateEnvironment
from tileinfer_core.thinking import Markers, find_markers, split_whole, takes_thinking_apart
from tileinfer_core.tokenizer_files import CONFIG_FILE, TokenizerConfig

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from tileinfer_core.messages import Message, Segment

TEMPLATE_FILE = "chat_template.jinja"
NAMED_FOLDER = "additional_chat_templates"
MAX_BYTES = 1 << 18  # the longest in the wild has about 40 kB


@dataclass(frozen=True, slots=True)
class _Source:
    text: str
    where: str  # the file, and the name inside it where there is one


class ChatTemplate:
    """Made by `load`; rendering compiles a template the first time it is used."""

    def __init__(self, sources: Mapping[str, _Source], named_tokens: Mapping[str, str]) -> None:
        self._sources = sources
        self._named_tokens = named_tokens
        self._environment = TemplateEnvironment()
        self._compiled: dict[str, Template] = {}

    @classmethod
    def load(cls, folder: Path) -> ChatTemplate | None:
        """The folder's template, or None if it has none.

        Raises:
            DamagedModelError: a template file that can't be read, or a template that isn't text.
        """
        sources = _find(folder)
        return cls(sources, TokenizerConfig.load(folder).named_tokens) if sources else None

    @property
    def source(self) -> str:
        """The text of the template used for messages without tools."""
        return self._choose(tools=False).text

    @property
    def where(self) -> str:
        return self._choose(tools=False).where

    def _choose(self, *, tools: bool) -> _Source:
        for name in ("tool_use", "default") if tools else ("default",):
            if name in self._sources:
                return self._sources[name]
        names = ", ".join(sorted(self._sources))
        where = next(iter(self._sources.values())).where
        raise DamagedModelError(f"{where}: there is no template named 'default', only {names}")

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        think: bool | None,
        date: dt.date,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Segment]:
        """The prompt. Its segments joined are what Transformers renders from the same messages and date.

        Raises:
            ModelError: the template fails or refuses the conversation; with its file, its line and the reason.
        """
        source = self._choose(tools=tools is not None)
        template = self._compile(source)
        markers = find_markers(source.text)
        inside = markers if markers and takes_thinking_apart(source.text, markers) else None
        tables = [_as_dict(message, inside) for message in messages]
        fixed: dict[str, Any] = {
            **self._named_tokens,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        if think is not None:
            fixed |= {"enable_thinking": think, "thinking": think}

        def render(change: Callable[[str], str]) -> str:
            values = {"messages": [_changed(table, change) for table in tables], "tools": _changed(tools, change)}
            self._environment.start(date, sum(map(len, texts)))
            return self._run(template, source, {**fixed, **values})

        texts = [text for table in tables for key, text in table.items() if key != "role"] + _texts(tools)
        return mark_segments(render, texts, source.text, ModelError)

    @property
    def switches_thinking(self) -> bool:
        """Whether the template looks at what `think` sets."""
        return re.search(r"(?<![.\w\"'])(enable_thinking|thinking)\b(?![\"'])", self.source) is not None

    def _compile(self, source: _Source) -> Template:
        if source.where not in self._compiled:
            try:
                tree = self._environment.metered(source.text)
                code = self._environment.compile(tree, filename=source.where)
            except Exception as error:
                raise self._located(error, source) from None
            self._compiled[source.where] = Template.from_code(self._environment, code, self._environment.globals.copy())
        return self._compiled[source.where]

    def _run(self, template: Template, source: _Source, values: dict[str, Any]) -> str:
        try:
            return "".join(template.generate(**values))
        except Exception as error:  # whatever a template's code can raise, from a missing key to deep recursion
            raise self._located(error, source) from None

    def _located(self, error: Exception, source: _Source) -> ModelError:
        line = error.lineno if isinstance(error, TemplateSyntaxError) else _line(error, source.where)
        place = f"{source.where}:{line}" if line else source.where
        reason = " ".join(str(error).split()) or type(error).__name__  # a MemoryError says nothing
        if isinstance(error, RefusedConversationError):
            return ModelError(f"{place}: the chat template refuses this conversation: {reason:.300}")
        return ModelError(
            f"{place}: the chat template fails: {reason:.300}",
            hint="`tileinfer generate --raw` works without the template",
        )


def _line(error: Exception, where: str) -> int | None:
    """The template's line in which the error was raised: Jinja rewrites tracebacks to show it."""
    line, frame = None, error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_filename == where:
            line = frame.tb_lineno
        frame = frame.tb_next
    return line


def _as_dict(message: Message, markers: Markers | None) -> dict[str, str]:
    thinking, content = message.thinking, message.content
    if thinking is None and message.role == "assistant":
        thinking, content = split_whole(content, markers)
    table = {"role": str(message.role), "content": content}
    return table if thinking is None else {**table, "reasoning_content": thinking, "thinking": thinking}


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of plain data with its texts changed; roles and keys stay."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: item if key == "role" else _changed(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_changed(item, change) for item in value]
    return value


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for item in value.values() for text in _texts(item)]
    return [text for item in value for text in _texts(item)] if isinstance(value, (list, tuple)) else []


def _find(folder: Path) -> dict[str, _Source]:
    """Templates by name; a .jinja file wins over tokenizer_config.json."""
    if (path := folder / TEMPLATE_FILE).exists():
        found = {"default": _read(path)}
    else:
        found = _from_config(folder / CONFIG_FILE)
    extra = sorted((folder / NAMED_FOLDER).glob("*.jinja"))
    return found | {path.stem: _read(path) for path in extra}


def _read(path: Path) -> _Source:
    try:
        text = read_small(path, MAX_BYTES).decode()
    except FileTooLargeError as error:
        raise DamagedModelError(
            f"{path}: has {error.size:,} bytes, expected at most {MAX_BYTES:,} in a chat template"
        ) from None
    except OSError as error:
        raise DamagedModelError(f"{path}: can't be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise DamagedModelError(f"{path}: not UTF-8: {error.reason} at byte {error.start}") from None
    return _checked(text, str(path))


def _checked(text: object, where: str) -> _Source:
    if not isinstance(text, str):
        raise DamagedModelError(f"{where}: a chat template must be a text, found {text!r:.80}")
    if not text.strip() or len(text) > MAX_BYTES:
        raise DamagedModelError(f"{where}: the chat template has {len(text):,} characters, expected 1 to {MAX_BYTES:,}")
    return _Source(text, where)


def _from_config(path: Path) -> dict[str, _Source]:
    value = read_json_object(path).get("chat_template") if path.exists() else None
    if value is None:
        return {}
    where = f"{path} (chat_template)"
    if not isinstance(value, list):
        return {"default": _checked(value, where)}
    try:
        named = {str(entry["name"]): entry["template"] for entry in value}
    except (KeyError, TypeError):
        raise DamagedModelError(f"{where}: expected a list of tables with name and template") from None
    return {name: _checked(text, f"{where[:-1]}, {name!r})") for name, text in named.items()}
