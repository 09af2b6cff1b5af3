"""Finds the probes, makes their launches, and holds their variants equal in the interpreter. Needs no GPU.

    [probe] = find(["padding"])
    check(probe)                                     # ProbeError: which variants differ, and by how much
    for variant in probe.variants(small=False): variant.record(spec_arrays(probe)) ...

A probe's file says what it computes in plain data (probes/__init__.py); here that becomes launches.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cuda.tile as ct
import numpy as np

from kernels.interpreter import InterpreterLauncher
from kernels.interpreter.dtypes import numpy_dtype
from kernels.launch import supports_pdl, with_hints
from kernels.specs import ArraySpec, Recorded, RecordingLauncher

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

FOLDER = Path(__file__).parent / "probes"
TOLERANCE = 1e-3  # of the largest value
LaunchError = ct.TileError  # what cuda-tile raises for a kernel that does not compile
_BLOCK = 1 << 20  # numbers drawn; longer arrays repeat them


class ProbeError(Exception):
    """The variants of a probe do not compute the same thing."""


@dataclass(frozen=True)
class Variant:
    """One way to write it.

    Attributes:
        steps: (kernel with its hints, grid, arguments); arguments are names of arrays, views of them, or constants.
        out: the array that must equal the other variants' of `group`, within `tolerance` of its largest value.
        pdl: each step is launched as a dependent of the one before.
        count: what a time is divided by.
    """

    name: str
    steps: tuple[tuple[Any, tuple[int, int, int], tuple[Any, ...]], ...]
    out: str
    group: str
    pick: Any
    pdl: bool
    tolerance: float
    count: int

    def record(self, arrays: Mapping[str, Any]) -> list[Recorded]:
        """The launches with these arrays (NumPy, CuPy or ArraySpec)."""
        return [
            Recorded(kernel, grid, tuple(argument(arg, arrays) for arg in args), self.pdl)
            for kernel, grid, args in self.steps
        ]


@dataclass(frozen=True)
class Probe:
    """One file. `question` is the first line of its docstring, `about` the rest."""

    name: str
    path: Path
    question: str
    about: str
    module: Any

    def arrays(self, *, small: bool) -> dict[str, tuple[tuple[int, ...], str, tuple[Any, ...]]]:
        """Name -> shape, dtype, fill."""
        return dict(self.module.arrays(small))

    def variants(self, *, small: bool) -> list[Variant]:
        return [_variant(name, about) for name, about in self.module.variants(small).items()]


def find(names: Iterable[str] = ()) -> list[Probe]:
    """Probes whose name contains one of `names`; all without any.

    Raises:
        KeyError: a name that no probe has in it.
    """
    known = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")
    wanted = list(names)
    chosen: dict[str, None] = dict.fromkeys(known if not wanted else ())
    for name in wanted:
        found = [name] if name in known else [stem for stem in known if name in stem]
        if not found:
            raise KeyError(f"no probe {name!r}; known: {', '.join(known)}")
        chosen |= dict.fromkeys(found)
    return [_load(name) for name in chosen]


def _load(name: str) -> Probe:
    module = importlib.import_module(f"kernels.lab.probes.{name}")
    question, _, about = (module.__doc__ or "").strip().partition("\n\n")
    return Probe(name, FOLDER / f"{name}.py", question, about.strip(), module)


def _variant(name: str, about: Mapping[str, Any]) -> Variant:
    steps = []
    for kernel, grid, args, *hints in about["steps"]:
        steps.append((with_hints(kernel, **(hints[0] if hints else {})), grid, tuple(args)))
    return Variant(
        name=name,
        steps=tuple(steps),
        out=about["out"],
        group=about.get("group", ""),
        pick=about.get("pick", slice(None)),
        pdl=about.get("pdl", False),
        tolerance=about.get("tolerance", TOLERANCE),
        count=about.get("count", len(steps)),
    )


def argument(arg: Any, arrays: Mapping[str, Any]) -> Any:
    """An array by its name, a view of one, a tuple of arrays for a list of them, or the constant itself."""
    if isinstance(arg, str):
        return arrays[arg]
    if isinstance(arg, list):
        return tuple(argument(item, arrays) for item in arg)
    if isinstance(arg, tuple):
        name, shape, *first = arg
        return view(arrays[name], shape, first[0] if first else 0)
    return arg


def view(array: Any, shape: tuple[int, ...], first: int) -> Any:
    """`shape` elements from the `first` on, in row-major order."""
    return array.reshape(-1)[first : first + math.prod(shape)].reshape(shape)


def spec_arrays(probe: Probe, *, small: bool = False) -> dict[str, ArraySpec]:
    """Arrays without memory: enough to compile for any target."""
    return {name: ArraySpec(shape, dtype) for name, (shape, dtype, _) in probe.arrays(small=small).items()}


def dtype_of(name: str) -> np.dtype[Any]:
    """NumPy's type of "bfloat16", "float32", …"""
    return numpy_dtype(getattr(ct, name))


def host_block(dtype: str, fill: tuple[Any, ...], size: int) -> np.ndarray[Any, Any]:
    """The first numbers of an array, at most a million of them; a longer array repeats them. "out" is all NaN or 85.

    Counting fills are made whole.
    """
    kind, *more = fill
    count = min(size, _BLOCK)
    rng = np.random.default_rng(1)
    into = dtype_of(dtype)
    if kind == "normal":
        return (rng.standard_normal(count, np.float32) * more[0]).astype(into)
    if kind == "int8":
        return rng.integers(-127, 128, count).astype(into)
    if kind == "zeros":
        return np.zeros(count, into)
    if kind == "value":
        return np.full(count, more[0], into)
    if kind == "out":
        return np.full(count, 85 if into.kind in "iu" else np.nan).astype(into)
    if kind in ("count", "steps"):
        return (np.arange(size) // (more[0] if more else 1)).astype(into)
    raise ValueError(f"unknown fill {kind!r}")


def host_arrays(probe: Probe, *, small: bool) -> dict[str, np.ndarray[Any, Any]]:
    made: dict[str, np.ndarray[Any, Any]] = {}
    for name, (shape, dtype, fill) in probe.arrays(small=small).items():
        if fill[0] == "transposed":
            made[name] = np.ascontiguousarray(made[fill[1]].T)
        else:
            made[name] = np.resize(host_block(dtype, fill, math.prod(shape)), shape)
    return made


def check(probe: Probe, arch: str = "sm_90") -> int:
    """Run every variant in the interpreter, with its checks. Returns how many were held against another.

    Raises:
        ProbeError: two of a group differ.
        InterpreterError: a variant broke a rule.
    """
    first: dict[str, np.ndarray[Any, Any]] = {}
    compared = 0
    for variant in probe.variants(small=True):
        if variant.pdl and not supports_pdl(arch):
            continue
        arrays = host_arrays(probe, small=True)
        launcher = InterpreterLauncher(arch, pdl=variant.pdl)
        for record in variant.record(arrays):
            launcher(record.kernel, record.grid, record.args)
        launcher.synchronize()
        compared += compare(probe.name, variant, arrays[variant.out], first)
    return compared


def compare(probe: str, variant: Variant, out: np.ndarray[Any, Any], first: dict[str, np.ndarray[Any, Any]]) -> bool:
    """Hold a variant's result against the first one of its group; the first is kept. Whether there was one.

    Raises:
        ProbeError: they differ, or there is something that is no number.
    """
    picked = out.reshape(-1)[variant.pick] if isinstance(variant.pick, slice) else out[variant.pick]
    found = np.array(picked, np.float64).reshape(-1)
    if not np.isfinite(found).all():
        raise ProbeError(f"{probe}: {variant.name!r} leaves {(~np.isfinite(found)).sum()} numbers unwritten")
    want = first.setdefault(variant.group, found)
    if want is found:
        return False
    if found.shape != want.shape:
        raise ProbeError(f"{probe}: {variant.name!r} gives {found.size} numbers, the first variant {want.size}")
    most = float(np.abs(found - want).max())
    allowed = variant.tolerance * float(np.abs(want).max())
    if most > allowed:
        raise ProbeError(f"{probe}: {variant.name!r} differs by {most:.3g}, allowed are {allowed:.3g}")
    return True


__all__ = ["Probe", "ProbeError", "RecordingLauncher", "Variant", "check", "find", "host_arrays", "spec_arrays"]
