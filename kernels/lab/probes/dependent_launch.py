"""What does programmatic dependent launch gain, and where should the wait stand?

A chain of products y = W x, each reading the one before, with BF16 weights that the L2 does not hold: 16 of
4,096 x 4,096, for which an SM has four blocks to run where the wait comes first and two where the weights fill its
registers, and 80 of 1,024 x 1,024, one block to an SM. Times are for one product. Needs sm_90 or newer for all but the
plain form.
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
    """Of each chain: its products, their rows and columns."""
    return {"4,096": (3, 64), "1,024": (3, 32)} if small else {"4,096": (16, 4096), "1,024": (80, 1024)}


def arrays(small):
    chains = sizes(small).items()
    weights = {f"w {name}": ((count * n, n), "bfloat16", ("normal", n**-0.5)) for name, (count, n) in chains}
    return weights | {f"x {name}": (((count + 1) * n,), "bfloat16", ("normal", 1.0)) for name, (count, n) in chains}


def variants(small):
    found = {}
    for size, (count, n) in sizes(small).items():
        w, x, tile = f"w {size}", f"x {size}", min(n, 1024)
        for name, form in (
            ("plain launches", NO_PDL),
            ("signal first, wait first", WAIT_FIRST),
            ("signal first, wait after the weights are asked for", WAIT_AFTER_WEIGHTS),
            ("no signal, wait after the weights are asked for", WAIT_AFTER_NO_SIGNAL),
            ("signal and wait after the weights are asked for", SIGNAL_AFTER_WEIGHTS),
            ("signal before the store, wait after the weights", SIGNAL_LAST),
        ):
            found[f"{size}: {name}"] = {
                "steps": [
                    (
                        product,
                        (n // 8, 1, 1),
                        (
                            (w, (n, n), j * n * n),
                            (x, (1, n), j * n),
                            (x, (1, n), (j + 1) * n),
                            8,
                            tile,
                            n // tile,
                            form,
                        ),
                    )
                    for j in range(count)
                ],
                "out": x,
                "group": size,
                "pick": slice(count * n, None),
                "pdl": form != NO_PDL,
                "tolerance": 0.05,
            }
    return found
