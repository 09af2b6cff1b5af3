"""Do occupancy and latency hints change prefill attention, and its bits?

Soft-max attention without a mask: 128 queries of a head to a block, keys and values in pages of 64, V stored
transposed. 1,024 queries, 16 heads of 128, 1,024 keys.
"""

import cuda.tile as ct

I = ct.Constant[int]


@ct.kernel
def attend(q, k, v, y, TQ: I, PAGES: I, LATENCY: I):
    i, h = ct.bid(0), ct.bid(1)
    queries = ct.load(q, index=(h, i, 0), shape=(1, TQ, 128), check_bounds=False).reshape((TQ, 128))
    top = ct.full((TQ, 1), -1e30, dtype=ct.float32)
    weight = ct.zeros((TQ, 1), dtype=ct.float32)
    total = ct.zeros((TQ, 128), dtype=ct.float32)
    for p in range(PAGES):
        if LATENCY:
            keys = ct.load(k, index=(0, h * PAGES + p), shape=(128, 64), order=(1, 0), latency=LATENCY)
            values = ct.load(v, index=(p, h), shape=(64, 128), order=(1, 0), latency=LATENCY)
        else:
            keys = ct.load(k, index=(0, h * PAGES + p), shape=(128, 64), order=(1, 0))
            values = ct.load(v, index=(p, h), shape=(64, 128), order=(1, 0))
        scores = ct.mma(queries, keys, ct.zeros((TQ, 64), dtype=ct.float32)) * 0.1275
        higher = ct.maximum(top, ct.max(scores, axis=1, keepdims=True))
        shrink = ct.exp2(top - higher)
        part = ct.exp2(scores - higher)
        weight = weight * shrink + ct.sum(part, axis=1, keepdims=True)
        total = ct.mma(part.astype(ct.bfloat16), values, total * shrink)
        top = higher
    ct.store(y, index=(h, i, 0), tile=(total / weight).astype(ct.bfloat16).reshape((1, TQ, 128)))


def sizes(small):
    return (1, 128, 128) if small else (16, 1024, 1024)  # heads, queries, keys


def arrays(small):
    heads, queries, keys = sizes(small)
    return {
        "q": ((heads, queries, 128), "bfloat16", ("normal", 1.0)),
        "k": ((heads * keys, 128), "bfloat16", ("normal", 1.0)),
        "v": ((heads * 128, keys), "bfloat16", ("normal", 1.0)),
        "y": ((heads, queries, 128), "bfloat16", ("out",)),
    }


def variants(small):
    heads, queries, keys = sizes(small)
    found = {}
    for tile, hints, latency in [
        *((64, hints, 0) for hints in ({}, {"occupancy": 1}, {"occupancy": 2}, {"occupancy": 3}, {"occupancy": 4})),
        *((64, {"occupancy": 2}, latency) for latency in (1, 2, 4, 8)),
        *((128, hints, 0) for hints in ({}, {"num_worker_warps": 8}, {"occupancy": 2})),
    ]:
        words = [f"{tile} queries", *(f"{a.replace('num_worker_', '')} {b}" for a, b in hints.items())]
        words += [f"latency {latency}"] if latency else []
        step = (attend, (queries // tile, heads, 1), ("q", "k", "v", "y", tile, keys // 64, latency), hints)
        found[", ".join(words)] = {"steps": [step], "out": "y", "tolerance": 0.02}
    return found
