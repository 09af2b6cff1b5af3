"""Reads generation_config.json: what the model's authors recommend. The file and each of its keys are optional.

A key of the wrong type or out of range is an error that names file and key. Keys that TileInfer does not know are
left alone: the file also carries settings of other programs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tileinfer_core.errors import DamagedModelError
from tileinfer_core.jsonfile import read_json_object

if TYPE_CHECKING:
    from pathlib import Path

FILE_NAME = "generation_config.json"


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """None means that the file does not say."""

    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    max_new_tokens: int | None = None

    @classmethod
    def load(cls, folder: Path) -> GenerationConfig:
        """The folder's file, or an empty configuration where there is none.

        Raises:
            DamagedModelError: not a JSON object, or a value of the wrong type or range.
        """
        path = folder / FILE_NAME
        if not path.exists():
            return cls()
        reader = _Reader(path, read_json_object(path))
        return cls(
            do_sample=reader.flag("do_sample"),
            temperature=reader.number("temperature", 0, 100),
            top_k=reader.whole("top_k"),
            top_p=reader.number("top_p", 0, 1),
            min_p=reader.number("min_p", 0, 1),
            repetition_penalty=reader.number("repetition_penalty", 0.01, 100),
            eos_token_ids=reader.ids("eos_token_id"),
            bos_token_id=reader.whole("bos_token_id"),
            pad_token_id=reader.token_id("pad_token_id"),
            max_new_tokens=reader.whole("max_new_tokens"),
        )


@dataclass(frozen=True, slots=True)
class _Reader:
    path: Path
    table: dict[str, object]

    def _refuse(self, key: str, wanted: str) -> DamagedModelError:
        return DamagedModelError(f"{self.path}: {key} must be {wanted}, found {self.table[key]!r:.80}")

    def flag(self, key: str) -> bool | None:
        value = self.table.get(key)
        if value is not None and not isinstance(value, bool):
            raise self._refuse(key, "true or false")
        return value

    def number(self, key: str, low: float, high: float) -> float | None:
        value = self.table.get(key)
        if value is None:
            return None
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not low <= value <= high:
            raise self._refuse(key, f"a number from {low} to {high}")
        return float(value)

    def whole(self, key: str) -> int | None:
        value = self.table.get(key)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 64:
            raise self._refuse(key, "a whole number from 0 to 2**64 - 1")
        return value

    def token_id(self, key: str) -> int | None:
        """Some files say -1 for "there is none"."""
        return None if self.table.get(key) == -1 else self.whole(key)

    def ids(self, key: str) -> tuple[int, ...]:
        """One id, a list of ids, or null."""
        value = self.table.get(key)
        ids = value if isinstance(value, list) else [] if value is None or value == -1 else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in ids):
            raise self._refuse(key, "a token id or a list of token ids")
        return tuple(dict.fromkeys(ids))
