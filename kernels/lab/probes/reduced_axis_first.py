"""Is a tile slower to reduce over its first axis?

Sums of 256 numbers that lie side by side, loaded as rows and summed along them, or loaded transposed and summed
over the first axis; and the same sums of a matrix that is stored transposed.
"""

import cuda.tile as ct

I = ct.Constant[int]


@ct.kernel
def along_rows(x, y, TMA: I):
    """x [rows, 256]: a tile of 32 rows, summed over axis 1."""
    i = ct.bid(0)
    tile = ct.load(x, index=(i, 0), shape=(32, 256), check_bounds=False, allow_tma=TMA == 1)
    ct.store(y, index=(i,), tile=ct.sum(tile, axis=1))


@ct.kernel
def loaded_transposed(x, y, TMA: I):
    """x [rows, 256]: a tile (256, 32), summed over axis 0."""
    i = ct.bid(0)
    tile = ct.load(x, index=(0, i), shape=(256, 32), order=(1, 0), check_bounds=False, allow_tma=TMA == 1)
    ct.store(y, index=(i,), tile=ct.sum(tile, axis=0))


@ct.kernel
def stored_transposed(x, y, TMA: I):
    """x [256, rows]: a tile (256, 32), summed over axis 0."""
    i = ct.bid(0)
    tile = ct.load(x, index=(0, i), shape=(256, 32), check_bounds=False, allow_tma=TMA == 1)
    ct.store(y, index=(i,), tile=ct.sum(tile, axis=0))


@ct.kernel
def stored_and_loaded_transposed(x, y, TMA: I):
    """x [256, rows]: a tile (32, 256), summed over axis 1."""
    i = ct.bid(0)
    tile = ct.load(x, index=(i, 0), shape=(32, 256), order=(1, 0), check_bounds=False, allow_tma=TMA == 1)
    ct.store(y, index=(i,), tile=ct.sum(tile, axis=1))


def arrays(small):
    rows = 64 if small else 33792
    return {
        "x": ((rows, 256), "float32", ("normal", 1.0)),
        "xt": ((256, rows), "float32", ("transposed", "x")),
        "y": ((rows,), "float32", ("out",)),
    }


def variants(small):
    grid = (2 if small else 1056, 1, 1)
    kinds = (
        ("rows, summed along them", along_rows, "x"),
        ("rows, loaded transposed, summed over axis 0", loaded_transposed, "x"),
        ("stored transposed, summed over axis 0", stored_transposed, "xt"),
        ("stored transposed, loaded as rows", stored_and_loaded_transposed, "xt"),
    )
    return {
        f"{name}, {'TMA' if tma else 'plain loads'}": {"steps": [(kernel, grid, (array, "y", tma))], "out": "y"}
        for tma in (0, 1)
        for name, kernel, array in kinds
    }
