"""A product's weights in each form that the device has them in, and which form a chunk of tokens is multiplied by.

A Weight alone says which kernel reads it: its scales are None where it is half precision.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kernels.configs import configured

if TYPE_CHECKING:
    from tileinfer_core.backends.cuda.device import Array
    from tileinfer_core.models.decoder import ModelDefinition
    from tileinfer_core.models.structure import LayerStructure

# Products in the order in which a byte of their copies saves most time: the first has groups, in most models.
COPIED = ("down_proj", "o_proj", "qkv_proj", "gate_up_proj")


class Weight(NamedTuple):
    """Of one product: half precision, or INT8 with its scales.

    `copy`: what INT8 values and scales stand for in half precision, where memory was left for it.
    """

    values: Array
    scale: Array = None
    copy: Array = None

    @property
    def in_digits(self) -> bool:
        """Whether a chunk's product with it goes bytes by bytes: INT8 with one scale a row."""
        return self.scale is not None and self.scale.shape[1] == 1

    @property
    def grouped(self) -> bool:
        """INT8 with several scales a row, which a chunk's product must have widened."""
        return self.scale is not None and not self.in_digits

    def for_chunk(self, tokens: int, limit: int | None) -> Weight:
        """What a chunk of so many tokens multiplies by; `limit` as in DigitLimits."""
        if self.copy is None or (self.in_digits and (limit is None or tokens <= limit)):
            return self
        return Weight(self.copy)


class DigitLimits(NamedTuple):
    """The longest chunk that goes bytes by digits where a product has a copy too: fewer bytes, but twice the rows.

    None: every chunk, so that there is no use for a copy. Weights with groups go by their copy at any length.
    """

    qkv_proj: int | None = None
    o_proj: int | None = None
    gate_up_proj: int | None = None
    down_proj: int | None = None


def digit_limits(structure: LayerStructure, arch: str) -> DigitLimits:
    """None at all where a table has no row: matrix units differ in what half precision costs."""
    return configured(DigitLimits, "digit_limits", arch, hidden=structure.hidden_size)


def worth_a_copy(model: ModelDefinition, arch: str, chunk: int) -> list[str]:
    """Products of COPIED that some chunk of up to `chunk` tokens would multiply by a copy."""
    limits = digit_limits(model.structure, arch)._asdict()
    found = []
    for product in COPIED:
        weights, limit = model.int8_weights([product]), limits[product]
        if any(p.is_grouped for p in weights) or (weights and limit is not None and limit < chunk):
            found.append(product)
    return found
