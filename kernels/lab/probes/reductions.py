"""What does one reduction over a whole block cost, and does it depend on its length?

A block reduces a tile 256 times, each time changed a little by the result before, so nothing overlaps. Times are
for one reduction. "no reduction" is the loop with its update alone.
"""

import cuda.tile as ct

I = ct.Constant[int]
NONE, SUM, MAX, ARGMAX, FIRST_MAX, FIRST_MAX_VALUE, SUM_BY_REDUCE = range(7)
TIMES = 256


def first_max(value_a, position_a, value_b, position_b):
    """The larger value; at equal values the smaller position. Never looks for NaN."""
    take_b = (value_b > value_a) | ((value_b == value_a) & (position_b < position_a))
    return ct.where(take_b, value_b, value_a), ct.where(take_b, position_b, position_a)


def add(a, b):
    return a + b


@ct.kernel
def reduce_often(x, times, y, N: I, KIND: I):
    """y[0] = the last of times[0] results. The count lies in memory, so that the loop is not unrolled."""
    values = ct.load(x, index=(0,), shape=(N,), allow_tma=False)
    positions = ct.arange(N, dtype=ct.int32)
    result = ct.zeros((1,), dtype=ct.float32)
    for _ in range(ct.load(times, index=(0,), shape=()).item()):
        if KIND == SUM:
            result = ct.sum(values, axis=0, keepdims=True)
        if KIND == SUM_BY_REDUCE:
            result = ct.reduce(values, 0, add, 0.0, keepdims=True)
        if KIND == MAX:
            result = ct.max(values, axis=0, keepdims=True)
        if KIND == ARGMAX:
            result = ct.argmax(values, axis=0, keepdims=True).astype(ct.float32)
        if KIND == FIRST_MAX:
            pair = ct.reduce((values, positions), 0, first_max, (float("-inf"), 2**31 - 1), keepdims=True)
            result = pair[1].astype(ct.float32)
        if KIND == FIRST_MAX_VALUE:
            pair = ct.reduce((values, positions), 0, first_max, (float("-inf"), 2**31 - 1), keepdims=True)
            result = pair[0]
        values = values * 0.9375 + result * 2.0**-16  # so little that the sum of 4,096 does not grow
    if KIND == NONE:
        result = ct.extract(values, (0,), (1,))
    ct.store(y, index=(0,), tile=result)


def arrays(small):
    return {
        "x": ((4096,), "float32", ("normal", 1.0)),
        "times": ((1,), "int32", ("value", 4 if small else TIMES)),
        "y": ((16,), "float32", ("out",)),
    }


KINDS = (
    ("no reduction", NONE, "nothing"),
    ("sum", SUM, "sum"),
    ("sum, by reduce", SUM_BY_REDUCE, "sum"),
    ("maximum", MAX, "maximum"),
    ("FirstMax, its value", FIRST_MAX_VALUE, "maximum"),
    ("argmax", ARGMAX, "position"),
    ("FirstMax, its position", FIRST_MAX, "position"),
)


def variants(small):
    times = 4 if small else TIMES
    return {
        f"{name}, {n:,}": {
            "steps": [(reduce_often, (1, 1, 1), ("x", "times", "y", n, kind))],
            "out": "y",
            "pick": slice(0, 1),
            "group": f"{group} of {n}",
            "count": times,
        }
        for n in (256, 512, 1024, 2048, 4096)
        for name, kind, group in KINDS
        if n < 4096 or kind != NONE  # ptxas 13.4 takes more than five minutes over the loop without a reduction
    }
