"""The products of the NumPy backend: the same bits on any number of cores; the threads follow what helps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from tileinfer_core.backends.numpy_blas import BlasThreads, find_blas_threads
from tileinfer_core.backends.numpy_products import FIRST_PAUSE, LONGEST_PAUSE, PIECE, SMALLEST, Products, ThreadChoice

if TYPE_CHECKING:
    from collections.abc import Iterator

SHAPES = [(2, 7, 5), (31, 576, PIECE), (31, 577, 4 * PIECE + 1), (64, 128, PIECE + 1), (200, 96, 3 * PIECE - 1)]


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    blas = find_blas_threads()
    yield
    if blas is not None:
        blas.use(blas.most)


def arrays(tokens: int, inputs: int, outputs: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(tokens)
    return rng.standard_normal((tokens, inputs), np.float32), rng.standard_normal((outputs, inputs), np.float32)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_cores_do_not_change_a_bit(shape: tuple[int, int, int]) -> None:
    x, weight = arrays(*shape)
    results = []
    for workers in (1, 2, 5):
        products = Products(BlasThreads(workers, lambda _: None))
        results.append(products.rows(x, weight))
        products.close()
    wanted = x.astype(np.float64) @ weight.T.astype(np.float64)
    np.testing.assert_allclose(results[0], wanted, atol=1e-5 * shape[1])
    assert all(np.array_equal(results[0], other) for other in results[1:])


def test_some_of_the_shapes_are_cut_and_some_are_not() -> None:
    sizes = [tokens * inputs * outputs for tokens, inputs, outputs in SHAPES]
    assert min(sizes) < SMALLEST < max(sizes)


def test_an_error_in_a_piece_is_an_error() -> None:
    products = Products(BlasThreads(2, lambda _: None))
    with pytest.raises(ValueError, match="not aligned"):
        products.rows(np.ones((64, 999), np.float32), np.ones((4 * PIECE, 1000), np.float32))
    products.close()


def test_one_row_has_the_same_bits_on_any_number_of_threads() -> None:
    blas = find_blas_threads()
    if blas is None:
        pytest.skip("NumPy has a BLAS whose threads can't be set")
    x, weight = arrays(1, 576, 49_152)
    results = []
    for threads in (1, 2, 3):
        blas.use(threads)
        results.append(Products(blas).one_row(weight, x[0]))
    assert all(np.array_equal(results[0], other) for other in results[1:])


def test_a_token_is_computed_on_the_threads_of_the_choice_and_the_trial_changes_nothing() -> None:
    used: list[int] = []
    products = Products(BlasThreads(4, used.append))
    logits = products.token(lambda: np.ones(3, np.float32), lambda hidden: hidden * len(used))
    assert used == [1, 4]
    assert logits.tolist() == [1, 1, 1]


# How many threads


def test_it_starts_alone_and_tries_the_others_at_once() -> None:
    choice = ThreadChoice(4)
    assert choice.threads == 1
    assert choice.took(0.02)
    choice.tried(0.004, 0.002)
    assert choice.threads == 4
    assert not any(choice.took(0.012) for _ in range(1000))
    assert choice.threads == 4


def test_threads_that_do_not_help_are_tried_seldom() -> None:
    choice = ThreadChoice(4)
    tries = 0
    for _ in range(10 * FIRST_PAUSE):
        if choice.took(0.02):
            tries += 1
            choice.tried(0.004, 0.004)
    assert choice.threads == 1
    assert 5 < tries <= 10


def test_a_machine_that_becomes_busy_costs_few_slow_tokens() -> None:
    """Trials that deceive: the long product goes well, the short ones then wait for a core each time."""
    choice, slow = ThreadChoice(2), 0
    for _ in range(5000):
        alone = choice.threads == 1
        slow += not alone
        if choice.took(0.02 if alone else 0.7):
            choice.tried(0.004, 0.002)
    assert slow <= 12
    assert choice._pause == LONGEST_PAUSE


def test_it_comes_back_to_the_threads_when_they_help_again() -> None:
    choice = ThreadChoice(2)
    for token in range(3000):
        busy = token < 100
        if choice.took(0.02 if choice.threads == 1 else 0.7 if busy else 0.011):
            choice.tried(0.004, 0.002)
    assert choice.threads == 2
    assert choice._pause == FIRST_PAUSE


def test_one_core_has_nothing_to_choose() -> None:
    choice = ThreadChoice(1)
    assert not any(choice.took(0.02) for _ in range(100))
