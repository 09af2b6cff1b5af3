"""Runs a kernel's Python function once per block, every cuda.tile operation redirected to NumPy.

Rests on two private names of cuda.tile 1.7: `DispatchMode.call_tile_function_from_host`, through which every stub goes
when it is called outside compiled code, and `kernel._pyfunc`, the function under the decorator. A test pins both.
"""

from __future__ import annotations

import copy
import random
import traceback
from typing import TYPE_CHECKING, Any

import cuda.tile as ct
import numpy as np
from cuda.tile._dispatch_mode import DispatchMode

from kernels.interpreter import atomics, ops, reductions
from kernels.interpreter.dtypes import FLOAT32, INT32, TO_TILE
from kernels.interpreter.errors import InterpreterError
from kernels.interpreter.memory import PAD, Array, axes_of
from kernels.interpreter.races import Chain, Launch
from kernels.interpreter.tile import Tile, check_shape
from kernels.interpreter.views import RawMemory, TiledView, fill_slice, load_advanced, store_advanced
from kernels.launch import supports_pdl

if TYPE_CHECKING:
    from collections.abc import Sequence

WEAK = ct.MemoryOrder.WEAK


class InterpreterLauncher:
    """A Launcher that interprets.

    Args:
        arch: whose configuration rows wrappers look up.
        pdl: interpret as a chain of programmatic dependent launches, with their rules. `synchronize` ends the chain.
        checks: races, undetermined values, aliasing, PDL order. Bounds and types are always checked.
        shuffle_seed: run the blocks of each launch in a random order; None keeps the natural one.
    """

    def __init__(
        self, arch: str = "sm_90", *, pdl: bool = False, checks: bool = True, shuffle_seed: int | None = None
    ) -> None:
        if pdl and not supports_pdl(arch):
            raise ValueError(f"programmatic dependent launch needs sm_90 or newer, the target is {arch}")
        self.arch = arch
        self.pdl = pdl
        self.processors = 3  # few, so that blocks have several tiles each, and not the same number
        self.checks = checks
        self.launches = 0
        self._random = None if shuffle_seed is None else random.Random(shuffle_seed)  # noqa: S311
        self._chain = Chain() if pdl and checks else None
        self._mode = _BlockMode(arch)
        self._before: Chain | None = None

    def with_pdl(self, on: bool) -> InterpreterLauncher:
        """A plain launch begins when the chain before it has finished."""
        other = copy.copy(self)
        other.pdl = on and supports_pdl(self.arch)
        if other.pdl:
            other._chain = self._chain or (Chain() if self.checks else None)  # noqa: SLF001 - its own kind
        else:
            other._chain, other._before = None, self._chain  # noqa: SLF001
        return other

    def synchronize(self) -> None:
        """Everything launched so far has finished (a stream synchronisation, the end of a graph)."""
        if self._chain is not None:
            self._chain.finish()

    def check(self, kernel: Any, args: Sequence[Any]) -> None:
        """Refuse arrays outside host memory, as GpuLauncher does those in it."""
        for arg in args:
            if hasattr(arg, "__cuda_array_interface__"):
                name = kernel._pyfunc.__name__  # noqa: SLF001
                raise TypeError(f"{name}: an argument of shape {arg.shape} is in device memory, expected a NumPy array")

    def __call__(self, kernel: Any, grid: Sequence[int], args: Sequence[Any]) -> None:
        """Run `kernel` on every block of `grid`. Arrays must be NumPy arrays.

        Raises:
            InterpreterError: the kernel broke a rule; memory then holds what had been written so far.
        """
        self.check(kernel, args)
        if self._before is not None:
            self._before.finish()
        self.launches += 1
        dimensions = tuple([*grid, 1, 1][:3])
        blocks = list(enumerate(block[::-1] for block in np.ndindex(*reversed(dimensions))))  # x fastest
        if self._random is not None:
            self._random.shuffle(blocks)
        launch = self._run(kernel, args, dimensions, blocks)
        if launch.has_races():
            launch.undo()
            launch = self._run(kernel, args, dimensions, blocks, first=launch)
        launch.commit()

    def _run(self, kernel: Any, args: Sequence[Any], grid: Any, blocks: Any, *, first: Launch | None = None) -> Launch:
        arrays: list[tuple[str, np.ndarray]] = []
        launch = Launch(arrays, checks=self.checks, chain=self._chain, first=first)
        values = _bind(kernel, args, launch, arrays)
        function, mode = kernel._pyfunc, self._mode  # noqa: SLF001
        mode.launch, mode.grid = launch, grid
        with mode.as_current(), np.errstate(all="ignore"):
            for number, block in blocks:
                mode.block = block
                launch.start(number)
                try:
                    function(*values)
                    launch.end_block()
                except Exception as error:
                    raise _located(error, function, block) from error
        launch.end_grid(function.__name__)
        return launch


def _bind(kernel: Any, args: Sequence[Any], launch: Launch, arrays: list[tuple[str, np.ndarray]]) -> list[Any]:
    """Arguments as the kernel sees them: arrays, 0-d tiles, and plain numbers where a parameter is ct.Constant."""
    annotated = kernel._annotated_function  # noqa: SLF001
    names = list(annotated.pysig.parameters)
    if len(names) != len(args):
        raise TypeError(f"{annotated.pyfunc.__name__} takes {len(names)} arguments, got {len(args)}")
    return [
        _argument(name, arg, note, launch, arrays)
        for name, arg, note in zip(names, args, annotated.parameter_annotations, strict=True)
    ]


def _argument(name: str, arg: Any, note: Any, launch: Launch, arrays: list[tuple[str, np.ndarray]]) -> Any:
    if isinstance(arg, np.ndarray):
        if arg.dtype not in TO_TILE:
            raise InterpreterError(f"argument {name}: data type {arg.dtype} is not interpreted")
        arrays.append((name, arg))
        static = getattr(note, "array", None)
        return Array(arg, name, launch, (static.static_shape_dims, static.static_stride_dims) if static else ((), ()))
    if isinstance(arg, (tuple, list)):
        each = getattr(note, "each", note)
        notes = getattr(note, "items", [each] * len(arg))
        return tuple(
            _argument(f"{name}[{i}]", item, one, launch, arrays)
            for i, (item, one) in enumerate(zip(arg, notes, strict=True))
        )
    if not isinstance(arg, (bool, int, float)):
        raise TypeError(f"argument {name}: expected a NumPy array or a number, got {type(arg).__name__}")
    if getattr(note, "constant", False):
        return arg
    if isinstance(arg, bool):
        return Tile(np.bool_(arg))
    scalar = getattr(note, "scalar", None)
    if isinstance(arg, int):
        wide = scalar is not None and scalar.dtype == ct.int64
        return Tile(np.array(arg, np.int64 if wide else INT32)[()])
    return Tile(np.array(arg, FLOAT32)[()])


def _located(error: Exception, function: Any, block: tuple[int, ...]) -> InterpreterError:
    """The error with kernel, block and the kernel's own source line."""
    line = ""
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename == function.__code__.co_filename:
            line = f" at line {frame.lineno}: {frame.line}"
    what = str(error) if isinstance(error, InterpreterError) else f"{type(error).__name__}: {error}"
    return InterpreterError(f"{function.__name__}, block {block}: {what}{line and '  [' + line.strip() + ']'}")


for _name, _function in atomics.STORES.items():  # methods, as on ct.TiledView
    setattr(TiledView, _name, _function)


class _BlockMode(DispatchMode):
    """Where calls of cuda.tile functions arrive while a block runs."""

    def __init__(self, arch: str) -> None:
        self.launch: Any = None
        self.block: tuple[int, ...] = (0, 0, 0)
        self.grid: tuple[int, ...] = (1, 1, 1)
        self.dependent = int(arch.removeprefix("sm_")) >= 90
        self.arch = arch
        self._found: dict[Any, Any] = {}
        self._table: dict[str, Any] = {**ops.TABLE, **reductions.TABLE, **atomics.TABLE, **MEMORY}
        self._table |= {
            "bid": lambda axis: Tile(np.int32(self.block[axis])),
            "num_blocks": lambda axis: Tile(np.int32(self.grid[axis])),
            "grid_dependency_control_wait": self._wait,
            "grid_dependency_control_launch_dependents": self._launch_dependents,
        }

    def call_tile_function_from_host(self, func: Any, args: Any, kwargs: Any) -> Any:
        found = self._found.get(func)
        if found is None:
            found = self._found[func] = self._find(func)
        return found(*args, **kwargs)

    def _find(self, func: Any) -> Any:
        name = func.__qualname__
        if hasattr(func, "_cutile_python_stub"):
            if name not in self._table:
                raise InterpreterError(f"cuda.tile operation {name} is not interpreted")
            return self._table[name]
        return func.__wrapped__  # a @ct.function of the kernel's own

    def _wait(self) -> None:
        self._needs_dependent("grid_dependency_control_wait")
        self.launch.wait()

    def _launch_dependents(self) -> None:
        self._needs_dependent("grid_dependency_control_launch_dependents")
        self.launch.start_dependents()

    def _needs_dependent(self, what: str) -> None:
        if not self.dependent:
            raise InterpreterError(f"{what} does not exist on {self.arch}")


def _load(
    array: Any,
    /,
    index: Any,
    shape: Any,
    *,
    order: Any = "C",
    padding_mode: Any = PAD.UNDETERMINED,
    check_bounds: bool = True,
    latency: Any = None,
    allow_tma: Any = None,
    memory_order: Any = WEAK,
    memory_scope: Any = None,
) -> Tile:
    del latency, allow_tma, memory_scope  # hints change the speed, not the result
    return array.load_tile(
        index, shape, order=order, padding=padding_mode, check_bounds=check_bounds, ordering=memory_order
    )


def _store(
    array: Any,
    /,
    index: Any,
    tile: Any,
    *,
    order: Any = "C",
    check_bounds: bool = True,
    latency: Any = None,
    allow_tma: Any = None,
    memory_order: Any = WEAK,
    memory_scope: Any = None,
) -> None:
    del latency, allow_tma, memory_scope
    array.store_tile(index, tile, order=order, check_bounds=check_bounds, ordering=memory_order)


def _gather(
    array: Any,
    indices: Any,
    /,
    *,
    mask: Any = None,
    padding_value: Any = 0,
    check_bounds: bool = True,
    latency: Any = None,
) -> Tile:
    del latency
    return array.gather(indices, mask, padding_value, check_bounds)


def _scatter(
    array: Any, indices: Any, value: Any, /, *, mask: Any = None, check_bounds: bool = True, latency: Any = None
) -> None:
    del latency
    array.scatter(indices, value, mask, check_bounds)


def _num_tiles(array: Any, /, axis: int, shape: Any, order: Any = "C") -> Tile:
    sides = check_shape(shape, "num_tiles") or (1,) * array.a.ndim
    have = array.a.shape[axes_of(order, array.a.ndim)[axis]]
    return Tile(np.int32(-(-have // sides[axis])))


def _load_advanced(
    array: Any, indices: Any, /, *, padding_mode: Any = PAD.UNDETERMINED, latency: Any = None, allow_tma: Any = None
) -> Tile:
    del latency, allow_tma
    return load_advanced(array, indices, padding_mode)


def _store_advanced(array: Any, indices: Any, tile: Any, /, *, latency: Any = None, allow_tma: Any = None) -> None:
    del latency, allow_tma
    store_advanced(array, indices, tile)


def _tiled_view(
    array: Any, tile_shape: Any, *, padding_mode: Any = PAD.UNDETERMINED, traversal_steps: Any = None
) -> TiledView:
    return TiledView(array, check_shape(tile_shape, "tiled_view"), padding_mode, traversal_steps)


MEMORY: dict[str, Any] = {
    "load": _load,
    "store": _store,
    "gather": _gather,
    "scatter": _scatter,
    "num_tiles": _num_tiles,
    "load_advanced_indexing": _load_advanced,
    "store_advanced_indexing": _store_advanced,
    "Slice.__init__": fill_slice,
    "Array.slice": Array.cut,
    "Array.tiled_view": _tiled_view,
    "Array.get_raw_memory": RawMemory,
}
