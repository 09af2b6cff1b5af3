"""kernels/sampling.py against two samplers that sort: the same id for a seed and step, the right distribution.

tests/reference/sampling.py knows nothing of the product; tileinfer_core.sampling.Sampler is what the CPU backend draws
with, so that a seed gives the same answer on both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from kernels.argmax import ArgmaxConfig, SampleOutputs, argmax, argmax_merge
from kernels.sampling import (
    SampleConfig,
    SampleWorkspace,
    sample,
    sample_workspace_shapes,
)
from kernels.sampling_layout import IN_PROMPT, NEVER_SAMPLED
from tests.reference import sampling as reference
from tests.reference.sampling import Settings
from tileinfer_core.sampling import Sampler, SamplingParams

RING = 8
FAMILIES = [151_936, 128_256, 131_072, 49_152, 32_003, 300, 1]


@dataclass
class Problem:
    """Logits and the history that penalties and masks look at."""

    logits: np.ndarray
    in_prompt: np.ndarray
    counts: np.ndarray
    allowed: np.ndarray

    @classmethod
    def draw(cls, vocab: int, *, seed: int, spread: float = 3.0, step: float = 0.0) -> Problem:
        """`step`: round the logits to its multiples, so that many are equal."""
        rng = np.random.default_rng(seed)
        logits = rng.standard_normal(vocab) * spread
        if step:
            logits = np.round(logits / step) * step
        allowed = rng.random(vocab) > 0.02
        allowed[rng.integers(vocab)] = True
        counts = (rng.random(vocab) < 0.1) * rng.integers(1, 4, vocab)
        return cls(logits.astype(np.float32), rng.random(vocab) < 0.1, counts, allowed)

    def token_state(self) -> np.ndarray:
        state = (self.counts + self.in_prompt * IN_PROMPT).astype(np.int32)
        state[~self.allowed] = NEVER_SAMPLED
        return state

    def history(self) -> list[int]:
        """The ids of prompt and answer, as the CPU's sampler takes them; the answer is counts.sum() long."""
        return [*np.flatnonzero(self.in_prompt), *np.repeat(np.arange(len(self.counts)), self.counts)]

    def cpu_sampler(self, s: Settings) -> Sampler:
        names = {"repetition_penalty": s.repetition, "presence_penalty": s.presence, "frequency_penalty": s.frequency}
        shared = {name: getattr(s, name) for name in ("temperature", "top_k", "top_p", "min_p", "seed")}
        return Sampler(SamplingParams(**shared, **names), self.allowed)

    def scores(self, settings: Settings) -> np.ndarray:
        return reference.penalised(self.logits, settings, self.in_prompt, self.counts, self.allowed)


class Device:
    """The sampler's arrays on a machine."""

    def __init__(self, machine: Any, problem: Problem, settings: Settings, step: int = 0, **config: int) -> None:
        s, self.machine, self.config = settings, machine, SampleConfig(**config)
        vocab = len(problem.logits)
        self.logits = machine.array(problem.logits.reshape(1, vocab))
        self.token_state = machine.array(problem.token_state())
        numbers = [s.temperature, s.top_p, s.min_p, s.repetition, s.presence, s.frequency, 0, 0]
        self.settings = machine.array(np.array(numbers, np.float32))
        words = np.array([s.top_k, s.seed & 0xFFFFFFFF, s.seed >> 32, step, 0, 0, 0, 0], np.int64)
        self.state = machine.array(words.astype(np.uint32).view(np.int32))
        shapes = sample_workspace_shapes(vocab, self.config)
        self.workspace = SampleWorkspace(**{name: machine.empty(*shape) for name, shape in shapes.items()})
        self.outputs = outputs(machine)

    def sample(self) -> tuple[int, float]:
        """(id, logprob) of one draw, out of the ring."""
        step = int(self.machine.host(self.state)[3])
        arrays = (self.logits, self.token_state, self.settings, self.state, self.workspace, self.outputs)
        sample(self.machine.launcher, *arrays, config=self.config)
        drawn = int(self.machine.host(self.outputs.sampled)[0])
        assert self.machine.host(self.outputs.ids, partly=True)[step % RING] == drawn
        return drawn, float(self.machine.host(self.outputs.logprobs, partly=True)[step % RING])


def outputs(machine: Any) -> SampleOutputs:
    ids, logprobs = machine.empty(RING, "int32"), machine.empty(RING, "float32")
    return SampleOutputs(machine.empty(1, "int32"), machine.array(np.array([7], np.int32)), ids, logprobs)


GREEDY = Settings(temperature=0, seed=5)
TYPICAL = Settings(top_k=20, top_p=0.95, seed=1)
PENALISED = Settings(top_k=20, top_p=0.95, min_p=0.01, repetition=1.3, presence=0.2, frequency=0.1, seed=2**40 + 17)
SETTINGS = [
    GREEDY,
    replace(PENALISED, temperature=0),
    TYPICAL,
    PENALISED,
    Settings(top_k=1, seed=3),
    Settings(top_k=128, seed=4, temperature=1.7),
    Settings(top_p=0.05, seed=6),
    Settings(min_p=0.2, seed=7, temperature=0.6),
    # wider than the sorted ids: the search over the vocabulary
    Settings(top_k=500, seed=8, temperature=2.0),
    Settings(top_k=700, top_p=0.9, min_p=0.002, seed=9, temperature=2.0),
    Settings(top_p=0.95, seed=10, temperature=3.0),
    Settings(min_p=0.001, seed=11, temperature=3.0),
    Settings(seed=12, temperature=3.0),
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("step", [0.0, 0.5], ids=["distinct", "tied"])
def test_same_id_as_the_reference(machine: Any, settings: Settings, step: float) -> None:
    if not machine.pdl:
        pytest.skip("the kernels are the same without PDL, and this test is long")
    problem = Problem.draw(2003, seed=1, step=step)
    device = Device(machine, problem, settings, step=41)
    drawn, logprob = device.sample()
    assert drawn == reference.sample(problem.scores(settings), settings, 41)
    assert logprob == pytest.approx(reference.logprob(problem.logits, problem.allowed, drawn), abs=2e-5)
    state = problem.token_state()
    state[drawn] += 1
    assert np.array_equal(machine.host(device.token_state), state)
    assert machine.host(device.outputs.length)[0] == 8
    assert machine.host(device.state)[3] == 42


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("round_to", [0.0, 0.5], ids=["distinct", "tied"])
def test_same_id_as_the_cpu_backend(machine: Any, settings: Settings, round_to: float) -> None:
    """Three draws of an answer that goes on: each counts towards the penalties of the next."""
    problem = Problem.draw(1500, seed=2, step=round_to)
    step, history, sampler = int(problem.counts.sum()), problem.history(), problem.cpu_sampler(settings)
    device = Device(machine, problem, settings, step=step)
    for drawn_before in range(3):
        drawn, logprob = device.sample()
        expected = sampler.sample(problem.logits, history, step + drawn_before)
        assert drawn == expected.id
        assert logprob == pytest.approx(expected.logprob, abs=2e-5)
        history.append(drawn)


@pytest.mark.parametrize("vocab", FAMILIES)
def test_vocabularies(machine: Any, vocab: int) -> None:
    problem = Problem.draw(vocab, seed=vocab)
    for settings in (TYPICAL, GREEDY):
        drawn, _ = Device(machine, problem, settings).sample()
        assert drawn == reference.sample(problem.scores(settings), settings, 0)


@pytest.mark.parametrize(
    "config", [{"chunk": 256, "sub": 32, "own": 8}, {"chunk": 1024, "sub": 128, "own": 16}], ids=str
)
def test_other_sizes_of_the_stages(machine: Any, config: dict[str, int]) -> None:
    problem = Problem.draw(9001, seed=3, step=0.25)
    settings = Settings(top_k=100, seed=13)
    drawn, _ = Device(machine, problem, settings, **config).sample()
    assert drawn == reference.sample(problem.scores(settings), settings, 0)


def test_steps_follow_and_count(machine: Any) -> None:
    """Twelve draws through one set of arrays: the ring wraps, and each id counts towards the next penalties."""
    problem, settings = (
        Problem.draw(600, seed=4),
        Settings(top_k=8, presence=0.8, frequency=0.3, repetition=1.2, seed=14),
    )
    device = Device(machine, problem, settings)
    for step in range(12):
        drawn, _ = device.sample()
        assert drawn == reference.sample(problem.scores(settings), settings, step)
        problem.counts[drawn] += 1


def test_peaked_on_a_masked_id(machine: Any) -> None:
    """Rows of the embedding table that are no token win never, whatever their logits."""
    problem = Problem.draw(700, seed=5)
    problem.logits[650:], problem.allowed[650:] = 90.0, False
    for settings in (GREEDY, TYPICAL, Settings(temperature=5.0, seed=1)):
        drawn, logprob = Device(machine, problem, settings).sample()
        assert drawn < 650
        assert logprob == pytest.approx(reference.logprob(problem.logits, problem.allowed, drawn), abs=2e-5)


def test_small_temperature(machine: Any) -> None:
    problem = Problem.draw(2000, seed=6)
    settings = Settings(temperature=1e-4, seed=1)
    drawn, _ = Device(machine, problem, settings).sample()
    assert drawn == int(np.argmax(problem.scores(settings)))


def test_known_numbers() -> None:
    """Random123's known answer for Philox4x32-10 with counter and key zero: 6627e8d5."""
    assert reference.philox_uniform(0, 0) == (0x6627E8D5 >> 8) / 2**24


def critical(degrees: int) -> float:
    """Chi-square's 99.9 % quantile (Wilson and Hilferty)."""
    return degrees * (1 - 2 / (9 * degrees) + 3.09 * (2 / (9 * degrees)) ** 0.5) ** 3


@pytest.mark.parametrize(
    "settings",
    [Settings(top_k=12, top_p=0.9, seed=21), Settings(temperature=1.5, seed=22), Settings(top_p=0.97, seed=23)],
    ids=str,
)
def test_distribution(machine: Any, settings: Settings) -> None:
    """Chi-square of many draws against the probabilities of the CPU backend's sampler, in about 20 classes."""
    if not machine.pdl:
        pytest.skip("the kernels are the same without PDL, and this test is long")
    draws = 4000 if machine.on_gpu else 160
    problem = Problem.draw(500, seed=7, spread=1.0)
    step = int(problem.counts.sum())
    candidates = problem.cpu_sampler(settings).candidates(problem.logits, problem.history(), step)
    ids, probabilities = candidates.ids, candidates.probs
    device = Device(machine, problem, settings, sub=16, own=16)
    counts = np.zeros(500)
    for _ in range(draws):
        counts[device.sample()[0]] += 1
    assert counts[np.setdiff1d(np.arange(500), ids)].sum() == 0
    edges = np.searchsorted(np.cumsum(probabilities), np.linspace(0, 1, 21)[1:-1])
    classes = [part for part in np.split(np.arange(len(ids)), np.unique(edges)) if len(part)]
    expected = np.array([probabilities[part].sum() for part in classes]) * draws
    observed = np.array([counts[ids[part]].sum() for part in classes])
    statistic = float(((observed - expected) ** 2 / expected).sum())
    assert statistic < critical(len(classes) - 1), f"chi-square {statistic:.1f} of {len(classes)} classes"


class TestArgmax:
    def run(self, machine: Any, logits: np.ndarray, vocab: int | None = None, chunk: int = 512) -> int:
        width = len(logits)
        chunks = -(-width // chunk)
        state, out = machine.zeros(8, "int32"), outputs(machine)
        partials = (machine.empty(chunks, "float32"), machine.empty(chunks, "int32"))
        config = ArgmaxConfig(chunk)
        rows = machine.array(logits.reshape(1, -1))
        argmax(machine.launcher, rows, *partials, state, out, vocab=vocab or width, config=config)
        assert machine.host(out.length)[0] == 8
        assert machine.host(state)[3] == 1
        assert machine.host(out.ids, partly=True)[0] == machine.host(out.sampled)[0]
        return int(machine.host(out.sampled)[0])

    @pytest.mark.parametrize("vocab", FAMILIES)
    def test_vocabularies(self, machine: Any, vocab: int) -> None:
        logits = np.random.default_rng(vocab).standard_normal(vocab).astype(np.float32)
        assert self.run(machine, logits) == np.argmax(logits)

    @pytest.mark.parametrize("places", [(3, 4), (511, 512), (0, 2002), (1999, 2000, 2001), (1024, 700)], ids=str)
    def test_ties_go_to_the_smaller_id(self, machine: Any, places: tuple[int, ...]) -> None:
        logits = np.full(2003, -2.0, np.float32)
        logits[list(places)] = 1.5
        assert self.run(machine, logits) == min(places)

    def test_all_equal_and_infinite(self, machine: Any) -> None:
        assert self.run(machine, np.zeros(1500, np.float32)) == 0
        logits = np.full(1500, -np.inf, np.float32)
        logits[1400] = -1e20
        assert self.run(machine, logits) == 1400

    def test_padded_columns_never_win(self, machine: Any) -> None:
        logits = np.concatenate([np.linspace(-1, 0, 700), np.full(100, 50)]).astype(np.float32)
        assert self.run(machine, logits, vocab=700) == 699


class TestRefusals:
    def test_types_and_shapes(self, machine: Any) -> None:
        device = Device(machine, Problem.draw(300, seed=1), TYPICAL)
        arrays = [device.logits, device.token_state, device.settings, device.state, device.workspace, device.outputs]

        def with_one(place: int, value: Any) -> None:
            sample(machine.launcher, *[*arrays[:place], value, *arrays[place + 1 :]], config=device.config)

        with pytest.raises(TypeError, match="sample: logits has dtype bfloat16, expected float32"):
            with_one(0, machine.zeros((1, 300), "bfloat16"))
        with pytest.raises(ValueError, match=r"sample: logits has shape \(2, 300\), expected \(1, any\)"):
            with_one(0, machine.zeros((2, 300), "float32"))
        with pytest.raises(ValueError, match=r"token_state has shape \(301,\), expected \(300\)"):
            with_one(1, machine.zeros(301, "int32"))
        with pytest.raises(TypeError, match="state has dtype float32, expected int32"):
            with_one(3, machine.zeros(8, "float32"))
        small = replace(device.workspace, sorted_ids=machine.zeros(64, "int32"))
        with pytest.raises(ValueError, match=r"workspace.sorted_ids has shape \(64,\), expected \(128\)"):
            with_one(4, small)
        ring = replace(device.outputs, ids=machine.zeros(12, "int32"))
        with pytest.raises(ValueError, match="ids has 12 entries, expected a power of two"):
            with_one(5, ring)

    def test_argmax(self, machine: Any) -> None:
        partials = (machine.zeros(1, "float32"), machine.zeros(1, "int32"))
        rest = (machine.zeros(8, "int32"), outputs(machine))
        logits = machine.zeros((1, 300), "float32")
        with pytest.raises(ValueError, match="argmax: vocab is 301, logits have 300 columns"):
            argmax(machine.launcher, logits, *partials, *rest, vocab=301, config=ArgmaxConfig(512))
        many = (machine.zeros(4097, "float32"), machine.zeros(4097, "int32"))
        with pytest.raises(ValueError, match="4097 partial maxima, at most 4096"):
            argmax_merge(machine.launcher, *many, *rest)
