"""What does a kernel parameter cost at launch?

Every variant copies 1,024 numbers from its first array; the other arrays are passed and not read. An array of rank
N is 1 + 2N parameters (address, lengths, strides).
"""

import cuda.tile as ct

I = ct.Constant[int]


@ct.kernel
def copy_first(y, x, others, N: I):
    """y = x. `others` is a tuple of arrays that nothing reads."""
    ct.store(y, index=(0,), tile=ct.load(x, index=(0,), shape=(N,)))


def arrays(small):
    names = {f"a{i}": ((4, 4, 16, 16), "float32", ("normal", 1.0)) for i in range(12)}
    return {"x": ((1024,), "float32", ("normal", 1.0)), "y": ((1024,), "float32", ("out",)), **names}


def variant(count, rank):
    shape = {1: (4096,), 2: (64, 64), 3: (16, 16, 16), 4: (4, 4, 16, 16)}[rank]
    others = tuple((f"a{i}", shape) for i in range(count))
    parameters = 6 + count * (1 + 2 * rank)
    step = (copy_first, (1, 1, 1), ("y", "x", [*others], 1024))
    return f"{parameters} parameters: {count} more arrays of rank {rank}", {"steps": [step], "out": "y", "tolerance": 0}


def variants(small):
    wanted = [(1, 1), (3, 1), (3, 2), (3, 4), (6, 2), (6, 4), (12, 1), (12, 2), (12, 4)]
    return dict(variant(count, rank) for count, rank in wanted)
