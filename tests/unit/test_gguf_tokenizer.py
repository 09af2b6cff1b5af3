"""The tokenizer that comes out of a GGUF file makes the same ids as the one that went in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.gguf_files import TinyModel
from tileinfer_core.errors import DamagedModelError, UnsupportedModelError
from tileinfer_core.gguf_import import convert
from tileinfer_core.gguf_import.metadata import Metadata
from tileinfer_core.gguf_import.pretokenizers import pre_tokenizer
from tileinfer_core.gguf_import.tokenizer import Vocabulary
from tileinfer_core.progress import silent

REFERENCE = json.loads((Path(__file__).parents[1] / "reference/sentencepiece.json").read_text())


def pieces(name: str, text: str) -> list[str]:
    """What a pre-tokenizer cuts `text` into, as text."""
    definition = {
        "version": "1.0", "added_tokens": [], "normalizer": None, "post_processor": None, "decoder": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(pre_tokenizer(name, "x").steps)},
        "model": {"type": "BPE", "vocab": {}, "merges": []},
    }  # fmt: skip
    tokenizer = Tokenizer.from_str(json.dumps(definition))
    return [text[start:end] for _, (start, end) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("gpt-2", "I'm 12345  ok\n\nx", ["I", "'m", " 12345", " ", " ok", "\n", "\n", "x"]),
        ("smollm", "I'm 123 ok", ["I", "'m", " ", "1", "2", "3", " ok"]),
        ("llama-bpe", "I'M 12345 (ok)\n\n  x", ["I", "'M", " ", "123", "45", " (", "ok", ")\n\n", " ", " x"]),
        ("qwen2", "I'M 123 ok\r\n\n x", ["I", "'M", " ", "1", "2", "3", " ok", "\r\n\n", " x"]),
        ("tekken", "HelloWorld 12/\n ABCdef", ["Hello", "World", " ", "1", "2", "/\n", " ABCdef"]),
        ("default", "a, b == 12345c", ["a", ",", " b", " ", "==", " ", "123", "45", "c"]),
        ("deepseek-coder", "ab 12\n中文x, y", ["ab", " ", "1", "2", "\n", "中文", "x", ",", " y"]),
    ],
)
def test_cutting_rules(name: str, text: str, expected: list[str]) -> None:
    assert pieces(name, text) == expected
    assert "".join(pieces(name, text)) == text


def test_an_unknown_rule_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="'brand-new'"):
        pre_tokenizer("brand-new", "file.gguf")


def load(model: TinyModel, tmp_path: Path) -> Tokenizer:
    convert(model.write(tmp_path / "t.gguf"), tmp_path / "out", silent)
    return Tokenizer.from_file(str(tmp_path / "out/tokenizer.json"))


def test_byte_level_vocabulary(tmp_path: Path) -> None:
    model = TinyModel()
    tokenizer = load(model, tmp_path)
    tokens, _ = model.tokens()
    assert [tokens[i] for i in tokenizer.encode("hello wo").ids] == ["hello", "Ġwo"]
    for text in ["é 日本 😀\t\n", "  x  ", "0 1\r\n"]:
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.encode("<|im_start|>x").ids[0] == 1
    assert tokenizer.encode("<think>").ids == [tokens.index("<think>")]
    assert tokenizer.decode([1, *tokenizer.encode("<think>").ids]) == "<think>"  # user-defined, so not special


def test_rows_without_a_token_stay_out_of_the_vocabulary(tmp_path: Path) -> None:
    model = TinyModel()
    tokenizer = load(model, tmp_path)
    assert tokenizer.get_vocab_size() == model.vocab - model.padding


def test_exporters_names_for_padding_rows_are_no_tokens() -> None:
    letters = ["a", "b", "[PAD2]", "[PAD9]"]
    keys = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": letters, "tokenizer.ggml.token_type": [1, 1, 5, 5]}
    vocabulary = Vocabulary(Metadata(Path("x"), {**keys, "tokenizer.ggml.merges": []}), 4)
    assert vocabulary.ids == {"a": 0, "b": 1, "[PAD9]": 3}  # the second is not the name of its own row


@pytest.mark.parametrize(
    ("pre", "flag", "expected"),
    [("smollm", None, False), ("llama-bpe", None, True), ("llama-bpe", False, False), ("smollm", True, True)],
)
def test_begin_of_text_rule(tmp_path: Path, pre: str, flag: bool | None, expected: bool) -> None:
    extra = {} if flag is None else {"tokenizer.ggml.add_bos_token": flag}
    tokenizer = load(TinyModel(pre=pre, extra=extra), tmp_path)
    config = json.loads((tmp_path / "out/tokenizer_config.json").read_text())
    assert config["add_bos_token"] is expected
    assert (tokenizer.encode("hello").ids[0] == 1) is expected
    assert tokenizer.encode("hello", add_special_tokens=False).ids[0] != 1
    assert (config["bos_token"], config["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert config["clean_up_tokenization_spaces"] is False


def sentence_piece(**changes: Any) -> Vocabulary:
    keys: dict[str, Any] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": REFERENCE["tokens"],
        "tokenizer.ggml.scores": REFERENCE["scores"],
        "tokenizer.ggml.token_type": REFERENCE["types"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return Vocabulary(Metadata(Path("x.gguf"), keys | changes), len(REFERENCE["tokens"]))


def test_sentencepiece_ids_are_exactly_its_own() -> None:
    tokenizer = Tokenizer.from_str(sentence_piece().files(64)["tokenizer.json"])
    tokenizer.encode_special_tokens = True
    for text, ids in REFERENCE["cases"]:
        assert tokenizer.encode(text, add_special_tokens=False).ids == ids, text
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode("x").ids[0] == 1  # SentencePiece models begin with BOS unless the file says otherwise


def test_sentencepiece_without_the_space_prefix() -> None:
    vocabulary = sentence_piece(**{"tokenizer.ggml.add_space_prefix": False})
    tokenizer = Tokenizer.from_str(vocabulary.files(64)["tokenizer.json"])
    ids = tokenizer.encode("Hello world", add_special_tokens=False).ids
    assert not REFERENCE["tokens"][ids[0]].startswith("\u2581")
    assert tokenizer.decode(ids) == "Hello world"


def test_scores_must_match_the_tokens() -> None:
    with pytest.raises(DamagedModelError, match="1 scores for"):
        sentence_piece(**{"tokenizer.ggml.scores": [0.0]}).files(64)


@pytest.mark.parametrize("kind", ["t5", "bert", "rwkv", "plamo2"])
def test_other_kinds_are_refused_by_name(kind: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"'{kind}'"):
        sentence_piece(**{"tokenizer.ggml.model": kind})
