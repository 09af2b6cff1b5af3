"""Arrays without memory, and a launcher that runs nothing: what ahead-of-time compilation needs of a call.

`ArraySpec` has the shape, type and strides of an array and enough of its behaviour for a wrapper's checks. The launcher
keeps kernel, grid and the signature that cuda-tile's JIT would derive from such arrays, so that what is compiled here
is what a launch looks for. The rules of `signature` were read off cuda-tile 1.7's own dispatcher; a GPU test holds them
against it.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import cuda.tile as ct
from cuda.tile.compilation import (
    ArrayConstraint,
    CallingConvention,
    ConstantConstraint,
    KernelSignature,
    ListConstraint,
    ScalarConstraint,
    TupleConstraint,
)

from kernels.configs import Used, used_since_last
from kernels.launch import address, processors_of, supports_pdl

if TYPE_CHECKING:
    from collections.abc import Sequence

_ITEMSIZE = {"bool": 1, "int8": 1, "uint8": 1, "int16": 2, "uint16": 2, "float16": 2, "bfloat16": 2, "int32": 4}
_ITEMSIZE |= {"uint32": 4, "float32": 4, "int64": 8, "uint64": 8, "float64": 8, "float8_e4m3fn": 1, "float8_e5m2": 1}


@dataclass(frozen=True)
class DTypeSpec:
    """A data type by its NumPy name."""

    name: str

    def __post_init__(self) -> None:
        if self.name not in _ITEMSIZE:
            raise ValueError(f"unknown data type {self.name!r}, expected one of {', '.join(sorted(_ITEMSIZE))}")

    @property
    def itemsize(self) -> int:
        return _ITEMSIZE[self.name]

    def __str__(self) -> str:
        return self.name

    def __eq__(self, other: object) -> bool:
        return self.name == (other.name if isinstance(other, DTypeSpec) else str(other))

    def __hash__(self) -> int:
        return hash(self.name)


@dataclass(frozen=True)
class _Flags:
    c_contiguous: bool


def _row_major(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    return tuple(itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


@dataclass(frozen=True)
class ArraySpec:
    """Shape and layout of an array on a device.

    Args:
        shape: lengths.
        dtype: NumPy name, such as "bfloat16".
        strides: bytes from one element to the next; row-major when left out.
        offset: bytes from an allocation's start, which the driver aligns to 256. Only its alignment matters.
    """

    shape: tuple[int, ...]
    dtype: DTypeSpec
    strides: tuple[int, ...]
    offset: int = 0

    def __init__(
        self,
        shape: int | tuple[int, ...],
        dtype: str | DTypeSpec,
        strides: tuple[int, ...] | None = None,
        offset: int = 0,
    ) -> None:
        lengths = (shape,) if isinstance(shape, int) else tuple(shape)
        kind = dtype if isinstance(dtype, DTypeSpec) else DTypeSpec(str(dtype))
        object.__setattr__(self, "shape", lengths)
        object.__setattr__(self, "dtype", kind)
        object.__setattr__(self, "strides", _row_major(lengths, kind.itemsize) if strides is None else tuple(strides))
        object.__setattr__(self, "offset", offset)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.size * self.itemsize

    @property
    def flags(self) -> _Flags:
        want = _row_major(self.shape, self.itemsize)
        return _Flags(all(n == 1 or have == w for n, have, w in zip(self.shape, self.strides, want, strict=True)))

    def __len__(self) -> int:
        return self.shape[0]

    def reshape(self, *shape: Any) -> ArraySpec:
        lengths = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else tuple(shape)
        if -1 in lengths:
            known = -math.prod(lengths)
            lengths = tuple(self.size // known if n == -1 else n for n in lengths)
        if math.prod(lengths) != self.size:
            raise ValueError(f"cannot reshape an array of shape {self.shape} into {lengths}")
        if not self.flags.c_contiguous:
            raise ValueError(f"cannot reshape an array of shape {self.shape} with strides {self.strides}")
        return ArraySpec(lengths, self.dtype, None, self.offset)

    def same_rows(self, rows: int) -> ArraySpec:
        return ArraySpec((rows, self.shape[1]), self.dtype, (0, self.itemsize), self.offset)

    def transpose(self, *axes: int) -> ArraySpec:
        shape, strides = (tuple(values[axis] for axis in axes) for values in (self.shape, self.strides))
        return ArraySpec(shape, self.dtype, strides, self.offset)

    def view(self, dtype: Any) -> ArraySpec:
        kind = DTypeSpec(str(dtype))
        if kind.itemsize != self.itemsize:
            raise ValueError(f"view of {self.dtype} as {kind}: element sizes differ")
        return ArraySpec(self.shape, kind, self.strides, self.offset)

    def __getitem__(self, index: Any) -> ArraySpec:
        """Basic slices with step 1, and whole numbers."""
        items = index if isinstance(index, tuple) else (index,)
        items += (slice(None),) * (self.ndim - len(items))
        shape, strides, offset = [], [], self.offset
        for item, length, stride in zip(items, self.shape, self.strides, strict=True):
            if isinstance(item, slice):
                start, stop, step = item.indices(length)
                if step != 1:
                    raise ValueError(f"an ArraySpec is sliced with step 1 only, got {item}")
                shape.append(max(stop - start, 0))
                strides.append(stride)
                offset += start * stride
            else:
                offset += (item % length) * stride
        return ArraySpec(tuple(shape), self.dtype, tuple(strides), offset)


def same_rows(row: Any, rows: int) -> Any:
    """A view [rows, K] of a row [1, K] (NumPy, CuPy or ArraySpec) whose rows are all the same memory."""
    if isinstance(row, ArraySpec):
        return row.same_rows(rows)
    homes = (kind.__module__.partition(".")[0] for kind in type(row).__mro__)
    home = importlib.import_module(next(home for home in homes if home in ("numpy", "cupy")))
    return home.broadcast_to(row, (rows, int(row.shape[1])))


@dataclass(frozen=True)
class Recorded:
    """One launch that did not happen."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    pdl: bool | None = None  # launched as a programmatic dependent; None leaves it to who launches
    rows: tuple[Used, ...] = field(default=(), compare=False)  # configurations looked up for it

    @property
    def name(self) -> str:
        return str(self.kernel._pyfunc.__name__)  # noqa: SLF001

    @property
    def module(self) -> str:
        """Where the kernel is defined, such as "kernels.norm"."""
        return str(self.kernel._pyfunc.__module__)  # noqa: SLF001

    @property
    def hints(self) -> tuple[tuple[str, Any], ...]:
        """Compiler hints that differ from cuda-tile's defaults."""
        found = vars(self.kernel._compiler_options)  # noqa: SLF001
        return tuple(sorted((key, value) for key, value in found.items() if value not in (None, 3)))

    def signature(self) -> Any:
        return signature(self.kernel, self.args)

    def identity(self) -> tuple[Any, ...]:
        """Equal for two launches that run the same code."""
        return self.module, self.kernel._pyfunc.__qualname__, self.hints, self.signature().symbol  # noqa: SLF001


class RecordingLauncher:
    """A Launcher that keeps every launch in `records` and runs none."""

    def __init__(
        self, arch: str, *, pdl: bool = False, processors: int | None = None, records: list[Recorded] | None = None
    ) -> None:
        if pdl and not supports_pdl(arch):
            raise ValueError(f"programmatic dependent launch needs sm_90 or newer, the target is {arch}")
        self.arch = arch
        self.pdl = pdl
        self.processors = processors or processors_of(arch)
        self.records: list[Recorded] = [] if records is None else records

    def with_pdl(self, on: bool) -> RecordingLauncher:
        """Records into the same list."""
        pdl = on and supports_pdl(self.arch)
        return RecordingLauncher(self.arch, pdl=pdl, processors=self.processors, records=self.records)

    def check(self, kernel: Any, args: Sequence[Any]) -> None:
        """Anything goes: nothing is read."""

    def __call__(self, kernel: Any, grid: Sequence[int], args: Sequence[Any]) -> None:
        self.records.append(Recorded(kernel, tuple(grid), tuple(args), self.pdl, used_since_last()))


# -- the signature the JIT would choose


def signature(kernel: Any, args: Sequence[Any]) -> Any:
    """cuda.tile's KernelSignature for these arguments (arrays may be ArraySpecs).

    As in cuda-tile 1.7: no two arrays alias; a stride of 1 and a length of 1 are constants; base address and strides in
    bytes are told apart by divisibility by 16, lengths in elements likewise.
    """
    notes = kernel._annotated_function.parameter_annotations  # noqa: SLF001
    if len(notes) != len(args):
        raise TypeError(f"{kernel._pyfunc.__name__} takes {len(notes)} arguments, got {len(args)}")  # noqa: SLF001
    constraints = [_constraint(arg, note) for arg, note in zip(args, notes, strict=True)]
    second = any(_needs_second(constraint) for constraint in constraints)
    convention = CallingConvention.cutile_python_v2() if second else CallingConvention.cutile_python_v1()
    return KernelSignature(constraints, convention).with_mangled_symbol(kernel._pyfunc.__name__)  # noqa: SLF001


def _constraint(arg: Any, note: Any) -> Any:
    if hasattr(arg, "strides") and hasattr(arg, "shape"):
        return _array(arg, getattr(note, "array", None))
    if isinstance(arg, tuple):
        each = getattr(note, "each", note)
        notes = getattr(note, "items", [each] * len(arg))
        return TupleConstraint([_constraint(item, one) for item, one in zip(arg, notes, strict=True)])
    if isinstance(arg, list):
        first, *others = [_array(item, None) for item in arg]
        if any(other != first for other in others):
            raise TypeError("arrays of one list must agree in type, rank and alignment to be compiled ahead of time")
        return ListConstraint(first, alias_groups=(), elements_may_alias=True)
    if not isinstance(arg, (bool, int, float)):
        raise TypeError(f"a kernel argument of type {type(arg).__name__} cannot be compiled ahead of time")
    if getattr(note, "constant", False):
        return ConstantConstraint(arg)
    scalar = getattr(note, "scalar", None)
    if scalar is not None:
        return ScalarConstraint(scalar.dtype)
    return ScalarConstraint(ct.bool_ if isinstance(arg, bool) else ct.int32 if isinstance(arg, int) else ct.float32)


def _array(array: Any, note: Any) -> Any:
    size = array.dtype.itemsize
    rank = len(array.shape)
    steps = tuple(stride // size for stride in array.strides)
    fixed_sides = {axis % rank for axis in note.static_shape_dims} if note else set()
    fixed_steps = {axis % rank for axis in note.static_stride_dims} if note else set()
    name = str(array.dtype)
    return ArrayConstraint(
        getattr(ct, "bool_" if name == "bool" else name),
        rank,
        index_dtype=note.index_dtype if note else ct.int32,
        stride_lower_bound_incl=0,
        alias_groups=(),
        may_alias_internally=any(step <= 0 for step in steps),
        stride_constant=[
            step if (i in fixed_steps if fixed_steps else step == 1) else None for i, step in enumerate(steps)
        ],
        shape_constant=[n if n == 1 or i in fixed_sides else None for i, n in enumerate(array.shape)],
        stride_divisible_by=[16 // size if stride % 16 == 0 else 1 for stride in array.strides],
        shape_divisible_by=[16 if n % 16 == 0 else 1 for n in array.shape],
        base_addr_divisible_by=16 if address(array) % 16 == 0 else 1,
    )


def _needs_second(constraint: Any) -> bool:
    """Whether a parameter needs the second calling convention: tuples and constant lengths do."""
    if hasattr(constraint, "items"):
        return True
    shape = getattr(getattr(constraint, "element", constraint), "shape_constant", ())
    return any(side is not None for side in shape)
