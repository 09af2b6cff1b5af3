"""The matrix products of the NumPy backend, on as many cores as help. The result does not depend on how many.

A prompt's products are cut into pieces of ROWS tokens or of output features, always the same, each for one BLAS
thread; a few threads of our own take them. They sleep while they wait, so a busy machine slows them down by its share
and no more (numpy_blas.py has what it does to OpenBLAS's threads).

A single token's products are too short for that: handing one over costs as much as half of it. They run on OpenBLAS's
threads where these help, which is tried out on the output head, the longest of them. Its matrix · vector product has
the same bits with any number of threads.
"""

from __future__ import annotations

import time
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from tileinfer_core.backends.numpy_blas import BlasThreads, find_blas_threads

if TYPE_CHECKING:
    from collections.abc import Callable

    Float32Array = np.ndarray[Any, np.dtype[np.float32]]

# Output features of a piece at most; a thinner piece packs the input more often than it is worth. An even number of
# equal pieces, each as weight · inputᵀ: the products of 37 tokens in SmolLM2-135M take 51 ms on two cores, against
# 67 ms as input · weightᵀ in pieces of 256 (OpenBLAS 0.3.31, its AVX-512 kernels; with those for AVX2 67 against 66).
PIECE = 512
ROWS = 128  # tokens; fewer pack the weight more often than it is worth
SMALLEST = 4 << 20  # multiply-adds of a product that is cut: 0.1 ms of one core
MAX_WORKERS = 16
FIRST_PAUSE, LONGEST_PAUSE = 16, 1024  # tokens between two trials


class Products:
    """`one_row` and `rows` are what the backend calls; `token` goes around a token's pass through the model."""

    def __init__(self, blas: BlasThreads | None = None) -> None:
        self._blas = find_blas_threads() if blas is None else blas
        self.workers = min(self._blas.most, MAX_WORKERS) if self._blas else 1
        self._pool: ThreadPoolExecutor | None = None
        self.choice = ThreadChoice(self._blas.most if self._blas else 1)

    def one_row(self, weight: Float32Array, x: Float32Array) -> Float32Array:
        """weight [N, K] · x [K] -> [N]. As matrix · vector: some BLAS builds take the same product as a thin matrix up
        to 60 times slower."""
        return cast("Float32Array", np.dot(weight, x))

    def rows(self, x: Float32Array, weight: Float32Array) -> Float32Array:
        """x [T, K] · weightᵀ [K, N] -> [T, N]."""
        if self._blas is None:
            return x @ weight.T
        self._blas.use(1)
        if x.shape[0] * weight.size < SMALLEST:
            return x @ weight.T
        out = np.empty((len(x), len(weight)), np.float32)
        transposed = weight.T

        def some_rows(start: int) -> None:
            np.dot(x[start : start + ROWS], transposed, out=out[start : start + ROWS])

        width = _even_width(len(weight))

        def some_features(start: int) -> None:
            out[:, start : start + width] = np.dot(weight[start : start + width], x.T).T

        if len(x) > ROWS:
            self._share(some_rows, range(0, len(x), ROWS))
        else:
            self._share(some_features, range(0, len(weight), width))
        return out

    def _share(self, piece: Callable[[int], None], starts: range) -> None:
        if self.workers == 1 or len(starts) == 1:
            for start in starts:
                piece(start)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.workers, thread_name_prefix="products")
        futures = [self._pool.submit(piece, start) for start in starts]
        for future in wait(futures, return_when=FIRST_EXCEPTION).done:
            future.result()

    def use(self, threads: int) -> None:
        if self._blas is not None:
            self._blas.use(threads)

    def token(self, layers: Callable[[], Float32Array], head: Callable[[Float32Array], Float32Array]) -> Float32Array:
        """One token through the layers and the output head, on the threads that help, and timed to learn which do."""
        choice = self.choice
        self.use(choice.threads)
        start = time.perf_counter()
        hidden = layers()
        between = time.perf_counter()
        logits = head(hidden)
        end = time.perf_counter()
        if choice.took(end - start):
            self.use(choice.other)
            start_of_trial = time.perf_counter()
            head(hidden)
            choice.tried(end - between, time.perf_counter() - start_of_trial)
        return logits

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None


def _even_width(features: int) -> int:
    """Of pieces of at most PIECE features, in multiples of 16, whose number is even."""
    pieces = 2 * -(-features // (2 * PIECE))
    return -(-features // (16 * pieces)) * 16


class ThreadChoice:
    """One thread or `most` for the next token, by what the last ones took.

    It starts with one. A trial that goes well changes to `most`; a token that then takes longer than with one thread
    changes back, and the pause before the next trial doubles. So a busy machine costs one slow token in a thousand.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.threads = 1
        self._alone_s = float("inf")  # the fastest token with one thread
        self._pause = FIRST_PAUSE
        self._left = 0  # tokens until the next trial
        self._good = 0

    @property
    def other(self) -> int:
        return self._most if self.threads == 1 else 1

    def took(self, seconds: float) -> bool:
        """Counts a token; True if a trial of the other number is due."""
        if self._most == 1:
            return False
        if self.threads == 1:
            self._alone_s = min(self._alone_s, seconds)
            self._left -= 1
            return self._left < 0
        if seconds > 1.5 * self._alone_s:
            self._back()
        else:
            self._good += 1
        if self._good > 4 * FIRST_PAUSE:
            self._pause = FIRST_PAUSE
        return False

    def tried(self, now_s: float, other_s: float) -> None:
        """The output head took `now_s` with the present number and `other_s` with the other."""
        if other_s < 0.85 * now_s:
            self.threads, self._good = self._most, 0
        else:
            self._left = self._pause

    def _back(self) -> None:
        self.threads = 1
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
        self._left = self._pause
