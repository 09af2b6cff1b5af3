"""The sampling settings, where each came from, and the exact sampler that every faster one is compared with.

One token is drawn in this order, in float64:

1. ids outside the vocabulary mask are out of the running;
2. repetition penalty, once for each distinct id of prompt and output: logit / r where positive, logit * r where not;
3. presence and frequency penalty over the output ids: logit - presence - frequency * count;
4. temperature 0: the largest logit, the smaller id of equals. That is all: the seed and the cuts below have no effect,
   the penalties above do. Otherwise logits / temperature;
5. top-k, then top-p (the smallest set whose share of the top-k set reaches p, never empty), then min-p (at least min_p
   times the largest probability). Each keeps a prefix of the ids sorted by probability, the smaller id first of equals;
6. the first id in that order whose cumulative probability exceeds u times the mass kept; u from philox.uniform.
"""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from tileinfer_core.errors import TileinferError, UsageError
from tileinfer_core.generation_config import FILE_NAME, GenerationConfig
from tileinfer_core.philox import uniform
from tileinfer_core.settings import Setting

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from tileinfer_core.settings import Settings

MAX_SEED = 2**63 - 1
_LIMITS: dict[str, tuple[float, float]] = {
    "temperature": (0, 100),
    "top_k": (0, 2**31 - 1),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 100),
    "presence_penalty": (-100, 100),
    "frequency_penalty": (-100, 100),
    "seed": (0, MAX_SEED),
}
_WHOLE = frozenset({"top_k", "seed"})


def flag_name(key: str) -> str:
    return "--" + key.replace("_", "-")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to draw a token. The defaults serve where neither the user nor the model says anything.

    top_k 0, top_p 1, min_p 0, repetition_penalty 1 and the other penalties 0 are off.

    Raises:
        UsageError: naming the flag, its range and the value, for one out of range.
    """

    temperature: float = 0.7
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for key in _LIMITS:
            check_setting(key, getattr(self, key), flag_name(key))

    @classmethod
    def from_settings(cls, settings: Mapping[str, Setting[Any]]) -> SamplingParams:
        return cls(**{key: setting.value for key, setting in settings.items()})


def check_setting(key: str, value: object, origin: str) -> None:
    """Refuse a sampling value of the wrong kind or out of range, in terms of where the user wrote it."""
    low, high = _LIMITS[key]
    kind = int if key in _WHOLE else (int, float)
    if isinstance(value, bool) or not isinstance(value, kind) or not low <= value <= high:
        word = "a whole number" if key in _WHOLE else "a number"
        name = origin if origin == flag_name(key) else f"{origin}: {key}"
        raise UsageError(f"{name} must be {word} from {low} to {high}, found {value!r}")


def resolve_sampling(
    flags: Mapping[str, float | int | None], settings: Settings, generation: GenerationConfig
) -> dict[str, Setting[Any]]:
    """Each setting with its origin: flag, then config file, then generation_config.json, then the default.

    `flags` is keyed by field name; None means that the flag was not given. A model whose file says
    `do_sample: false` is greedy unless a flag or the config file sets a temperature. The seed is random unless set.
    """
    unknown = set(flags) - set(_LIMITS)
    if unknown:
        raise UsageError(f"no sampling setting named {', '.join(sorted(unknown))}; there are {', '.join(_LIMITS)}")
    return {
        field.name: _resolve(field.name, field.default, flags, settings, generation) for field in fields(SamplingParams)
    }


def _resolve(
    key: str, default: Any, flags: Mapping[str, float | int | None], settings: Settings, generation: GenerationConfig
) -> Setting[Any]:
    if (value := flags.get(key)) is not None:
        setting: Setting[Any] = Setting(value, flag_name(key))
    elif key in settings.sampling:
        setting = settings.sampling[key]
    elif key == "temperature" and generation.do_sample is False:
        return Setting(0.0, f"{FILE_NAME} (do_sample false)")
    elif (value := getattr(generation, key, None)) is not None:
        setting = Setting(value, FILE_NAME)
    elif key == "seed":
        return Setting(secrets.randbits(32), "random")
    else:
        return Setting(default, "default")
    check_setting(key, setting.value, setting.origin)
    return setting if key in _WHOLE else Setting(float(setting.value), setting.origin)


@dataclass(frozen=True, slots=True)
class Sampled:
    """A drawn token. `logprob` is the model's own: log-softmax of its raw logits over the valid ids, natural log."""

    id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Candidates:
    """What is left after all cuts: ids by falling probability and their probabilities, which add up to 1."""

    ids: NDArray[np.int64]  # [N]
    probs: NDArray[np.float64]  # [N]


class Sampler:
    """Draws tokens by the definition at the top of this file.

    `valid_ids` ([V] bool) is False for rows of the logits that are no token: padding of the embedding table.
    """

    def __init__(self, params: SamplingParams, valid_ids: NDArray[np.bool_] | None = None) -> None:
        self.params = params
        self._invalid = None if valid_ids is None else np.flatnonzero(~valid_ids)
        self._vocab_size = None if valid_ids is None else len(valid_ids)

    def sample(self, logits: NDArray[np.float32], history: Sequence[int], step: int) -> Sampled:
        """Draw the id that follows `history`, the prompt's ids and then the `step` ids drawn so far.

        Raises:
            TileinferError: the logits hold NaN or +infinity, or no id is possible.
        """
        raw = self._masked(logits)  # [V] float64
        scores = self._penalised(raw, history, step)
        if self.params.temperature == 0:
            chosen = int(np.argmax(scores))
        else:
            chosen = draw(cut(scores, self.params), uniform(self.params.seed, step))
        return Sampled(chosen, float(raw[chosen] - _logsumexp(raw)))

    def candidates(self, logits: NDArray[np.float32], history: Sequence[int], step: int) -> Candidates:
        """The distribution that `sample` draws from."""
        scores = self._penalised(self._masked(logits), history, step)
        if self.params.temperature == 0:
            return Candidates(np.array([np.argmax(scores)], np.int64), np.ones(1))
        return cut(scores, self.params)

    def _masked(self, logits: NDArray[np.float32]) -> NDArray[np.float64]:
        """The logits in float64, -infinity where there is no token."""
        if logits.ndim != 1 or (self._vocab_size is not None and len(logits) != self._vocab_size):
            wanted = "any" if self._vocab_size is None else self._vocab_size
            raise ValueError(f"sample: logits have shape {logits.shape}, expected ({wanted},)")
        scores = logits.astype(np.float64)
        if self._invalid is not None:
            scores[self._invalid] = -np.inf
        peak = scores.max(initial=-np.inf)  # NaN if any is
        if math.isnan(peak) or peak == np.inf:
            raise TileinferError(
                f"the model's logits hold {'NaN' if math.isnan(peak) else 'infinity'}, so no token can be chosen",
                hint="check the files with `tileinfer verify`; half precision can also overflow on some models",
            )
        if peak == -np.inf:
            raise TileinferError("every token is impossible after this prompt: all logits are -infinity")
        return scores

    def _penalised(self, raw: NDArray[np.float64], history: Sequence[int], step: int) -> NDArray[np.float64]:
        params = self.params
        if params.repetition_penalty == 1 and params.presence_penalty == 0 and params.frequency_penalty == 0:
            return raw
        scores = raw.copy()
        ids = np.asarray(history, np.int64)
        if params.repetition_penalty != 1:
            seen = np.unique(ids)
            values = scores[seen]
            scores[seen] = np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
        if params.presence_penalty or params.frequency_penalty:
            seen, counts = np.unique(ids[len(ids) - step :], return_counts=True)
            scores[seen] -= params.presence_penalty + params.frequency_penalty * counts
        return scores


def _logsumexp(scores: NDArray[np.float64]) -> float:
    peak = scores.max()
    return float(peak + np.log(np.exp(scores - peak).sum()))


def cut(scores: NDArray[np.float64], params: SamplingParams) -> Candidates:
    """Temperature, top-k, top-p and min-p over penalised scores ([V], finite or -infinity, temperature > 0)."""
    ids = _by_falling_score(scores, params.top_k)  # [N]
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the largest to -infinity, as it should
        weights = np.exp((scores[ids] - scores[ids[0]]) / params.temperature)  # [N], the first is 1
    kept = len(ids)
    if params.top_p < 1:
        cumulative = np.cumsum(weights)
        kept = int(np.searchsorted(cumulative, params.top_p * cumulative[-1])) + 1
    if params.min_p > 0:
        kept = min(kept, int(np.count_nonzero(weights >= params.min_p)))
    kept = max(1, min(kept, int(np.count_nonzero(weights))))
    return Candidates(ids[:kept], weights[:kept] / weights[:kept].sum())


def _by_falling_score(scores: NDArray[np.float64], top_k: int) -> NDArray[np.int64]:
    """Ids by falling score, the smaller id first of equals, at most `top_k` of them (0: all)."""
    if not 0 < top_k < len(scores):
        return np.argsort(-scores, kind="stable")
    threshold = np.partition(scores, len(scores) - top_k)[len(scores) - top_k]
    possible = np.flatnonzero(scores >= threshold)  # more than top_k where scores are equal
    return possible[np.argsort(-scores[possible], kind="stable")][:top_k]


def draw(candidates: Candidates, u: float) -> int:
    """The first candidate whose cumulative probability exceeds u."""
    cumulative = np.cumsum(candidates.probs)
    index = int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
    return int(candidates.ids[min(index, len(candidates.ids) - 1)])
