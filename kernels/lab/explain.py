"""Which specialisation of a kernel a launch makes, and why: what cuda-tile's JIT tells two launches apart by.

    found = specialisation(Recorded(kernel, grid, args))     # arrays may be CuPy, NumPy or ArraySpec
    differences(found, other)                                # ["x: element type float32, there bfloat16"]

A kernel compiles once for each combination of its parameters' traits and its hints; the grid, the stream and whether it
is launched as a dependent do not count. The traits are read off cuda-tile's own signature objects (kernels/specs.py).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cuda.tile.compilation import ArrayConstraint, ConstantConstraint, ListConstraint, ScalarConstraint, TupleConstraint

from kernels.launch import with_hints
from kernels.specs import ArraySpec, Recorded

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

MOST_INT32 = 1 << 31
HINTS = ("occupancy", "num_worker_warps", "num_ctas", "opt_level")
_ARRAY = re.compile(r"(?P<dtype>[a-z]\w*)\[(?P<shape>[\d, ]*)\](?:@(?P<offset>\d+))?(?::\((?P<strides>[-\d, ]*)\))?")


class LaunchTextError(ValueError):
    """A launch in words that can't be understood; the message says which part."""


@dataclass(frozen=True)
class Trait:
    """One thing that the compiler may rely on. `value` is short enough for a table."""

    parameter: str
    what: str
    value: str


@dataclass(frozen=True)
class Specialisation:
    """One compiled form of a kernel. Two launches run the same code when kernel, hints and symbol agree."""

    kernel: str
    symbol: str
    hints: tuple[tuple[str, Any], ...]
    traits: tuple[Trait, ...]

    @property
    def identity(self) -> tuple[Any, ...]:
        return self.kernel, self.hints, self.symbol

    @property
    def parameters(self) -> int:
        """Of the launch: an address, lengths and strides for each array, those that are constants included."""
        arrays = [trait for trait in self.traits if trait.what == "rank"]
        scalars = [trait for trait in self.traits if trait.what == "scalar of type"]
        return sum(1 + 2 * int(trait.value) for trait in arrays) + len(scalars)


def specialisation(record: Recorded) -> Specialisation:
    """What a launch would run. Nothing is compiled."""
    signature = record.signature()
    names = list(record.kernel._annotated_function.pysig.parameters)  # noqa: SLF001
    traits = [
        trait
        for name, constraint in zip(names, signature.parameters, strict=True)
        for trait in _traits(name, constraint)
    ]
    return Specialisation(record.name, signature.symbol, record.hints, tuple(traits))


def refused(record: Recorded) -> str | None:
    """Why cuda-tile would not launch this: it raises OverflowError for an array that 32-bit indices don't reach."""
    names = list(record.kernel._annotated_function.pysig.parameters)  # noqa: SLF001
    for name, arg, constraint in zip(names, record.args, record.signature().parameters, strict=True):
        if not isinstance(constraint, ArrayConstraint) or str(constraint.index_dtype) != "int32":
            continue
        for what, number in (("length", max(arg.shape, default=0)), ("stride", _longest_stride(arg))):
            if number >= MOST_INT32:
                return f"{name} has a {what} of {number:,}; from 2³¹ on it needs the annotation IndexedWithInt64"
    return None


def _longest_stride(array: Any) -> int:
    """In elements."""
    item = int(array.nbytes) // max(int(array.size), 1)
    return max((abs(int(step)) // max(item, 1) for step in array.strides), default=0)


def _traits(name: str, constraint: Any) -> Iterator[Trait]:
    if isinstance(constraint, ArrayConstraint):
        yield from _array_traits(name, constraint)
    elif isinstance(constraint, TupleConstraint):
        yield Trait(name, "tuple of", str(len(constraint.items)))
        for i, item in enumerate(constraint.items):
            yield from _traits(f"{name}[{i}]", item)
    elif isinstance(constraint, ListConstraint):
        yield Trait(name, "list", "its arrays share these traits")
        yield from _traits(f"{name}[…]", constraint.element)
    elif isinstance(constraint, ConstantConstraint):
        yield Trait(name, "constant", repr(constraint.value))
    elif isinstance(constraint, ScalarConstraint):
        yield Trait(name, "scalar of type", str(constraint.dtype))
    else:
        yield Trait(name, "parameter", str(constraint))


def _array_traits(name: str, array: ArrayConstraint) -> Iterator[Trait]:
    yield Trait(name, "element type", str(array.dtype))
    yield Trait(name, "rank", str(array.ndim))
    yield Trait(name, "index width", str(array.index_dtype))
    aligned = array.base_addr_divisible_by == 16
    yield Trait(name, "address", "divisible by 16 bytes" if aligned else "not divisible by 16 bytes")
    if array.may_alias_internally:
        yield Trait(name, "elements", "may share memory (a stride of 0)")
    for axis in range(array.ndim):
        yield Trait(name, f"length of axis {axis}", _length(array, axis))
        yield Trait(name, f"stride of axis {axis}", _stride(array, axis))


def _length(array: ArrayConstraint, axis: int) -> str:
    if array.shape_constant[axis] is not None:
        return f"{array.shape_constant[axis]} (constant)"
    return "divisible by 16" if array.shape_divisible_by[axis] == 16 else "not divisible by 16"


def _stride(array: ArrayConstraint, axis: int) -> str:
    if array.stride_constant[axis] is not None:
        return f"{array.stride_constant[axis]} (constant)"
    return "divisible by 16 bytes" if array.stride_divisible_by[axis] > 1 else "not divisible by 16 bytes"


def differences(found: Specialisation, other: Specialisation) -> list[str]:
    """Why two launches do not run the same code; [] when they do."""
    mine = {(trait.parameter, trait.what): trait.value for trait in found.traits}
    theirs = {(trait.parameter, trait.what): trait.value for trait in other.traits}
    said = [
        f"{name}: {what} {value}, there {theirs.get((name, what), 'none')}"
        for (name, what), value in mine.items()
        if theirs.get((name, what)) != value
    ]
    said += [f"{name}: no {what}, there {value}" for (name, what), value in theirs.items() if (name, what) not in mine]
    if found.hints != other.hints:
        said.append(f"hints: {hints_text(found.hints)}, there {hints_text(other.hints)}")
    return said


def hints_text(hints: Iterable[tuple[str, Any]]) -> str:
    return ", ".join(f"{name} {value}" for name, value in hints) or "none"


def nearest(found: Specialisation, others: Sequence[Specialisation]) -> int | None:
    """The number of the one that differs least; None where there is none."""
    return min(range(len(others)), key=lambda i: (len(differences(found, others[i])), i), default=None)


def changed(base: Recorded, text: str) -> Recorded:
    """The launch `base` with some arguments changed: "x=bfloat16[17,1024] y=float32[17,64]@8 N=128 occupancy=2".

    An array is TYPE[LENGTHS], with @BYTES from where memory is aligned, and :(STRIDES in bytes) where it is not
    row-major.

    Raises:
        LaunchTextError: naming the part that is no argument of the kernel, or no array.
    """
    names = list(base.kernel._annotated_function.pysig.parameters)  # noqa: SLF001
    args, hints = list(base.args), {}
    for part in re.findall(r"\S+=[^=]*?(?=\s+\S+=|\s*$)", text.strip()) or [text]:
        name, equals, value = part.strip().partition("=")
        if not equals or (name not in names and name not in HINTS):
            known = ", ".join([*names, *HINTS])
            raise LaunchTextError(f"{part.strip()!r} is no argument of {base.name}; known: {known}")
        if name in HINTS and name not in names:
            hints[name] = _whole(name, value.strip())
        else:
            args[names.index(name)] = _argument(name, value.strip(), args[names.index(name)])
    kernel = with_hints(base.kernel, **hints) if hints else base.kernel
    return Recorded(kernel, base.grid, tuple(args), base.pdl)


def _argument(name: str, text: str, before: Any) -> Any:
    match = _ARRAY.fullmatch(text)
    if match is not None:
        shape = tuple(int(part) for part in match["shape"].replace(" ", "").split(",") if part)
        strides = match["strides"]
        steps = None if strides is None else tuple(int(part) for part in strides.replace(" ", "").split(",") if part)
        if steps is not None and len(steps) != len(shape):
            raise LaunchTextError(f"{name}: {len(shape)} lengths and {len(steps)} strides")
        try:
            return ArraySpec(shape, match["dtype"], steps, int(match["offset"] or 0))
        except ValueError as error:
            raise LaunchTextError(f"{name}: {error}") from None
    if hasattr(before, "shape"):
        raise LaunchTextError(f"{name} is an array, such as {name}=float32[16,128]; found {text!r}")
    words = {"true": True, "false": False}
    if text.lower() in words:
        return words[text.lower()]
    if not isinstance(before, float):
        return _whole(name, text)
    try:
        return float(text)
    except ValueError:
        raise LaunchTextError(f"{name} is a number, found {text!r}") from None


def _whole(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise LaunchTextError(f"{name} is a whole number, found {text!r}") from None
