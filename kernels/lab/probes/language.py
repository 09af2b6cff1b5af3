"""Does the way a loop over arrays, a constant or a shift is written change the code?

The sum of three arrays, written out, over a tuple by static_iter, over an index, and by recursion; a factor of 0.7
as a plain number and as a float32 one; a shift of a tile and of a scalar by a plain number and by a typed one.
"""

import cuda.tile as ct

I = ct.Constant[int]


@ct.kernel
def added_out(x, y, N: I):
    i = ct.bid(0)
    a, b, c = x
    total = ct.load(a, index=(i,), shape=(N,)) + ct.load(b, index=(i,), shape=(N,))
    ct.store(y, index=(i,), tile=total + ct.load(c, index=(i,), shape=(N,)))


@ct.kernel
def added_over_tuple(x, y, N: I):
    i = ct.bid(0)
    total = ct.zeros((N,), dtype=ct.float32)
    for array in ct.static_iter(x):
        total = total + ct.load(array, index=(i,), shape=(N,))
    ct.store(y, index=(i,), tile=total)


@ct.kernel
def added_over_index(x, y, N: I):
    i = ct.bid(0)
    total = ct.load(x[0], index=(i,), shape=(N,))
    for j in ct.static_iter(range(1, 3)):
        total = total + ct.load(x[j], index=(i,), shape=(N,))
    ct.store(y, index=(i,), tile=total)


def add_rest(total, arrays, i, N):
    if len(arrays) == 0:
        return total
    return add_rest(total + ct.load(arrays[0], index=(i,), shape=(N,)), arrays[1:], i, N)


@ct.kernel
def added_by_recursion(x, y, N: I):
    i = ct.bid(0)
    ct.store(y, index=(i,), tile=add_rest(ct.load(x[0], index=(i,), shape=(N,)), x[1:], i, N))


@ct.kernel
def scaled_plain(x, y, N: I):
    i = ct.bid(0)
    ct.store(y, index=(i,), tile=ct.load(x, index=(i,), shape=(N,)) * 0.7)


@ct.kernel
def scaled_typed(x, y, N: I):
    i = ct.bid(0)
    factor = ct.full((1,), 0.7, dtype=ct.float32)
    ct.store(y, index=(i,), tile=ct.load(x, index=(i,), shape=(N,)) * factor)


@ct.kernel
def shifted_plain(x, y, N: I):
    i = ct.bid(0)
    ct.store(y, index=(i,), tile=ct.load(x, index=(i,), shape=(N,)) >> 3)


@ct.kernel
def shifted_typed(x, y, N: I):
    i = ct.bid(0)
    ct.store(y, index=(i,), tile=ct.load(x, index=(i,), shape=(N,)) >> ct.full((1,), 3, dtype=ct.int32))


@ct.kernel
def scalar_shifted_plain(x, y, N: I):
    i = ct.bid(0)
    ct.store(y, index=(i,), tile=ct.load(x, index=(i,), shape=(N,)) + (ct.load(x, index=(999,), shape=()).item() >> 3))


@ct.kernel
def scalar_shifted_typed(x, y, N: I):
    i = ct.bid(0)
    count = ct.full((), 3, dtype=ct.int32)
    more = ct.load(x, index=(999,), shape=()).item() >> count
    ct.store(y, index=(i,), tile=ct.load(x, index=(i,), shape=(N,)) + more)


def blocks(small):
    return 2 if small else 4096


def arrays(small):
    n = 1024 * blocks(small)
    floats = dict.fromkeys(("a", "b", "c"), ((n,), "float32", ("normal", 1.0)))
    ints = {"n": ((n,), "int32", ("count",)), "m": ((n,), "int32", ("out",))}
    return {**floats, "y": ((n,), "float32", ("out",)), **ints}


def variants(small):
    grid = (blocks(small), 1, 1)
    three = ["a", "b", "c"]
    added, scaled = {"out": "y", "group": "added"}, {"out": "y", "group": "scaled", "tolerance": 0}
    shifted = {"out": "m", "group": "shifted", "tolerance": 0}
    scalar = {"out": "m", "group": "scalar", "tolerance": 0}
    return {
        "sum, written out": {"steps": [(added_out, grid, (three, "y", 1024))], **added},
        "sum, static_iter over the tuple": {"steps": [(added_over_tuple, grid, (three, "y", 1024))], **added},
        "sum, static_iter over indices": {"steps": [(added_over_index, grid, (three, "y", 1024))], **added},
        "sum, by recursion": {"steps": [(added_by_recursion, grid, (three, "y", 1024))], **added},
        "factor 0.7": {"steps": [(scaled_plain, grid, ("a", "y", 1024))], **scaled},
        "factor of a float32 tile": {"steps": [(scaled_typed, grid, ("a", "y", 1024))], **scaled},
        "shift by 3": {"steps": [(shifted_plain, grid, ("n", "m", 1024))], **shifted},
        "shift by an int32 tile": {"steps": [(shifted_typed, grid, ("n", "m", 1024))], **shifted},
        "scalar shifted by 3": {"steps": [(scalar_shifted_plain, grid, ("n", "m", 1024))], **scalar},
        "scalar shifted by an int32 one": {"steps": [(scalar_shifted_typed, grid, ("n", "m", 1024))], **scalar},
    }
