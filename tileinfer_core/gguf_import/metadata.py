"""Typed access to a GGUF file's keys: a missing key or one of the wrong type is named, with the file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from tileinfer_core.errors import DamagedModelError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

T = TypeVar("T")
D = TypeVar("D")


class Metadata:
    """The keys of one file. `text(key)` demands the key; `text_or(key, default)` does not."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path = path
        self.values = values

    def text(self, key: str) -> str:
        return self._typed(key, str, "text")

    def text_or(self, key: str, default: D) -> str | D:
        return self.text(key) if key in self.values else default

    def flag_or(self, key: str, default: D) -> bool | D:
        return self._typed(key, bool, "true or false") if key in self.values else default

    def integer(self, key: str) -> int:
        """A whole number of at least 0."""
        value = self._typed(key, int, "a whole number")
        if value < 0:
            raise DamagedModelError(f"{self.path}: {key} is {value}, expected at least 0")
        return value

    def integer_or(self, key: str, default: D) -> int | D:
        return self.integer(key) if key in self.values else default

    def number(self, key: str) -> float:
        """A float32 as the shortest decimal that means it: 1e-05, not 9.999999747378752e-06."""
        return float(str(np.float32(self._typed(key, float, "a number"))))

    def number_or(self, key: str, default: D) -> float | D:
        return self.number(key) if key in self.values else default

    def strings(self, key: str) -> list[str]:
        return self._list(key, str, "texts")

    def integers(self, key: str) -> list[int]:
        return self._list(key, int, "whole numbers")

    def numbers(self, key: str) -> list[float]:
        return self._list(key, float, "numbers")

    def per_layer(self, key: str, layers: int) -> int:
        """A number that some exporters repeat for every layer; all of them must agree."""
        value = self.values.get(key)
        if isinstance(value, list) and len(value) == layers and len(set(value)) == 1:
            return Metadata(self.path, {key: value[0]}).integer(key)
        return self.integer(key)

    def _list(self, key: str, kind: type[T], words: str) -> list[T]:
        values = self._typed(key, list, f"a list of {words}")
        if not all(type(item) is kind for item in values):
            raise DamagedModelError(f"{self.path}: {key} is not a list of {words}")
        return values

    def _typed(self, key: str, kind: type[T], words: str) -> T:
        if key not in self.values:
            raise DamagedModelError(f"{self.path}: the key {key} is missing")
        value = self.values[key]
        if type(value) is not kind:
            raise DamagedModelError(f"{self.path}: {key} is {value!r:.40}, expected {words}")
        return value
