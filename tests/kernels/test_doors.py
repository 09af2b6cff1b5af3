"""Every wrapper refuses every wrong array, naming what it found and what it expected, before anything is launched.

A table of valid calls; each array of each call is then given a wrong type, rank, length, layout, alignment and place.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kernels.activation import swiglu, xielu
from kernels.argmax import ArgmaxConfig, SampleOutputs, argmax, argmax_merge
from kernels.attention_decode import AttentionConfig, attention_decode, workspace_floats
from kernels.attention_prefill import AttentionPrefillConfig, attention_prefill
from kernels.catalogue import FAMILIES
from kernels.dequantise import dequantise
from kernels.digit_slices import digit_slices
from kernels.digits import token_digits
from kernels.embedding import embedding, embedding_decode
from kernels.interpreter import InterpreterLauncher
from kernels.kv_write import kv_write
from kernels.launch import GpuLauncher
from kernels.linear import linear, linear_norm, linear_residual, linear_swiglu, linear_xielu
from kernels.linear_int8 import (
    linear_int8,
    linear_int8_norm,
    linear_int8_residual,
    linear_int8_swiglu,
    linear_int8_xielu,
)
from kernels.linear_int8_tokens import (
    linear_int8_tokens,
    linear_int8_tokens_norm,
    linear_int8_tokens_residual,
    linear_int8_tokens_swiglu,
    linear_int8_tokens_xielu,
)
from kernels.linear_prefill import (
    LinearPrefillConfig,
    linear_prefill,
    linear_prefill_residual,
    linear_prefill_swiglu,
    linear_prefill_xielu,
)
from kernels.linear_prefill_digits import (
    linear_prefill_digits,
    linear_prefill_digits_residual,
    linear_prefill_digits_swiglu,
    linear_prefill_digits_xielu,
)
from kernels.linear_prefill_int8 import linear_prefill_int8_residual
from kernels.linear_split import LinearSplitConfig, linear_split, linear_split_residual
from kernels.linear_tokens import (
    linear_tokens_norm,
    linear_tokens_residual,
    linear_tokens_swiglu,
    linear_tokens_xielu,
)
from kernels.norm import rms_norm, rms_norm_digits
from kernels.rope import qk_norm_rope_kv, rope_queries
from kernels.sampling import SampleConfig, SampleWorkspace, sample, sample_workspace_shapes
from kernels.specs import ArraySpec, RecordingLauncher
from kernels.widen_pages import widen_pages
from tests.reference.random_arrays import DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Read element by element, so that any address serves: indices, counters, settings, pairs of numbers.
ANY_ADDRESS = {"ids", "alphas", "start", "length", "block_table", "settings", "state", "sampled", "logprobs"} | {
    "partial_values",
    "partial_ids",
}


@dataclass
class Call:
    """A wrapper with arrays that fit. Names with a dot are fields of a dataclass argument."""

    wrapper: Callable[..., None]
    arrays: dict[str, ArraySpec]
    options: dict[str, Any] = field(default_factory=dict)
    groups: dict[str, Callable[..., Any]] = field(default_factory=dict)

    def __call__(self, launcher: Any, arrays: dict[str, Any] | None = None, **options: Any) -> None:
        given = dict(self.arrays if arrays is None else arrays)
        for name, kind in self.groups.items():
            given[name] = kind(**{key.partition(".")[2]: given.pop(key) for key in list(given) if key.startswith(name)})
        self.wrapper(launcher, **given, **(self.options | options))


def half(*shape: int) -> ArraySpec:
    return ArraySpec(shape, "bfloat16")


def floats(*shape: int) -> ArraySpec:
    return ArraySpec(shape, "float32")


def ints(*shape: int) -> ArraySpec:
    return ArraySpec(shape, "int32")


def signed(*shape: int) -> ArraySpec:
    return ArraySpec(shape, "int8")


def pair(values: Any, scales: Any) -> tuple[Any, Any]:
    return values, scales


HEADS = {"kv_heads": 2, "head_dim": 64}
ROPE = {"cos": floats(128, 32), "sin": floats(128, 32)}
POOLS = {"k_pool": half(256, 64), "v_pool": half(256, 64), "block_table": ints(16)}
TILES = {"config": LinearPrefillConfig(64, 64, 64)}
SPLIT = {"config": LinearSplitConfig(2, 4, 32)}
OUTPUTS = {"outputs.sampled": ints(1), "outputs.length": ints(1), "outputs.ids": ints(8), "outputs.logprobs": floats(8)}
DECODE = AttentionConfig("page", 2)
SAMPLE = SampleConfig()
WORKSPACE = {f"workspace.{name}": ArraySpec(*shape) for name, shape in sample_workspace_shapes(1100, SAMPLE).items()}
TOKENS = {"x.values": signed(8, 64), "x.scales": floats(3, 1)}
MADE = {"digits.values": signed(8, 64), "digits.scales": floats(3, 1)}
PARTS = {"parts": floats(3 * 128)}
IN_TWO = {"w": signed(48, 64), "scale": floats(48, 2)}  # groups of 32
INT8_POOLS = {
    "k_pool": ArraySpec((256, 64), "int8"),
    "v_pool": ArraySpec((256, 64), "int8"),
    "block_table": ints(16),
} | {
    "scales.k": floats(4, 64),
    "scales.v": floats(4, 64),
}
SCALES: dict[str, Any] = {"scales": lambda k, v: (k, v)}
DIGITS = {"x": signed(16, 64), "x_scale": floats(8, 1), "w": signed(48, 64), "scale": floats(48, 1)}
INT8 = {"w": signed(48, 64), "scale": floats(48, 4)}  # groups of 16
GAIN = {"q_gain": floats(1, 64), "k_gain": floats(1, 64)}

CALLS = [
    Call(swiglu, {"gate_up": half(3, 128), "y": half(3, 64)}),
    Call(xielu, {"x": half(3, 64), "alphas": floats(2), "y": half(3, 64)}),
    Call(
        argmax,
        {"logits": floats(1, 1100), "partial_values": floats(2), "partial_ids": ints(2), "state": ints(8), **OUTPUTS},
        {"vocab": 1000, "config": ArgmaxConfig()},
        {"outputs": SampleOutputs},
    ),
    Call(
        argmax_merge,
        {"partial_values": floats(3), "partial_ids": ints(3), "state": ints(8), **OUTPUTS},
        groups={"outputs": SampleOutputs},
    ),
    Call(
        sample,
        {"logits": floats(1, 1100), "token_state": ints(1100), "settings": floats(8), "state": ints(8)}
        | WORKSPACE
        | OUTPUTS,
        {"config": SAMPLE},
        {"workspace": SampleWorkspace, "outputs": SampleOutputs},
    ),
    Call(
        attention_decode,
        {"qkv": half(1, 512), **GAIN, **ROPE, **POOLS, "length": ints(1)}
        | {"workspace": floats(workspace_floats(DECODE, 4, 2, 64)), "out": half(1, 256)},
        {**HEADS, "context": 100, "config": DECODE},
    ),
    Call(
        attention_decode,
        {"qkv": half(1, 512), **GAIN, **ROPE, **INT8_POOLS, "length": ints(1)}
        | {"workspace": floats(workspace_floats(DECODE, 4, 2, 64)), "out": half(1, 256)},
        {**HEADS, "context": 100, "config": DECODE},
        SCALES,
    ),
    Call(
        widen_pages,
        {**INT8_POOLS, "start": ints(1), "k_out": half(256, 64), "v_out": half(256, 64)},
        {**HEADS, "tokens": 3},
        SCALES,
    ),
    Call(kv_write, {"qkv": half(3, 512), "gain": floats(1, 64), **ROPE, "start": ints(1), **INT8_POOLS}, HEADS, SCALES),
    Call(
        attention_prefill,
        {"q": half(3, 256), **POOLS, "start": ints(1), "out": half(3, 256)},
        {**HEADS, "config": AttentionPrefillConfig(tile_q=64)},
    ),
    Call(embedding, {"ids": ints(3), "table": half(50, 64), "stream": floats(3, 64)}),
    Call(
        embedding_decode,
        {"ids": ints(2), "table": half(50, 64), "gain": floats(1, 64), "stream": floats(2, 64), "normed": half(2, 64)}
        | {"square_sums": floats(2, 8)},
    ),
    Call(
        embedding,
        {"ids": ints(3), "table": signed(50, 64), "stream": floats(3, 64), "scale": floats(50, 4)},
    ),
    Call(
        embedding_decode,
        {"ids": ints(1), "table": signed(50, 64), "gain": floats(1, 64), "stream": floats(1, 64), "normed": half(1, 64)}
        | {"square_sums": floats(1, 8), "scale": floats(50, 4)},
    ),
    Call(kv_write, {"qkv": half(3, 512), "gain": floats(1, 64), **ROPE, "start": ints(1), **POOLS}, HEADS),
    Call(
        rope_queries, {"qkv": half(3, 512), "gain": half(1, 64), **ROPE, "start": ints(1), "out": half(3, 256)}, HEADS
    ),
    Call(
        qk_norm_rope_kv,
        {"qkv": half(3, 512), **GAIN, **ROPE, "start": ints(1), **POOLS, "queries": half(3, 256)},
        HEADS,
    ),
    Call(linear, {"x": half(1, 64), "w": half(48, 64), "y": floats(1, 48), "bias": half(1, 48)}),
    Call(
        linear_norm,
        {"normed": half(1, 64), "square_sums": floats(1, 8), "w": half(48, 64), "y": half(1, 48)}
        | {"bias": floats(1, 48)},
        {"eps": 1e-6},
    ),
    Call(
        linear_swiglu,
        {"normed": half(1, 64), "square_sums": floats(1, 8), "w": half(48, 64), "y": half(1, 24)},
        {"eps": 1e-6},
    ),
    Call(
        linear_xielu,
        {"normed": half(1, 64), "square_sums": floats(1, 8), "w": half(48, 64), "alphas": floats(2), "y": half(1, 48)},
        {"eps": 1e-6},
    ),
    Call(
        linear_residual,
        {"x": half(1, 64), "w": half(48, 64), "stream": floats(1, 48), "gain": floats(1, 48)}
        | {"normed": half(1, 48), "square_sums": floats(1, 8), "bias": half(1, 48)},
    ),
    Call(
        linear_tokens_norm,
        {"normed": half(8, 64), "square_sums": floats(3, 8), "w": half(48, 64), **PARTS, "y": half(3, 48)}
        | {"bias": floats(1, 48)},
        {"eps": 1e-6},
    ),
    Call(
        linear_tokens_swiglu,
        {"normed": half(8, 64), "square_sums": floats(3, 8), "w": half(48, 64), **PARTS, "y": half(3, 24)}
        | {"bias": half(1, 48)},
        {"eps": 1e-6},
    ),
    Call(
        linear_tokens_xielu,
        {"normed": half(8, 64), "square_sums": floats(3, 8), "w": half(48, 64), **PARTS}
        | {"alphas": floats(2), "y": half(3, 48)},
        {"eps": 1e-6},
    ),
    Call(
        linear_tokens_residual,
        {"x": half(8, 64), "w": half(48, 64), **PARTS, "stream": floats(3, 48), "gain": floats(1, 48)}
        | {"normed": half(3, 48), "square_sums": floats(3, 4), "bias": half(1, 48)},
    ),
    Call(linear_int8, {"x": half(1, 64), **INT8, "y": floats(1, 48), "bias": half(1, 48)}),
    Call(
        linear_int8_norm,
        {"normed": half(1, 64), "square_sums": floats(1, 8), **INT8, "y": half(1, 48), "bias": floats(1, 48)},
        {"eps": 1e-6},
    ),
    Call(
        linear_int8_swiglu,
        {"normed": half(1, 64), "square_sums": floats(1, 8), **INT8, "y": half(1, 24), "bias": half(1, 48)},
        {"eps": 1e-6},
    ),
    Call(
        linear_int8_xielu,
        {"normed": half(1, 64), "square_sums": floats(1, 8), **INT8, "alphas": floats(2), "y": half(1, 48)},
        {"eps": 1e-6},
    ),
    Call(
        linear_int8_residual,
        {"x": half(1, 64), **INT8, "stream": floats(1, 48), "gain": floats(1, 48), "normed": half(1, 48)}
        | {"square_sums": floats(1, 8), "bias": half(1, 48)},
    ),
    Call(digit_slices, {"x": half(3, 64), **MADE}, {}, {"digits": pair}),
    Call(
        linear_int8_tokens,
        {**TOKENS, **IN_TWO, **PARTS, "y": floats(3, 48), "bias": half(1, 48)},
        {},
        {"x": pair},
    ),
    Call(
        linear_int8_tokens_norm,
        {**TOKENS, "square_sums": floats(3, 8), **IN_TWO, **PARTS, "y": half(3, 48), "bias": floats(1, 48)},
        {"eps": 1e-6},
        {"x": pair},
    ),
    Call(
        linear_int8_tokens_swiglu,
        {**TOKENS, "square_sums": floats(3, 8), "w": signed(128, 64), "scale": floats(128, 1), **PARTS}
        | {"y": half(3, 64), **MADE, "bias": half(1, 128)},
        {"eps": 1e-6},
        {"x": pair, "digits": pair},
    ),
    Call(
        linear_int8_tokens_xielu,
        {**TOKENS, "square_sums": floats(3, 8), "w": signed(64, 64), "scale": floats(64, 1), **PARTS}
        | {"alphas": floats(2), "y": half(3, 64), **MADE},
        {"eps": 1e-6},
        {"x": pair, "digits": pair},
    ),
    Call(
        linear_int8_tokens_residual,
        {**TOKENS, "w": signed(64, 64), "scale": floats(64, 2), **PARTS, "stream": floats(3, 64)}
        | {"gain": floats(1, 64), "normed": half(3, 64), "square_sums": floats(3, 4), **MADE, "bias": half(1, 64)},
        {},
        {"x": pair, "digits": pair},
    ),
    Call(
        linear_split,
        {"x": half(1, 64), "w": half(48, 64), "parts": floats(2, 48), "y": floats(1, 48), "bias": half(1, 48)},
        SPLIT,
    ),
    Call(
        linear_split_residual,
        {"x": half(1, 64), "w": half(48, 64), "parts": floats(2, 48), "stream": floats(1, 48), "gain": floats(1, 48)}
        | {"normed": half(1, 48), "square_sums": floats(1, 4), "bias": half(1, 48)},
        SPLIT,
    ),
    Call(linear_prefill, {"x": half(3, 64), "w": half(48, 64), "y": half(3, 48), "bias": half(48)}, TILES),
    Call(
        linear_prefill_residual,
        {"x": half(3, 64), "w": half(48, 64), "residual": floats(3, 48), "bias": half(48)},
        TILES,
    ),
    Call(linear_prefill_swiglu, {"x": half(3, 64), "w": half(48, 64), "y": half(3, 24), "bias": half(48)}, TILES),
    Call(
        linear_prefill_xielu,
        {"x": half(3, 64), "w": half(48, 64), "alphas": floats(2), "y": half(3, 48), "bias": half(48)},
        TILES,
    ),
    Call(linear_prefill_int8_residual, {"x": half(3, 64), **INT8, "residual": floats(3, 48), "bias": half(48)}, TILES),
    Call(dequantise, {**INT8, "out": half(48, 64)}),
    Call(token_digits, {"x": half(8, 64), "digits": signed(16, 64), "scales": floats(8, 1)}),
    Call(linear_prefill_digits, {**DIGITS, "y": half(8, 48), "bias": half(48)}, TILES),
    Call(linear_prefill_digits_residual, {**DIGITS, "residual": floats(8, 48), "bias": half(48)}, TILES),
    Call(linear_prefill_digits_swiglu, {**DIGITS, "y": half(8, 24), "bias": half(48)}, TILES),
    Call(linear_prefill_digits_xielu, {**DIGITS, "alphas": floats(2), "y": half(8, 48), "bias": half(48)}, TILES),
    Call(rms_norm, {"x": floats(3, 64), "gain": half(1, 64), "y": half(3, 64)}, {"eps": 1e-6}),
    Call(
        rms_norm_digits,
        {"x": floats(8, 64), "gain": half(1, 64), "digits": signed(16, 64), "scales": floats(8, 1)},
        {"eps": 1e-6},
    ),
]


def each_array() -> Iterator[Any]:
    for number, call in enumerate(CALLS):
        for name in call.arrays:
            yield pytest.param(call, name, id=f"{number}-{call.wrapper.__name__}-{name}")


def refused(call: Call, name: str, wrong: Any, error: type[Exception], *words: str) -> None:
    """The call with one array replaced ends with `error`, whose message names the wrapper and `words`."""
    launcher = RecordingLauncher("sm_90", pdl=True)
    with pytest.raises(error) as caught:
        call(launcher, call.arrays | {name: wrong})
    message = str(caught.value)
    assert message.startswith(("argmax: ", f"{call.wrapper.__name__}: ", "rope_queries: ", "kv_write: ")), message
    for word in words:
        assert word in message, message
    assert launcher.records == [], "launched before it refused"


def test_the_table_has_every_wrapper() -> None:
    parts = {"kernels.tokens_join"}  # of the wrappers of two other families
    wrappers = {
        f"{family}.{name}"
        for family in set(FAMILIES) - parts
        for name, function in vars(importlib.import_module(family)).items()
        if inspect.isfunction(function)
        and function.__module__ == family
        and next(iter(inspect.signature(function).parameters), "") == "launcher"
        and not name.startswith("_")
        and name != "model_launches"
    }
    assert {f"{call.wrapper.__module__}.{call.wrapper.__name__}" for call in CALLS} | {
        "kernels.argmax.argmax"
    } == wrappers


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.wrapper.__name__)
def test_the_calls_of_the_table_are_valid(call: Call) -> None:
    launcher = RecordingLauncher("sm_90", pdl=True)
    call(launcher)
    assert launcher.records
    parameters = inspect.signature(call.wrapper).parameters
    assert {name.partition(".")[0] for name in call.arrays} | set(call.options) <= set(parameters)


@pytest.mark.parametrize(("call", "name"), list(each_array()))
class TestEveryArray:
    def test_type(self, call: Call, name: str) -> None:
        right = call.arrays[name]
        refused(call, name, ArraySpec(right.shape, "float64"), TypeError, "float64", "expected")

    def test_no_array(self, call: Call, name: str) -> None:
        refused(call, name, [1.0, 2.0], TypeError, "list", "expected an array")

    def test_rank(self, call: Call, name: str) -> None:
        right = call.arrays[name]
        shape = (1, 1, *right.shape)
        refused(call, name, ArraySpec(shape, right.dtype), ValueError, str(shape), "expected")

    def test_length(self, call: Call, name: str) -> None:
        """Each axis three too long: at least one of the call's arrays then contradicts another, or a rule."""
        right = call.arrays[name]
        for axis in range(right.ndim):
            shape = tuple(n + 3 * (i == axis) for i, n in enumerate(right.shape))
            if (name.partition(".")[2] or name, axis) in FREE_AXES.get(call.wrapper.__name__, ()):
                continue
            refused(call, name, ArraySpec(shape, right.dtype), ValueError, "expect")

    def test_empty(self, call: Call, name: str) -> None:
        right = call.arrays[name]
        refused(call, name, ArraySpec((0, *right.shape[1:]), right.dtype), ValueError)

    def test_layout(self, call: Call, name: str) -> None:
        right = call.arrays[name]
        if right.size == 1:
            pytest.skip("one element has one layout")
        strides = tuple(2 * stride for stride in right.strides)
        refused(call, name, ArraySpec(right.shape, right.dtype, strides), ValueError, "not C-contiguous", str(strides))

    def test_alignment(self, call: Call, name: str) -> None:
        right = call.arrays[name]
        if (name.partition(".")[2] or name) in ANY_ADDRESS:
            pytest.skip("read element by element")
        wrong = ArraySpec(right.shape, right.dtype, offset=8)
        refused(call, name, wrong, ValueError, "address 0x8", "multiple of 16 bytes")

    def test_place(self, call: Call, name: str) -> None:
        """One array in the wrong memory, the others right: no kernel of the wrapper runs."""
        if call.wrapper.__name__.startswith("argmax") and name == "outputs.logprobs":
            pytest.skip("argmax gives it to no kernel")
        for launcher, right, wrong in ((Counting(), DeviceArray, host_array), (Interpreted(), host_array, DeviceArray)):
            arrays: dict[str, Any] = {key: right(spec) for key, spec in call.arrays.items()}
            arrays[name] = wrong(call.arrays[name])
            with pytest.raises(TypeError, match=r"argument of shape .* in (host|device) memory, expected a"):
                call(launcher, arrays)
            assert launcher.launches == 0


# Axes whose length a wrapper takes as it is: how many ids, positions, pages, entries of a ring there are.
PARTS_AXES = {("parts", 0)}
FREE_AXES: dict[str, set[tuple[str, int]]] = {
    "argmax": {("logits", 1)},
    "attention_decode": {("block_table", 0), ("workspace", 0)},
    "attention_prefill": {("block_table", 0)},
    "embedding": {("table", 0)},
    "embedding_decode": {("table", 0)},
    "kv_write": {("block_table", 0), ("qkv", 0)},
    **dict.fromkeys(
        (f"linear_int8_tokens{form}" for form in ("", "_norm", "_swiglu", "_xielu", "_residual")), PARTS_AXES
    ),
    **dict.fromkeys((f"linear_tokens{form}" for form in ("_norm", "_swiglu", "_xielu", "_residual")), PARTS_AXES),
    "qk_norm_rope_kv": {("block_table", 0)},
    "widen_pages": {("block_table", 0)},
}


def host_array(spec: ArraySpec) -> np.ndarray:
    return np.zeros(spec.shape, DTYPES[str(spec.dtype)])


class DeviceArray(ArraySpec):
    """What a launcher can see of a CuPy array: shape, type, and that it lies in device memory."""

    def __init__(self, spec: ArraySpec) -> None:
        super().__init__(spec.shape, spec.dtype, spec.strides, spec.offset)

    __cuda_array_interface__: dict[str, Any] = {}  # noqa: RUF012

    def reshape(self, *shape: Any) -> DeviceArray:
        return DeviceArray(super().reshape(*shape))

    def same_rows(self, rows: int) -> DeviceArray:
        return DeviceArray(super().same_rows(rows))

    def transpose(self, *axes: int) -> DeviceArray:
        return DeviceArray(super().transpose(*axes))

    def __getitem__(self, index: Any) -> DeviceArray:
        return DeviceArray(super().__getitem__(index))


class Counting(GpuLauncher):
    """A GPU launcher that counts instead of launching."""

    def __init__(self) -> None:
        super().__init__(0, "sm_90", pdl=True)
        self.launches = 0

    def __call__(self, kernel: Any, grid: Any, args: Any) -> None:
        self.check(kernel, args)
        self.launches += 1


class Interpreted(InterpreterLauncher):
    def __init__(self) -> None:
        super().__init__("sm_90", pdl=True)


@pytest.mark.parametrize(
    ("wrapper", "options", "message"),
    [
        (kv_write, {"kv_heads": 0}, r"expected \(heads \+ 2 · 0\)"),
        (kv_write, {"head_dim": 96}, "head_dim is 96, expected 64 or 128"),
        (rope_queries, {"kv_heads": 3}, "qkv has 512 columns, expected"),
        (attention_decode, {"context": 0}, "context is 0, expected at least 1"),
        (attention_decode, {"context": 129}, "hold 128 positions, not 129"),
        (attention_prefill, {"kv_heads": 0}, "q has 256 columns, expected a multiple of 0 KV heads"),
        (attention_prefill, {"head_dim": 32}, "head_dim is 32, expected 64 or 128"),
        (attention_prefill, {"scale": float("nan")}, "scale is nan, expected a positive number"),
        (argmax, {"vocab": 0}, "vocab is 0, logits have 1100 columns"),
        (argmax, {"vocab": 1101}, "vocab is 1101, logits have 1100 columns"),
    ],
)
def test_numbers(wrapper: Any, options: dict[str, Any], message: str) -> None:
    call = next(call for call in CALLS if call.wrapper is wrapper and not call.groups.keys() & {"scales"})
    launcher = RecordingLauncher("sm_90")
    with pytest.raises(ValueError, match=message):
        call(launcher, **options)
    assert launcher.records == []
