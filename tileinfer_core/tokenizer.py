"""Text to token ids and back, with the model's own tokenizer.json.

**User text is text.** The library is told never to match a control token (`<|im_end|>`, `<think>`). In the template's
own text each occurrence of one is replaced by an alias, a random string that is an added token with the same matching
rules; the whole prompt is then encoded in one call, and the aliases' ids are replaced by the real ones. So

- a prompt whose messages hold no control token's text gets exactly the ids that Transformers gives;
- what a user types is never a control token: not alone, not together with the text around it, not after a normalizer
  has rewritten it; and it merges with its neighbours as any text does;
- limit: where the ordinary vocabulary itself can spell a control token (a whole word of a BPE with `ignore_merges`),
  the text is cut in the middle of it, so that the two sides of the cut don't merge.

`clean_up_tokenization_spaces` is never applied: it deletes spaces that the model wrote.
"""

from __future__ import annotations

import itertools
from functools import cached_property
from operator import is_not
from typing import TYPE_CHECKING

import numpy as np

from tileinfer_core.control_tokens import ControlTokens
from tileinfer_core.detokenizer import DecoderPlan, StreamingDetokenizer
from tileinfer_core.errors import DamagedModelError, UnsupportedModelError, UsageError
from tileinfer_core.messages import Segment
from tileinfer_core.tokenizer_files import (
    TOKENIZER_FILE,
    TokenizerConfig,
    add_config_tokens,
    library_errors,
    load_backend,
    surroundings,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray
    from tokenizers import Tokenizer as Backend


class Tokenizer:
    """Made by `load`. `vocab_size` is the number of rows of the model's logits, often more than there are tokens."""

    def __init__(self, backend: Backend, config: TokenizerConfig, vocab_size: int, where: str) -> None:
        self.vocab_size = vocab_size
        self._where = where
        self._config = config
        self._backend = backend
        backend.no_truncation()
        backend.no_padding()
        add_config_tokens(backend, config, where)
        self._added = dict(backend.get_added_tokens_decoder())
        named = [backend.token_to_id(token) for token in config.named_tokens.values()]
        self._hidden = {key for key, token in self._added.items() if token.special}
        self._hidden.update(token_id for token_id in named if token_id is not None)
        self._plan = DecoderPlan.compile(backend.decoder, where)
        self._bytes: dict[tuple[int, bool], bytes | None] = {}
        self._controls = ControlTokens(backend, self._added)

    @classmethod
    def load(cls, folder: Path, vocab_size: int) -> Tokenizer:
        """
        Raises:
            UnsupportedModelError: a part of tokenizer.json that the library or TileInfer doesn't have.
            DamagedModelError: a file that is broken or contradicts itself.
        """
        config = TokenizerConfig.load(folder)
        where = str(folder / TOKENIZER_FILE)
        backend = load_backend(folder)
        with library_errors(where):
            return cls(backend, config, vocab_size, where)

    # Special tokens

    @property
    def control_ids(self) -> frozenset[int]:
        """The ids that no text of a message turns into."""
        return self._controls.ids

    @property
    def bos_token_id(self) -> int | None:
        return self._named_id("bos_token")

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The end-of-sequence id that the tokenizer's files name: one or none."""
        eos = self._named_id("eos_token")
        return frozenset() if eos is None else frozenset({eos})

    def _named_id(self, name: str) -> int | None:
        token = self._config.named_tokens.get(name)
        return None if token is None else self.token_id(token)

    def token_id(self, token: str) -> int | None:
        """The id of a token by its exact spelling in the vocabulary."""
        token_id = self._backend.token_to_id(token)
        return None if token_id in self._controls.alias_ids else token_id

    @cached_property
    def valid_ids_mask(self) -> NDArray[np.bool_]:
        """[vocab_size], True where a row of the logits is a token; the rest is padding and must not be sampled."""
        tokens = map(self._backend.id_to_token, range(self.vocab_size))  # half the time of get_vocab's table
        mask = np.fromiter(map(is_not, tokens, itertools.repeat(None)), np.bool_, self.vocab_size)
        mask[[token_id for token_id in self._controls.alias_ids if token_id < self.vocab_size]] = False
        return mask

    def ids_beyond(self, rows: int) -> list[int]:
        """Ids of tokens for which the embedding has no row."""
        ids = set(self._backend.get_vocab(with_added_tokens=True).values()) - self._controls.alias_ids.keys()
        return sorted(token_id for token_id in ids if token_id >= rows)

    def prepare(self) -> None:
        """Work that the first answer would have to wait for."""
        _ = self.valid_ids_mask

    # Text to ids

    def encode(self, text: str, *, special: bool, add_bos: bool | None = None) -> list[int]:
        """Ids of a text by itself. `special`: is the text's `<|im_end|>` a control token?

        `add_bos` None follows the tokenizer's own rule for what stands before and after a text, True puts exactly one
        BOS in front, False adds nothing. A text that (being special) brings its own BOS doesn't get a second one.
        """
        ids = self.encode_segments([Segment(text, special)])
        if add_bos is None:
            before, after = self._own_rule
        else:
            before, after = [self.bos_token_id] if add_bos and self.bos_token_id is not None else [], []
        has_it = bool(before) and ids[: len(before)] == before
        return ids + after if has_it else before + ids + after

    @cached_property
    def _own_rule(self) -> tuple[list[int], list[int]]:
        """What tokenizer.json's post-processor puts before and after a text."""
        with library_errors(self._where):
            return surroundings(self._backend)

    def encode_segments(self, segments: Sequence[Segment]) -> list[int]:
        """Ids of a rendered prompt; nothing is added, because a template prints its own BOS.

        Raises:
            UsageError: the text is not Unicode, as when bytes that are not UTF-8 came in from outside.
            DamagedModelError: an id beyond the model's `vocab_size` rows.
        """
        text = self._controls.text_with_aliases(segments)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            found = text[error.start : error.end]
            raise UsageError(f"the text is not valid Unicode: {found!r:.40} at character {error.start}") from None
        with library_errors(self._where):
            ids = self._encode(text)
        if ids and (largest := max(ids)) >= self.vocab_size:
            raise DamagedModelError(
                f"{self._where}: the text needs token {largest}, but the model has only {self.vocab_size} rows"
            )
        return ids

    def _encode(self, text: str) -> list[int]:
        encoding = self._backend.encode(text, add_special_tokens=False)
        ids, aliases, controls = encoding.ids, self._controls.alias_ids, self._controls.ids
        spans = [span for token_id, span in zip(ids, encoding.offsets, strict=True) if token_id in aliases]
        if len(spans) < self._controls.count_aliases(text):
            return self._encode(self._controls.without_unmatched(text, spans))
        if controls.isdisjoint(ids):
            return [aliases.get(token_id, token_id) for token_id in ids]
        spans = [span for token_id, span in zip(ids, encoding.offsets, strict=True) if token_id in controls]
        if any(stop - start < 2 for start, stop in spans):
            raise UnsupportedModelError(f"{self._where}: a control token is an ordinary character of the vocabulary")
        cuts = [0, *((start + stop) // 2 for start, stop in spans), len(text)]
        return [token_id for start, stop in itertools.pairwise(cuts) for token_id in self._encode(text[start:stop])]

    # Ids to text

    def stream(
        self, *, skip_special: bool = True, keep: Iterable[str] = (), continues: bool = False
    ) -> StreamingDetokenizer:
        """A detokenizer for one answer.

        `keep` names special tokens that show all the same, such as thinking markers. `continues`: the text goes on
        after a prompt (`--raw`), so a first token that begins with a space keeps it; without it the text starts here,
        and SentencePiece kinds drop that space, as decoding the ids at once does.
        """
        kept = {self._backend.token_to_id(token) for token in keep}
        hidden = frozenset(self._hidden - kept) if skip_special else frozenset()

        def look_up(token_id: int, first: bool) -> bytes | None:
            return None if token_id in hidden else self._token_bytes(token_id, first)

        return StreamingDetokenizer(look_up, self._plan, continues=continues)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of all ids at once, equal to what `stream` gives for them one by one."""
        stream = self.stream(skip_special=skip_special)
        return stream.push_all(ids) + stream.flush()

    def piece(self, token_id: int) -> str:
        """One token by itself, for people to read: bytes that are no whole character show as U+FFFD."""
        return self.piece_bytes(token_id).decode("utf-8", "replace")

    def piece_bytes(self, token_id: int) -> bytes:
        """What `piece` shows."""
        return self._token_bytes(token_id, False) or b""

    def _token_bytes(self, token_id: int, first: bool) -> bytes | None:
        """None for an id that is no token."""
        key = (token_id, first)
        if key not in self._bytes:
            self._bytes[key] = self._spell(token_id, first)
        return self._bytes[key]

    def _spell(self, token_id: int, first: bool) -> bytes | None:
        if not 0 <= token_id <= 0xFFFFFFFF or token_id in self._controls.alias_ids:
            return None
        added = self._added.get(token_id)
        if added is None:
            token = self._backend.id_to_token(token_id)
            return None if token is None else self._plan.token_bytes(token, first=first, added=False)
        # A normalized token stands for the text that the normalizer made: with ▁ in front, it took a space with it.
        normalizer = self._backend.normalizer if added.normalized else None
        text = normalizer.normalize_str(added.content) if normalizer else added.content
        return self._plan.token_bytes(text, first=first, added=True)
