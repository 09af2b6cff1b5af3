"""Where the sampler's settings and counters lie in device memory, and the scalars that its kernels read from them.

One place for the numbers that host code writes and kernels read:

    settings [8] float32   temperature, top_p, min_p, repetition, presence, frequency penalty, 2 unused
    state    [8] int32     top_k, low and high word of the seed, step, 4 unused
    token_state [V] int32  negative: never sampled; bit 30: occurs in the prompt; low 30 bits: times sampled
"""

from __future__ import annotations

import cuda.tile as ct

CANDIDATES = 128  # ids kept in sorted order; wider nuclei search the whole vocabulary
SETTINGS = 8
TEMPERATURE, TOP_P, MIN_P, REPETITION_PENALTY, PRESENCE_PENALTY, FREQUENCY_PENALTY = range(6)
STATE_WORDS = 8
TOP_K, SEED_LOW, SEED_HIGH, STEP = range(4)
IN_PROMPT = 1 << 30
COUNT_MASK = IN_PROMPT - 1
NEVER_SAMPLED = -(1 << 31)
MASKED_LOGIT = -1.0e30  # finite, so that a chunk of masked ids gives exp(0), not NaN


def read(array, index):
    """One element of a small array as a scalar tile."""
    return ct.load(array, index=(index,), shape=(), allow_tma=False)


def active_candidates(settings, state):
    """How many sorted ids the settings need: 1 when greedy, top-k when that fits, else CANDIDATES."""
    top_k = read(state, TOP_K)
    wanted = ct.where((top_k >= 1) & (top_k < CANDIDATES), top_k, CANDIDATES)
    return ct.where(read(settings, TEMPERATURE) > 0.0, wanted, 1).item()


def advance(state, sampled, length, ids, drawn):
    """Leave the drawn id for the next step and for the host, and count the step."""
    step = read(state, STEP)
    ct.store(sampled, index=(0,), tile=drawn, allow_tma=False)
    ct.store(ids, index=(step & (ids.shape[0] - 1),), tile=drawn, allow_tma=False)
    ct.store(length, index=(0,), tile=read(length, 0) + 1, allow_tma=False)
    ct.store(state, index=(STEP,), tile=step + 1, allow_tma=False)
