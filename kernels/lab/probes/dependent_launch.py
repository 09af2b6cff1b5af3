"""What does programmatic dependent launch gain, and where should the wait stand?

A chain of 16 products y = W x, each reading the one before, 4,096 x 4,096 BF16 weights each. Times are for one
product. Needs sm_90 or newer for all but the plain form.
"""

import cuda.tile as ct

I = ct.Constant[int]
NO_PDL, WAIT_FIRST, WAIT_AFTER_WEIGHTS, WAIT_AFTER_NO_SIGNAL, SIGNAL_AFTER_WEIGHTS, SIGNAL_LAST = range(6)


@ct.kernel
def product(w, x, y, TN: I, TK: I, NK: I, FORM: I):
    """A block has TN rows of W in registers. The signal lets the next kernel start, the wait makes x visible."""
    i = ct.bid(0)
    if FORM == WAIT_FIRST or FORM == WAIT_AFTER_WEIGHTS:
        ct.grid_dependency_control_launch_dependents()
    if FORM == WAIT_FIRST:
        ct.grid_dependency_control_wait()
    tiles = tuple(
        ct.load(w, index=(i, k), shape=(TN, TK), allow_tma=False, check_bounds=False) for k in ct.static_iter(range(NK))
    )
    if FORM == SIGNAL_AFTER_WEIGHTS:
        ct.grid_dependency_control_launch_dependents()
    if FORM != NO_PDL and FORM != WAIT_FIRST:
        ct.grid_dependency_control_wait()
    total = ct.zeros((TN, TK), dtype=ct.float32)
    for k in ct.static_iter(range(NK)):
        xt = ct.load(x, index=(0, k), shape=(1, TK), allow_tma=False, check_bounds=False)
        total = total + tiles[k].astype(ct.float32) * xt.astype(ct.float32)
    out = ct.sum(total, axis=1).reshape((1, TN)).astype(y.dtype)
    if FORM == SIGNAL_LAST:
        ct.grid_dependency_control_launch_dependents()
    ct.store(y, index=(0, i), tile=out, allow_tma=False)


def sizes(small):
    return (3, 64, 64) if small else (16, 4096, 4096)  # products, rows and columns of each, columns of a tile


def arrays(small):
    count, n, k = sizes(small)
    return {
        "w": ((count * n, k), "bfloat16", ("normal", k**-0.5)),
        "x": (((count + 1) * k,), "bfloat16", ("normal", 1.0)),
    }


def variants(small):
    count, n, k = sizes(small)
    tile = 64 if small else 1024
    found = {}
    for name, form in (
        ("plain launches", NO_PDL),
        ("signal first, wait first", WAIT_FIRST),
        ("signal first, wait after the weights are asked for", WAIT_AFTER_WEIGHTS),
        ("no signal, wait after the weights are asked for", WAIT_AFTER_NO_SIGNAL),
        ("signal and wait after the weights are asked for", SIGNAL_AFTER_WEIGHTS),
        ("signal before the store, wait after the weights", SIGNAL_LAST),
    ):
        steps = [
            (
                product,
                (n // 8, 1, 1),
                (("w", (n, k), j * n * k), ("x", (1, k), j * k), ("x", (1, n), (j + 1) * k), 8, tile, k // tile, form),
            )
            for j in range(count)
        ]
        found[name] = {
            "steps": steps,
            "out": "x",
            "pick": slice(count * k, None),
            "pdl": form != NO_PDL,
            "tolerance": 0.05,
        }
    return found
