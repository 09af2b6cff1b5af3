"""What the blocks of one launch, and the kernels of one chain, do to each other's memory.

Blocks run one after the other, but a race is found whatever the order: writes are kept in a map of block numbers, reads
in a log that is compared with that map when the launch ends. An atomic with acquire and release ordering makes the
writes of the blocks that released before visible, so that "the last block to arrive merges" is no race.

Reading what another block writes is no fault as long as nothing comes of it: decode attention loads a whole page while
another block writes the newest row of it, and masks that row. So a launch with such reads is undone and run again with
those elements flagged RACING (see `tile`), and fails only if one reaches a result.

Under programmatic dependent launch a kernel may start before the ones before it have finished. `Chain` keeps what
those kernels wrote; reading it before grid_dependency_control_wait is an error, and so are a store before the wait and
a block that ends without having waited.

But where every block of a kernel started its dependents after its own wait, all kernels before it have ended when the
next one starts, or any later one. Those may then store before their wait what that kernel and those since neither read
nor write, and one block that waits is enough for a grid: it ends with its last block.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import cuda.tile as ct
import numpy as np

from kernels.interpreter.errors import InterpreterError
from kernels.interpreter.memory import address, map_view, root_of
from kernels.interpreter.tile import RACING, UNKNOWN

if TYPE_CHECKING:
    from kernels.interpreter.memory import Array

_RELEASING = (ct.MemoryOrder.RELEASE, ct.MemoryOrder.ACQ_REL)
_ACQUIRING = (ct.MemoryOrder.ACQUIRE, ct.MemoryOrder.ACQ_REL)
ATOMIC = 1 << 30  # added to the block number of an atomic write
NOBODY: frozenset[int] = frozenset()
Access = tuple["Array", Any, Any]  # array, order of its axes, part


class Chain:
    """Arrays written by the kernels of a chain since the last point at which all of them had finished."""

    def __init__(self) -> None:
        self._written: dict[int, tuple[weakref.ref, np.ndarray]] = {}
        self._running: list[list[Access]] | None = None

    def started(self, accesses: list[Access], *, late: bool) -> None:
        """A kernel's reads and writes; `late`: all before it have ended when the next one starts."""
        if late:
            self._running = [accesses]
        elif self._running is not None:
            self._running.append(accesses)

    @property
    def few_run(self) -> bool:
        """Whether it is known which kernels can still run when the next one starts."""
        return self._running is not None

    def touched(self, array: Array, order: Any, part: Any) -> bool:
        """Whether a kernel that can still run reads or writes an element of this part."""
        seen = np.zeros(max(array.root.nbytes, 1), bool)
        for other, other_order, other_part in (access for one in self._running or () for access in one):
            if other.root is array.root:
                view_of(map_view(seen, other.a, other.root), other_order)[other_part] = True
        return bool(view_of(map_view(seen, array.a, array.root), order)[part].any())

    def add(self, array: Array, order: Any, part: Any) -> None:
        key = id(array.root)
        if key not in self._written:
            forget = weakref.ref(array.root, lambda _: self._written.pop(key, None))
            self._written[key] = (forget, np.zeros(max(array.root.nbytes, 1), bool))
        view_of(map_view(self._written[key][1], array.a, array.root), order)[part] = True

    def wrote(self, array: Array, order: Any, part: Any) -> bool:
        record = self._written.get(id(array.root))
        if record is None:
            return False
        return bool(view_of(map_view(record[1], array.a, array.root), order)[part].any())

    def finish(self) -> None:
        self._written.clear()
        self._running = []


class Launch:
    """Bookkeeping of one launch: who wrote and read what, and what made a value undetermined."""

    def __init__(
        self,
        arguments: list[tuple[str, np.ndarray]],
        *,
        checks: bool,
        chain: Chain | None,
        first: Launch | None = None,
    ) -> None:
        self.checks = checks
        self.chain = chain
        self.arguments = arguments
        self.number = 0  # of the block that runs
        self.waited = False
        self._any_waited = False
        self._started_early = False  # a block let the next kernel start before its own wait, or ended without one
        self.suspects: set[str] = set()
        self._writers: dict[int, np.ndarray] = {}
        self._reads: list[tuple[Array, Any, Any, int, frozenset[int], bool]] = []
        self._stores: list[tuple[Array, Any, Any]] = []
        self._visible: dict[int, frozenset[int]] = {}
        self._released: dict[tuple[int, int], frozenset[int]] = {}
        self._alias_checked: set[str] = set()
        self._undo: list[tuple[np.ndarray, Any, np.ndarray]] = []
        self.first = first
        self.racing = {} if first is None else first.racing_writers
        self.racing_writers: dict[int, np.ndarray] = {}
        self.race: str = "" if first is None else first.race

    def start(self, number: int) -> None:
        self.number = number
        self.waited = False
        self.suspects.clear()

    def blame(self, bad: Any) -> str:
        """What is wrong with a value, and where it may come from."""
        if not (bad & UNKNOWN).any():
            return f"a value that depends on a race: {self.race}"
        if not self.suspects:
            return "an undetermined value (a cast to an integer that cannot hold it, or a shift by too many bits)"
        return f"an undetermined value (it may come from the {'; or the '.join(sorted(self.suspects)[:3])})"

    def wait(self) -> None:
        self.waited = self._any_waited = True

    def start_dependents(self) -> None:
        self._started_early |= not self.waited

    # -- called by every access

    def reads(self, array: Array, order: Any, part: Any, *, atomic: bool = False) -> None:
        visible = self._visible.get(self.number, NOBODY)
        self._reads.append((array, order, part, self.number, visible, atomic))
        if self.chain is not None and not self.waited and self.chain.wrote(array, order, part):
            raise InterpreterError(
                f"load of {array!r} before grid_dependency_control_wait, but an earlier kernel of the chain writes it"
            )

    def writes(self, array: Array, order: Any, part: Any, *, atomic: bool = False) -> None:
        if self.chain is not None:
            if not self.waited and (not self.chain.few_run or self.chain.touched(array, order, part)):
                raise InterpreterError(f"store to {array!r} before grid_dependency_control_wait")
            self._stores.append((array, order, part))
        if array.name not in self._alias_checked:
            self._check_alias(array)
        writers = self._writers.get(id(array.root))
        if writers is None:
            writers = self._writers[id(array.root)] = np.zeros(max(array.root.nbytes, 1), np.int32)
        view = view_of(array.over(writers), order)
        mine = self.number + 1 + (ATOMIC if atomic else 0)
        before = view[part]
        if before.any():
            others = before[(before != 0) & (before & ~ATOMIC != self.number + 1)]
            if atomic:
                others = others[others < ATOMIC]
            rivals = {int(other & ~ATOMIC) - 1 for other in np.unique(others)}
            rivals -= self._visible.get(self.number, NOBODY)
            if rivals:
                raise InterpreterError(f"store to {array!r}: block number {min(rivals)} wrote the same element")
        view[part] = mine
        if self.first is None:
            self._undo.append((view_of(array.a, order), part, view_of(array.a, order)[part].copy()))
            if array.unwritten is not None:
                holes = view_of(array.unwritten, order)
                self._undo.append((holes, part, holes[part].copy()))

    def add_racing(self, bad: Any, array: Array, order: Any, part: Any, *, atomic: bool = False) -> Any:
        """`bad` with the flag of elements that other blocks write, where this block does not see them ordered."""
        writers = self.racing.get(id(array.root))
        if writers is None or self.first is None:
            return bad
        seen = view_of(array.over(writers), order)[part]
        if atomic:
            seen = np.where(seen < ATOMIC, seen, 0)
        flag = np.zeros(seen.shape, np.uint8)
        for other in self.first.unordered(seen, self.number, self._visible.get(self.number, NOBODY)):
            flag[seen & ~ATOMIC == other + 1] = RACING
        if not flag.any():
            return bad
        return flag if bad is None else bad | flag

    def orders(self, array: Array, where: Any, order: Any) -> None:
        """An atomic at `where`: publish this block's writes, and see those of blocks that published before."""
        visible = self._visible.get(self.number, NOBODY)
        flat = np.ravel_multi_index(where, array.a.shape).tolist() if where else [0]
        for element in flat:
            key = (address(array.a), element)
            if order in _ACQUIRING:
                visible |= self._released.get(key, NOBODY)
            if order in _RELEASING:
                self._released[key] = self._released.get(key, NOBODY) | visible | {self.number}
        self._visible[self.number] = visible

    def _check_alias(self, array: Array) -> None:
        self._alias_checked.add(array.name)
        for name, other in self.arguments:
            if array.name != name and not array.name.startswith(f"{name}[") and shares(array.a, other):
                raise InterpreterError(f"store to {array!r}: the argument {name}{other.shape} shares its memory")

    # -- at the end

    def end_block(self) -> None:
        if self.chain is not None and not self.waited and not self.chain.few_run:
            raise InterpreterError("a block of a dependent launch ends without grid_dependency_control_wait")
        self._started_early |= not self.waited

    def end_grid(self, kernel: str) -> None:
        if self.chain is not None and not self._any_waited:
            raise InterpreterError(f"{kernel}: no block of a dependent launch reaches grid_dependency_control_wait")

    def unordered(self, writers: np.ndarray, block: int, visible: frozenset[int]) -> list[int]:
        """Blocks among `writers` that neither happened before the read by `block`, nor after it."""
        found = np.unique(writers[(writers != 0) & (writers & ~ATOMIC != block + 1)])
        numbers = {int(other & ~ATOMIC) - 1 for other in found} - visible
        return sorted(n for n in numbers if block not in self._visible.get(n, NOBODY))

    def has_races(self) -> bool:
        """Compare reads with writes; `race` tells the first read of what another block writes without an order."""
        for array, order, part, block, visible, atomic in self._reads if self._writers else ():
            key = id(array.root)
            writers = self._writers.get(key)
            if writers is None or key in self.racing_writers:
                continue
            seen = view_of(array.over(writers), order)[part]
            if atomic:  # two atomic accesses never race
                seen = np.where(seen < ATOMIC, seen, 0)
            rivals = self.unordered(seen, block, visible) if seen.any() else []
            if rivals:
                self.racing_writers[key] = writers
                text = f"load of {array!r} in block number {block} races with block number {rivals[0]}, which writes it"
                self.race = self.race or text
        return bool(self.racing_writers)

    def undo(self) -> None:
        """Memory as it was before the launch."""
        for target, part, before in reversed(self._undo):
            target[part] = before

    def commit(self) -> None:
        """The launch stands: later kernels of the chain must wait for it."""
        if self.chain is not None:
            for array, order, part in self._stores:
                self.chain.add(array, order, part)
            reads = [(array, order, part) for array, order, part, *_ in self._reads]
            self.chain.started(reads + self._stores, late=not self._started_early)


def view_of(view: np.ndarray, order: Any) -> np.ndarray:
    return view if order is None or order == tuple(range(view.ndim)) else view.transpose(order)


def shares(x: np.ndarray, y: np.ndarray) -> bool:
    """Whether two arrays have an element in common; undecided cases count as yes."""
    if root_of(x) is not root_of(y) or not np.may_share_memory(x, y):
        return False
    try:
        return bool(np.shares_memory(x, y, max_work=100_000))  # type: ignore[arg-type]  # any number is a limit
    except np.exceptions.TooHardError:
        return True
