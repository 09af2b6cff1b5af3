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
from collections.abc import Callable, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any

from jinja2 import nodes
from jinja2.exceptions import TemplateRuntimeError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from tileinfer_core.template_budget import COLLECTIONS, Budget, TemplateNamespace

if TYPE_CHECKING:
    import datetime as dt

    from jinja2.parser import Parser
    from jinja2.runtime import Context, Macro

_DROPPED_FILTERS = ("urlize", "wordwrap", "xmlattr", "random")
_CONSTANT_COST = frozenset({"length", "count", "first", "last", "default", "d"})
_DATA = (type(None), str, bytes, int, float, range, Mapping, TemplateNamespace, *COLLECTIONS)
_LITERALS = (nodes.List, nodes.Tuple, nodes.Dict)


class RefusedConversationError(TemplateRuntimeError):
    """The template called raise_exception."""


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
        items = sum(len(literal.items) for literal in node.find_all(_LITERALS))
        call = _call("turn", [nodes.Const(texts), nodes.Const(items)], node.lineno)
        node.body.insert(0, nodes.ExprStmt(call, lineno=node.lineno))
        return node

    visit_For = visit_Macro = visit_CallBlock = _with_turn  # noqa: N815  # the names that the visitor looks for

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        """Jinja compiles a slice to Python's, out of the sandbox's sight."""
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        ends = [end or nodes.Const(None) for end in (node.arg.start, node.arg.stop, node.arg.step)]
        return _call("sliced", [node.node, *ends], node.lineno)

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
            self.filters[name] = self._bounded(name, self.filters[name])
        del self.globals["lipsum"]
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": self._strftime_now,
            "dict": _TemplateDict(),
            "namespace": TemplateNamespace,
        }

    def start(self, date: dt.date, characters: int) -> None:
        """Begin a rendering of messages that bring so many characters."""
        self.budget, self.date = Budget(characters), date

    def metered(self, source: str) -> nodes.Template:
        """The parsed template with its budget built in, for `compile`."""
        self.budget = Budget()
        tree: nodes.Template = _Metering().visit(self.parse(source))
        return tree

    def turn(self, characters: int, items: int) -> str:
        self.budget.turn(characters, items)
        return ""

    def sliced(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        return self.budget.made(value[start:stop:step])

    def joined(self, *values: object) -> str:
        """Jinja's `~`."""
        self.budget.size(values)
        text: str = self.budget.made("".join(map(str, values)))
        return text

    def _finalize(self, value: Any) -> Any:
        self.budget.write(self.budget.size(value))
        return value

    def _strftime_now(self, format: str) -> str:  # noqa: A002  # Transformers' name
        return self.date.strftime(format) if self.date else ""

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            self.budget.size((left, right))
        elif operator == "%" and isinstance(left, str):
            self.budget.check_format(left, right)
        elif operator == "*":
            self.budget.check_product(left, right)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            self.budget.check_bits(left.bit_length() * abs(right))
        return self.budget.made(super().call_binop(context, operator, left, right))

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        method = getattr(obj, "__wrapped__", obj)  # the sandbox has a wrapper of its own around str.format
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            self.budget.check_method(owner, getattr(method, "__name__", ""), [*args, *kwargs.values()])
        return self.budget.made(super().call(context, obj, *args, **kwargs))

    def _bounded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)  # keeps the marks by which Jinja passes context or environment first
        def bounded(*args: Any, **kwargs: Any) -> Any:
            values = [self.budget.drained(argument) for argument in args]
            self.budget.check_filter(name, [value for value in [*values, *kwargs.values()] if isinstance(value, _DATA)])
            return self.budget.made(function(*values, **kwargs))

        return bounded
