"""Ids, texts and rendered chats against what Transformers makes of the same files."""

from __future__ import annotations

import pytest

from tests.text_fixtures import FAMILIES, chat, date, family, goldens, tokenizer, with_template
from tileinfer_core.chat_template import ChatTemplate
from tileinfer_core.errors import ModelError

CORPUS = goldens("text_goldens.json")["corpus"]
CHATS = goldens("text_goldens.json")["chats"]
TOOLS = goldens("text_goldens.json")["tools"]
TEMPLATED = [(name, template) for name in FAMILIES for template in family(name)["templates"]]


@pytest.mark.parametrize("name", FAMILIES)
def test_corpus_ids(name):
    controls = tokenizer(name).control_ids
    for text, ids in zip(CORPUS, family(name)["corpus"], strict=True):
        as_text = tokenizer(name).encode(text, special=False, add_bos=False)
        assert tokenizer(name).encode(text, special=True, add_bos=False) == ids
        assert as_text == ids or not controls.isdisjoint(ids)  # the corpus holds a control token of one family
        assert controls.isdisjoint(as_text)


@pytest.mark.parametrize("name", FAMILIES)
def test_own_rule_for_bos_and_eos(name):
    found = [tokenizer(name).encode(text, special=True) for text in CORPUS]
    assert found == family(name)["corpus_with_own_rule"]


@pytest.mark.parametrize("name", FAMILIES)
def test_control_tokens_in_the_templates_own_text(name):
    """Neighbours, whitespace around tokens that take it, tokens that must stand alone."""
    for text, ids in family(name)["scaffolds"]:
        assert tokenizer(name).encode(text, special=True, add_bos=False) == ids, text


@pytest.mark.parametrize("name", FAMILIES)
def test_decoded_text(name):
    for ids, text in zip(family(name)["corpus"], family(name)["decoded"], strict=True):
        assert tokenizer(name).decode(ids, skip_special=False) == text
    for (_, ids), text in zip(family(name)["scaffolds"], family(name)["scaffolds_decoded"], strict=True):
        assert tokenizer(name).decode(ids) == text


@pytest.mark.parametrize(("name", "template"), TEMPLATED)
def test_rendered_chats(name, template, tmp_path):
    loaded = ChatTemplate.load(with_template(tmp_path, name, template))
    controls = [tokenizer(name).piece(key) for key in tokenizer(name).control_ids]
    compared = 0
    for row in family(name)["templates"][template]:
        messages = chat(CHATS[row["chat"]])
        tools = TOOLS if row["tools"] else None
        options = {"add_generation_prompt": row["prompt"], "think": row["think"], "tools": tools, "date": date()}
        if "refused" in row:
            with pytest.raises(ModelError) as caught:
                loaded.render(messages, **options)
            assert row["refused"] in str(caught.value)
            continue
        segments = loaded.render(messages, **options)
        user_typed_control = any(token in message.content for token in controls for message in messages)
        assert "".join(segment.text for segment in segments) == row["text"]
        assert (tokenizer(name).encode_segments(segments) == row["ids"]) or user_typed_control
        compared += 1
    assert compared >= 8


@pytest.mark.parametrize("name", FAMILIES)
def test_valid_ids(name):
    mask = tokenizer(name).valid_ids_mask
    assert mask.sum() == family(name)["rows"]
    assert mask[: family(name)["rows"]].all()
