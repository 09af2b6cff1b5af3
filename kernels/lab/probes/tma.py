"""Are loads through TMA or plain ones faster?

A product for one token (weights read once), a product for 512 tokens (tiles read by many blocks), and a copy; each
with and without `allow_tma`.
"""

import cuda.tile as ct

I = ct.Constant[int]


@ct.kernel
def one_token(w, x, y, TN: I, TK: I, NK: I, TMA: I):
    i = ct.bid(0)
    total = ct.zeros((TN, TK), dtype=ct.float32)
    for k in ct.static_iter(range(NK)):
        wt = ct.load(w, index=(i, k), shape=(TN, TK), check_bounds=False, allow_tma=TMA == 1)
        xt = ct.load(x, index=(0, k), shape=(1, TK), check_bounds=False, allow_tma=TMA == 1)
        total = total + wt.astype(ct.float32) * xt.astype(ct.float32)
    ct.store(y, index=(0, i), tile=ct.sum(total, axis=1).reshape((1, TN)), allow_tma=TMA == 1)


@ct.kernel
def many_tokens(x, w, y, TM: I, TN: I, TK: I, TMA: I):
    i, j = ct.bid(0), ct.bid(1)
    total = ct.zeros((TM, TN), dtype=ct.float32)
    for k in range(ct.num_tiles(x, 1, (TM, TK))):
        xt = ct.load(x, index=(i, k), shape=(TM, TK), check_bounds=False, allow_tma=TMA == 1)
        wt = ct.load(w, index=(k, j), shape=(TK, TN), order=(1, 0), check_bounds=False, allow_tma=TMA == 1)
        total = ct.mma(xt, wt, total)
    ct.store(y, index=(i, j), tile=total, check_bounds=False, allow_tma=TMA == 1)


@ct.kernel
def copy(x, y, TM: I, TN: I, TMA: I):
    i = ct.bid(0)
    tile = ct.load(x, index=(i, 0), shape=(TM, TN), check_bounds=False, allow_tma=TMA == 1)
    ct.store(y, index=(i, 0), tile=tile, check_bounds=False, allow_tma=TMA == 1)


def sizes(small):
    return (128, 128, 128) if small else (512, 16384, 4096)


def arrays(small):
    t, n, k = sizes(small)
    return {
        "x": ((t, k), "bfloat16", ("normal", 1.0)),
        "w": ((n, k), "bfloat16", ("normal", 0.02)),
        "row": ((1, n), "float32", ("out",)),
        "y": ((t, n // 4), "float32", ("out",)),
        "copy": ((n, k), "bfloat16", ("out",)),
    }


def variants(small):
    t, n, k = sizes(small)
    tile = 128 if small else 1024
    found = {}
    for tma in (0, 1):
        how = "TMA" if tma else "plain loads"
        gemv = (one_token, (n // 8, 1, 1), ("w", ("x", (1, k)), "row", 8, tile, k // tile, tma))
        found[f"one token, {how}"] = {"steps": [gemv], "out": "row", "group": "one token"}
        side = 32 if small else 128
        product = (many_tokens, (t // 128, n // 4 // side, 1), ("x", ("w", (n // 4, k)), "y", 128, side, 64, tma))
        found[f"512 tokens, {how}"] = {"steps": [product], "out": "y", "group": "512 tokens"}
        step = (copy, (n // 4, 1, 1), ("w", "copy", 4, k, tma))
        found[f"copy, {how}"] = {"steps": [step], "out": "copy", "group": "copy", "tolerance": 0}
    return found
