"""Streamed text: whole characters only, the joined stream equal to the text at once, leading spaces, constant work."""

from __future__ import annotations

import random

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from tests.text_fixtures import FAMILIES, TOKENIZERS, goldens, tokenizer
from tileinfer_core.detokenizer import DecoderPlan, StreamingDetokenizer
from tileinfer_core.tokenizer import Tokenizer

CORPUS = goldens("text_goldens.json")["corpus"]
BYTE_LEVEL = [name for name in FAMILIES if name not in {"sentencepiece", "metaspace"}]


@pytest.mark.parametrize("name", FAMILIES)
def test_joined_stream_is_the_text_at_once(name):
    for text in [*CORPUS, "🧑🏽‍🚀 " * 5 + "देवनागरी 漢字"]:
        ids = tokenizer(name).encode(text, special=False, add_bos=False)
        stream = tokenizer(name).stream()
        pieces = [stream.push(token_id) for token_id in ids]
        assert not any("\ufffd" in piece for piece in pieces)
        assert stream.flush() == ""
        assert "".join(pieces) == tokenizer(name).decode(ids)


def test_a_character_over_many_tokens_comes_whole():
    ids = tokenizer("qwen").encode("🧑🏽‍🚀", special=False)
    stream = tokenizer("qwen").stream()
    pieces = [stream.push(token_id) for token_id in ids]
    assert len(ids) > 4
    assert [piece for piece in pieces if piece] == list("🧑🏽‍🚀")


@pytest.mark.parametrize("name", BYTE_LEVEL)
def test_any_ids_decode_as_the_library_does(name):
    """Random ids make every kind of broken UTF-8."""
    backend = tokenizers.Tokenizer.from_file(str(TOKENIZERS / name / "tokenizer.json"))
    rng = random.Random(name)
    for _ in range(300):
        ids = [rng.randrange(480) for _ in range(rng.randint(1, 30))]
        stream = tokenizer(name).stream(skip_special=False)
        joined = "".join([stream.push(token_id) for token_id in ids]) + stream.flush()
        assert joined == tokenizer(name).decode(ids, skip_special=False)
        assert joined == backend.decode(ids, skip_special_tokens=False)


def test_unfinished_bytes_are_flushed():
    ids = tokenizer("qwen").encode("a😀", special=False)
    stream = tokenizer("qwen").stream()
    assert stream.push_all(ids[:-1]) == "a"
    assert stream.flush() == "\ufffd"
    assert tokenizer("qwen").decode(ids[:-1]) == "a\ufffd"


def test_byte_tokens_of_sentencepiece():
    byte = {value: tokenizer("sentencepiece").token_id(f"<0x{value:02X}>") for value in range(256)}
    stream = tokenizer("sentencepiece").stream()
    pieces = [stream.push(byte[value]) for value in "é漢".encode()]
    assert pieces == ["", "é", "", "", "漢"]
    letter = tokenizer("sentencepiece").token_id("a")
    assert tokenizer("sentencepiece").decode([byte[0xE2], byte[0x82], letter]) == "\ufffda"


@pytest.mark.parametrize(("name", "first"), [("sentencepiece", "the"), ("metaspace", "the"), ("qwen", " the")])
def test_leading_space(name, first):
    token = next(key for key in range(560) if tokenizer(name).piece(key) == " the")
    stream = tokenizer(name).stream()
    assert stream.push(token) + stream.push(token) == first + " the"
    assert tokenizer(name).decode([token, token]) == first + " the"
    assert tokenizer(name).stream(continues=True).push(token) == " the"


def test_only_one_leading_space_is_dropped_in_sentencepiece():
    space = tokenizer("sentencepiece").token_id("▁")
    assert tokenizer("sentencepiece").decode([space, space, space]) == "  "


def test_special_tokens_are_hidden_but_for_those_asked_for():
    ids = tokenizer("qwen").encode("<|im_start|>a<think>b</think><|im_end|>", special=True)
    assert tokenizer("qwen").decode(ids) == "a<think>b</think>"  # the file does not flag these two special
    assert tokenizer("qwen").stream(keep=["<|im_end|>"]).push_all(ids) == "a<think>b</think><|im_end|>"
    assert tokenizer("qwen").decode(ids, skip_special=False) == "<|im_start|>a<think>b</think><|im_end|>"


def test_work_per_token_does_not_grow():
    """One look-up for each token, and nothing kept but an unfinished character."""
    looked_up = []

    def look_up(token_id, first):
        looked_up.append(token_id)
        return b"\xe6\xbc\xa2"[token_id % 3 : token_id % 3 + 1]

    stream = StreamingDetokenizer(look_up, DecoderPlan(), continues=False)
    lengths = {len(stream.push(token_id)) for token_id in range(30_000)}
    assert lengths == {0, 1}
    assert looked_up == list(range(30_000))


def test_a_tokenizer_without_a_decoder_puts_spaces(tmp_path):
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.save(str(tmp_path / "tokenizer.json"))
    loaded = Tokenizer.load(tmp_path, 3)
    assert loaded.decode(loaded.encode("a b a", special=False)) == "a b a" == backend.decode([0, 1, 0])
