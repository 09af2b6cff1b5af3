"""Tile shapes and hints per architecture: one JSON table per target, read once.

A table is sm_XX.json:

    {"gpu": "H200", "date": "2026-11-30", "versions": {"cuda-tile": "1.7.0", "tileiras": "13.4.92"},
     "families": {"linear_decode": [
         {"when": {"n": 4096, "k": 1024}, "config": {"tile_n": 8, "tile_k": 1024}, "us": 4.1, "chosen": "measured"},
         {"when": {}, "config": {"tile_n": 4, "tile_k": 512}, "chosen": "rule"}]}}

`when` names the shape a row is for; the first row whose every entry agrees wins, so exact rows come first and the
default, {}, last. An entry [lo, hi] agrees with lo ≤ value ≤ hi. "chosen" is "measured" (with the microseconds that
chose it) or "rule".

A target without a table takes the nearest older one, and `Table.note` says so. Nothing older: ValueError.
"""

from __future__ import annotations

import contextlib
import functools
import json
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator

Config = TypeVar("Config")
_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Row:
    """One configuration. `us` is the time that chose it, None for a row chosen by rule."""

    when: dict[str, Any]
    config: dict[str, Any]
    chosen: str
    us: float | None

    def agrees(self, shape: dict[str, int]) -> bool:
        return all(name in shape and _within(shape[name], wanted) for name, wanted in self.when.items())


@dataclass(frozen=True)
class Table:
    """The rows for one target. `arch` is the target asked for, `source` the one whose table answers."""

    arch: str
    source: str
    about: dict[str, Any]
    families: dict[str, tuple[Row, ...]]

    @property
    def note(self) -> str | None:
        """What to tell the user when the table is another architecture's."""
        if self.arch == self.source:
            return None
        return f"no kernel configurations for {self.arch}: using those of {self.source}, the nearest older architecture"

    def row(self, family: str, **shape: int) -> Row:
        """The row of `family` for a shape, such as n=4096, k=1024.

        Raises:
            KeyError: the table does not have the family, or no row for the shape.
        """
        if family not in self.families:
            raise KeyError(f"{self.source}.json has no family {family!r}, only {', '.join(sorted(self.families))}")
        for row in self.families[family]:
            if row.agrees(shape):
                return row
        raise KeyError(f"{self.source}.json, {family}: no row for {shape}")


def _within(value: int, wanted: Any) -> bool:
    if isinstance(wanted, list):
        low, high = wanted
        return bool(low <= value <= high)
    return bool(value == wanted)


def number(arch: str) -> int:
    """90 for "sm_90" (and for "sm_90a")."""
    digits = arch.removeprefix("sm_").rstrip("abcdefghijklmnopqrstuvwxyz")
    if not arch.startswith("sm_") or not digits.isdigit():
        raise ValueError(f"{arch!r} is no target, expected a name such as sm_90")
    return int(digits)


def targets() -> list[str]:
    """Architectures that have a table, oldest first."""
    return sorted((path.stem for path in _FOLDER.glob("sm_*.json")), key=number)


@functools.cache
def table(arch: str) -> Table:
    """The table for `arch`, or the nearest older one.

    Raises:
        ValueError: `arch` is no target, or is older than every table.
    """
    older = [name for name in targets() if number(name) <= number(arch)]
    if not older:
        oldest = targets()[0] if targets() else "none"
        raise ValueError(f"no kernel configurations for {arch}: the oldest architecture supported is {oldest}")
    source = f"sm_{number(arch)}" if f"sm_{number(arch)}" in older else older[-1]
    content = json.loads((_FOLDER / f"{source}.json").read_text(encoding="utf-8"))
    families = {
        family: tuple(Row(row["when"], row["config"], row["chosen"], row.get("us")) for row in rows)
        for family, rows in content.pop("families").items()
    }
    asked = source if number(source) == number(arch) else arch
    return Table(asked, source, content, families)


def config(family: str, arch: str, **shape: int) -> dict[str, Any]:
    """The configuration of `family` for a target and shape: keyword arguments of its config dataclass."""
    found = table(arch)
    row = found.row(family, **shape)
    noted = _noted.get()
    if noted is not None:
        noted.append(Used(family, found.source, found.families[family].index(row), row))
    return dict(row.config)


def configured(kind: type[Config], family: str, arch: str, **shape: int) -> Config:
    """The same as `kind`; a family or shape without a row takes the defaults of `kind`."""
    try:
        return kind(**config(family, arch, **shape))
    except KeyError:
        return kind()


@dataclass(frozen=True)
class Used:
    """A row that was looked up: the `index`-th of `family` in <source>.json."""

    family: str
    source: str
    index: int
    row: Row


_noted: ContextVar[list[Used] | None] = ContextVar("rows looked up", default=None)


@contextlib.contextmanager
def noting() -> Iterator[None]:
    """Within, launches that are recorded carry the rows that were looked up for them (Recorded.rows)."""
    token = _noted.set([])
    try:
        yield
    finally:
        _noted.reset(token)


def used_since_last() -> tuple[Used, ...]:
    """The rows looked up since the last call; () outside `noting`."""
    noted = _noted.get()
    if not noted:
        return ()
    found = tuple(noted)
    noted.clear()
    return found
