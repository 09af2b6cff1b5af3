"""The demo model's tokenizer and chat template, converted from its GGUF file, against Transformers' reading of it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.text_fixtures import chat, date, goldens
from tileinfer_core.chat_template import ChatTemplate
from tileinfer_core.config import ModelConfig
from tileinfer_core.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.demo


@pytest.fixture(scope="module")
def demo_folder(demo_home: Path) -> Path:
    folder = next(path.parent for path in demo_home.rglob("tokenizer.json"))
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"
    return folder


@pytest.fixture(scope="module")
def demo_tokenizer(demo_folder: Path) -> Tokenizer:
    return Tokenizer.load(demo_folder, ModelConfig.load(demo_folder).vocab_size)


def test_ids_and_text(demo_tokenizer: Tokenizer) -> None:
    for text, ids in goldens("demo_text_goldens.json")["corpus"]:
        assert demo_tokenizer.encode(text, special=False) == ids
        assert demo_tokenizer.decode(ids) == text


def test_chats(demo_folder: Path, demo_tokenizer: Tokenizer) -> None:
    template = ChatTemplate.load(demo_folder)
    assert template is not None
    for row in goldens("demo_text_goldens.json")["chats"]:
        turns = goldens("text_goldens.json")["chats"][row["chat"]]
        tools = goldens("text_goldens.json")["tools"] if row["tools"] is True else row["tools"] or None
        options = {"add_generation_prompt": row["prompt"], "think": row["think"], "tools": tools, "date": date()}
        segments = template.render(chat(turns), **options)
        assert "".join(segment.text for segment in segments) == row["text"]
        assert demo_tokenizer.encode_segments(segments) == row["ids"]


def test_end_of_sequence(demo_tokenizer: Tokenizer) -> None:
    eos = goldens("demo_text_goldens.json")["eos_token"]
    assert demo_tokenizer.eos_token_ids == {demo_tokenizer.token_id(eos)}
