"""Model names: short names for well-known models, what a Hub id looks like, and guesses at what a typo meant."""

from __future__ import annotations

import difflib
import re
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

DEMO = "demo"
INT8_SUFFIX = "-int8"  # of a model's name: what `quantize` made of it

SHIPPED: Mapping[str, str] = MappingProxyType(
    {
        DEMO: DEMO,
        "smollm2:135m": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "smollm2:360m": "HuggingFaceTB/SmolLM2-360M-Instruct",
        "smollm2:1.7b": "HuggingFaceTB/SmolLM2-1.7B-Instruct",
        "qwen3:0.6b": "Qwen/Qwen3-0.6B",
        "qwen3:1.7b": "Qwen/Qwen3-1.7B",
        "qwen3:4b": "Qwen/Qwen3-4B",
        "qwen3:8b": "Qwen/Qwen3-8B",
        "qwen3:14b": "Qwen/Qwen3-14B",
        "qwen3:32b": "Qwen/Qwen3-32B",
        "qwen2.5:7b": "Qwen/Qwen2.5-7B-Instruct",
        "mistral:7b": "mistralai/Mistral-7B-Instruct-v0.3",
        "llama3.2:1b": "meta-llama/Llama-3.2-1B-Instruct",
        "llama3.2:3b": "meta-llama/Llama-3.2-3B-Instruct",
        "llama3.1:8b": "meta-llama/Llama-3.1-8B-Instruct",
        "apertus:8b": "swiss-ai/Apertus-8B-Instruct-2509",
        "apertus1.5:8b": "swiss-ai/Apertus-v1.5-8B",
    }
)

_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?"
_HUB_ID = re.compile(rf"{_PART}/{_PART}")
_RESERVED = (".partial", ".old", ".lock", ".git", ".ipynb")


def is_hub_id(name: str) -> bool:
    """Whether the Hub could have a model of this name: ORG/NAME, its letters, no "--" and no ".."."""
    fits = len(name) <= 96 and _HUB_ID.fullmatch(name) and "--" not in name and ".." not in name
    return bool(fits) and not name.endswith(_RESERVED)


def is_stored_name(name: str) -> bool:
    """Whether a model of TileInfer's own store could have this name."""
    return name in (DEMO, DEMO + INT8_SUFFIX) or is_hub_id(name)


def lookup(name: str, own: Mapping[str, str]) -> str | None:
    """The model behind an alias; the user's own aliases come first. Case does not matter.

    ALIAS-int8 is what `quantize` made of that alias's model, unless it is an alias itself or its model is a path.
    """
    table = {**SHIPPED, **{alias.lower(): target for alias, target in own.items()}}
    name = name.lower()
    plain = table.get(name.removesuffix(INT8_SUFFIX))
    if name not in table and name.endswith(INT8_SUFFIX) and plain and is_stored_name(plain):
        return plain + INT8_SUFFIX
    return table.get(name)


def aliases_of(model: str, own: Mapping[str, str]) -> tuple[str, ...]:
    """All short names that lead to `model`."""
    names = {*SHIPPED, *own}
    return tuple(sorted(name for name in names if lookup(name, own) == model))


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """Up to three known names that resemble `name`, best first; case and the organisation's name count little."""
    folded = {candidate.lower(): candidate for candidate in known}
    tails = {candidate.lower().rpartition("/")[2]: candidate for candidate in folded.values()}
    matches = difflib.get_close_matches(name.lower(), folded, n=3, cutoff=0.6)
    matches_tail = difflib.get_close_matches(name.lower().rpartition("/")[2], tails, n=3, cutoff=0.6)
    return list(dict.fromkeys([folded[m] for m in matches] + [tails[m] for m in matches_tail]))[:3]
