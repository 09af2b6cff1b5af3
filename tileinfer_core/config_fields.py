"""Typed access to the fields of a config.json: every read names the type and the range that it wants.

A value of the wrong type or out of range is a DamagedModelError that shows wanted and found. null counts as absent,
as it does for Transformers. Nothing is converted: "32" is not 32, 2048.0 is not 2048 and true is not 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from tileinfer_core.errors import DamagedModelError

if TYPE_CHECKING:
    from collections.abc import Mapping

V = TypeVar("V", int, float, str)


class Fields:
    """The fields of one JSON object. `where` names it in errors; `read` collects the names that were asked for."""

    def __init__(self, table: Mapping[str, Any], where: str) -> None:
        self._table = table
        self._where = where
        self.read: set[str] = set()

    def raw(self, name: str) -> Any:
        """The value as it is; None when absent or null."""
        self.read.add(name)
        return self._table.get(name)

    @property
    def unread(self) -> tuple[str, ...]:
        """Names in the file that nothing has asked for."""
        return tuple(sorted(self._table.keys() - self.read))

    def integer(self, name: str, *, high: int, low: int = 1, default: int | None = None) -> int:
        """A whole number in [low, high]; `default` when absent, an error when there is no default either."""
        value = self.optional_integer(name, high=high, low=low)
        return self._required(name, default) if value is None else value

    def optional_integer(self, name: str, *, high: int, low: int = 1) -> int | None:
        value = self.raw(name)
        if value is None:
            return None
        if type(value) is not int or not low <= value <= high:
            raise self.error(name, f"a whole number from {low} to {high}", value)
        return value

    def number(self, name: str, *, low: float, high: float, default: float | None = None) -> float:
        """A finite number in [low, high]; `default` when absent, an error when there is no default either."""
        value = self.optional_number(name, low=low, high=high)
        return self._required(name, default) if value is None else value

    def optional_number(self, name: str, *, low: float, high: float) -> float | None:
        value = self.raw(name)
        if value is None:
            return None
        if type(value) not in (int, float) or not low <= value <= high:  # NaN is in no range
            raise self.error(name, f"a number from {low:g} to {high:g}", value)
        return float(value)

    def boolean(self, name: str, *, default: bool) -> bool:
        value = self.raw(name)
        if value is None:
            return default
        if type(value) is not bool:
            raise self.error(name, "true or false", value)
        return value

    def string(self, name: str, *, default: str | None = None) -> str:
        value = self.raw(name)
        if value is None:
            return self._required(name, default)
        if type(value) is not str:
            raise self.error(name, "a string", value)
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        """Token ids written as one whole number, a list of them, or as none: null, or -1 in old files."""
        value = self.raw(name)
        ids = value if isinstance(value, list) else [] if value in (None, -1) else [value]
        if not all(type(i) is int and 0 <= i < 1 << 31 for i in ids):
            raise self.error(name, "a token id or a list of token ids", value)
        return tuple(dict.fromkeys(ids))

    def error(self, name: str, wanted: str, found: object) -> DamagedModelError:
        shown = repr(found)
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        return DamagedModelError(f"{self._where}: {name} must be {wanted}, found {shown}")

    def _required(self, name: str, default: V | None) -> V:
        if default is None:
            raise DamagedModelError(f"{self._where}: no {name}, which this model needs")
        return default
