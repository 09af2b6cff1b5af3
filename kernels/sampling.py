"""Sampling on the device: temperature, top-k, top-p, min-p, penalties and seeded draws.

Every setting lives in device memory, so one captured graph serves any of them; greedy is temperature 0. The order is
penalties, temperature, top-k, top-p, min-p, then one draw by inverse CDF over descending probability, ties to the
smaller id. Exact for every setting: nothing is approximated when a nucleus is wider than the CANDIDATES sorted ids;
the draw then searches the whole vocabulary (kernels/sampling_draw.py).

Selection needs no sort and no repeated argmax. The vocabulary is cut into runs of SUB ids. The k largest ids can only
lie in the k runs with the largest maxima, so

    sample_adjust   each chunk: penalties, temperature, the maximum of each run, sums for the soft-max
    sample_select   each chunk ranks its runs' maxima against all others and copies runs of rank < k to row [rank]
    sample_rank     each of those rows ranks its ids against the k * SUB copied ones and scatters them in order
    sample_draw     one block: top-p, min-p, the random number, the id, its log-probability, the counters

It refuses logits that are not float32 and vocabularies with fewer than one id. NaN logits are the caller's bug.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cuda.tile as ct

from kernels.argmax import SampleOutputs, check_outputs, output_specs, power_of_two
from kernels.configs import config as table_config
from kernels.launch import Together, check_array
from kernels.notation import NEG_INF, ZERO, Int
from kernels.sampling_draw import draw
from kernels.sampling_layout import (
    CANDIDATES,
    COUNT_MASK,
    FREQUENCY_PENALTY,
    MASKED_LOGIT,
    PRESENCE_PENALTY,
    REPETITION_PENALTY,
    SETTINGS,
    STATE_WORDS,
    STEP,
    TEMPERATURE,
    active_candidates,
    advance,
    read,
)
from kernels.specs import ArraySpec

if TYPE_CHECKING:
    from kernels.launch import Launcher
    from kernels.shapes import ModelShape

COMPARES = 8192  # elements of a tile of comparisons: 64 registers a thread; twice that spills


@dataclass(frozen=True)
class SampleConfig:
    """Sizes of the stages.

    chunk: ids per block of sample_adjust and sample_select, at least CANDIDATES; sub: ids per run; own: ids per block
    of sample_rank; tail: ids per step of the search beyond the sorted ids.
    """

    chunk: int = 512
    sub: int = 64
    own: int = 4
    tail: int = 4096


@dataclass(frozen=True)
class SampleWorkspace:
    """Device arrays between the stages; `sample_workspace_shapes` gives their shapes and dtypes."""

    adjusted: Any
    run_maxima: Any
    partials: Any
    won_values: Any
    won_ids: Any
    sorted_values: Any
    sorted_ids: Any


def sample_workspace_shapes(vocab: int, config: SampleConfig) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of each SampleWorkspace array for `vocab` logits."""
    chunks = -(-vocab // config.chunk)
    return {
        "adjusted": ((chunks * config.chunk,), "float32"),
        "run_maxima": ((chunks * config.chunk // config.sub,), "float32"),
        "partials": ((4, chunks), "float32"),
        "won_values": ((CANDIDATES, config.sub), "float32"),
        "won_ids": ((CANDIDATES, config.sub), "int32"),
        "sorted_values": ((CANDIDATES,), "float32"),
        "sorted_ids": ((CANDIDATES,), "int32"),
    }


@ct.kernel
def sample_adjust_kernel(logits, token_state, settings, adjusted, run_maxima, partials, CHUNK: Int, SUB: Int, PDL: Int):
    """adjusted = (penalised logits) / temperature; maxima of runs of SUB; soft-max sums of raw and adjusted logits.

    logits [V] float32; token_state [V] int32 (sampling_layout); settings [8], adjusted [chunks * CHUNK] float32;
    run_maxima [chunks * CHUNK / SUB] float32; partials [4, chunks] float32: adjusted max and sum, raw max and sum.
    Grid (chunks,): one block owns CHUNK ids.
    float32 throughout; the sums are of exp(x - maximum of the chunk).
    Ids past V and ids with a negative token_state become MASKED_LOGIT.
    """
    chunk = ct.bid(0)
    if PDL:
        ct.grid_dependency_control_launch_dependents()
        ct.grid_dependency_control_wait()
    raw = ct.load(logits, index=(chunk,), shape=(CHUNK,), padding_mode=NEG_INF, allow_tma=False)
    state = ct.load(token_state, index=(chunk,), shape=(CHUNK,), padding_mode=ZERO, allow_tma=False)
    ids = ct.arange(CHUNK, dtype=ct.int32) + chunk * CHUNK
    allowed = (state >= 0) & (ids < logits.shape[0])
    raw = ct.where(allowed, raw, MASKED_LOGIT)
    count = state & COUNT_MASK
    repetition = read(settings, REPETITION_PENALTY)
    value = ct.where(state > 0, ct.where(raw > 0.0, raw / repetition, raw * repetition), raw)
    value = value - ct.where(count > 0, read(settings, PRESENCE_PENALTY), 0.0)
    value = value - count.astype(ct.float32) * read(settings, FREQUENCY_PENALTY)
    temperature = read(settings, TEMPERATURE)
    value = ct.where(allowed, value / ct.where(temperature > 0.0, temperature, 1.0), MASKED_LOGIT)
    ct.store(adjusted, index=(chunk,), tile=value, check_bounds=False, allow_tma=False)
    maxima = ct.max(value.reshape((CHUNK // SUB, SUB)), axis=1)
    ct.store(run_maxima, index=(chunk,), tile=maxima, check_bounds=False, allow_tma=False)
    top, raw_top = ct.max(maxima), ct.max(raw)
    ct.store(partials, index=(0, chunk), tile=top, allow_tma=False)
    ct.store(partials, index=(1, chunk), tile=ct.sum(ct.exp(value - top)), allow_tma=False)
    ct.store(partials, index=(2, chunk), tile=raw_top, allow_tma=False)
    ct.store(partials, index=(3, chunk), tile=ct.sum(ct.exp(raw - raw_top)), allow_tma=False)


@ct.kernel
def sample_select_kernel(
    adjusted, run_maxima, settings, state, won_values, won_ids, CHUNK: Int, SUB: Int, COLUMNS: Int, PDL: Int
):
    """Copy each run whose maximum ranks r < k among all runs (larger first, ties to the smaller id) to row r.

    adjusted, run_maxima: of sample_adjust; settings [8] float32; state [8] int32; won_values [CANDIDATES, SUB] float32;
    won_ids [CANDIDATES, SUB] int32. k = CANDIDATES, or top-k where that is smaller.
    Grid (chunks,): one block owns CHUNK ids, so CHUNK / SUB runs.
    Compares only. The k largest ids lie in the k chosen runs, because each run before has an id that precedes them.
    Maxima past the last run read as -inf; rows from k on are left as they were.
    """
    chunk = ct.bid(0)
    if PDL:
        ct.grid_dependency_control_launch_dependents()
        ct.grid_dependency_control_wait()
    RUNS = CHUNK // SUB
    own = ct.load(run_maxima, index=(chunk,), shape=(RUNS,), check_bounds=False, allow_tma=False).reshape((RUNS, 1))
    own_id = (ct.arange(RUNS, dtype=ct.int32) + chunk * RUNS).reshape((RUNS, 1))
    ahead = ct.zeros((RUNS, COLUMNS), dtype=ct.int32)
    for step in range(ct.num_tiles(run_maxima, axis=0, shape=(COLUMNS,))):
        other = ct.load(run_maxima, index=(step,), shape=(COLUMNS,), padding_mode=NEG_INF, allow_tma=False)
        other = other.reshape((1, COLUMNS))
        other_id = (ct.arange(COLUMNS, dtype=ct.int32) + step * COLUMNS).reshape((1, COLUMNS))
        before = (other > own) | ((other == own) & (other_id < own_id))
        ahead = ahead + ct.where(before, 1, 0)
    rank = ct.sum(ahead, axis=1, keepdims=True)  # [RUNS, 1]
    won = rank < active_candidates(settings, state)
    values = ct.load(adjusted, index=(chunk,), shape=(CHUNK,), check_bounds=False, allow_tma=False)
    lane = ct.arange(SUB, dtype=ct.int32).reshape((1, SUB))
    ct.scatter(won_values, (rank, lane), values.reshape((RUNS, SUB)), mask=won)
    ct.scatter(won_ids, (rank, lane), own_id * SUB + lane, mask=won)


@ct.kernel
def sample_rank_kernel(
    won_values,
    won_ids,
    run_maxima,
    settings,
    state,
    sorted_values,
    sorted_ids,
    SUB: Int,
    OWN: Int,
    COLUMNS: Int,
    PDL: Int,
):
    """sorted[r] = the id of rank r among the chosen runs' ids (larger value first, ties to the smaller id), r < k.

    won_values, won_ids [CANDIDATES * SUB]: of sample_select, flat; settings [8] float32; state [8] int32;
    sorted_values [CANDIDATES] float32; sorted_ids [CANDIDATES] int32. k as in sample_select.
    Grid (min(CANDIDATES, runs) * SUB / OWN,): one block owns OWN ids of one run. It leaves at once where the run was
    not chosen or all its ids are smaller than the smallest chosen maximum, so than k others: most do.
    Compares only.
    Columns past the chosen runs are not compared; entries of `sorted` from k on are left as they were.
    """
    part = ct.bid(0)
    if PDL:
        ct.grid_dependency_control_launch_dependents()
        ct.grid_dependency_control_wait()
    active = active_candidates(settings, state)
    rows = ct.minimum(active, run_maxima.shape[0])
    if part * OWN < rows * SUB:
        own = ct.load(won_values, index=(part,), shape=(OWN,), check_bounds=False, allow_tma=False).reshape((OWN, 1))
        last = ct.load(won_values, index=(rows - 1,), shape=(SUB,), check_bounds=False, allow_tma=False)
        if (ct.max(own) >= ct.max(last)) | (rows < active):
            own_id = ct.load(won_ids, index=(part,), shape=(OWN,), check_bounds=False, allow_tma=False)
            own_id = own_id.reshape((OWN, 1))
            ahead = ct.zeros((OWN, COLUMNS), dtype=ct.int32)
            for step in range(ct.cdiv(rows * SUB, COLUMNS)):
                other = ct.load(won_values, index=(step,), shape=(COLUMNS,), check_bounds=False, allow_tma=False)
                other = other.reshape((1, COLUMNS))
                other_id = ct.load(won_ids, index=(step,), shape=(COLUMNS,), check_bounds=False, allow_tma=False)
                other_id = other_id.reshape((1, COLUMNS))
                column = (ct.arange(COLUMNS, dtype=ct.int32) + step * COLUMNS).reshape((1, COLUMNS))
                before = (other > own) | ((other == own) & (other_id < own_id))
                ahead = ahead + ct.where(before & (column < rows * SUB), 1, 0)
            rank = ct.sum(ahead, axis=1, keepdims=True)
            ct.scatter(sorted_values, (rank,), own, mask=rank < active)
            ct.scatter(sorted_ids, (rank,), own_id, mask=rank < active)


@ct.kernel
def sample_draw_kernel(
    logits, adjusted, partials, sorted_values, sorted_ids, settings, state, token_state,
    sampled, length, ids, logprobs, PARTIALS: Int, TAIL: Int, PDL: Int,
):  # fmt: skip
    """Draw one id: first whose running mass, in descending order, exceeds u * (mass of the kept prefix).

    logits, token_state [V]; adjusted [V'] float32; partials [4, chunks] float32; sorted_* [CANDIDATES];
    settings [8] float32; state [8] int32; sampled, length [1] int32; ids [R] int32, logprobs [R] float32.
    Grid (1,). Writes sampled, ids and logprobs at step % R, and adds 1 to length, token_state[id] and the step.
    float32; masses relative to the largest probability; logprob = raw logit - log of the raw sum over the vocabulary.
    Partials past the last chunk read as -inf (maxima) and 0 (sums).
    """
    if PDL:
        ct.grid_dependency_control_launch_dependents()
        ct.grid_dependency_control_wait()
    drawn = draw(adjusted, partials, sorted_values, sorted_ids, settings, state, PARTIALS, TAIL)
    drawn = ct.minimum(ct.maximum(drawn, 0), logits.shape[0] - 1)  # NaN logits rank nothing: any id, but a valid one
    raw_maxima = ct.load(partials, index=(2, 0), shape=(1, PARTIALS), padding_mode=NEG_INF, allow_tma=False)
    raw_sums = ct.load(partials, index=(3, 0), shape=(1, PARTIALS), padding_mode=ZERO, allow_tma=False)
    raw_top = ct.max(raw_maxima)
    raw_whole = ct.sum(ct.exp(raw_maxima - raw_top) * raw_sums)
    own = read(logits, drawn) - raw_top - ct.log(raw_whole)
    ct.store(logprobs, index=(read(state, STEP) & (logprobs.shape[0] - 1),), tile=own, allow_tma=False)
    ct.store(token_state, index=(drawn,), tile=read(token_state, drawn) + 1, allow_tma=False)
    advance(state, sampled, length, ids, drawn)


def sample(
    launcher: Launcher,
    logits: Any,
    token_state: Any,
    settings: Any,
    state: Any,
    workspace: SampleWorkspace,
    outputs: SampleOutputs,
    *,
    config: SampleConfig,
) -> None:
    """Draw one id from logits by the settings in device memory; four launches.

    Args:
        logits: [1, V] float32.
        token_state: [V] int32, per id: negative = never sampled; bit 30 = occurs in the prompt; low bits = times
            sampled. The draw counts its own id.
        settings: [8] float32, state: [8] int32 (kernels/sampling_layout.py). state's step is advanced.
        workspace: arrays of `sample_workspace_shapes`.

    Raises:
        ValueError, TypeError: shape, dtype or layout.
    """
    check_array("sample: logits", logits, (1, None), "float32", align=16)
    vocab = int(logits.shape[1])
    check_array("sample: token_state", token_state, (vocab,), "int32", align=16)
    check_array("sample: settings", settings, (SETTINGS,), "float32")
    check_outputs("sample", state, outputs)
    for name, (shape, dtype) in sample_workspace_shapes(vocab, config).items():
        check_array(f"sample: workspace.{name}", getattr(workspace, name), shape, dtype, align=16)
    w, flat, pdl = workspace, logits.reshape(-1), int(launcher.pdl)
    together = Together(launcher)
    chunk, sub, own = config.chunk, config.sub, config.own
    chunks = -(-vocab // chunk)
    args: tuple[Any, ...] = (flat, token_state, settings, w.adjusted, w.run_maxima, w.partials)
    together(sample_adjust_kernel, (chunks, 1, 1), (*args, chunk, sub, pdl))
    args = (w.adjusted, w.run_maxima, settings, state, w.won_values, w.won_ids)
    together(sample_select_kernel, (chunks, 1, 1), (*args, chunk, sub, COMPARES * sub // chunk, pdl))
    args = (w.won_values.reshape(-1), w.won_ids.reshape(-1), w.run_maxima, settings, state)
    args += (w.sorted_values, w.sorted_ids)
    rows = min(CANDIDATES, chunks * chunk // sub)
    together(sample_rank_kernel, (rows * sub // own, 1, 1), (*args, sub, own, COMPARES // own, pdl))
    args = (flat, w.adjusted, w.partials, w.sorted_values, w.sorted_ids, settings, state, token_state)
    args += (outputs.sampled, outputs.length, outputs.ids, outputs.logprobs)
    together(sample_draw_kernel, (1, 1, 1), (*args, power_of_two(chunks), config.tail, pdl))
    together.launch()


def model_launches(launcher: Launcher, model: ModelShape, dtype: str) -> None:
    """A draw from the vocabulary."""
    del dtype  # logits are float32
    config = SampleConfig(**table_config("sample", launcher.arch, vocab=model.vocab))
    shapes = sample_workspace_shapes(model.vocab, config)
    workspace = SampleWorkspace(**{name: ArraySpec(*shape) for name, shape in shapes.items()})
    arrays = (ArraySpec(model.vocab, "int32"), ArraySpec(SETTINGS, "float32"), ArraySpec(STATE_WORDS, "int32"))
    logits = ArraySpec((1, model.vocab), "float32")
    sample(launcher, logits, *arrays, workspace, output_specs(), config=config)
