"""What a step's kernels move and compute, and which rows configured them: a step as data, before anything runs.

Bytes are what must move at least: weights and activations once, of a table the rows that are looked up, of the KV
pools the positions that the step sees. Reading a line twice, or a page for each of its query heads, is the kernel's
own affair.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kernels.launch import address

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kernels.configs import Used
    from kernels.specs import Recorded

# Arrays of which a kernel reads a few elements, known only when it runs
_FEW = {
    "sample_select_kernel": {"adjusted"},
    "sample_draw_kernel": {"logits", "adjusted", "token_state"},
}
_CACHED = ("k_pool", "v_pool", "k_out", "v_out")
_BY_POSITION = ("cos", "sin")
_WRITES_CACHE = ("kv_write_kernel",)


@dataclass(frozen=True)
class StepShape:
    """`tokens` go through the step; with them the sequence has `context` positions."""

    tokens: int
    context: int


def arguments(record: Recorded) -> Iterator[tuple[str, Any]]:
    """Parameter names with the arrays and constants of a launch; of arrays that are one memory the first."""
    names = list(record.kernel._annotated_function.pysig.parameters)  # noqa: SLF001
    seen: set[Any] = set()
    for name, arg in zip(names, record.args, strict=True):
        if hasattr(arg, "shape"):
            key = (id(arg) if not hasattr(arg, "__cuda_array_interface__") else address(arg), tuple(arg.shape))
            if key in seen:
                continue
            seen.add(key)
        yield name, arg


def moved_bytes(record: Recorded, step: StepShape) -> int:
    """The least that a launch reads and writes."""
    found = dict(arguments(record))
    few = _FEW.get(record.name, set())
    return sum(
        _bytes_of(record.name, name, arg, found, step)
        for name, arg in found.items()
        if hasattr(arg, "shape") and name not in few
    )


def _bytes_of(kernel: str, name: str, array: Any, found: dict[str, Any], step: StepShape) -> int:
    size = int(array.nbytes)
    item = size // max(int(array.size), 1)
    if name in _CACHED:
        heads, width = found.get("HKV", found.get("KV_HEADS", 1)), found.get("D", found.get("DIM", 1))
        positions = step.tokens if kernel in _WRITES_CACHE else step.context
        return min(size, positions * heads * width * item)
    if name in _BY_POSITION:
        return min(size, step.tokens * int(array.shape[1]) * item)
    if name == "table" and len(array.shape) == 2:
        return min(size, step.tokens * int(array.shape[1]) * item)
    if name in ("table", "block_table"):
        return min(size, -(-step.context // 64) * item)
    if name in ("stream", "residual") and "residual" in kernel:
        return 2 * size  # read and written
    return size


def operations(record: Recorded, step: StepShape) -> int:
    """Multiplications and additions of a matrix product or an attention; 0 for anything else."""
    found = dict(arguments(record))
    weight, x = found.get("w"), found.get("x")
    if weight is not None and x is not None:
        return 2 * int(weight.shape[0]) * int(weight.shape[1]) * int(x.shape[0])
    if "k_pool" in found and "q" in found:
        q = found["q"]
        if record.name.startswith("attention_prefill"):
            before = step.context - step.tokens
            pairs = step.tokens * before + step.tokens * (step.tokens + 1) // 2
            return 4 * pairs * int(q.shape[1])
        return 4 * step.context * int(q.size)
    return 0


def rows_text(record: Recorded) -> str:
    """The rows that configured a launch: "linear[3] tile_n 16, tile_k 256 (2.9 µs)"."""
    return "; ".join(_row_text(used) for used in record.rows)


def _row_text(used: Used) -> str:
    config = ", ".join(f"{name} {value}" for name, value in used.row.config.items() if value is not None)
    chosen = f"{used.row.us} µs" if used.row.us is not None else used.row.chosen
    return f"{used.source} {used.family}[{used.index}]: {config} ({chosen})"


def label(record: Recorded) -> str:
    """Kernel, its largest matrix, grid: equal for the launches of one kind in all layers."""
    shapes = [tuple(arg.shape) for _, arg in arguments(record) if hasattr(arg, "shape") and len(arg.shape) == 2]
    largest = max(shapes, key=lambda shape: shape[0] * shape[1], default=())
    return f"{record.name} {'x'.join(map(str, largest))} grid {'x'.join(map(str, record.grid))}"
