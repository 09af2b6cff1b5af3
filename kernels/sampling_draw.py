"""The sampler's last stage: cuts, the random number, the draw, and the search for draws beyond the sorted ids.

All three cuts (top-k, top-p, min-p) keep a prefix of the ids in descending order, so what is kept is one number: the
mass of that prefix, with the largest probability as unit. The draw is the first id at which the running mass exceeds
u times it. Where the prefix or the draw lies beyond the CANDIDATES sorted ids, `element_reaching` bisects the keys of
the adjusted logits over the whole vocabulary: 16 passes of one block, 0.22 ms on an H200, exact, and rarely needed.

Random numbers: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) with key = seed,
counter = (step, 0, 0, 0); u = its first word's top 24 bits * 2^-24.
"""

from __future__ import annotations

from typing import TypeAlias

import cuda.tile as ct

from kernels.sampling_layout import (
    CANDIDATES,
    MIN_P,
    SEED_HIGH,
    SEED_LOW,
    STEP,
    TOP_K,
    TOP_P,
    active_candidates,
    read,
)

CI: TypeAlias = ct.Constant[int]
NEG_INF = ct.PaddingMode.NEG_INF
ZERO = ct.PaddingMode.ZERO
LOG2_E = 1.4426950408889634
LOWEST = -87.0  # exp(x) leaves float32's normal numbers: ids below carry no mass


def philox(counter, key_low, key_high):
    """First word of Philox4x32-10 for counter (counter, 0, 0, 0); uint32 scalars in and out."""
    c0, c1, c2, c3 = counter, counter ^ counter, counter ^ counter, counter ^ counter
    for _ in ct.static_iter(range(10)):
        product0 = c0.astype(ct.uint64) * 0xD2511F53
        product1 = c2.astype(ct.uint64) * 0xCD9E8D57
        high0, low0 = (product0 >> 32).astype(ct.uint32), product0.astype(ct.uint32)
        high1, low1 = (product1 >> 32).astype(ct.uint32), product1.astype(ct.uint32)
        c0, c1, c2, c3 = high1 ^ c1 ^ key_low, low1, high0 ^ c3 ^ key_high, low0
        key_low = key_low + 0x9E3779B9
        key_high = key_high + 0xBB67AE85
    return c0


def uniform(state):
    """The draw's random number in [0, 1), a multiple of 2^-24."""
    step, low, high = read(state, STEP), read(state, SEED_LOW), read(state, SEED_HIGH)
    word = philox(ct.bitcast(step, ct.uint32), ct.bitcast(low, ct.uint32), ct.bitcast(high, ct.uint32))
    return (word >> 8).astype(ct.int32).astype(ct.float32) * (1.0 / (1 << 24))


def order_key(value):
    """int32 that orders as the float32 does."""
    bits = ct.bitcast(value, ct.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def key_value(key):
    """The float32 whose order_key is `key`."""
    return ct.bitcast(key ^ ((key >> 31) & 0x7FFFFFFF), ct.float32)


def weight(value, top, BY_COUNT: CI):
    """What an id adds to the running sum: its mass relative to the largest, or 1 when ids are counted."""
    mass = ct.exp2((value - top) * LOG2_E, flush_to_zero=True)
    return ct.where(mass > 0.0, 1.0, 0.0) if BY_COUNT else mass


def sums_from(adjusted, top, key_a, key_b, key_c, BY_COUNT: CI, TAIL: CI):
    """Sums of weights of ids whose key is at least key_a, key_b, key_c. 12 us for 151,936 ids on an H200."""
    bound_a, bound_b, bound_c = key_value(key_a), key_value(key_b), key_value(key_c)
    sum_a = ct.zeros((TAIL,), dtype=ct.float32)
    sum_b = ct.zeros((TAIL,), dtype=ct.float32)
    sum_c = ct.zeros((TAIL,), dtype=ct.float32)
    for step in range(ct.num_tiles(adjusted, axis=0, shape=(TAIL,))):
        value = ct.load(adjusted, index=(step,), shape=(TAIL,), padding_mode=NEG_INF)
        mass = weight(value, top, BY_COUNT)
        sum_a = sum_a + ct.where(value >= bound_a, mass, 0.0)
        sum_b = sum_b + ct.where(value >= bound_b, mass, 0.0)
        sum_c = sum_c + ct.where(value >= bound_c, mass, 0.0)
    return ct.sum(sum_a), ct.sum(sum_b), ct.sum(sum_c)


def element_reaching(adjusted, top, target, BY_COUNT: CI, TAIL: CI):
    """(key, sum) of the first value, in descending order, at which the running sum of weights reaches `target`.

    `sum` is that of all strictly larger values. Invariant: sum from `low` >= target > sum from `high + 1`; a target
    above the whole sum is lowered to it. Three keys a pass, so 16 passes narrow any 32-bit interval to one key.
    """
    high = order_key(top)
    low = order_key(top + LOWEST)
    whole, _, _ = sums_from(adjusted, top, low, low, low, BY_COUNT, TAIL)
    target = ct.minimum(target, whole)
    while low < high:
        # Unsigned width: the interval can be wider than int32 holds.
        width = (ct.bitcast(high, ct.uint32) - ct.bitcast(low, ct.uint32)).astype(ct.int64)
        key_a = low + ((width + 3) // 4).astype(ct.int32)
        key_b = low + ((width + 1) // 2).astype(ct.int32)
        key_c = low + ((3 * width + 3) // 4).astype(ct.int32)
        sum_a, sum_b, sum_c = sums_from(adjusted, top, key_a, key_b, key_c, BY_COUNT, TAIL)
        in_c, in_b, in_a = sum_c >= target, sum_b >= target, sum_a >= target
        new_low = ct.where(in_c, key_c, ct.where(in_b, key_b, ct.where(in_a, key_a, low)))
        high = ct.where(in_c, high, ct.where(in_b, key_c - 1, ct.where(in_a, key_b - 1, key_a - 1)))
        low = new_low
    above, _, _ = sums_from(adjusted, top, low + 1, low + 1, low + 1, BY_COUNT, TAIL)
    return low, above, target


def mass_reaching(adjusted, top, target, TAIL: CI):
    """Mass of the smallest prefix whose mass reaches `target`."""
    key, above, reachable = element_reaching(adjusted, top, target, 0, TAIL)
    each = weight(key_value(key), top, 0)
    return above + ct.maximum(ct.ceil((reachable - above) / each), 1.0) * each


def mass_of_first(adjusted, top, count, TAIL: CI):
    """Mass of the `count` largest ids."""
    key, above, reachable = element_reaching(adjusted, top, count.astype(ct.float32), 1, TAIL)
    mass, _, _ = sums_from(adjusted, top, key + 1, key + 1, key + 1, 0, TAIL)
    return mass + (reachable - above) * weight(key_value(key), top, 0)


def kept_mass(adjusted, top, whole, settings, state, TAIL: CI):
    """Mass of the kept prefix where it is longer than the sorted ids. `whole`: mass of the vocabulary."""
    kept = whole
    top_k = read(state, TOP_K)
    if top_k > CANDIDATES:
        kept = mass_of_first(adjusted, top, top_k, TAIL)
    top_p = read(settings, TOP_P)
    if top_p < 1.0:
        kept = ct.minimum(kept, mass_reaching(adjusted, top, top_p * kept, TAIL))
    min_p = read(settings, MIN_P)
    if min_p > 0.0:
        key = order_key(top + ct.log(min_p))
        likely, _, _ = sums_from(adjusted, top, key, key, key, 0, TAIL)
        kept = ct.minimum(kept, likely)
    return kept


def tail_id(adjusted, top, target, TAIL: CI):
    """The id at which the running mass, in descending order, reaches `target`; equal values count by ascending id."""
    key, above, reachable = element_reaching(adjusted, top, target, 0, TAIL)
    wanted = key_value(key)
    skip = ct.floor((reachable - above) / weight(wanted, top, 0)).astype(ct.int32)
    passed = ct.zeros((), dtype=ct.int32)
    found = ct.zeros((), dtype=ct.int32)
    for step in range(ct.num_tiles(adjusted, axis=0, shape=(TAIL,))):
        value = ct.load(adjusted, index=(step,), shape=(TAIL,), padding_mode=NEG_INF)
        tied = ct.where(value == wanted, 1, 0)
        here = ct.sum(tied)
        if here > 0:  # the last tied id stands where rounding asks for one more
            if passed <= skip:
                position = ct.minimum(skip - passed, here - 1) + 1
                ids = ct.arange(TAIL, dtype=ct.int32) + step * TAIL
                found = ct.sum(ct.where((tied == 1) & (ct.cumsum(tied, axis=0) == position), ids, 0))
            passed = passed + here
    return found


def draw(adjusted, partials, sorted_values, sorted_ids, settings, state, PARTIALS: CI, TAIL: CI):
    """The id whose running mass, in descending order, first exceeds u * (mass of the kept prefix)."""
    lane = ct.arange(CANDIDATES, dtype=ct.int32)
    active = active_candidates(settings, state)
    values = ct.load(sorted_values, index=(0,), shape=(CANDIDATES,), check_bounds=False, allow_tma=False)
    candidates = ct.load(sorted_ids, index=(0,), shape=(CANDIDATES,), check_bounds=False, allow_tma=False)
    top = read(sorted_values, 0)
    listed = ct.minimum(active, adjusted.shape[0])
    live = lane < listed
    masses = ct.where(live, ct.exp(values - top), 0.0)
    running = ct.cumsum(masses, axis=0)
    listed_mass = ct.sum(ct.where(lane == listed - 1, running, 0.0))

    maxima = ct.load(partials, index=(0, 0), shape=(1, PARTIALS), padding_mode=NEG_INF, allow_tma=False)
    sums = ct.load(partials, index=(1, 0), shape=(1, PARTIALS), padding_mode=ZERO, allow_tma=False)
    top_k = read(state, TOP_K)
    complete = (active < CANDIDATES) | (top_k == CANDIDATES)  # the sorted ids are all that top-k keeps
    whole = ct.where(complete, listed_mass, ct.sum(ct.exp(maxima - top) * sums))

    top_p = read(settings, TOP_P)
    nucleus = 1 + ct.sum(ct.where(live & ((running < top_p * whole) | (top_p >= 1.0)), 1, 0))
    likely = ct.sum(ct.where(live & (masses >= read(settings, MIN_P)), 1, 0))
    kept = ct.minimum(ct.minimum(nucleus, likely), listed)
    inside = complete | (nucleus <= listed) | (likely < listed)
    kept_sum = ct.sum(ct.where(lane == kept - 1, running, 0.0))
    if not inside.item():
        kept_sum = kept_mass(adjusted, top, whole, settings, state, TAIL)
    target = uniform(state) * kept_sum
    index = ct.sum(ct.where(live & (running <= target), 1, 0))
    index = ct.where(inside, ct.minimum(index, kept - 1), index)
    drawn = ct.sum(ct.where(lane == index, candidates, 0))
    if index >= listed:
        drawn = tail_id(adjusted, top, target, TAIL)
    return drawn.item()
