"""Must INT8 keys and values be converted for the tensor cores in small pieces?

A page of 64 INT8 keys, converted to BF16, times the queries; the scores times a page of INT8 values. Whole pages,
halves of the head dimension, 32 keys at a time, and both. Four query columns are real.
"""

import cuda.tile as ct

I = ct.Constant[int]
ZERO = ct.PaddingMode.ZERO


def bf16(array, index, shape):
    return ct.load(array, index=index, shape=shape, check_bounds=False).astype(ct.bfloat16)


@ct.kernel
def pages_whole(q, k, v, y, PAGES: I, C: I):
    """y[b] (128 x 4) = sum over pages of V^T (128 x 64) (K (64 x 128) q (128 x C))."""
    b = ct.bid(0)
    columns = ct.load(q, index=(0, 0), shape=(128, C), order=(1, 0), padding_mode=ZERO)
    total = ct.zeros((128, C), dtype=ct.float32)
    for i in range(PAGES):
        page = b * PAGES + i
        scores = ct.mma(bf16(k, (page, 0), (64, 128)), columns, ct.zeros((64, C), dtype=ct.float32))
        part = (scores * 0.0078125).astype(ct.bfloat16)
        total = ct.mma(bf16(v, (page, 0), (128, 64)), part, total)
    ct.store(y, index=(b, 0, 0), tile=total.reshape((1, 128, C)))


@ct.kernel
def pages_in_halves(q, k, v, y, PAGES: I, C: I):
    """The same, with keys, values, queries and sums in two halves of the head dimension."""
    b = ct.bid(0)
    low = ct.load(q, index=(0, 0), shape=(64, C), order=(1, 0), padding_mode=ZERO)
    high = ct.load(q, index=(1, 0), shape=(64, C), order=(1, 0), padding_mode=ZERO)
    total_low, total_high = ct.zeros((64, C), dtype=ct.float32), ct.zeros((64, C), dtype=ct.float32)
    for i in range(PAGES):
        page = b * PAGES + i
        scores = ct.mma(bf16(k, (page, 0), (64, 64)), low, ct.zeros((64, C), dtype=ct.float32))
        scores = ct.mma(bf16(k, (page, 1), (64, 64)), high, scores)
        part = (scores * 0.0078125).astype(ct.bfloat16)
        total_low = ct.mma(bf16(v, (2 * page, 0), (64, 64)), part, total_low)
        total_high = ct.mma(bf16(v, (2 * page + 1, 0), (64, 64)), part, total_high)
    ct.store(y, index=(b, 0, 0), tile=total_low.reshape((1, 64, C)))
    ct.store(y, index=(b, 1, 0), tile=total_high.reshape((1, 64, C)))


@ct.kernel
def keys_by_32(q, k, v, y, PAGES: I, C: I):
    """The same, 32 keys at a time."""
    b = ct.bid(0)
    columns = ct.load(q, index=(0, 0), shape=(128, C), order=(1, 0), padding_mode=ZERO)
    total = ct.zeros((128, C), dtype=ct.float32)
    for i in range(PAGES):
        page = b * PAGES + i
        for half in ct.static_iter(range(2)):
            scores = ct.mma(bf16(k, (2 * page + half, 0), (32, 128)), columns, ct.zeros((32, C), dtype=ct.float32))
            part = (scores * 0.0078125).astype(ct.bfloat16)
            total = ct.mma(bf16(v, (page, half), (128, 32)), part, total)
    ct.store(y, index=(b, 0, 0), tile=total.reshape((1, 128, C)))


@ct.kernel
def keys_by_32_in_halves(q, k, v, y, PAGES: I, C: I):
    """Both."""
    b = ct.bid(0)
    low = ct.load(q, index=(0, 0), shape=(64, C), order=(1, 0), padding_mode=ZERO)
    high = ct.load(q, index=(1, 0), shape=(64, C), order=(1, 0), padding_mode=ZERO)
    total_low, total_high = ct.zeros((64, C), dtype=ct.float32), ct.zeros((64, C), dtype=ct.float32)
    for i in range(PAGES):
        page = b * PAGES + i
        for half in ct.static_iter(range(2)):
            scores = ct.mma(bf16(k, (2 * page + half, 0), (32, 64)), low, ct.zeros((32, C), dtype=ct.float32))
            scores = ct.mma(bf16(k, (2 * page + half, 1), (32, 64)), high, scores)
            part = (scores * 0.0078125).astype(ct.bfloat16)
            total_low = ct.mma(bf16(v, (2 * page, half), (64, 32)), part, total_low)
            total_high = ct.mma(bf16(v, (2 * page + 1, half), (64, 32)), part, total_high)
    ct.store(y, index=(b, 0, 0), tile=total_low.reshape((1, 64, C)))
    ct.store(y, index=(b, 1, 0), tile=total_high.reshape((1, 64, C)))


def sizes(small):
    return (1, 2) if small else (264, 8)


def arrays(small):
    blocks, pages = sizes(small)
    return {
        "q": ((4, 128), "bfloat16", ("normal", 0.01)),
        "k": ((blocks * pages * 64, 128), "int8", ("int8",)),
        "v": ((blocks * pages * 128, 64), "int8", ("int8",)),
        "y": ((blocks, 128, 4), "float32", ("out",)),
    }


def variants(small):
    blocks, pages = sizes(small)
    found = {}
    for columns in (8, 16):
        for name, kernel in (
            ("whole pages", pages_whole),
            ("halves of the head dimension", pages_in_halves),
            ("32 keys at a time", keys_by_32),
            ("32 keys at a time, in halves", keys_by_32_in_halves),
        ):
            step = (kernel, (blocks, 1, 1), ("q", "k", "v", "y", pages, columns))
            found[f"{name}, {columns} columns"] = {"steps": [step], "out": "y", "tolerance": 0.02}
    return found
