"""What the host writes for the device's sampler."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.sampling_layout import IN_PROMPT, NEVER_SAMPLED, SEED_HIGH, SEED_LOW, STEP, TEMPERATURE, TOP_K, TOP_P
from tileinfer_core.backends.cuda.interpreted import Done
from tileinfer_core.backends.cuda.sampling_state import Pending, settings_of, state_of, token_state
from tileinfer_core.errors import TileinferError
from tileinfer_core.sampling import SamplingParams


def test_ids_are_masked_marked_and_counted():
    valid = np.array([True, True, True, True, False])
    found = token_state(5, valid, [1, 2, 1, 3, 1, 3], prompt_tokens=3)
    assert found.tolist() == [0, IN_PROMPT + 1, IN_PROMPT, 2, NEVER_SAMPLED]
    assert token_state(3, None, [], 0).tolist() == [0, 0, 0]


def test_a_seed_of_63_bits_and_the_largest_top_k_fit():
    params = SamplingParams(temperature=0.5, top_p=0.25, top_k=2**31 - 1, seed=2**63 - 1)
    state = state_of(params, 7).view(np.uint32)
    assert state[TOP_K] == 2**31 - 1
    assert (int(state[SEED_HIGH]) << 32) + int(state[SEED_LOW]) == 2**63 - 1
    assert state[STEP] == 7
    assert settings_of(params)[[TEMPERATURE, TOP_P]].tolist() == [0.5, 0.25]


def test_a_log_probability_that_is_no_number_is_an_error():
    slot = np.zeros((2, 1), np.int32)
    slot[1] = np.array([np.nan], np.float32).view(np.int32)
    with pytest.raises(TileinferError, match="NaN"):
        Pending(Done(), slot).take()
    slot[0], slot[1] = 9, np.array([-1.5], np.float32).view(np.int32)
    assert (Pending(Done(), slot).take().id, Pending(Done(), slot).take().logprob) == (9, -1.5)
