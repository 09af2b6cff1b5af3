"""Reads tokenizer.json and the settings around it, and says in one line what is wrong with a file that fails.

The `tokenizers` library parses tokenizer.json. Its message for a part that it doesn't know ("data did not match any
variant of untagged enum") helps nobody, so a file that fails is taken apart to name the part.
"""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, __version__
from tokenizers import Tokenizer as Backend

from tileinfer_core.errors import DamagedModelError, TileinferError, UnsupportedModelError
from tileinfer_core.jsonfile import read_json_object

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
MAP_FILE = "special_tokens_map.json"
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
_NESTED = ("normalizers", "pretokenizers", "processors", "decoders")
_EMPTY_MODEL = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}


@dataclass(frozen=True, slots=True)
class TokenizerConfig:
    """What tokenizer_config.json (and special_tokens_map.json, where the former is silent) says.

    Not read, on purpose: `clean_up_tokenization_spaces`, which deletes spaces that the model wrote, and `add_bos_token`
    and `add_eos_token`, which yield to the rule in tokenizer.json, as in Transformers.
    """

    named_tokens: dict[str, str] = field(default_factory=dict)  # "eos_token" → "<|im_end|>"
    added_tokens: dict[int, AddedToken] = field(default_factory=dict)

    @classmethod
    def load(cls, folder: Path) -> TokenizerConfig:
        """
        Raises:
            DamagedModelError: a file is no JSON object, or a value has the wrong type.
        """
        path = folder / CONFIG_FILE
        table = read_json_object(path) if path.exists() else {}
        named = _named_tokens(folder / MAP_FILE) if (folder / MAP_FILE).exists() else {}
        named |= _named_tokens(path) if path.exists() else {}
        return cls(named, _added(path, table))


def _named_tokens(path: Path) -> dict[str, str]:
    table = read_json_object(path)
    named = {}
    for key in NAMED_TOKENS:
        value = table.get(key)
        content = value.get("content") if isinstance(value, dict) else value
        if content is not None and not isinstance(content, str):
            raise DamagedModelError(f"{path}: {key} must be a token's text, found {value!r:.80}")
        if content:
            named[key] = content
    return named


def _added(path: Path, table: dict[str, Any]) -> dict[int, AddedToken]:
    try:
        return {int(key): _added_token(entry) for key, entry in (table.get("added_tokens_decoder") or {}).items()}
    except (AttributeError, KeyError, TypeError, ValueError):
        raise DamagedModelError(f"{path}: added_tokens_decoder is not a table of tokens by id") from None


def _added_token(entry: dict[str, Any]) -> AddedToken:
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    if not isinstance(entry["content"], str):
        raise TypeError
    return AddedToken(entry["content"], **{flag: bool(entry[flag]) for flag in flags if flag in entry})


def load_backend(folder: Path) -> Backend:
    """The library's tokenizer for the folder.

    Raises:
        UnsupportedModelError: no tokenizer.json, or a part of a type that this version of the library doesn't know.
        DamagedModelError: the file is broken.
    """
    path = folder / TOKENIZER_FILE
    if not path.exists():
        raise UnsupportedModelError(
            f"{path}: missing, and TileInfer reads no other tokenizer format",
            hint="use a repository that has tokenizer.json (tokenizer.model alone is not enough)",
        )
    if not path.is_file():
        raise DamagedModelError(f"{path}: can't be read: not a regular file")
    try:
        with library_errors(str(path)):
            backend = _from_file(path)
    except DamagedModelError as error:
        raise _explain(path, error) from None
    _check_post_processor(backend, path)
    return backend


def _from_file(path: Path) -> Backend:
    """The library takes names that are UTF-8; a file system has others."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return Backend.from_buffer(path.read_bytes())
    return Backend.from_file(str(path))


def _check_post_processor(backend: Backend, path: Path) -> None:
    """A template that names a token it doesn't define makes the library panic, with a page of text on stderr."""
    state = json.loads(backend.post_processor.__getstate__()) if backend.post_processor else {}
    for part in state.get("processors", [state]):
        defined = part.get("special_tokens")
        for piece in part.get("single", []) if isinstance(defined, dict) else []:
            token = piece.get("SpecialToken", {}).get("id")
            if token is not None and token not in defined:
                raise DamagedModelError(f"{path}: the post_processor uses {token!r:.80} and doesn't define it")


def add_config_tokens(backend: Backend, config: TokenizerConfig, where: str) -> None:
    """Add the tokens that only tokenizer_config.json knows, as Transformers does, under the ids given there."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    for token_id, token in sorted(config.added_tokens.items()):
        if token.content in known or not token.content:
            continue
        backend.add_tokens([token])
        if (found := backend.token_to_id(token.content)) != token_id:
            raise DamagedModelError(
                f"{where}: {CONFIG_FILE} gives {token.content!r} the id {token_id}, but here it would be {found}"
            )


def surroundings(backend: Backend) -> tuple[list[int], list[int]]:
    """The ids that the file's post-processor puts before and after a text, seen on a text of one token or more."""
    for probe in ("a", "0", ".", " "):
        bare = backend.encode(probe, add_special_tokens=False).ids
        full = backend.encode(probe, add_special_tokens=True).ids
        for start in range(len(full) - len(bare) + 1) if bare else ():
            if full[start : start + len(bare)] == bare:
                return full[:start], full[start + len(bare) :]
    return [], []


@contextmanager
def library_errors(where: str) -> Iterator[None]:
    """Turn whatever the library raises, Rust panics included, into a DamagedModelError about `where`."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, TileinferError):  # the third: Ctrl-C came before the block
        raise
    except BaseException as error:  # a Rust panic is a BaseException
        raise DamagedModelError(f"{where}: the tokenizers library can't use it: {error}") from None


def _explain(path: Path, error: DamagedModelError) -> DamagedModelError | UnsupportedModelError:
    table = read_json_object(path)  # raises if it isn't even JSON
    for part in _PARTS:
        if bad := _unknown_type(part, table.get(part)):
            return UnsupportedModelError(
                f"{path}: {part} {bad} can't be read by tokenizers {__version__}",
                hint="update the library with `pip install -U tokenizers`, or fetch the file again if it is damaged",
            )
    kind = table["model"].get("type", "BPE") if isinstance(table.get("model"), dict) else None
    if kind not in ("BPE", "Unigram", "WordPiece", "WordLevel"):  # a tuple: `kind` may be unhashable
        return UnsupportedModelError(f"{path}: model type {kind!r:.80} can't be read by tokenizers {__version__}")
    return error


def _unknown_type(part: str, component: object) -> str | None:
    """The innermost component that the library refuses when it stands alone, in words."""
    if component is None or _accepts(part, component):
        return None
    if not isinstance(component, dict):
        return f"{component!r:.80}"
    for key in _NESTED:
        for child in component.get(key) or [] if isinstance(component.get(key), list) else []:
            if bad := _unknown_type(part, child):
                return bad
    return f"type {component.get('type')!r:.80}"


def _accepts(part: str, component: object) -> bool:
    text = json.dumps({"version": "1.0", "added_tokens": [], part: component, "model": _EMPTY_MODEL})
    try:
        with library_errors(part):
            Backend.from_str(text)
    except DamagedModelError:
        return False
    return True
