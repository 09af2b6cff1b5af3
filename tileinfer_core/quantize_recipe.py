"""Which groups share a scale in which module: the recipes of `tileinfer quantize`, and how config.json states them.

By default one scale a row, which costs a GPU nothing, but groups of 64 columns where a row loses most: in the
embedding, the output head and mlp.down_proj. docs/int8.md has what the other recipes gave, and what loads where.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from tileinfer_core.errors import UsageError
from tileinfer_core.packed_int8 import PACKING
from tileinfer_core.quantization import LINEAR_CLASS, METHOD, PACKED, PLAIN, Int8

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

MIXED = "mixed-precision"  # what compressed-tensors calls groups of several layouts
FINE = 64  # columns of a group where rows lose most
EMBEDDING, HEAD = "embed_tokens", "lm_head"
FINE_MODULES = (EMBEDDING, HEAD, "down_proj")
LEAST, MOST = 16, 1 << 12


@dataclass(frozen=True, slots=True)
class Stored:
    """How a module is written: its numbers, and whether as int32 words (packed_int8.py) or as int8."""

    int8: Int8
    packed: bool

    @property
    def layout(self) -> str:
        return PACKED if self.packed else PLAIN


@dataclass(frozen=True, slots=True)
class Recipe:
    """`group_size` None: the default. 0: one scale a row everywhere. Else groups of so many columns everywhere.

    `embedding`: "int8", "bf16" (it stays as it is, and so does a head tied to it), or None: INT8 where it is the head
    too. An embedding of its own is read a row at a time, so that INT8 would make nothing faster, and vLLM and
    Transformers have no layout in common for one.
    """

    group_size: int | None = None
    embedding: Literal["int8", "bf16"] | None = None

    def __post_init__(self) -> None:
        size = self.group_size
        if size and (not LEAST <= size <= MOST or size & (size - 1)):
            raise UsageError(f"--group-size must be 0 or a power of two from {LEAST} to {MOST:,}, found {size}")

    def for_model(self, *, tied: bool, columns: int) -> ModelRecipe:
        """`columns` divides the columns of every matrix."""
        keeps = self.embedding == "bf16" or (self.embedding is None and not tied)
        kept = () if not keeps else (EMBEDDING, HEAD) if tied else (EMBEDDING,)
        return ModelRecipe(self.group_size, kept, columns)


@dataclass(frozen=True, slots=True)
class ModelRecipe:
    """A Recipe for one model; modules that end in a name of `kept` stay as they are. `columns` as in for_model."""

    group_size: int | None
    kept: tuple[str, ...]
    columns: int

    @property
    def name(self) -> str:
        """As the receipt and the manifest have it."""
        words = {EMBEDDING: "embedding", HEAD: "head"}
        if self.group_size is None:
            fine = [words.get(module, module) for module in FINE_MODULES if module not in self.kept]
            scales = f"a scale a row; groups of {FINE} in {_listed(fine)}"
        else:
            scales = f"groups of {self.group_size}" if self.group_size else "a scale a row"
        return scales + (f"; {_listed([words[module] for module in self.kept])} unchanged" if self.kept else "")

    def of(self, module: str, columns: int) -> Stored | None:
        """How a module with so many columns is written; None: as it is.

        An embedding in INT8 is not packed: Transformers can't look up rows of a packed one.

        Raises:
            UsageError: groups that were asked for and do not divide the columns. The default's become smaller.
        """
        if module.endswith(self.kept):
            return None
        return Stored(self._format(module, columns), columns % PACKING == 0 and not module.endswith(EMBEDDING))

    def _format(self, module: str, columns: int) -> Int8:
        if self.group_size:
            if columns % self.group_size:
                fits = next((size for size in (128, 64, 32, 16) if self.columns % size == 0), 0)
                raise UsageError(
                    f"--group-size {self.group_size} does not divide the {columns} columns of {module}",
                    hint=f"--group-size {fits} does" if fits else "--group-size 0 gives one scale a row",
                )
            return Int8(self.group_size)
        if self.group_size is None and module.endswith(FINE_MODULES):
            return Int8(next((size for size in (FINE, FINE // 2, FINE // 4) if columns % size == 0), None))
        return Int8()


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def quantization_config(modules: Mapping[str, Stored | None]) -> dict[str, Any]:
    """The section of config.json for {module: how it is stored, None: not quantised}.

    The commonest form holds for all linear modules, others go by pattern; embedding and head always by name: the
    class of vLLM's head is no Linear. Each group names its layout, since compressed-tensors 0.20 guesses wrong.
    """
    stored = {module: form for module, form in modules.items() if form}
    common = max(stored.values(), key=list(stored.values()).count)
    targets: dict[Stored, list[str]] = {common: [LINEAR_CLASS]}
    for target, form in _patterns(stored):
        if form != common or not target.startswith("re:"):
            targets.setdefault(form, []).append(target)
    layouts = {form.layout for form in targets}
    return {
        "quant_method": METHOD,
        "format": layouts.pop() if len(layouts) == 1 else MIXED,
        "quantization_status": "compressed",
        "ignore": [module for module, form in modules.items() if form is None and not module.endswith(EMBEDDING)],
        "config_groups": {
            f"group_{i}": _group(names, form) for i, (form, names) in enumerate(targets.items())
        },
    }  # fmt: skip


def _patterns(stored: Mapping[str, Stored]) -> Iterable[tuple[str, Stored]]:
    """Modules outside the layers by name, those of the layers by a pattern over all layers."""
    seen = set()
    for module, form in stored.items():
        kind = module.rpartition(".")[2]
        target = f"re:.*{kind}$" if ".layers." in module else module
        if target not in seen:
            seen.add(target)
            yield target, form


def _group(targets: list[str], form: Stored) -> dict[str, Any]:
    return {
        "targets": targets,
        "format": form.layout,
        "weights": {
            "num_bits": 8,
            "type": "int",
            "symmetric": True,
            "strategy": "channel" if form.int8.group_size is None else "group",
            "group_size": form.int8.group_size,
            "dynamic": False,
        },
        "input_activations": None,
        "output_activations": None,
    }
