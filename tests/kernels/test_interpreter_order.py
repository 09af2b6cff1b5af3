"""Faults of order: blocks that race, atomics that do not order, dependent launches that read or store too early."""

from __future__ import annotations

import cuda.tile as ct
import numpy as np
import pytest

from kernels.interpreter import InterpreterLauncher
from tests.kernels.kernels_for_tests import branch_kernel, caught, floats, run

I = ct.Constant[int]  # noqa: E741


@ct.kernel
def same_element_kernel(y, ATOMIC: I):
    if ATOMIC:
        ct.atomic_add(y, 0, 1)
    else:
        ct.store(y, index=(0,), tile=1)


@ct.kernel
def neighbour_kernel(x, OFFSET: I):
    i = ct.bid(0)
    tile = ct.load(x, index=((i + OFFSET) % ct.num_blocks(0),), shape=(4,))
    ct.store(x, index=(i,), tile=tile + 1.0)


@ct.kernel
def last_block_kernel(part, counter, y, ORDERED: I):
    """Each block stores its part, and the one that arrives last adds them up."""
    i = ct.bid(0)
    ct.store(part, index=(i,), tile=ct.full((1,), 1.0, dtype=ct.float32))
    if ORDERED:
        before = ct.atomic_add(counter, 0, 1)
    else:
        before = ct.atomic_add(counter, 0, 1, memory_order=ct.MemoryOrder.RELAXED)
    if before == ct.num_blocks(0) - 1:
        ct.store(y, index=(0,), tile=ct.sum(ct.load(part, index=(0,), shape=(4,)), axis=0))


@ct.kernel
def chained_kernel(w, x, y, EARLY: I, WAIT: I, STORE_EARLY: I):
    ct.grid_dependency_control_launch_dependents()
    weight = ct.load(w, index=(0,), shape=(4,))
    if STORE_EARLY:
        ct.store(y, index=(0,), tile=weight)
    if EARLY:
        value = ct.load(x, index=(0,), shape=(4,))
    if WAIT:
        ct.grid_dependency_control_wait()
    if not EARLY:
        value = ct.load(x, index=(0,), shape=(4,))
    ct.store(y, index=(0,), tile=weight * value)


def test_two_blocks_write_one_element() -> None:
    with caught("block number 0 wrote the same element"):
        run(same_element_kernel, 2, np.zeros(1, np.int32), 0)
    counter = np.zeros(1, np.int32)
    run(same_element_kernel, 5, counter, 1)
    assert counter[0] == 5


@ct.kernel
def page_kernel(q, pool, v, y, n, MASK: I, WEIGHT: I):
    """Block 1 writes row n of the pool, block 0 reads the whole page and may mask that row."""
    if ct.bid(0) == 1:
        ct.store(pool, index=(n, 0), tile=ct.full((1, 16), 3.0, dtype=ct.float32))
        ct.store(v, index=(n, 0), tile=ct.full((1, 16), 3.0, dtype=ct.float32))
    else:
        row = ct.arange(16, dtype=ct.int32).reshape((16, 1))
        page = ct.load(pool, index=(0, 0), shape=(16, 16))
        score = ct.mma(page, ct.load(q, index=(0, 0), shape=(16, 16)), ct.zeros((16, 16), dtype=ct.float32))
        if MASK:
            score = ct.where(row < n, score, -1.0e30)
        weight = ct.exp2(score - ct.max(score, axis=0, keepdims=True))
        values = ct.transpose(ct.load(v, index=(0, 0), shape=(16, 16)))
        if WEIGHT:
            weight = weight + 1.0e-30
        ct.store(y, index=(0, 0), tile=ct.mma(values, weight, ct.zeros((16, 16), dtype=ct.float32)))


def page_arguments() -> list[np.ndarray]:
    return [np.ones((16, 16), np.float32) for _ in range(4)]


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_race_that_is_masked_is_no_fault(seed: int | None) -> None:
    """Masked before the soft-max, and its weight is exactly 0: the old value or the new makes no difference."""
    q, pool, v, y = page_arguments()
    run(page_kernel, 2, q, pool, v, y, 9, 1, 0, shuffle_seed=seed)
    assert (y == 9).all()
    assert (pool[9] == 3).all()
    assert (pool[8] == 1).all()


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
@pytest.mark.parametrize(("mask", "weight"), [(0, 0), (1, 1)])
def test_race_that_reaches_a_result(seed: int | None, mask: int, weight: int) -> None:
    """Unmasked keys, or a weight that is not quite 0."""
    with caught("store to y.*depends on a race: load of (pool|v).* in block number 0 races with block number 1"):
        run(page_kernel, 2, *page_arguments(), 9, mask, weight, shuffle_seed=seed)


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
@pytest.mark.parametrize("offset", [1, 3])
def test_race_is_found_in_any_order(seed: int | None, offset: int) -> None:
    with caught("races with block number"):
        run(neighbour_kernel, 4, floats(16), offset, shuffle_seed=seed)


def test_own_element_is_no_race() -> None:
    x = floats(16)
    run(neighbour_kernel, 4, x, 0)
    assert x.tolist() == (floats(16) + 1).tolist()


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_last_block_needs_an_ordered_atomic(seed: int | None) -> None:
    y = np.zeros(1, np.float32)
    run(last_block_kernel, 4, floats(4), np.zeros(1, np.int32), y, 1, shuffle_seed=seed)
    assert y[0] == 4
    with caught("races with block number"):
        run(last_block_kernel, 4, floats(4), np.zeros(1, np.int32), y, 0, shuffle_seed=seed)


class TestDependentLaunch:
    def chain(self) -> tuple[InterpreterLauncher, np.ndarray, np.ndarray, np.ndarray]:
        """A launcher whose first kernel has written x."""
        launcher = InterpreterLauncher("sm_90", pdl=True)
        w, x, y = floats(4), np.zeros(4, np.float32), np.zeros(4, np.float32)
        launcher(chained_kernel, (1, 1, 1), (w, floats(4), x, 0, 1, 0))
        return launcher, w, x, y

    def test_weights_before_the_wait(self) -> None:
        launcher, w, x, y = self.chain()
        launcher(chained_kernel, (1, 1, 1), (w, x, y, 0, 1, 0))
        assert y.tolist() == [0, 1, 8, 27]

    def test_read_before_the_wait(self) -> None:
        launcher, w, x, y = self.chain()
        with caught("load of x.*before grid_dependency_control_wait"):
            launcher(chained_kernel, (1, 1, 1), (w, x, y, 1, 1, 0))

    def test_read_before_the_wait_of_a_kernel_two_launches_back(self) -> None:
        launcher, w, x, y = self.chain()
        launcher(chained_kernel, (1, 1, 1), (w, floats(4), y, 0, 1, 0))
        with caught("load of x.*before grid_dependency_control_wait"):
            launcher(chained_kernel, (1, 1, 1), (w, x, np.zeros(4, np.float32), 1, 1, 0))

    def test_read_before_the_wait_after_a_synchronisation(self) -> None:
        launcher, w, x, y = self.chain()
        launcher.synchronize()
        launcher(chained_kernel, (1, 1, 1), (w, x, y, 1, 1, 0))
        assert y.tolist() == [0, 1, 8, 27]

    def test_no_wait(self) -> None:
        launcher, w, _, y = self.chain()
        with caught("store to y.*before grid_dependency_control_wait"):
            launcher(chained_kernel, (1, 1, 1), (w, floats(4), y, 0, 0, 0))

    def test_store_before_the_wait(self) -> None:
        launcher, w, x, y = self.chain()
        with caught("store to y.*before grid_dependency_control_wait"):
            launcher(chained_kernel, (1, 1, 1), (w, x, y, 0, 1, 1))

    def test_block_that_does_nothing_must_wait_too(self) -> None:
        launcher, *_ = self.chain()
        with caught("without grid_dependency_control_wait"):
            launcher(branch_kernel, (1, 1, 1), (np.zeros(1, np.float32), floats(1)))

    def test_older_architectures_have_no_dependent_launch(self) -> None:
        with caught("does not exist on sm_89"):
            InterpreterLauncher("sm_89")(chained_kernel, (1, 1, 1), (floats(4), floats(4), floats(4), 0, 1, 0))
        with pytest.raises(ValueError, match="sm_90 or newer"):
            InterpreterLauncher("sm_89", pdl=True)


@ct.kernel
def ordered_kernel(x, y, LATE: I):
    """y = x; the next kernel may start before this block's wait, or after it."""
    if not LATE:
        ct.grid_dependency_control_launch_dependents()
    ct.grid_dependency_control_wait()
    if LATE:
        ct.grid_dependency_control_launch_dependents()
    i = ct.bid(0)
    ct.store(y, index=(i,), tile=ct.load(x, index=(i,), shape=(4,)))


@ct.kernel
def early_kernel(w, y, WAITS: I):
    """y = w before any wait; then WAITS blocks wait."""
    i = ct.bid(0)
    ct.store(y, index=(i,), tile=ct.load(w, index=(i,), shape=(4,)))
    if i < WAITS:
        ct.grid_dependency_control_wait()


class TestStoresBeforeTheWait:
    """Allowed on what no kernel touches that can still run, where it is known which ones can."""

    def chain(self, *, late: int) -> tuple[InterpreterLauncher, list[np.ndarray]]:
        """A launcher that has run x -> y with two blocks, the arrays w, x, y, and z, which a kernel before x wrote."""
        launcher, arrays = InterpreterLauncher("sm_90", pdl=True), [floats(8) + i for i in range(4)]
        w, x, y, z = arrays
        launcher(ordered_kernel, (2, 1, 1), (w, z, 0))
        launcher(ordered_kernel, (2, 1, 1), (x, y, late))
        return launcher, arrays

    @pytest.mark.parametrize("waits", [1, 2])
    def test_an_array_that_a_finished_kernel_wrote(self, waits: int) -> None:
        launcher, (w, x, _, z) = self.chain(late=1)
        launcher(early_kernel, (2, 1, 1), (x, z, waits))
        assert z.tolist() == x.tolist()
        launcher(ordered_kernel, (2, 1, 1), (z, w, 0))
        assert w.tolist() == x.tolist()

    @pytest.mark.parametrize("which", [1, 2])
    def test_what_the_running_kernel_reads_or_writes(self, which: int) -> None:
        launcher, arrays = self.chain(late=1)
        with caught("store to y.*before grid_dependency_control_wait"):
            launcher(early_kernel, (2, 1, 1), (arrays[0], arrays[which], 2))

    def test_after_a_kernel_that_started_it_too_soon(self) -> None:
        launcher, (_, x, _, z) = self.chain(late=0)
        with caught("store to y.*before grid_dependency_control_wait"):
            launcher(early_kernel, (2, 1, 1), (x, z, 2))

    @pytest.mark.parametrize("which", [1, 2, 3])
    def test_after_an_early_kernel(self, which: int) -> None:
        """It started the next one before its wait: both kernels may still run then, and no others."""
        launcher, arrays = self.chain(late=1)
        w, x, _, z = arrays
        launcher(early_kernel, (2, 1, 1), (x, z, 1))
        with caught("store to y.*before grid_dependency_control_wait"):
            launcher(early_kernel, (2, 1, 1), (floats(8), arrays[which], 2))
        launcher(early_kernel, (2, 1, 1), (x, w, 2))
        assert w.tolist() == x.tolist()

    def test_after_a_synchronisation(self) -> None:
        launcher, (_, x, _, z) = self.chain(late=0)
        launcher.synchronize()
        launcher(early_kernel, (2, 1, 1), (x, z, 1))
        assert z.tolist() == x.tolist()

    def test_after_kernels_that_start_the_next_one_too_soon(self) -> None:
        launcher, (w, x, y, _) = self.chain(late=1)
        launcher(ordered_kernel, (2, 1, 1), (y, x, 0))
        launcher(early_kernel, (2, 1, 1), (floats(8), w, 1))
        with caught("store to y.*before grid_dependency_control_wait"):
            launcher(early_kernel, (2, 1, 1), (floats(8), y, 1))

    def test_a_grid_that_nobody_waits_in(self) -> None:
        launcher, (_, x, _, z) = self.chain(late=1)
        with caught("early_kernel: no block of a dependent launch reaches grid_dependency_control_wait"):
            launcher(early_kernel, (2, 1, 1), (x, z, 0))


@ct.kernel
def flag_kernel(data, flag, y, ORDERED: I):
    """Block 0 publishes data, block 1 reads it once the flag is up."""
    if ct.bid(0) == 0:
        ct.store(data, index=(0,), tile=5.0)
        scope = ct.MemoryScope.DEVICE
        if ORDERED == 2:
            ct.store(flag, index=(0,), tile=1, memory_order=ct.MemoryOrder.RELEASE, memory_scope=scope)
        elif ORDERED == 1:
            ct.store(flag, index=(0,), tile=1, memory_order=ct.MemoryOrder.RELAXED, memory_scope=scope)
        else:
            ct.store(flag, index=(0,), tile=1)
    else:
        order = ct.MemoryOrder.ACQUIRE
        up = ct.load(flag, index=(0,), shape=(), memory_order=order, memory_scope=ct.MemoryScope.DEVICE)
        if up == 1:
            ct.store(y, index=(0,), tile=ct.load(data, index=(0,), shape=(1,)))


@ct.kernel
def relaxed_kernel(w, x, y, EARLY: I):
    order, scope = ct.MemoryOrder.RELAXED, ct.MemoryScope.DEVICE
    tile = ct.load(w, index=(ct.bid(0),), shape=(4,), memory_order=order, memory_scope=scope)
    if EARLY:
        tile = tile + ct.load(x, index=(0,), shape=(4,), memory_order=order, memory_scope=scope)
    ct.grid_dependency_control_wait()
    ct.store(y, index=(ct.bid(0),), tile=tile)


def test_relaxed_loads_are_reads_too() -> None:
    """They pass by the L1 cache, and order nothing."""
    launcher, x, y = InterpreterLauncher("sm_90", pdl=True), floats(8), np.zeros(8, np.float32)
    launcher(relaxed_kernel, (2, 1, 1), (floats(8), x, y, 0))
    assert y.tolist() == floats(8).tolist()
    with caught("load of x.*before grid_dependency_control_wait"):
        launcher(relaxed_kernel, (2, 1, 1), (floats(8), y, x, 1))


def test_flag_needs_release_and_acquire() -> None:
    y = np.zeros(1, np.float32)
    run(flag_kernel, 2, np.zeros(1, np.float32), np.zeros(1, np.int32), y, 2)
    assert y[0] == 5
    with caught("load of data.*races with block number 0"):
        run(flag_kernel, 2, np.zeros(1, np.float32), np.zeros(1, np.int32), y, 1)
    with caught("a branch reads a value that races"):
        run(flag_kernel, 2, np.zeros(1, np.float32), np.zeros(1, np.int32), y, 0)
