"""Does a narrow matrix product fall off the tensor cores, and on which side?

Decode attention's K (64 x 128) times q (128 x R), summed over pages of 64 keys, with R query rows on the M side or
on the N side. Four rows are real, the rest is padding.
"""

import cuda.tile as ct

I = ct.Constant[int]
ZERO = ct.PaddingMode.ZERO


@ct.kernel
def rows_on_m(q, keys, y, R: I, PAGES: I):
    """y[b] (4 x 64) = sum over pages of q (R x 128) K^T (128 x 64)."""
    b = ct.bid(0)
    rows = ct.load(q, index=(0, 0), shape=(R, 128), padding_mode=ZERO)
    total = ct.zeros((R, 64), dtype=ct.float32)
    for i in range(PAGES):
        page = ct.load(keys, index=(0, b * PAGES + i), shape=(128, 64), order=(1, 0), check_bounds=False)
        total = ct.mma(rows, page, total)
    ct.store(y, index=(b, 0, 0), tile=total.reshape((1, R, 64)))


@ct.kernel
def rows_on_n(q, keys, y, R: I, PAGES: I):
    """y[b] (64 x 4) = sum over pages of K (64 x 128) q^T (128 x R)."""
    b = ct.bid(0)
    columns = ct.load(q, index=(0, 0), shape=(128, R), order=(1, 0), padding_mode=ZERO)
    total = ct.zeros((64, R), dtype=ct.float32)
    for i in range(PAGES):
        page = ct.load(keys, index=(b * PAGES + i, 0), shape=(64, 128), check_bounds=False)
        total = ct.mma(page, columns, total)
    ct.store(y, index=(b, 0, 0), tile=total.reshape((1, 64, R)))


def sizes(small):
    return (2, 2) if small else (264, 8)  # blocks, pages of each


def arrays(small):
    blocks, pages = sizes(small)
    return {
        "q": ((4, 128), "bfloat16", ("normal", 1.0)),
        "keys": ((blocks * pages * 64, 128), "bfloat16", ("normal", 0.1)),
        "m": ((blocks, 4, 64), "float32", ("out",)),
        "n": ((blocks, 64, 4), "float32", ("out",)),
    }


def variants(small):
    blocks, pages = sizes(small)
    found = {}
    for rows in (32, 16, 8, 4):
        step = (rows_on_m, (blocks, 1, 1), ("q", "keys", "m", rows, pages))
        found[f"R={rows} on M"] = {"steps": [step], "out": "m", "group": "M"}
    for rows in (32, 16, 8, 4):
        step = (rows_on_n, (blocks, 1, 1), ("q", "keys", "n", rows, pages))
        found[f"R={rows} on N"] = {"steps": [step], "out": "n", "group": "N"}
    return found
