"""What do four and eight worker warps change?

The hint `num_worker_warps` on a large prefill product (tiles of 128 x 256 x 64, whose sums fill four warps'
registers), on an RMSNorm of rows of 4,096, and on a product for one token.
"""

import cuda.tile as ct

I = ct.Constant[int]


@ct.kernel
def product(x, w, y, TM: I, TN: I, TK: I):
    i, j = ct.bid(0), ct.bid(1)
    total = ct.zeros((TM, TN), dtype=ct.float32)
    for k in range(ct.num_tiles(x, 1, (TM, TK))):
        xt = ct.load(x, index=(i, k), shape=(TM, TK), check_bounds=False)
        wt = ct.load(w, index=(k, j), shape=(TK, TN), order=(1, 0), check_bounds=False)
        total = ct.mma(xt, wt, total)
    ct.store(y, index=(i, j), tile=total.astype(y.dtype), check_bounds=False)


@ct.kernel
def norm(x, y, N: I):
    i = ct.bid(0)
    row = ct.load(x, index=(i, 0), shape=(1, N), check_bounds=False).astype(ct.float32)
    scale = ct.rsqrt(ct.sum(row * row, axis=1, keepdims=True) * (1.0 / N) + 1e-6)
    ct.store(y, index=(i, 0), tile=(row * scale).astype(y.dtype), check_bounds=False)


@ct.kernel
def one_token(w, x, y, TN: I, TK: I, NK: I):
    i = ct.bid(0)
    total = ct.zeros((TN, TK), dtype=ct.float32)
    for k in ct.static_iter(range(NK)):
        wt = ct.load(w, index=(i, k), shape=(TN, TK), check_bounds=False, allow_tma=False)
        xt = ct.load(x, index=(0, k), shape=(1, TK), check_bounds=False, allow_tma=False)
        total = total + wt.astype(ct.float32) * xt.astype(ct.float32)
    ct.store(y, index=(0, i), tile=ct.sum(total, axis=1).reshape((1, TN)), allow_tma=False)


def sizes(small):
    return (128, 256, 512) if small else (2048, 8192, 4096)


def arrays(small):
    t, n, k = sizes(small)
    return {
        "x": ((t, k), "bfloat16", ("normal", 1.0)),
        "w": ((n, k), "bfloat16", ("normal", 0.02)),
        "y": ((t, n), "bfloat16", ("out",)),
        "normed": ((t, k), "bfloat16", ("out",)),
        "row": ((1, n), "float32", ("out",)),
    }


def variants(small):
    t, n, k = sizes(small)
    tile = 512 if small else 1024
    found = {}
    for warps in (None, 4, 8):
        hints = {} if warps is None else {"num_worker_warps": warps}
        how = "the compiler's choice" if warps is None else f"{warps} warps"
        large = (product, (t // 128, n // 256, 1), ("x", "w", "y", 128, 256, 64), hints)
        found[f"product 128x256x64, {how}"] = {"steps": [large], "out": "y", "group": "product", "tolerance": 0.01}
        rows = (norm, (t, 1, 1), ("x", "normed", k), hints)
        found[f"norm, {how}"] = {"steps": [rows], "out": "normed", "group": "norm", "tolerance": 0.01}
        token = (one_token, (n // 8, 1, 1), ("w", ("x", (1, k)), "row", 8, tile, k // tile), hints)
        found[f"one token, {how}"] = {"steps": [token], "out": "row", "group": "one token"}
    return found
