"""How text is cut before byte-pair merging, by the name a GGUF file stores in tokenizer.ggml.pre.

A GGUF file holds the vocabulary and the merges but only this name for the cutting rule. Each entry below is the rule
of the model family's own tokenizer.json, in the notation of the `tokenizers` library. A name that is not in the table
is refused: a wrong rule still makes tokens, only not the ones the model was trained on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tileinfer_core.errors import UnsupportedModelError

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """`steps` run one after another; `ignore_merges` takes a piece that is a token as it is, without merging."""

    steps: tuple[Json, ...]
    normalizer: Json | None = None
    ignore_merges: bool = False
    add_bos: bool = False  # what holds when the file does not say


def _split(pattern: str) -> Json:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _byte_level(*, use_regex: bool) -> Json:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


_GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGITS: Json = {"type": "Digits", "individual_digits": True}
_BYTES = _byte_level(use_regex=False)


def _llama3_pattern(digits: str) -> str:
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN_PATTERN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_GPT2 = PreTokenizer((_byte_level(use_regex=True),))
_SMOLLM = PreTokenizer((_DIGITS, _byte_level(use_regex=True)))
_LLAMA3 = PreTokenizer((_split(_llama3_pattern(r"\p{N}{1,3}")), _BYTES), ignore_merges=True, add_bos=True)
_QWEN2 = PreTokenizer((_split(_llama3_pattern(r"\p{N}")), _BYTES), normalizer={"type": "NFC"})
_TEKKEN = PreTokenizer((_split(_TEKKEN_PATTERN), _BYTES), ignore_merges=True, add_bos=True)
# What llama.cpp applies to files that predate the name; it is nobody's own rule, but those files mean this one.
_DEFAULT = PreTokenizer(
    (_split(r"[\p{P}\$\+<=>\^~\|]+"), _split(_GPT2_PATTERN), _split(r"\p{N}+"), _split("[0-9][0-9][0-9]"), _BYTES)
)
_DEEPSEEK_CODER = PreTokenizer(
    (_split("[\r\n]"), _split(r"\s?\p{L}+"), _split(r"\s?\p{P}+"), _split("[一-龥ࠀ-一가-퟿]+"), _DIGITS, _BYTES)
)

_BY_NAME = {
    "default": _DEFAULT,
    "gpt-2": _GPT2,
    "gpt2": _GPT2,
    "smollm": _SMOLLM,
    "starcoder": _SMOLLM,
    "refact": _SMOLLM,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "tekken": _TEKKEN,
    "deepseek-coder": _DEEPSEEK_CODER,
}


def pre_tokenizer(name: str, where: object) -> PreTokenizer:
    """The rule of that name; UnsupportedModelError, naming it, for one that is not known."""
    try:
        return _BY_NAME[name]
    except KeyError:
        raise UnsupportedModelError(
            f"{where}: the pre-tokenizer {name!r} is not known; known are {', '.join(_BY_NAME)}",
            hint="use the model's safetensors version, which brings its own tokenizer.json",
        ) from None
