"""What the device's sampler works from, and the ids on their way back to the host.

Settings, counters and the per-id state (masked, in the prompt, times sampled) are written once when decoding starts;
from then on the device keeps them. Each drawn id and its log-probability land in a ring on the device and are copied to
pinned memory beside the next step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kernels.sampling_layout import (
    FREQUENCY_PENALTY,
    IN_PROMPT,
    MIN_P,
    NEVER_SAMPLED,
    PRESENCE_PENALTY,
    REPETITION_PENALTY,
    SEED_HIGH,
    SEED_LOW,
    SETTINGS,
    STATE_WORDS,
    STEP,
    TEMPERATURE,
    TOP_K,
    TOP_P,
)
from tileinfer_core.backends.cuda.buffers import RING
from tileinfer_core.errors import TileinferError
from tileinfer_core.sampling import Sampled

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tileinfer_core.backends.base import BoolArray
    from tileinfer_core.backends.cuda.device import Array, Device, Event, HostArray
    from tileinfer_core.sampling import SamplingParams

_WORD = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Pending:
    """One drawn id that is still on its way."""

    event: Event
    slot: HostArray  # [2, 1]: id, bits of the log-probability

    def take(self) -> Sampled:
        """Wait for it.

        Raises:
            TileinferError: the logits held NaN or infinity.
        """
        self.event.wait()
        logprob = float(self.slot[1:].view(np.float32)[0, 0])
        if not math.isfinite(logprob):
            raise TileinferError(
                "the model's logits hold NaN or infinity, so no token can be chosen",
                hint="check the files with `tileinfer verify`; half precision can also overflow on some models",
            )
        return Sampled(int(self.slot[0, 0]), logprob)


class SamplingState:
    """Host side of the sampler's arrays."""

    def __init__(self, device: Device, buffers: Mapping[str, Array], vocab: int) -> None:
        self._device = device
        self._buffers = buffers
        self._settings = device.pinned((SETTINGS,), "float32")
        self._state = device.pinned((STATE_WORDS,), "int32")
        self._length = device.pinned((1,), "int32")
        self._tokens = device.pinned((vocab,), "int32")
        self._ring = device.pinned((RING, 2, 1), "int32")

    def begin(
        self, params: SamplingParams, valid_ids: BoolArray | None, token_ids: Sequence[int], prompt_tokens: int
    ) -> None:
        """Queue everything for the draw that follows `token_ids`: the prompt, and then the output so far."""
        self._device.synchronize()  # an earlier copy may still read the pinned arrays
        self._settings[:] = settings_of(params)
        self._state[:] = state_of(params, len(token_ids) - prompt_tokens)
        self._length[0] = len(token_ids)
        self._tokens[:] = token_state(len(self._tokens), valid_ids, token_ids, prompt_tokens)
        for name, host in (
            ("settings", self._settings),
            ("state", self._state),
            ("length", self._length),
            ("token_state", self._tokens),
        ):
            self._device.copy_in(self._buffers[name], host)

    def fetch(self, step: int) -> Pending:
        """The id drawn at `step`, which has been queued."""
        slot = step % RING
        target = self._ring[slot]
        event = self._device.fetch(target, self._buffers["ring"][:, slot : slot + 1])
        return Pending(event, target)


def settings_of(params: SamplingParams) -> HostArray:
    values = np.zeros(SETTINGS, np.float32)
    values[TEMPERATURE] = params.temperature
    values[TOP_P] = params.top_p
    values[MIN_P] = params.min_p
    values[REPETITION_PENALTY] = params.repetition_penalty
    values[PRESENCE_PENALTY] = params.presence_penalty
    values[FREQUENCY_PENALTY] = params.frequency_penalty
    return values


def state_of(params: SamplingParams, step: int) -> HostArray:
    values = np.zeros(STATE_WORDS, np.uint32)
    values[TOP_K] = params.top_k
    values[SEED_LOW] = params.seed & _WORD
    values[SEED_HIGH] = params.seed >> 32
    values[STEP] = step
    return values.view(np.int32)


def token_state(vocab: int, valid_ids: BoolArray | None, token_ids: Sequence[int], prompt_tokens: int) -> HostArray:
    """[V]: negative: never sampled; IN_PROMPT: occurs in the prompt; low bits: times sampled."""
    ids = np.asarray(token_ids, np.int64)
    values = np.bincount(ids[prompt_tokens:], minlength=vocab).astype(np.int32)
    values[ids[:prompt_tokens]] |= IN_PROMPT
    if valid_ids is not None:
        values[~valid_ids] = NEVER_SAMPLED
    return values
