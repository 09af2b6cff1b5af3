"""tokenizer.json, tokenizer_config.json and chat_template.jinja from the vocabulary inside a GGUF file.

Two kinds of vocabulary are read, by the name in tokenizer.ggml.model:

    gpt2    byte-level BPE: tokens, merges and the name of the pre-tokenizer
    llama   SentencePiece BPE: tokens and scores; the merges follow from the scores, as in the fast tokenizers of
            Transformers, with byte fallback for what the vocabulary lacks

Anything else (Unigram, WordPiece, RWKV) is refused by name.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from tileinfer_core.errors import DamagedModelError, UnsupportedModelError
from tileinfer_core.gguf_import.pretokenizers import PreTokenizer, pre_tokenizer

if TYPE_CHECKING:
    from tileinfer_core.gguf_import.metadata import Metadata

Json = dict[str, Any]

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_SPACE = "\u2581"  # SentencePiece writes a space as this

# Control tokens that end a turn or a text in every family that has them. A GGUF file names one or two end tokens,
# the original generation_config often three; a model that makes one of these has finished either way.
_END_TOKENS = frozenset({"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "</s>"})


class Vocabulary:
    """The tokens of a GGUF file, checked; `files()` is what goes into the model folder."""

    def __init__(self, metadata: Metadata, rows: int) -> None:
        """Args:
        metadata: the file's keys.
        rows: rows of the embedding matrix, which may exceed the tokens (padding) but never the other way round.
        """
        self.metadata = metadata
        self.tokens = metadata.strings("tokenizer.ggml.tokens")
        self.types = _types(metadata, len(self.tokens))
        if not self.tokens or len(self.tokens) > rows or len(self.types) != len(self.tokens):
            raise DamagedModelError(
                f"{metadata.path}: {len(self.tokens)} tokens, {len(self.types)} token types and {rows} embedding rows"
            )
        self.kind = metadata.text("tokenizer.ggml.model")
        if self.kind not in ("gpt2", "llama"):
            raise UnsupportedModelError(
                f"{metadata.path}: the tokenizer kind {self.kind!r} is not known; known are gpt2 and llama",
                hint="use the model's safetensors version, which brings its own tokenizer.json",
            )
        self.rule: PreTokenizer | None = None
        if self.kind == "gpt2":
            self.rule = pre_tokenizer(metadata.text_or("tokenizer.ggml.pre", "default"), metadata.path)
        self.ids = self._ids()

    def _ids(self) -> dict[str, int]:
        """Text → id, without the names that exporters give to padding rows ("[PAD151669]")."""
        ids: dict[str, int] = {}
        for index, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True)):
            if kind == _UNUSED and token == f"[PAD{index}]":
                continue
            if token in ids:
                raise DamagedModelError(f"{self.metadata.path}: the tokens {ids[token]} and {index} are both {token!r}")
            ids[token] = index
        return ids

    def special_id(self, which: str) -> int | None:
        """tokenizer.ggml.<which>_token_id, or None; an id beyond the vocabulary is damage."""
        key = f"tokenizer.ggml.{which}_token_id"
        index = self.metadata.integer_or(key, None)
        if index is not None and index >= len(self.tokens):
            raise DamagedModelError(f"{self.metadata.path}: {key} is {index}, the vocabulary has {len(self.tokens)}")
        return index

    @property
    def end_ids(self) -> list[int]:
        """Every id that ends a generation, the file's own end token first."""
        named = [self.special_id(which) for which in ("eos", "eot", "eom")]
        known = [i for i, token in enumerate(self.tokens) if self.types[i] == _CONTROL and token in _END_TOKENS]
        return list(dict.fromkeys([i for i in named if i is not None] + known))

    @property
    def add_bos(self) -> bool:
        default = self.rule.add_bos if self.rule else True
        return self.metadata.flag_or("tokenizer.ggml.add_bos_token", default) and self.special_id("bos") is not None

    @property
    def add_eos(self) -> bool:
        return self.metadata.flag_or("tokenizer.ggml.add_eos_token", False) and self.special_id("eos") is not None

    def files(self, context_length: int) -> dict[str, str]:
        """{file name: content}. The content of tokenizer.json is loaded once, so that a bad one is found here."""
        definition = json.dumps(self._definition(), ensure_ascii=False)
        _check(definition, self.metadata)
        config = json.dumps(self._config(context_length), ensure_ascii=False, indent=2)
        files = {"tokenizer.json": definition, "tokenizer_config.json": config + "\n"}
        template = self.metadata.text_or("tokenizer.chat_template", None)
        if template is not None:
            files["chat_template.jinja"] = template
        return files

    def _added_tokens(self) -> list[Json]:
        added = []
        for index, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True)):
            if kind in (_CONTROL, _UNKNOWN, _USER_DEFINED) and token:
                flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
                added.append({"id": index, "content": token, **flags, "special": kind != _USER_DEFINED})
        return added

    def _definition(self) -> Json:
        definition = self._byte_level() if self.rule else self._sentence_piece()
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": self._added_tokens(),
            **definition,
            "post_processor": self._post_processor(),
        }

    def _byte_level(self) -> Json:
        rule = self.rule
        assert rule is not None  # noqa: S101 - only called for it
        merges = self.metadata.strings("tokenizer.ggml.merges")
        return {
            "normalizer": rule.normalizer,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(rule.steps)},
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": self._bpe([self._merge(line) for line in merges], ignore_merges=rule.ignore_merges),
        }

    def _merge(self, line: str) -> list[str]:
        """A merge is "left right"; the search starts at 1 because the left side may itself begin with a space."""
        middle = line.find(" ", 1)
        left, right = line[:middle], line[middle + 1 :]
        if middle < 0 or left not in self.ids or right not in self.ids or left + right not in self.ids:
            raise DamagedModelError(f"{self.metadata.path}: the merge {line!r} is not of two tokens that make a third")
        return [left, right]

    def _sentence_piece(self) -> Json:
        prefix = self.metadata.flag_or("tokenizer.ggml.add_space_prefix", True)
        to_spaces: Json = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
        from_spaces: Json = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
        steps = [{"type": "Prepend", "prepend": _SPACE}] if prefix else []
        strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
        unknown = self.special_id("unknown")
        return {
            "normalizer": {"type": "Sequence", "normalizers": [*steps, from_spaces]},
            "pre_tokenizer": None,
            "decoder": {
                "type": "Sequence",
                "decoders": [to_spaces, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip],
            },
            "model": {
                **self._bpe(self._merges_from_scores(), ignore_merges=False),
                "unk_token": None if unknown is None else self.tokens[unknown],
                "fuse_unk": True,
                "byte_fallback": True,
            },
        }

    def _merges_from_scores(self) -> list[list[str]]:
        """Every way to make a token of two others, best-scored token first, as Transformers derives them."""
        scores = self.metadata.numbers("tokenizer.ggml.scores")
        if len(scores) != len(self.tokens):
            raise DamagedModelError(f"{self.metadata.path}: {len(scores)} scores for {len(self.tokens)} tokens")
        pieces = {t: i for t, i in self.ids.items() if self.types[i] not in (_CONTROL, _UNKNOWN, _BYTE)}
        merges: list[tuple[float, str, str]] = []
        for token, index in pieces.items():
            pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
            known = [pair for pair in pairs if pair[0] in pieces and pair[1] in pieces]
            known.sort(key=lambda pair: (pieces[pair[0]], pieces[pair[1]]))
            merges.extend((scores[index], left, right) for left, right in known)
        merges.sort(key=lambda merge: (merge[0], len(merge[1]), len(merge[2])), reverse=True)
        return [[left, right] for _, left, right in merges]

    def _bpe(self, merges: list[list[str]], *, ignore_merges: bool) -> Json:
        return {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": ignore_merges,
            "vocab": self.ids,
            "merges": merges,
        }

    def _post_processor(self) -> Json | None:
        """What `encode` adds around a text, so that other readers of the folder add the same."""
        bos, eos = self.special_id("bos"), self.special_id("eos")
        before = [bos] if self.add_bos and bos is not None else []
        after = [eos] if self.add_eos and eos is not None else []
        if not before and not after:
            return None

        def pieces(letter: str, kind: int) -> list[Json]:
            around = [
                [{"SpecialToken": {"id": self.tokens[i], "type_id": kind}} for i in p if i is not None]
                for p in (before, after)
            ]
            return [*around[0], {"Sequence": {"id": letter, "type_id": kind}}, *around[1]]

        return {
            "type": "TemplateProcessing",
            "single": pieces("A", 0),
            "pair": pieces("A", 0) + pieces("B", 1),
            "special_tokens": {
                self.tokens[i]: {"id": self.tokens[i], "ids": [i], "tokens": [self.tokens[i]]} for i in before + after
            },
        }

    def _config(self, context_length: int) -> Json:
        config: Json = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": context_length,
            "clean_up_tokenization_spaces": False,
            "add_bos_token": self.add_bos,
            "add_eos_token": self.add_eos,
        }
        for name, which in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
            index = self.special_id(which)
            config[f"{name}_token"] = None if index is None else self.tokens[index]
        config["added_tokens_decoder"] = {
            str(token["id"]): {k: v for k, v in token.items() if k != "id"} for token in self._added_tokens()
        }
        return config


def _types(metadata: Metadata, count: int) -> list[int]:
    key = "tokenizer.ggml.token_type"
    return metadata.integers(key) if key in metadata.values else [_NORMAL] * count


def _check(definition: str, metadata: Metadata) -> None:
    try:
        Tokenizer.from_str(definition)
    except Exception as error:  # the library raises bare Exception
        raise DamagedModelError(f"{metadata.path}: its vocabulary makes no valid tokenizer: {error}") from error
