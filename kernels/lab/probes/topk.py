"""Is a top-k over a vocabulary better in two stages than in one block?

The 20 largest of 151,936 logits with their positions, ties to the smaller position, by repeated FirstMax: over
everything in one block, or over chunks in parallel blocks and then over the chunks' winners.
"""

import cuda.tile as ct

I = ct.Constant[int]
K = 20
SLOTS = 32  # K rounded up


def first_max(value_a, position_a, value_b, position_b):
    take_b = (value_b > value_a) | ((value_b == value_a) & (position_b < position_a))
    return ct.where(take_b, value_b, value_a), ct.where(take_b, position_b, position_a)


@ct.kernel
def one_block(x, values, positions, CHUNK: I, CHUNKS: I, K: I):
    """K passes over the vocabulary, each finding the best of what comes after the one before."""
    last, last_at = ct.full((1,), float("inf"), dtype=ct.float32), ct.full((1,), -1, dtype=ct.int32)
    for k in range(K):
        best, best_at = ct.full((1,), float("-inf"), dtype=ct.float32), ct.full((1,), 2**31 - 1, dtype=ct.int32)
        for c in range(CHUNKS):
            tile = ct.load(x, index=(c,), shape=(CHUNK,), padding_mode=ct.PaddingMode.NEG_INF, allow_tma=False)
            at = ct.arange(CHUNK, dtype=ct.int32) + c * CHUNK
            after = (tile < last) | ((tile == last) & (at > last_at))
            tile = ct.where(after, tile, float("-inf"))
            value, where = ct.reduce((tile, at), 0, first_max, (float("-inf"), 2**31 - 1), keepdims=True)
            best, best_at = first_max(best, best_at, value, where)
        ct.store(values, index=(k,), tile=best)
        ct.store(positions, index=(k,), tile=best_at)
        last, last_at = best, best_at


@ct.kernel
def chunk_winners(x, values, positions, CHUNK: I, SLOTS: I, K: I):
    """values[b], positions[b] [SLOTS]: the K largest of chunk b."""
    b = ct.bid(0)
    tile = ct.load(x, index=(b,), shape=(CHUNK,), padding_mode=ct.PaddingMode.NEG_INF, allow_tma=False)
    at = ct.arange(CHUNK, dtype=ct.int32) + b * CHUNK
    for k in range(K):
        value, where = ct.reduce((tile, at), 0, first_max, (float("-inf"), 2**31 - 1), keepdims=True)
        ct.store(values, index=(b * SLOTS + k,), tile=value)
        ct.store(positions, index=(b * SLOTS + k,), tile=where)
        tile = ct.where(at == where, float("-inf"), tile)


@ct.kernel
def winners_of_winners(values, positions, best, best_at, N: I, SLOTS: I, K: I):
    """The K largest of all chunks' winners."""
    slot = ct.arange(N, dtype=ct.int32)
    tile = ct.load(values, index=(0,), shape=(N,), padding_mode=ct.PaddingMode.NEG_INF, allow_tma=False)
    tile = ct.where(slot % SLOTS < K, tile, float("-inf"))
    at = ct.load(positions, index=(0,), shape=(N,), padding_mode=ct.PaddingMode.ZERO, allow_tma=False)
    at = ct.where(slot % SLOTS < K, at, 2**31 - 1)
    for k in range(K):
        value, where = ct.reduce((tile, at), 0, first_max, (float("-inf"), 2**31 - 1), keepdims=True)
        ct.store(best, index=(k,), tile=value)
        ct.store(best_at, index=(k,), tile=where)
        tile = ct.where(at == where, float("-inf"), tile)


def arrays(small):
    vocabulary = 4096 if small else 151936
    return {
        "x": ((vocabulary,), "float32", ("normal", 1.0)),
        "values": ((160 * SLOTS,), "float32", ("zeros",)),
        "positions": ((160 * SLOTS,), "int32", ("zeros",)),
        "best": ((SLOTS,), "float32", ("out",)),
        "best_at": ((SLOTS,), "int32", ("out",)),
    }


def two_stages(vocabulary, chunk):
    chunks = -(-vocabulary // chunk)
    lists = 1 << (chunks * SLOTS - 1).bit_length()
    return [
        (chunk_winners, (chunks, 1, 1), ("x", "values", "positions", chunk, SLOTS, K)),
        (
            winners_of_winners,
            (1, 1, 1),
            (("values", (chunks * SLOTS,)), ("positions", (chunks * SLOTS,)), "best", "best_at", lists, SLOTS, K),
        ),
    ]


def variants(small):
    vocabulary = 4096 if small else 151936
    chunk = 1024 if small else 4096
    alone = (one_block, (1, 1, 1), ("x", "best", "best_at", chunk, -(-vocabulary // chunk), K))
    about = {"out": "best_at", "pick": slice(0, K), "tolerance": 0, "count": 1}
    return {
        f"one block, chunks of {chunk:,}": {"steps": [alone], **about},
        f"two stages, chunks of {chunk:,}": {"steps": two_stages(vocabulary, chunk), **about},
        f"two stages, chunks of {chunk // 4:,}": {"steps": two_stages(vocabulary, chunk // 4), **about},
    }
