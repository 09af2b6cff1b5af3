"""What one rendering of a chat template may take: loop turns, the size of what it builds, and seconds.

Checks come before the work: `'a' * 10**11` is refused, not computed. A list that holds itself many times over counts as
often as it would be written out, because that is what printing it would do. What is built counts again in a sum over
the whole rendering, because a template can keep it all.
"""

from __future__ import annotations

import re
import time
from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.utils import Namespace

BASE_TEXT = 1 << 22  # characters of one value beside what the messages bring; the longest context holds about a million
BASE_PRINTED = 1 << 26  # counted for each loop turn as if every branch in it printed
BASE_MADE = 1 << 27  # all texts and lists made on the way: half a gigabyte where a character takes four bytes
ITEM_COST = 16  # characters that an element of a list counts for in that sum
MAX_ITEMS = 1 << 19  # elements of one value; a conversation of a thousand turns has about 5,000
MAX_TURNS = 1_000_000  # loop turns and macro calls; such a conversation needs about 10,000
MAX_SECONDS = 10.0
MAX_INT_BITS = 1 << 16
_WIDE_FORMAT = re.compile(r"\d{5,}|\*|\{[^{}]*\{")


COLLECTIONS = (list, tuple, set, frozenset, dict, KeysView, ValuesView, ItemsView)


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


class Budget:
    """One rendering's. `characters` is what the messages bring, which no bound may stand in the way of."""

    def __init__(self, characters: int = 0) -> None:
        self._max_text = BASE_TEXT + 4 * characters
        self._printable = BASE_PRINTED + 16 * characters
        self._makeable = BASE_MADE + 64 * characters
        self._turns = MAX_TURNS
        self._deadline = time.monotonic() + MAX_SECONDS

    def turn(self, characters: int, items: int) -> None:
        """One turn of a loop or call of a macro with so much text and so many elements of lists in its body."""
        self._turns -= 1
        self._make(items * ITEM_COST)
        if self._turns < 0:
            raise SecurityError(f"it takes more than {MAX_TURNS:,} loop turns")
        self.write(characters)

    def write(self, characters: int) -> None:
        self._printable -= characters
        if self._printable < 0:
            raise SecurityError("it prints without end")
        self.check_time()

    def made(self, value: Any) -> Any:
        """The value, once it is counted as made."""
        if isinstance(value, str):
            self._make(len(value))
        elif isinstance(value, COLLECTIONS):
            self._make(len(value) * ITEM_COST)
        return value

    def _make(self, characters: int) -> None:
        self._makeable -= characters
        if self._makeable < 0:
            raise SecurityError("it builds texts and lists without end")

    def check_time(self) -> None:
        if time.monotonic() > self._deadline:
            raise SecurityError(f"it takes more than {MAX_SECONDS:.0f} seconds")

    def check_text(self, characters: float) -> None:
        if characters > self._max_text:
            raise SecurityError(f"it builds a text of more than {self._max_text:,} characters")

    def size(self, value: object) -> int:
        """Characters and elements of a value when it is written out in full."""
        if isinstance(value, str):
            self.check_text(len(value))
            return len(value)
        total, items, waiting = 0, 0, [value]
        while waiting:
            item = waiting.pop()
            items += 1
            total += 1 + _own_size(item)
            waiting += _elements(item)
            if items + len(waiting) > MAX_ITEMS:
                raise SecurityError(f"it builds a value of more than {MAX_ITEMS:,} elements")
        self.check_text(total)
        self.check_time()
        return total

    def check_bits(self, bits: int) -> None:
        if bits > MAX_INT_BITS:
            raise SecurityError(f"it computes a number of more than {MAX_INT_BITS:,} bits")

    def check_product(self, left: Any, right: Any) -> None:
        if isinstance(left, int) and isinstance(right, int):
            self.check_bits(left.bit_length() + right.bit_length())
        elif isinstance(right, int):
            self._check_repeated(left, right)
        elif isinstance(left, int):
            self._check_repeated(right, left)

    def _check_repeated(self, value: Any, times: int) -> None:
        self.check_text(self.size(value) * times)
        if isinstance(value, (list, tuple)) and len(value) * times > MAX_ITEMS:
            raise SecurityError(f"it builds a value of more than {MAX_ITEMS:,} elements")

    def check_format(self, template: object, arguments: object) -> None:
        """`'%999999999d'` makes a gigabyte out of nothing, and each field can repeat all arguments."""
        if isinstance(template, (str, bytes)):
            text = str(template)
            if _WIDE_FORMAT.search(text):
                raise SecurityError("it formats with a computed width or one of more than four digits")
            fields = text.count("%") + text.count("{")
            self.check_text(len(text) + 10_000 * fields + fields * self.size(arguments))

    def check_replace(self, text: object, arguments: list[Any]) -> None:
        if isinstance(text, str) and len(arguments) >= 2 and isinstance(arguments[0], str):
            self.check_text(len(text) + text.count(arguments[0]) * self.size(arguments[1]))

    def check_method(self, text: str, name: str, arguments: list[Any]) -> None:
        """Bound what a method of a string can make."""
        total = self.size(text) + self.size(arguments)
        if name == "replace":
            self.check_replace(text, arguments)
        elif name == "join" and arguments:
            if isinstance(arguments[0], Iterator):
                raise SecurityError("it joins what a generator makes with a string's method; the filter does that")
            self.check_text(total + len(text) * len(arguments[0]))
        elif name in {"format", "format_map"}:
            self.check_format(text, arguments)
        elif name == "translate":
            raise SecurityError("it calls str.translate")
        else:
            widest = max([argument for argument in arguments if isinstance(argument, int)], default=0)
            self.check_text(widest * (1 + text.count("\t")))

    def check_filter(self, name: str, values: list[Any]) -> None:
        """Bound what a filter can make of its data."""
        total = self.size(values)
        whole = [value for value in values[1:] if isinstance(value, int)]
        texts = [len(value) for value in values[1:] if isinstance(value, str)]
        if name == "center":
            self.check_text(max([0, *whole]))
        elif name in {"indent", "tojson", "join", "batch", "slice"}:
            self.check_text(total * max([1, *whole, *texts]))
        elif name == "replace":
            self.check_replace(values[0] if values else None, values[1:])
        elif name == "format":
            self.check_format(values[0] if values else None, values[1:])

    def drained(self, value: Any) -> Any:
        """A generator as a list, so that it can be measured."""
        if not isinstance(value, Iterator):
            return value
        items, total = [], 0
        for item in value:
            total += self.size(item)
            self.check_text(total)
            items.append(item)
        return self.made(items)


def _own_size(item: object) -> int:
    if isinstance(item, (str, bytes, range)):
        return len(item)
    return item.bit_length() // 3 if isinstance(item, int) else 0


def _elements(item: object) -> list[Any]:
    if isinstance(item, Mapping):
        return [*item.keys(), *item.values()]
    if isinstance(item, COLLECTIONS):
        return list(item)
    return [item.attributes()] if isinstance(item, TemplateNamespace) else []
