"""Token ids to text, whole characters at a time.

Every supported decoder is a map from a token to bytes, and what is joined is bytes: a character that is split over
tokens waits until its last byte is there, and the text is the same however it is cut into pushes. Each push costs the
length of its own token. Bytes that are not UTF-8 become U+FFFD as the Unicode standard recommends, one for each
maximal broken part, and only then.

Refused: decoders that need the token after (WordPiece, CTC, BPE with word endings); no model served here has one.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from tileinfer_core.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tokenizers.decoders import Decoder

TextStep = Callable[[str, bool], str]  # (token, is it the first of the text) → token
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class Strip:
    """Drop up to `count` of `character` at the very start of the text."""

    character: str
    count: int


@dataclass(frozen=True, slots=True)
class DecoderPlan:
    """A tokenizer.json decoder, compiled. `separator` stands between tokens (a file without a decoder: a space)."""

    steps: tuple[TextStep, ...] = ()
    byte_level: bool = False
    byte_fallback: bool = False
    strip: Strip | None = None
    separator: bytes = b""

    @classmethod
    def compile(cls, decoder: Decoder | None, where: str) -> DecoderPlan:
        """
        Raises:
            UnsupportedModelError: naming the part that can't be streamed.
        """
        if decoder is None:
            return cls(separator=b" ")
        parts = _flatten(json.loads(decoder.__getstate__()))
        return _compile(parts, where)

    def token_bytes(self, token: str, *, first: bool, added: bool) -> bytes:
        """An added token's text stands for itself; any other is spelled in the decoder's alphabet."""
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(match[1])
        for step in self.steps:
            token = step(token, first)
        if self.byte_level and not added:
            table = byte_alphabet()
            if all(character in table for character in token):
                return bytes(table[character] for character in token)
        return token.encode("utf-8", "replace")


def _flatten(part: dict[str, Any]) -> list[dict[str, Any]]:
    if part["type"] == "Sequence":
        return [leaf for child in part["decoders"] for leaf in _flatten(child)]
    return [part]


def _compile(parts: list[dict[str, Any]], where: str) -> DecoderPlan:
    steps: list[TextStep] = []
    kinds = [part["type"] for part in parts]
    strip = None
    for index, part in enumerate(parts):
        joined = "Fuse" in kinds[:index] or "ByteLevel" in kinds[:index]
        match part:
            case {"type": "ByteLevel" | "ByteFallback" | "Fuse"}:
                pass
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if (
                len(old) == 1 or not joined
            ):
                steps.append(lambda token, _first, old=old, new=new: token.replace(old, new))  # type: ignore[misc]
            case {"type": "Metaspace", "replacement": str(mark), "prepend_scheme": scheme} if not joined:
                steps.append(_metaspace(mark, keeps_first=scheme == "never"))
            case {"type": "Strip", "content": str(character), "start": int(count), "stop": 0} if joined and not strip:
                strip = Strip(character, count)
            case _:
                text = json.dumps(part, ensure_ascii=False)
                raise UnsupportedModelError(f"{where}: TileInfer can't stream through the decoder {text:.120}")
    return DecoderPlan(tuple(steps), "ByteLevel" in kinds, "ByteFallback" in kinds, strip)


def _metaspace(mark: str, *, keeps_first: bool) -> TextStep:
    return lambda token, first: token.replace(mark, "" if first and not keeps_first else " ")


@cache
def byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of the 256 bytes as printable characters."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + index): byte for index, byte in enumerate(others)}


class StreamingDetokenizer:
    """One text in the making: `push` ids, show what comes back, `flush` at the end.

    `look_up(id, first)` gives a token's bytes: b"" for what is not shown, None for an id that there isn't.
    """

    def __init__(self, look_up: Callable[[int, bool], bytes | None], plan: DecoderPlan, *, continues: bool) -> None:
        self._look_up = look_up
        self._separator = plan.separator
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._first = not continues
        self._strip = None if continues else plan.strip
        self._to_strip = self._strip.count if self._strip else 0

    def push(self, token_id: int) -> str:
        """The characters that this token completes, often none or several. Unknown ids add nothing."""
        piece = self._look_up(token_id, self._first)
        if piece is None:
            return ""
        if self._separator and not self._first:
            piece = self._separator + piece
        self._first = False
        return self._stripped(self._decoder.decode(piece))

    def push_all(self, token_ids: Iterable[int]) -> str:
        return "".join([self.push(token_id) for token_id in token_ids])

    def flush(self) -> str:
        """What the last tokens left unfinished: U+FFFD for an incomplete character, or nothing."""
        return self._stripped(self._decoder.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        while text and self._to_strip:
            if self._strip is None or text[0] != self._strip.character:
                self._to_strip = 0
            else:
                text, self._to_strip = text[1:], self._to_strip - 1
        return text
