"""Do occupancy and latency hints change a decode product?

y = W x for one token: a block has 8 rows of W in registers, plain 16-byte loads, one sum at the end. 16,384 x 4,096
BF16 weights, 134 MB, more than the L2 holds.
"""

import cuda.tile as ct

I = ct.Constant[int]


@ct.kernel
def rows(w, x, y, TN: I, TK: I, NK: I, LATENCY: I):
    i = ct.bid(0)
    total = ct.zeros((TN, TK), dtype=ct.float32)
    for k in ct.static_iter(range(NK)):
        if LATENCY:
            wt = ct.load(w, index=(i, k), shape=(TN, TK), allow_tma=False, check_bounds=False, latency=LATENCY)
        else:
            wt = ct.load(w, index=(i, k), shape=(TN, TK), allow_tma=False, check_bounds=False)
        xt = ct.load(x, index=(0, k), shape=(1, TK), allow_tma=False, check_bounds=False)
        total = total + wt.astype(ct.float32) * xt.astype(ct.float32)
    ct.store(y, index=(0, i), tile=ct.sum(total, axis=1).reshape((1, TN)), allow_tma=False)


def sizes(small):
    return (16, 512) if small else (16384, 4096)


def arrays(small):
    n, k = sizes(small)
    return {
        "w": ((n, k), "bfloat16", ("normal", 0.02)),
        "x": ((1, k), "bfloat16", ("normal", 1.0)),
        "y": ((1, n), "float32", ("out",)),
    }


def variants(small):
    n, k = sizes(small)
    tile = 512 if small else 1024
    found = {}
    for hints, latency in [({}, 0), *(({"occupancy": o}, 0) for o in (1, 2, 4, 8)), *(({}, lat) for lat in (1, 4, 10))]:
        name = f"latency {latency}" if latency else ", ".join(f"{a} {b}" for a, b in hints.items()) or "no hint"
        step = (rows, (n // 8, 1, 1), ("w", "x", "y", 8, tile, k // tile, latency), hints)
        found[name] = {"steps": [step], "out": "y"}
    return found
