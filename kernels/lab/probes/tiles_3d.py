"""Does a 3-D tile, or an axis of length 1 kept, change the code?

Sums of 256 numbers: over the third axis of an (8, 4, 256) tile, over the second of (32, 256), and with the summed
axis kept, reshaped away or never there.
"""

import cuda.tile as ct


@ct.kernel
def three_axes(x, y):
    i = ct.bid(0)
    tile = ct.load(x, index=(i, 0, 0), shape=(8, 4, 256), check_bounds=False, allow_tma=False)
    ct.store(y, index=(i, 0), tile=ct.sum(tile, axis=2))


@ct.kernel
def two_axes(x, y):
    i = ct.bid(0)
    tile = ct.load(x, index=(i, 0), shape=(32, 256), check_bounds=False, allow_tma=False)
    ct.store(y, index=(i,), tile=ct.sum(tile, axis=1))


@ct.kernel
def three_axes_reshaped(x, y):
    i = ct.bid(0)
    tile = ct.load(x, index=(i, 0, 0), shape=(8, 4, 256), check_bounds=False, allow_tma=False).reshape((32, 256))
    ct.store(y, index=(i,), tile=ct.sum(tile, axis=1))


@ct.kernel
def axis_kept(x, y):
    i = ct.bid(0)
    tile = ct.load(x, index=(i, 0), shape=(32, 256), check_bounds=False, allow_tma=False)
    share = tile / ct.sum(tile * tile, axis=1, keepdims=True)
    ct.store(y, index=(i, 0), tile=share)


@ct.kernel
def axis_reshaped(x, y):
    i = ct.bid(0)
    tile = ct.load(x, index=(i, 0), shape=(32, 256), check_bounds=False, allow_tma=False)
    share = tile / ct.sum(tile * tile, axis=1).reshape((32, 1))
    ct.store(y, index=(i, 0), tile=share)


@ct.kernel
def axis_of_one_in_front(x, y):
    i = ct.bid(0)
    tile = ct.load(x, index=(i, 0), shape=(32, 256), check_bounds=False, allow_tma=False).reshape((1, 32, 256))
    share = tile / ct.sum(tile * tile, axis=2, keepdims=True)
    ct.store(y, index=(i, 0), tile=share.reshape((32, 256)))


def blocks(small):
    return 2 if small else 1056


def arrays(small):
    rows = 32 * blocks(small)
    return {
        "x": ((rows, 256), "float32", ("normal", 1.0)),
        "sums": ((rows,), "float32", ("out",)),
        "y": ((rows, 256), "float32", ("out",)),
    }


def variants(small):
    n = blocks(small)
    wide, narrow = ("x", (8 * n, 4, 256)), "x"
    sums = {"out": "sums", "group": "sums"}
    shares = {"out": "y", "group": "shares"}
    return {
        "sum, tile (32, 256)": {"steps": [(two_axes, (n, 1, 1), (narrow, "sums"))], **sums},
        "sum, tile (8, 4, 256)": {"steps": [(three_axes, (n, 1, 1), (wide, ("sums", (8 * n, 4))))], **sums},
        "sum, (8, 4, 256) reshaped": {"steps": [(three_axes_reshaped, (n, 1, 1), (wide, "sums"))], **sums},
        "share, axis kept": {"steps": [(axis_kept, (n, 1, 1), (narrow, "y"))], **shares},
        "share, axis reshaped": {"steps": [(axis_reshaped, (n, 1, 1), (narrow, "y"))], **shares},
        "share, axis of one in front": {"steps": [(axis_of_one_in_front, (n, 1, 1), (narrow, "y"))], **shares},
    }
