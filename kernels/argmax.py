"""Greedy choice on the device: the first id of the largest logit, and what every choice leaves behind.

Two stages: each block reduces a run of the vocabulary to (maximum, first id), one block reduces those. A product that
already has its block's maximum starts at the second (`argmax_merge`).

It refuses logits that are not float32. NaN logits are the caller's bug: `first_max` does not look for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cuda.tile as ct

from kernels.configs import config as table_config
from kernels.launch import Together, check_array
from kernels.notation import NEG_INF, ZERO, Int
from kernels.sampling_layout import MASKED_LOGIT, STATE_WORDS, advance
from kernels.specs import ArraySpec

if TYPE_CHECKING:
    from kernels.launch import Launcher
    from kernels.shapes import ModelShape


@dataclass(frozen=True)
class ArgmaxConfig:
    """chunk: ids per block of the first stage."""

    chunk: int = 1024


@dataclass(frozen=True)
class SampleOutputs:
    """What a draw leaves: for the next step on the device, and for the host to read later.

    sampled [1] int32: the id. length [1] int32: 1 is added. ids [R] int32 and logprobs [R] float32: the id and its
    log-probability (natural log of the raw soft-max) at step % R, R a power of two. argmax leaves logprobs alone.
    """

    sampled: Any
    length: Any
    ids: Any
    logprobs: Any


def first_max(value_a, position_a, value_b, position_b):
    """The larger value; at equal values the smaller position. A quarter of the compares of argmax plus max."""
    take_b = (value_b > value_a) | ((value_b == value_a) & (position_b < position_a))
    return ct.where(take_b, value_b, value_a), ct.where(take_b, position_b, position_a)


@ct.kernel
def argmax_chunk_kernel(logits, partial_values, partial_ids, CHUNK: Int, VOCAB: Int, PDL: Int):
    """partial[i] = (max, first position of the max) of logits[i * CHUNK : (i + 1) * CHUNK].

    logits [V'] float32, V' >= VOCAB; partial_values [chunks] float32; partial_ids [chunks] int32.
    Grid (chunks,): one block owns CHUNK ids.
    No arithmetic, so no rounding. Equal values: the smaller id.
    Ids from VOCAB on and past the end of the array (padding -inf) never win.
    """
    chunk = ct.bid(0)
    if PDL:
        ct.grid_dependency_control_launch_dependents()
        ct.grid_dependency_control_wait()
    ids = ct.arange(CHUNK, dtype=ct.int32) + chunk * CHUNK
    values = ct.load(logits, index=(chunk,), shape=(CHUNK,), padding_mode=NEG_INF, allow_tma=False)
    values = ct.where(ids < VOCAB, values, MASKED_LOGIT)
    value, position = ct.reduce((values, ids), 0, first_max, (float("-inf"), 2**31 - 1))
    ct.store(partial_values, index=(chunk,), tile=value, allow_tma=False)
    ct.store(partial_ids, index=(chunk,), tile=position, allow_tma=False)


@ct.kernel
def argmax_merge_kernel(partial_values, partial_ids, state, sampled, length, ids, PARTIALS: Int, PDL: Int):
    """sampled[0] = ids[step % R] = the id whose partial value is largest, ties to the smaller id.

    partial_values [n] float32, partial_ids [n] int32, n <= PARTIALS; state [8], sampled, length [1], ids [R] int32.
    Grid (1,). Adds 1 to length and to the step.
    No arithmetic, so no rounding.
    Entries past n read as -inf and never win.
    """
    if PDL:
        ct.grid_dependency_control_launch_dependents()
        ct.grid_dependency_control_wait()
    values = ct.load(partial_values, index=(0,), shape=(PARTIALS,), padding_mode=NEG_INF, allow_tma=False)
    positions = ct.load(partial_ids, index=(0,), shape=(PARTIALS,), padding_mode=ZERO, allow_tma=False)
    _, drawn = ct.reduce((values, positions), 0, first_max, (float("-inf"), 2**31 - 1))
    advance(state, sampled, length, ids, drawn)


def argmax(
    launcher: Launcher,
    logits: Any,
    partial_values: Any,
    partial_ids: Any,
    state: Any,
    outputs: SampleOutputs,
    *,
    vocab: int,
    config: ArgmaxConfig,
) -> None:
    """The first id of the largest of logits[0, :vocab] to `outputs`; two launches.

    Args:
        logits: [1, V'] float32, V' >= vocab.
        partial_values, partial_ids: [ceil(V' / chunk)] float32 and int32, workspace.
        state: [8] int32 (kernels/sampling_layout.py); the step is advanced, nothing else is read.

    Raises:
        ValueError, TypeError: shape, dtype or layout.
    """
    check_array("argmax: logits", logits, (1, None), "float32", align=16)
    width = int(logits.shape[1])
    if not 1 <= vocab <= width:
        raise ValueError(f"argmax: vocab is {vocab}, logits have {width} columns")
    chunks = -(-width // config.chunk)
    check_array("argmax: partial_values", partial_values, (chunks,), "float32")
    check_array("argmax: partial_ids", partial_ids, (chunks,), "int32")
    args = (logits.reshape(-1), partial_values, partial_ids, config.chunk, vocab, int(launcher.pdl))
    together = Together(launcher)
    together(argmax_chunk_kernel, (chunks, 1, 1), args)
    argmax_merge(together, partial_values, partial_ids, state, outputs)
    together.launch()


def argmax_merge(launcher: Launcher, partial_values: Any, partial_ids: Any, state: Any, outputs: SampleOutputs) -> None:
    """The second stage alone, for a producer that already left one (maximum, first id) per block.

    Args:
        partial_values, partial_ids: [n] float32 and int32, n <= 4096.
        state: [8] int32; the step is advanced.

    Raises:
        ValueError, TypeError: shape, dtype or layout.
    """
    check_array("argmax: partial_values", partial_values, (None,), "float32")
    count = int(partial_values.shape[0])
    check_array("argmax: partial_ids", partial_ids, (count,), "int32")
    if count > 4096:
        raise ValueError(f"argmax: {count} partial maxima, at most 4096 fit one block")
    check_outputs("argmax", state, outputs)
    args = (partial_values, partial_ids, state, outputs.sampled, outputs.length, outputs.ids)
    launcher(argmax_merge_kernel, (1, 1, 1), (*args, power_of_two(count), int(launcher.pdl)))


def check_outputs(op: str, state: Any, outputs: SampleOutputs) -> None:
    check_array(f"{op}: state", state, (STATE_WORDS,), "int32")
    check_array(f"{op}: sampled", outputs.sampled, (1,), "int32")
    check_array(f"{op}: length", outputs.length, (1,), "int32")
    check_array(f"{op}: ids", outputs.ids, (None,), "int32")
    ring = int(outputs.ids.shape[0])
    if ring & (ring - 1):
        raise ValueError(f"{op}: ids has {ring} entries, expected a power of two")
    check_array(f"{op}: logprobs", outputs.logprobs, (ring,), "float32")


def power_of_two(count: int) -> int:
    """The tile that holds `count` elements, at least one a thread."""
    return max(128, 1 << (count - 1).bit_length())


def model_launches(launcher: Launcher, model: ModelShape, dtype: str) -> None:
    """A greedy choice over the vocabulary."""
    del dtype  # logits are float32
    config = ArgmaxConfig(**table_config("argmax", launcher.arch, vocab=model.vocab))
    chunks = -(-model.vocab // config.chunk)
    partials = (ArraySpec(chunks, "float32"), ArraySpec(chunks, "int32"))
    logits, state = ArraySpec((1, model.vocab), "float32"), ArraySpec(STATE_WORDS, "int32")
    argmax(launcher, logits, *partials, state, output_specs(), vocab=model.vocab, config=config)


def output_specs() -> SampleOutputs:
    """The outputs without memory, with a ring of 64 steps."""
    one = ArraySpec(1, "int32")
    return SampleOutputs(one, one, ArraySpec(64, "int32"), ArraySpec(64, "float32"))
