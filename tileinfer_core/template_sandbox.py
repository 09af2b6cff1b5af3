"""The Jinja2 that chat templates are written for, with a bound on what a hostile one can take.

Environment, functions and settings are those of Transformers: immutable sandbox, trim_blocks, lstrip_blocks, loop
controls, the `generation` tag, `raise_exception`, `strftime_now`, a `tojson` that leaves HTML and non-ASCII alone.
Missing on purpose: `lipsum`, and the filters `urlize`, `wordwrap`, `xmlattr`, `random`, which no chat template uses.

A template comes with a model from anywhere, so each rendering has a budget: loop turns and macro calls, the size of any
text it builds, and seconds. The counting is compiled into the template (a call at the top of each loop and macro body,
`~` as a bounded call), because Jinja2 has no loop but `for`, over something finite.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateRuntimeError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

if TYPE_CHECKING:
    import datetime as dt

    from jinja2.parser import Parser
    from jinja2.runtime import Context, Macro

MAX_TEXT = 1 << 24  # characters of one value; the longest context holds about a million
MAX_PRINTED = 1 << 26  # characters, counted for each loop turn as if every branch in it printed
MAX_TURNS = 1_000_000  # loop turns and macro calls; a conversation of a thousand turns needs about 10,000
MAX_SECONDS = 10.0
MAX_INT_BITS = 1 << 16
_DROPPED_FILTERS = ("urlize", "wordwrap", "xmlattr", "random")
_CONSTANT_COST = frozenset({"length", "count", "first", "last", "default", "d"})
_WIDE_FORMAT = re.compile(r"\d{5,}|\*")


class RefusedConversationError(TemplateRuntimeError):
    """The template called raise_exception."""


class Budget:
    """What one rendering may still take."""

    def __init__(self) -> None:
        self._turns = MAX_TURNS
        self._text = MAX_PRINTED
        self._deadline = time.monotonic() + MAX_SECONDS

    def turn(self, characters: int) -> None:
        """One turn of a loop or call of a macro that has so many characters of text in its body."""
        self._turns -= 1
        if self._turns < 0:
            raise SecurityError(f"it takes more than {MAX_TURNS:,} loop turns")
        self.write(characters)
        if not self._turns % 64 and time.monotonic() > self._deadline:
            raise SecurityError(f"it takes more than {MAX_SECONDS:.0f} seconds")

    def write(self, characters: int) -> None:
        self._text -= characters
        if self._text < 0:
            raise SecurityError(f"it prints more than {MAX_PRINTED:,} characters")


def size(value: object) -> int:
    """Characters and elements of a value when it is written out in full, shared parts counted each time.

    Raises:
        SecurityError: more than MAX_TEXT.
    """
    total, waiting = 0, [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, (str, bytes, range)):
            total += len(item)
        elif isinstance(item, int):
            total += 1 + item.bit_length() // 3
        elif isinstance(item, Mapping):
            waiting += [*item.keys(), *item.values()]
        elif isinstance(item, (list, tuple, set, frozenset)):
            waiting += item
        elif isinstance(item, TemplateNamespace):
            waiting.append(item.attributes())
        total += 1
        if total + len(waiting) > MAX_TEXT:
            raise SecurityError(f"it builds a value of more than {MAX_TEXT:,} characters")
    return total


def _check_size(characters: float) -> None:
    if characters > MAX_TEXT:
        raise SecurityError(f"it builds a text of more than {MAX_TEXT:,} characters")


def _check_format(template: object) -> None:
    """`'%999999999d'` makes a gigabyte out of nothing."""
    if isinstance(template, (str, bytes)) and _WIDE_FORMAT.search(str(template)):
        raise SecurityError("it formats with a width of more than four digits")


class TemplateNamespace(Namespace):
    """`namespace()` without names that begin with an underscore, as in Transformers."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # no self, so that namespace(self=…) works
        self, rest = args[0], args[1:]
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def attributes(self) -> dict[str, Any]:
        found: dict[str, Any] = object.__getattribute__(self, "_Namespace__attrs")
        return found


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"it stores the underscore name {name!r} on a namespace")


class _TemplateDict:
    """`dict(…)` without the class's attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks the model's turns for training; here it is its body."""

    tags = {"generation"}  # noqa: RUF012  # the base class's form

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Macro) -> str:
        text: str = caller()
        return text


class _Metering(NodeTransformer):
    """Puts the budget's calls into a parsed template."""

    def _with_turn(self, node: Any) -> Any:
        self.generic_visit(node)
        texts = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        call = _call("turn", [nodes.Const(texts)], node.lineno)
        node.body.insert(0, nodes.ExprStmt(call, lineno=node.lineno))
        return node

    visit_For = visit_Macro = visit_CallBlock = _with_turn  # noqa: N815  # the names that the visitor looks for

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _call("joined", node.nodes, node.lineno)


def _call(name: str, arguments: list[Any], line: int) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), arguments, [], None, None, lineno=line)


def _tojson(
    x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> None:
    raise RefusedConversationError(str(message))


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """One per chat template. `start` begins a rendering with a new budget and the session's date."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], finalize=self._finalize
        )
        self.budget = Budget()
        self.date: dt.date | None = None
        self.filters["tojson"] = _tojson
        for name in _DROPPED_FILTERS:
            del self.filters[name]
        for name in set(self.filters) - _CONSTANT_COST:
            self.filters[name] = _bounded_filter(name, self.filters[name])
        del self.globals["lipsum"]
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": self._strftime_now,
            "dict": _TemplateDict(),
            "namespace": TemplateNamespace,
        }

    def start(self, date: dt.date) -> None:
        self.budget, self.date = Budget(), date

    def metered(self, source: str) -> nodes.Template:
        """The parsed template with its budget built in, for `compile`."""
        tree: nodes.Template = _Metering().visit(self.parse(source))
        return tree

    def turn(self, characters: int) -> str:
        self.budget.turn(characters)
        return ""

    def joined(self, *values: object) -> str:
        """Jinja's `~`."""
        _check_size(sum(size(value) for value in values))
        return "".join(map(str, values))

    def _finalize(self, value: Any) -> Any:
        self.budget.write(size(value))
        return value

    def _strftime_now(self, format: str) -> str:  # noqa: A002  # Transformers' name
        return self.date.strftime(format) if self.date else ""

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            _check_size(size(left) + size(right))
        elif operator == "%" and isinstance(left, str):
            _check_format(left)
            size(right)
        elif operator == "*":
            _check_product(left, right)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() * abs(right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str):
            _check_method(owner, getattr(obj, "__name__", ""), [*args, *kwargs.values()])
        return super().call(context, obj, *args, **kwargs)


def _check_bits(bits: int) -> None:
    if bits > MAX_INT_BITS:
        raise SecurityError(f"it computes a number of more than {MAX_INT_BITS:,} bits")


def _check_product(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())
    elif isinstance(right, int):
        _check_size(size(left) * right)
    elif isinstance(left, int):
        _check_size(size(right) * left)


def _check_method(text: str, name: str, arguments: list[Any]) -> None:
    """Bound what a method of a string can make."""
    total = size(text) + size(arguments)
    if name == "replace":
        _check_replace(text, arguments)
    elif name == "join" and arguments:
        if isinstance(arguments[0], Iterator):
            raise SecurityError("it joins the items of a generator with a string's method; the filter does that")
        _check_size(total + len(text) * len(arguments[0]))
    elif name in {"format", "format_map"}:
        _check_format(text)
    elif name == "translate":
        raise SecurityError("it calls str.translate")
    elif any(isinstance(argument, int) and argument > MAX_TEXT // (1 + text.count("\t")) for argument in arguments):
        raise SecurityError(f"it calls {name} with a width of more than {MAX_TEXT:,}")


def _check_replace(text: object, arguments: list[Any]) -> None:
    if isinstance(text, str) and len(arguments) >= 2 and isinstance(arguments[0], str):
        _check_size(len(text) + text.count(arguments[0]) * size(arguments[1]))


def _drained(value: Any) -> Any:
    """A generator as a list, so that it can be measured."""
    if not isinstance(value, Iterator):
        return value
    items, total = [], 0
    for item in value:
        total += size(item)
        _check_size(total)
        items.append(item)
    return items


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)  # keeps the marks by which Jinja passes context or environment first
    def bounded(*args: Any, **kwargs: Any) -> Any:
        values = [_drained(argument) for argument in args]
        given = [value for value in [*values, *kwargs.values()] if _is_data(value)]
        total = sum(size(value) for value in given)
        _check_size(total)
        whole = [value for value in given if isinstance(value, int) and not isinstance(value, bool)]
        texts = [len(value) for value in given[1:] if isinstance(value, str)]
        if name in {"indent", "center", "tojson", "join", "batch", "slice"}:
            _check_size(total * max([1, *whole, *texts]) if name != "center" else max([1, *whole]))
        elif name == "replace":
            _check_replace(given[0] if given else None, given[1:])
        elif name == "format":
            _check_format(given[0] if given else None)
        return function(*values, **kwargs)

    return bounded


def _is_data(value: object) -> bool:
    return value is None or isinstance(
        value, (str, bytes, int, float, range, Mapping, list, tuple, set, TemplateNamespace)
    )
