"""Do occupancy and latency hints change the product of a verify step?

y = x W^T for 8 tokens, with the rows of W on the M side of the product and the tokens on its N side:
tiles of 64 x 128 of 16,384 x 4,096 BF16 weights, 134 MB, more than the L2 holds. A block has 64 rows.
"""

import cuda.tile as ct

I = ct.Constant[int]
ZERO = ct.PaddingMode.ZERO


@ct.kernel
def product(w, x, y, TN: I, TK: I, LATENCY: I):
    i = ct.bid(0)
    total = ct.zeros((TN, 8), dtype=ct.float32)
    for k in range(ct.num_tiles(w, 1, (TN, TK))):
        if LATENCY:
            wt = ct.load(w, index=(i, k), shape=(TN, TK), check_bounds=False, latency=LATENCY)
        else:
            wt = ct.load(w, index=(i, k), shape=(TN, TK), check_bounds=False)
        xt = ct.load(x, index=(k, 0), shape=(TK, 8), order=(1, 0), padding_mode=ZERO)
        total = ct.mma(wt, xt, total)
    ct.store(y, index=(i, 0), tile=total, order=(1, 0))


def sizes(small):
    return (128, 512) if small else (16384, 4096)


def arrays(small):
    n, k = sizes(small)
    return {
        "w": ((n, k), "bfloat16", ("normal", 0.02)),
        "x": ((8, k), "bfloat16", ("normal", 1.0)),
        "y": ((8, n), "float32", ("out",)),
    }


def variants(small):
    n, _ = sizes(small)
    found = {}
    for hints, latency in [({}, 0), *(({"occupancy": o}, 0) for o in (1, 2, 4)), *(({}, lat) for lat in (1, 2, 4, 8))]:
        name = f"latency {latency}" if latency else ", ".join(f"{a} {b}" for a, b in hints.items()) or "no hint"
        step = (product, (n // 64, 1, 1), ("w", "x", "y", 64, 128, latency), hints)
        found[name] = {"steps": [step], "out": "y", "tolerance": 0.01}
    return found
