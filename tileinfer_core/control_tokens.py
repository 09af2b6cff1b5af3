"""Keeps the text that a user controls from becoming control tokens; tokenizer.py's docstring gives the method.

Every added token that is not mere whitespace is a control token here, whether its file flags it special or not: a
typed `<think>` should no more steer the model than a typed `<|im_end|>`. Whitespace tokens (runs of spaces or
newlines) are ordinary vocabulary.
"""

from __future__ import annotations

import itertools
import re
import secrets
from typing import TYPE_CHECKING

from tokenizers import AddedToken

from tileinfer_core.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tokenizers import Tokenizer as Backend

    from tileinfer_core.messages import Segment

_PRIVATE_USE = 0x100000  # plane 16: 65,534 characters without a meaning


class ControlTokens:
    """The control tokens of one tokenizer, each with an alias that only this process knows.

    Making it changes `backend`: control tokens are not matched any more, their aliases are.

    `alias_ids` maps the ids that the library gave the aliases to the real ones.

    Raises:
        UnsupportedModelError: the tokenizer's normalizer does not let an alias pass.
    """

    def __init__(self, backend: Backend, added: Mapping[int, AddedToken]) -> None:
        self._tokens = {token.content: token for token in added.values() if token.content.strip()}
        self.ids = frozenset(key for key, token in added.items() if token.content.strip())
        self.alias_ids: dict[int, int] = {}
        self._alias_of: dict[str, str] = {}
        self._content_of: dict[str, str] = {}
        backend.add_special_tokens(list(self._tokens))
        backend.encode_special_tokens = True  # the library's name for: text that spells a special token stays text
        self._make_aliases(backend, {token.content: key for key, token in added.items()})
        longest_first = sorted(self._tokens, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def _make_aliases(self, backend: Backend, ids: Mapping[str, int]) -> None:
        # 48 random bits: whoever writes a prompt can't guess them
        self._nonce = "".join(chr(_PRIVATE_USE + secrets.randbelow(0xFFFE)) for _ in range(3))
        serials = itertools.count()
        waiting = list(self._tokens)
        while waiting:  # once, but for a vocabulary with gaps: it may own the ids that the library gives out
            made = {content: f"{self._nonce}{chr(_PRIVATE_USE + next(serials))}" for content in waiting}
            backend.add_tokens([_alias_token(alias, self._tokens[content]) for content, alias in made.items()])
            for content, alias in made.items():
                alias_id = backend.token_to_id(alias)
                if alias_id is not None and backend.model.id_to_token(alias_id) is None:
                    self.alias_ids[alias_id] = ids[content]
                    self._alias_of[content], self._content_of[alias] = alias, content
            waiting = [content for content in waiting if content not in self._alias_of]
        self._check(backend)

    def _check(self, backend: Backend) -> None:
        """Does each alias come out as its one token?"""
        for (alias, content), alias_id in zip(self._content_of.items(), self.alias_ids, strict=True):
            if backend.encode(alias, add_special_tokens=False).ids.count(alias_id) != 1:
                raise UnsupportedModelError(f"the normalizer of tokenizer.json deletes the stand-in for {content!r}")

    def text_with_aliases(self, segments: Sequence[Segment]) -> str:
        """The joined text, where the control tokens that the template itself wrote are replaced by their aliases."""
        whole = "".join([segment.text for segment in segments])
        parts = [
            self._pattern.sub(lambda match: self._alias_of[match[0]], whole[start:end]) if special else whole[start:end]
            for start, end, special in _stretches(segments)
        ]
        return "".join(parts)

    def count_aliases(self, text: str) -> int:
        return text.count(self._nonce)

    def without_unmatched(self, text: str, matched: Sequence[tuple[int, int]]) -> str:
        """The text with those aliases spelled out again that the tokenizer did not take for tokens.

        An added token is not matched everywhere: `single_word` ones stand alone, and a `normalized` one of a tokenizer
        that puts ▁ before a text is only found after a space. Its alias has the same rules.
        """
        spans = iter([*matched, (len(text), len(text))])
        start, stop = next(spans)

        def put_back(match: re.Match[str]) -> str:
            nonlocal start, stop
            while stop < match.end():
                start, stop = next(spans)
            return match[0] if start <= match.start() else self._content_of[match[0]]

        return re.sub(f"{self._nonce}.", put_back, text, flags=re.DOTALL)


def _alias_token(alias: str, token: AddedToken) -> AddedToken:
    flags = {flag: getattr(token, flag) for flag in ("single_word", "lstrip", "rstrip", "normalized")}
    return AddedToken(alias, special=False, **flags)


def _stretches(segments: Iterable[Segment]) -> list[tuple[int, int, bool]]:
    """(start, end, special) with neighbours of a kind as one: a template may spell a token in pieces."""
    stretches: list[tuple[int, int, bool]] = []
    end = 0
    for segment in segments:
        start, end = end, end + len(segment.text)
        if stretches and stretches[-1][2] == segment.special:
            stretches[-1] = (stretches[-1][0], end, segment.special)
        else:
            stretches.append((start, end, segment.special))
    return stretches
