"""The decode loop: a plain generator from a prompt to events. It knows runners and ids, no files, no conversation.

    prompt in chunks (what the cache holds already is skipped)  ->  sample, stop rules, text, one token after another

Ctrl-C can come at any point. Nothing here needs to be undone then: the cache counts only tokens whose step is complete,
and `Tally` holds what has been said so far.
"""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tileinfer_core.backends.base import Warns
from tileinfer_core.events import Finished, PrefillProgress, SampledToken, Timings, Usage

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from tileinfer_core.answer_stream import AnswerStream
    from tileinfer_core.backends.base import BoolArray, Runner
    from tileinfer_core.events import Event, EventStream, FinishReason
    from tileinfer_core.kv_cache import KvCache
    from tileinfer_core.sampling import SamplingParams
    from tileinfer_core.stopping import StopRules
    from tileinfer_core.thinking import ThinkBudget


@dataclass(frozen=True, slots=True)
class Job:
    """One answer to make. `closing_ids` end the thinking when `budget` is spent.

    `begun` are the ids of an answer that was cut short, if this one is to go on with it: they count as output for
    penalties and the random counter, and not as tokens of this answer.
    """

    runner: Runner
    cache: KvCache
    prompt_ids: Sequence[int]
    sampling: SamplingParams
    valid_ids: BoolArray | None
    rules: StopRules
    stream: AnswerStream
    budget: ThinkBudget
    closing_ids: Sequence[int]
    prefill_chunk: int
    load_s: float
    begun: Sequence[int] = ()


@dataclass(slots=True)
class Tally:
    """What one answer has come to so far; `finished` may be asked at any point. `output_ids` begin with job.begun."""

    job: Job
    reused: int = 0
    output_ids: list[int] = field(init=False)
    sampled: list[SampledToken] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)
    prefill_s: float | None = None
    first_at: float | None = None
    last_at: float | None = None

    def __post_init__(self) -> None:
        self.output_ids = list(self.job.begun)

    @property
    def new_tokens(self) -> int:
        return len(self.output_ids) - len(self.job.begun)

    def count(self, token_id: int, logprob: float | None) -> None:
        self.last_at = time.perf_counter()
        if self.first_at is None:
            self.first_at = self.last_at
        self.output_ids.append(token_id)
        self.sampled.append(SampledToken(token_id, logprob))

    def finished(self, reason: FinishReason) -> Finished:
        job = self.job
        return Finished(
            reason,
            Usage(len(job.prompt_ids) + len(job.begun), self.reused, self.new_tokens),
            self._timings(),
            job.sampling.seed,
            job.stream.answer,
            job.stream.thinking,
            job.stream.matched,
            tuple(self.sampled),
            job.runner.take_warnings() if isinstance(job.runner, Warns) else (),
        )

    def _timings(self) -> Timings:
        ttft = None if self.first_at is None else self.first_at - self.started
        new = len(self.job.prompt_ids) + len(self.job.begun) - self.reused
        prefill = new / self.prefill_s if self.prefill_s else None
        decode = None
        if self.first_at is not None and self.last_at is not None and self.last_at > self.first_at:
            decode = (self.new_tokens - 1) / (self.last_at - self.first_at)
        return Timings(self.job.load_s, self.job.runner.compile_s, ttft, prefill, decode)


def generate(job: Job, tally: Tally) -> EventStream:
    """The events of one answer, Finished last."""
    start = time.perf_counter()
    for token_id in job.begun:
        job.stream.push(token_id)
        job.budget.spend(thinking=job.stream.thinking_now)
    given = [*job.prompt_ids, *job.begun]
    tally.reused = _rewind(job.cache, given)
    yield from _prefill(job, given)
    tally.prefill_s = time.perf_counter() - start
    reason = yield from _decode(job, tally)
    yield from job.stream.flush()
    yield tally.finished(reason)


def _rewind(cache: KvCache, token_ids: Sequence[int]) -> int:
    """Keep what the cache has of `token_ids`, but for the last one: its logits are needed. Returns how many."""
    keep = min(cache.common_prefix(token_ids), len(token_ids) - 1)
    cache.truncate(keep)
    return keep


def _prefill(job: Job, token_ids: Sequence[int]) -> EventStream:
    """Bring the cache up to `token_ids`, chunk by chunk. Between chunks the caller may stop."""
    first = job.cache.length
    total = len(token_ids) - first
    while (done := job.cache.length - first) < total:
        job.runner.prefill(job.cache, token_ids[first + done : first + done + job.prefill_chunk])
        yield PrefillProgress(job.cache.length - first, total)


def _decode(job: Job, tally: Tally) -> Generator[Event, None, FinishReason]:
    """Sample until there is a reason to finish."""
    while True:
        steps = job.runner.decode(job.cache, job.sampling, job.valid_ids, len(job.prompt_ids))
        with closing(steps):
            for sampled in steps:
                if reason := (yield from _take(job, tally, sampled.id, sampled.logprob)):
                    return reason
                if job.budget.spend(thinking=job.stream.thinking_now):
                    break
        if reason := (yield from _close_thinking(job, tally)):
            return reason


def _take(
    job: Job, tally: Tally, token_id: int, logprob: float | None = None
) -> Generator[Event, None, FinishReason | None]:
    """Count one new id, let its text out, and say whether it was the last one."""
    tally.count(token_id, logprob)
    if job.rules.is_end(token_id):
        return "stop"
    yield from job.stream.push(token_id)
    if job.stream.matched is not None:
        return "stop"
    if job.rules.is_full(tally.new_tokens):
        return "length"
    return "context" if len(job.prompt_ids) + len(tally.output_ids) >= job.cache.max_tokens else None


def _close_thinking(job: Job, tally: Tally) -> Generator[Event, None, FinishReason | None]:
    """End the thinking as if the model had: its closing ids become output, and decoding can go on after them."""
    for token_id in job.closing_ids:
        if reason := (yield from _take(job, tally, token_id)):
            return reason
    token_ids = [*job.prompt_ids, *tally.output_ids]
    _rewind(job.cache, token_ids)
    job.runner.prefill(job.cache, token_ids[job.cache.length :])
    return None
