"""Do helper functions and closures cost anything?

y = silu(x) * 2 + 1, written in one expression, through a function, through three nested ones, and through a
closure.
"""

import cuda.tile as ct

I = ct.Constant[int]


def silu(x):
    return x / (1.0 + ct.exp(-x))


def twice(x):
    return x * 2.0


def twice_and_one(x):
    return twice(silu(x)) + 1.0


def applied(f, x):
    return f(x)


@ct.kernel
def written_out(x, y, N: I):
    i = ct.bid(0)
    tile = ct.load(x, index=(i,), shape=(N,), check_bounds=False)
    ct.store(y, index=(i,), tile=tile / (1.0 + ct.exp(-tile)) * 2.0 + 1.0, check_bounds=False)


@ct.kernel
def one_helper(x, y, N: I):
    i = ct.bid(0)
    tile = ct.load(x, index=(i,), shape=(N,), check_bounds=False)
    ct.store(y, index=(i,), tile=silu(tile) * 2.0 + 1.0, check_bounds=False)


@ct.kernel
def nested_helpers(x, y, N: I):
    i = ct.bid(0)
    tile = ct.load(x, index=(i,), shape=(N,), check_bounds=False)
    ct.store(y, index=(i,), tile=twice_and_one(tile), check_bounds=False)


@ct.kernel
def closure(x, y, N: I):
    i = ct.bid(0)
    tile = ct.load(x, index=(i,), shape=(N,), check_bounds=False)
    factor = 2.0

    def scaled(t):
        return t / (1.0 + ct.exp(-t)) * factor + 1.0

    ct.store(y, index=(i,), tile=scaled(tile), check_bounds=False)


@ct.kernel
def function_as_argument(x, y, N: I):
    i = ct.bid(0)
    tile = ct.load(x, index=(i,), shape=(N,), check_bounds=False)
    ct.store(y, index=(i,), tile=applied(lambda t: silu(t) * 2.0 + 1.0, tile), check_bounds=False)


def blocks(small):
    return 2 if small else 4096


def arrays(small):
    n = 1024 * blocks(small)
    return {"x": ((n,), "float32", ("normal", 1.0)), "y": ((n,), "float32", ("out",))}


def variants(small):
    kinds = {
        "written out": written_out,
        "one helper": one_helper,
        "three nested helpers": nested_helpers,
        "closure": closure,
        "function as an argument": function_as_argument,
    }
    return {
        name: {"steps": [(kernel, (blocks(small), 1, 1), ("x", "y", 1024))], "out": "y"}
        for name, kernel in kinds.items()
    }
