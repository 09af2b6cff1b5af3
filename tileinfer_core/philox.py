"""Philox4x32-10, the counter-based generator behind `--seed`: the same number for the same (seed, step), anywhere.

Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). There is no state to carry, so a
run that starts in the middle, or on the GPU, draws what a whole run on the CPU would draw.
"""

from __future__ import annotations

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

Counter = tuple[int, int, int, int]


def philox4x32(counter: Counter, key: tuple[int, int]) -> Counter:
    """Ten rounds over four 32-bit words; Random123's known-answer vectors hold for it."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0, product1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2  # 64 bits each
        c0, c1, c2, c3 = (product1 >> 32) ^ c1 ^ k0, product1 & _MASK, (product0 >> 32) ^ c3 ^ k1, product0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, step: int) -> float:
    """The number in [0, 1) for one drawn token: 24 bits, so that float32 on the device holds exactly the same one."""
    key = (seed & _MASK, (seed >> 32) & _MASK)
    word = philox4x32((step & _MASK, (step >> 32) & _MASK, 0, 0), key)[0]
    return (word >> 8) * 2.0**-24
