"""How often does an array that grows by one entry compile again?

Forty-eight launches of a kernel that adds the rows a table names. The table has 1 to 48 entries, or always 48 of
which the length in device memory counts. "kernels" is the number of specialisations.
"""

import cuda.tile as ct

I = ct.Constant[int]


@ct.kernel
def sum_of_rows(x, table, length, y, D: I):
    """y = sum of x[table[i]] for i < length."""
    total = ct.zeros((1, D), dtype=ct.float32)
    for i in range(ct.load(length, index=(0,), shape=()).item()):
        row = ct.load(table, index=(i,), shape=()).item()
        total = total + ct.load(x, index=(row, 0), shape=(1, D))
    ct.store(y, index=(0, 0), tile=total)


LENGTHS = range(1, 49)


def arrays(small):
    return {
        "x": ((64, 128), "float32", ("normal", 1.0)),
        "table": ((48,), "int32", ("count",)),
        "lengths": ((49 * 4,), "int32", ("steps", 4)),
        "y": ((1, 128), "float32", ("out",)),
    }


def launches(entries):
    """`entries(n)` is the table's length while n of its entries count; the length lies in a 16-byte slot of its own."""
    return [
        (sum_of_rows, (1, 1, 1), ("x", ("table", (entries(n),)), ("lengths", (4,), 4 * n), "y", 128)) for n in LENGTHS
    ]


def variants(small):
    return {
        "table of as many entries as count": {"steps": launches(lambda n: n), "out": "y", "tolerance": 0},
        "table padded to a multiple of 16": {"steps": launches(lambda n: -(-n // 16) * 16), "out": "y", "tolerance": 0},
        "table of fixed length": {"steps": launches(lambda n: 48), "out": "y", "tolerance": 0},
    }
