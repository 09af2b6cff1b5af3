"""The small tokenizers, templates and golden values that the tests of text share."""

from __future__ import annotations

import datetime as dt
import json
import shutil
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tileinfer_core.messages import Message
from tileinfer_core.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

TESTS = Path(__file__).parent
TOKENIZERS = TESTS / "fixtures" / "tokenizers"
TEMPLATES = TESTS / "fixtures" / "templates"
FAMILIES = sorted(path.name for path in TOKENIZERS.iterdir())
ROWS = 2048  # more than any of these tokenizers has entries: the models' padded rows


@cache
def goldens(name: str) -> Any:
    return json.loads((TESTS / "reference" / name).read_text())


def family(name: str) -> Any:
    return goldens("text_goldens.json")["families"][name]


def date() -> dt.datetime:
    return dt.datetime.fromisoformat(goldens("text_goldens.json")["date"])


@cache
def tokenizer(name: str, rows: int = ROWS) -> Tokenizer:
    return Tokenizer.load(TOKENIZERS / name, rows)


def with_template(folder: Path, tokenizer_name: str, template: str) -> Path:
    """A copy of a tokenizer's folder with a template: the name of one in fixtures/, or its text."""
    shutil.copytree(TOKENIZERS / tokenizer_name, folder, dirs_exist_ok=True)
    path = TEMPLATES / f"{template}.jinja"
    text = path.read_text() if "{" not in template else template
    (folder / "chat_template.jinja").write_text(text)
    return folder


def chat(turns: Iterable[Sequence[str]]) -> list[Message]:
    return [Message(*turn) for turn in turns]
