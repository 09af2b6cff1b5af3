"""Do occupancy and latency hints change a prefill product?

y (T x N) = x (T x K) W^T through TMA: 512 tokens of 4,096 numbers in tiles of 128 x 128 x 64, with 0.5 and with 2
blocks for each of 132 multiprocessors; and 64 tokens in tiles of 64 x 128 x 64, with 0.5.
"""

import cuda.tile as ct

I = ct.Constant[int]


@ct.kernel
def product(x, w, y, TM: I, TN: I, TK: I, LATENCY: I):
    i, j = ct.bid(0), ct.bid(1)
    total = ct.zeros((TM, TN), dtype=ct.float32)
    for k in range(ct.num_tiles(x, 1, (TM, TK))):
        if LATENCY:
            xt = ct.load(x, index=(i, k), shape=(TM, TK), check_bounds=False, latency=LATENCY)
            wt = ct.load(w, index=(k, j), shape=(TK, TN), order=(1, 0), check_bounds=False, latency=LATENCY)
        else:
            xt = ct.load(x, index=(i, k), shape=(TM, TK), check_bounds=False)
            wt = ct.load(w, index=(k, j), shape=(TK, TN), order=(1, 0), check_bounds=False)
        total = ct.mma(xt, wt, total)
    ct.store(y, index=(i, j), tile=total.astype(y.dtype), check_bounds=False)


def sizes(small):
    return (128, 512, 128) if small else (512, 8192, 4096)


def arrays(small):
    t, n, k = sizes(small)
    return {
        "x": ((t, k), "bfloat16", ("normal", 1.0)),
        "w": ((n, k), "bfloat16", ("normal", 0.02)),
        "y": ((t, n), "bfloat16", ("out",)),
    }


def variants(small):
    t, n, k = sizes(small)
    found = {}
    for part, tokens, width in (("few blocks", t, n // 4), ("many blocks", t, n), ("64 tokens", 64, n)):
        tile = min(tokens, 128)
        args = (("x", (tokens, k)), ("w", (width, k)), ("y", (tokens, width)), tile, 128, 64)
        grid, about = (tokens // tile, width // 128, 1), {"out": "y", "group": part, "tolerance": 0.01}
        about["pick"] = slice(0, tokens * width)
        for hints in ({}, {"occupancy": 1}, {"occupancy": 2}, {"occupancy": 4}):
            name = ", ".join(f"{key} {value}" for key, value in hints.items()) or "no hint"
            found[f"{part}, {name}"] = {"steps": [(product, grid, (*args, 0), hints)], **about}
        for latency in (1, 2, 4, 6, 10):
            found[f"{part}, latency {latency}"] = {"steps": [(product, grid, (*args, latency))], **about}
    return found
