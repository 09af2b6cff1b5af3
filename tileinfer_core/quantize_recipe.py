"""Which groups share a scale in which module: the recipes of `tileinfer quantize`, and how config.json states them.

By default one scale a row, which costs a GPU nothing, but groups of 64 columns where a row loses most: in the
embedding, the output head and mlp.down_proj. docs/int8.md has what the other recipes gave.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tileinfer_core.errors import UsageError
from tileinfer_core.quantization import EMBEDDING_CLASS, LINEAR_CLASS, METHOD, Int8

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

LAYOUT = "int-quantized"
FINE = 64  # columns of a group where rows lose most
FINE_MODULES = ("embed_tokens", "lm_head", "down_proj")
LEAST, MOST = 16, 1 << 12


@dataclass(frozen=True, slots=True)
class Recipe:
    """`group_size` None: the default. 0: one scale a row everywhere. Else groups of so many columns everywhere."""

    group_size: int | None = None

    def __post_init__(self) -> None:
        size = self.group_size
        if size and (not LEAST <= size <= MOST or size & (size - 1)):
            raise UsageError(f"--group-size must be 0 or a power of two from {LEAST} to {MOST:,}, found {size}")

    @property
    def name(self) -> str:
        if self.group_size is None:
            return f"a scale a row; groups of {FINE} in embedding, head and down_proj"
        return f"groups of {self.group_size}" if self.group_size else "a scale a row"

    def of(self, module: str, columns: int) -> Int8:
        """The format of a module with so many columns.

        Raises:
            UsageError: groups that were asked for and do not divide the columns. The default's become smaller.
        """
        if self.group_size:
            if columns % self.group_size:
                fits = next((size for size in (128, 64, 32, 16) if columns % size == 0), 0)
                raise UsageError(
                    f"--group-size {self.group_size} does not divide the {columns} columns of {module}",
                    hint=f"--group-size {fits} does" if fits else "--group-size 0 gives one scale a row",
                )
            return Int8(self.group_size)
        if self.group_size is None and module.endswith(FINE_MODULES):
            return Int8(next((size for size in (FINE, FINE // 2, FINE // 4) if columns % size == 0), None))
        return Int8()


def quantization_config(formats: Mapping[str, Int8]) -> dict[str, Any]:
    """The section of config.json for {module: format}: the commonest format for all, others by name or pattern.

    Each group names the layout again: compressed-tensors 0.20 takes weights alone in INT8 for packed ones otherwise.
    """
    common = max(formats.values(), key=list(formats.values()).count)
    targets: dict[Int8, list[str]] = {common: [LINEAR_CLASS, EMBEDDING_CLASS]}
    for target, int8 in _patterns(formats):
        if int8 != common:
            targets.setdefault(int8, []).append(target)
    return {
        "quant_method": METHOD,
        "format": LAYOUT,
        "quantization_status": "compressed",
        "ignore": [],
        "config_groups": {
            f"group_{i}": _group(names, int8) for i, (int8, names) in enumerate(targets.items())
        },
    }  # fmt: skip


def _patterns(formats: Mapping[str, Int8]) -> Iterable[tuple[str, Int8]]:
    """Modules outside the layers by name, those of the layers by a pattern over all layers."""
    seen = set()
    for module, int8 in formats.items():
        kind = module.rpartition(".")[2]
        target = f"re:.*{kind}$" if ".layers." in module else module
        if target not in seen:
            seen.add(target)
            yield target, int8


def _group(targets: list[str], int8: Int8) -> dict[str, Any]:
    return {
        "targets": targets,
        "format": LAYOUT,
        "weights": {
            "num_bits": 8,
            "type": "int",
            "symmetric": True,
            "strategy": "channel" if int8.group_size is None else "group",
            "group_size": int8.group_size,
            "dynamic": False,
        },
        "input_activations": None,
        "output_activations": None,
    }
