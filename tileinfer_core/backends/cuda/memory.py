"""What fits on the device, decided from the config and the free memory before a byte is loaded.

    weights   every array of the model in the type that the kernels read
    KV        2 * layers * key/value heads * head dimension * item size a token, in pages of 64 tokens; in INT8 a byte
              an item and a float32 for each key and value
    buffers   what the steps work in: fixed, however long the sequence gets, but for the rope tables, the block table
              and, where the cache is INT8, a layer's keys and values in half precision
    headroom  CUDA's own: kernel code, captured graphs
    copies    INT8 weights in half precision, which long prompts are multiplied by, where there is memory to spare: at
              most a quarter of what the device has beside all this, and half of what other programs have left of that

All of it is taken at load, so that no later step can run out. An explicit context that does not fit is refused with the
largest one that does; without one, the model's own length is cut to what fits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tileinfer_core.errors import OutOfMemoryError
from tileinfer_core.kv_cache import PAGE_SIZE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tileinfer_core.models.decoder import ModelDefinition
    from tileinfer_core.models.structure import Parameter

HEADROOM = 384 << 20
ALLOCATION_STEP = 512
SCALE_BYTES = 4
SMALLEST_CONTEXT = 256  # a model that has room for less is of no use
SPARE_SHARE, FREE_SHARE = 4, 2  # copies take at most one part of so many: of the device, and of what is free


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes on the device, and the context that they serve. `pages` has one more than the context needs: scratch.

    `copied`: products, such as "down_proj", whose INT8 weights are kept in half precision too.
    """

    context: int
    pages: int
    weight_bytes: int
    kv_bytes: int
    buffer_bytes: int
    headroom: int
    free: int
    copied: tuple[str, ...] = ()
    copy_bytes: int = 0

    @property
    def total(self) -> int:
        return self.weight_bytes + self.kv_bytes + self.buffer_bytes + self.headroom + self.copy_bytes

    def with_copies(
        self, model: ModelDefinition, products: Sequence[str], *, item: int, device_bytes: int
    ) -> MemoryPlan:
        """This plan, with copies of as many of `products`, in this order, as there is room for.

        Where the device is not crowded, what is copied does not depend on other programs: nor do a seed's tokens.
        """
        room = min((device_bytes - self.total) // SPARE_SHARE, (self.free - self.total) // FREE_SHARE)
        copied, taken = [], 0
        for product in products:
            size = sum(_padded(parameter, item) for parameter in model.int8_weights([product]))
            if taken + size <= room:
                copied.append(product)
                taken += size
        return replace(self, copied=tuple(copied), copy_bytes=taken)


def weight_bytes(model: ModelDefinition, item: int) -> int:
    """Every array at its size padded to 512 bytes: INT8 a byte an element, scales four, the rest `item`."""
    return sum(_padded(p, _bytes_each(p, item)) for p in model.parameters)


def _padded(parameter: Parameter, item: int) -> int:
    return allocated(math.prod(parameter.shape) * item)


def allocated(size: int) -> int:
    """Bytes that an array of `size` takes: the device gives them in steps of 512."""
    return -(-size // ALLOCATION_STEP) * ALLOCATION_STEP


def _bytes_each(parameter: Parameter, item: int) -> int:
    return 1 if parameter.int8 is not None else 4 if parameter.is_scale else item


def kv_bytes_per_token(model: ModelDefinition, item: int) -> int:
    """`item` bytes an element; 1 is INT8, which has a scale for each key and value."""
    scale = SCALE_BYTES if item == 1 else 0
    heads, size = model.structure.num_key_value_heads, model.structure.head_dim
    return 2 * model.config.num_hidden_layers * heads * (size * item + scale)


def pages_for(context: int) -> int:
    """Pages of a sequence of `context` tokens, and the scratch page."""
    return -(-context // PAGE_SIZE) + 1


def plan_memory(
    model: ModelDefinition,
    *,
    asked: int | None,
    free: int,
    item: int,
    kv_item: int | None = None,
    buffer_bytes: Callable[[int], int],
    headroom: int = HEADROOM,
) -> MemoryPlan:
    """The plan for `asked` tokens of context, or for as many as the model has and the device holds.

    `item` is the size of a half-precision weight, `kv_item` of a number in the cache (None: the same); `buffer_bytes`
    gives the steps' buffers for a context.

    Raises:
        OutOfMemoryError: with the bytes needed and free, and the largest context that fits.
    """

    def plan(context: int) -> MemoryPlan:
        pages = pages_for(context)
        kv = pages * PAGE_SIZE * kv_bytes_per_token(model, kv_item or item)
        return MemoryPlan(context, pages, weight_bytes(model, item), kv, buffer_bytes(context), headroom, free)

    wanted = plan(asked or model.config.max_context)
    if wanted.total <= free:
        return wanted
    largest = _largest_context(wanted.context, lambda context: plan(context).total <= free)
    if asked is None and largest >= SMALLEST_CONTEXT:
        return plan(largest)
    raise _too_large(wanted, largest)


def _largest_context(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest multiple of a page below `limit` that fits; 0 if none does."""
    low, high = 0, limit // PAGE_SIZE  # pages; low fits
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle * PAGE_SIZE) else (low, middle - 1)
    return low * PAGE_SIZE


def _too_large(plan: MemoryPlan, largest: int) -> OutOfMemoryError:
    need = f"{gib(plan.total)} for a context of {plan.context:,} tokens (weights {gib(plan.weight_bytes)}, "
    need += f"keys and values {gib(plan.kv_bytes)}, buffers {gib(plan.buffer_bytes + plan.headroom)})"
    message = f"the model needs {need}, the GPU has {gib(plan.free)} free"
    if largest >= SMALLEST_CONTEXT:
        return OutOfMemoryError(message, hint=f"use --context {largest}: the longest that fits")
    return OutOfMemoryError(
        message,
        hint="no context fits beside the weights: stop other programs on the GPU, take a smaller or quantised model, "
        "or use --backend cpu",
    )


def gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
