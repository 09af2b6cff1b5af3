"""INT8 weight products of a verify step: linear_int8.py's five for 1 to 8 tokens, bytes by bytes on the tensor cores.

    linear_int8_tokens           y = x Wᵀ (+ bias)                  W[n, k] = scale[n, k // G] · w[n, k], w int8
    linear_int8_tokens_norm      the same with RMSNorm of the input folded in; also the LM head, y in float32
    linear_int8_tokens_swiglu    the same, then silu(gate)·up on interleaved rows
    linear_int8_tokens_xielu     the same, then xIELU
    linear_int8_tokens_residual  stream += x Wᵀ (+ bias), and what the next RMSNorm needs

Two launches each. The first multiplies: weights on M, the tokens' digits (kernels/digit_slices.py) on N, two columns a
token. A block owns some rows and one or more slices of 512 columns, so that products of few rows fill the GPU too; it
asks for all its weights before it waits for the kernel before it. int32 sums of a slice are exact, scaled
in float32 and stored as shares. The second launch (kernels/tokens_join.py) adds the shares of a token, ends the
product, and makes the digits that the next product wants.

Refuses: more than 8 tokens, groups of fewer than 32 columns (the narrowest product of bytes).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cuda.tile as ct

from kernels.digit_slices import MAX_TOKENS, SLICE, check_digits, columns, digit_shapes, slices
from kernels.int8_scales import check_int8
from kernels.int8_tokens import (
    Int8TokensConfig,
    check_cut,
    digit_tile,
    early_tile,
    joined,
    linear_int8_tokens_config,
    part_floats,
    run_scales,
    slice_sums,
    token_scales,
)
from kernels.launch import check_array, with_hints
from kernels.linear import PLAIN, SWIGLU, XIELU
from kernels.linear_int8 import GROUP
from kernels.notation import HALF, Bool, Int
from kernels.specs import ArraySpec
from kernels.tokens_join import both, join, join_residual, shares_in, tokens_square_slots

if TYPE_CHECKING:
    from kernels.digit_slices import Digits
    from kernels.launch import Launcher
    from kernels.shapes import ModelShape
    from kernels.tokens_join import Launch


@ct.kernel
def linear_int8_tokens_kernel(
    w, scale, x, x_scale, parts, TN: Int, MK: Int, STEPS: Int, G: Int, COLUMNS: Int, EVEN: Bool, PDL: Bool
):
    """parts[p, t, n] = Σ_k scale[n, k // G] w[n, k] x[t, k] over the p-th share of the columns.

    w [N, K] int8; scale [N, 1] (G = 0) or [N, K / G] float32; x [COLUMNS, K] int8 and x_scale [T, slices] float32
    are the tokens in digits; parts [shares, T, N] float32. Grid (ceil(N / TN), shares): TN rows, STEPS slices of 512
    columns. int32 sums within a slice and group, exact; scaled and added in float32. EVEN: tiles divide N and K, and
    nothing is checked but the tokens; else edges read 0 and stores past N are dropped.
    """
    i, p = ct.bid(0), ct.bid(1)
    T = ct.static_eval(COLUMNS // 2)
    PER = ct.static_eval(SLICE // MK)
    if PDL:
        ct.grid_dependency_control_launch_dependents()
    tiles = tuple(early_tile(w, i, p * STEPS * PER + j, TN, MK, EVEN) for j in ct.static_iter(range(STEPS * PER)))
    scales = tuple(run_scales(scale, i, p * STEPS + s, TN, G, EVEN) for s in ct.static_iter(range(STEPS)))
    if PDL:
        ct.grid_dependency_control_wait()
    of_tokens = tuple(token_scales(x_scale, p * STEPS + s, T) for s in ct.static_iter(range(STEPS)))
    xs = tuple(digit_tile(x, p * STEPS * PER + j, MK, COLUMNS, EVEN) for j in ct.static_iter(range(STEPS * PER)))
    total = ct.zeros((TN, T), dtype=ct.float32)
    for s in ct.static_iter(range(STEPS)):
        sums = slice_sums(tiles, xs, scales[s], s * PER, PER, TN, COLUMNS)
        total = total + joined(sums, TN, T) * of_tokens[s]
    out = ct.permute(total, (1, 0)).reshape((1, T, TN))
    ct.store(parts, index=(p, 0, i), tile=out, allow_tma=False)


# -- wrappers


def linear_int8_tokens(
    launcher: Launcher, x: Digits, w: Any, scale: Any, parts: Any, y: Any, *, bias: Any = None,
    config: Int8TokensConfig | None = None,
) -> None:  # fmt: skip
    """y [T, N] = x [T, K] · (scale · w)ᵀ (+ bias [1, N]) for 1 to 8 tokens; y half or float32.

    `x` is digits and scales as kernels.digit_slices makes them; w int8 [N, K]; scale float32 [N, K / G] or [N, 1];
    `parts` float32, a workspace of at least `part_floats`.

    Raises:
        ValueError, TypeError: an array's shape, layout, alignment or type is not what the kernels read.
    """
    _launch(launcher, "linear_int8_tokens", (x, w, scale, parts), None, y, bias, PLAIN, 0.0, config)


def linear_int8_tokens_norm(
    launcher: Launcher, x: Digits, square_sums: Any, w: Any, scale: Any, parts: Any, y: Any, *, eps: float,
    bias: Any = None, config: Int8TokensConfig | None = None,
) -> None:  # fmt: skip
    """y [T, N] = RMSNorm(x) · (scale · w)ᵀ (+ bias), as kernels.linear.linear_norm; x stands for normed = x·g.

    Raises:
        ValueError, TypeError: an array's shape, layout, alignment or type is not what the kernels read.
    """
    _launch(launcher, "linear_int8_tokens_norm", (x, w, scale, parts), square_sums, y, bias, PLAIN, eps, config)


def linear_int8_tokens_swiglu(
    launcher: Launcher, x: Digits, square_sums: Any, w: Any, scale: Any, parts: Any, y: Any, digits: Digits | None, *,
    eps: float, bias: Any = None, config: Int8TokensConfig | None = None,
) -> None:  # fmt: skip
    """y [T, N/2] half = silu(gate)·up of RMSNorm(x) · (scale · w)ᵀ (+ bias [1, N]), and y in `digits` if there are any;
    row 2j of w is gate row j, row 2j+1 is up row j.

    Raises:
        ValueError, TypeError: an array's shape, layout, alignment or type is not what the kernels read.
    """
    op = "linear_int8_tokens_swiglu"
    _launch(launcher, op, (x, w, scale, parts), square_sums, y, bias, SWIGLU, eps, config, digits)


def linear_int8_tokens_xielu(
    launcher: Launcher, x: Digits, square_sums: Any, w: Any, scale: Any, parts: Any, alphas: Any, y: Any,
    digits: Digits | None, *, eps: float, config: Int8TokensConfig | None = None,
) -> None:  # fmt: skip
    """y [T, N] half = xIELU(RMSNorm(x) · (scale · w)ᵀ), and y in `digits` if there are any. alphas: float32 [2].

    Raises:
        ValueError, TypeError: an array's shape, layout, alignment or type is not what the kernels read.
    """
    op = "linear_int8_tokens_xielu"
    check_array(f"{op}: alphas", alphas, (2,), "float32")
    _launch(launcher, op, (x, w, scale, parts), square_sums, y, alphas, XIELU, eps, config, digits)


def linear_int8_tokens_residual(
    launcher: Launcher, x: Digits, w: Any, scale: Any, parts: Any, stream: Any, gain: Any, normed: Any,
    square_sums: Any, digits: Digits, *, bias: Any = None, config: Int8TokensConfig | None = None,
) -> None:  # fmt: skip
    """stream [T, N] float32 += x [T, K] · (scale · w)ᵀ (+ bias), then normed = stream·gain, half and in `digits`, and
    partial sums of squares.

    `gain` [1, N] is the weight of the RMSNorm that comes next. square_sums [T, NB]: NB a power of two,
    `tokens_square_slots` or more; entries past the blocks are never written and must be zero.

    Raises:
        ValueError, TypeError: an array's shape, layout, alignment or type is not what the kernels read.
    """
    op = "linear_int8_tokens_residual"
    check_array(f"{op}: stream", stream, (None, None), "float32", align=16)
    product, room, _ = _product(launcher, op, (x, w, scale, parts), int(stream.shape[0]), bias, config)
    end = join_residual(launcher, op, room, stream, gain, normed, square_sums, bias, digits)
    both(launcher, product, end)


Inputs = tuple[Any, Any, Any, Any]  # digits and scales of the tokens, the weight and its scales, workspace


def _launch(
    launcher: Launcher, op: str, inputs: Inputs, square_sums: Any, y: Any, extra: Any, act: int, eps: float,
    config: Int8TokensConfig | None, digits: Digits | None = None,
) -> None:  # fmt: skip
    check_array(f"{op}: y", y, (None, None), "float32", *HALF, align=16)
    product, room, k = _product(launcher, op, inputs, int(y.shape[0]), extra if act != XIELU else None, config)
    both(launcher, product, join(launcher, op, room, square_sums, y, extra, act, k, eps, digits))


def _product(
    launcher: Launcher, op: str, inputs: Inputs, tokens: int, bias: Any, config: Int8TokensConfig | None
) -> tuple[Launch, Any, int]:
    """The product's launch, the shares [S, T, N] that it writes, columns of w."""
    x, w, scale, parts = inputs
    n, k, group = check_int8(op, w, scale)
    check_digits(op, x, tokens, k)
    if bias is not None:
        check_array(f"{op}: bias", bias, (1, n), *HALF, "float32", align=16)
    c = config or linear_int8_tokens_config(launcher.arch, n, k, group)
    tile_k = check_cut(op, c, k, group)
    shares = slices(k) // c.steps
    room = shares_in(op, parts, shares, tokens, n)
    even = n % c.tile_n == 0 and k % SLICE == 0
    args = (w, scale, *x, room, c.tile_n, tile_k, c.steps, group or 0, columns(tokens), even, launcher.pdl)
    kernel = linear_int8_tokens_kernel
    hinted = kernel if c.occupancy is None else with_hints(kernel, occupancy=c.occupancy)
    return (hinted, (-(-n // c.tile_n), shares, 1), args), room, k


def model_launches(launcher: Launcher, model: ModelShape, dtype: str) -> None:
    """The products of a verify step with one scale a row, down product and head in groups too; for 4 and 8 tokens."""
    for tokens in (MAX_TOKENS // 2, MAX_TOKENS):
        for group in (None, GROUP):
            _model_step(launcher, model, dtype, tokens, group)


def _model_step(launcher: Launcher, model: ModelShape, dtype: str, tokens: int, group: int | None) -> None:
    def array(*shape: int, of: str = dtype) -> ArraySpec:
        return ArraySpec(shape, of)

    def digits(k: int) -> Digits:
        values, scales = digit_shapes(tokens, k)
        return array(*values, of="int8"), array(*scales, of="float32")

    def weight(name: str, group: int | None = None) -> tuple[ArraySpec, ArraySpec, ArraySpec]:
        n, k = model.products[name]
        floats = part_floats(launcher.arch, tokens, n, k, group)
        return array(n, k, of="int8"), array(n, k // (group or k), of="float32"), array(floats, of="float32")

    sums = array(tokens, tokens_square_slots(model.hidden), of="float32")
    stream, normed = array(tokens, model.hidden, of="float32"), array(tokens, model.hidden)
    gain, act, x = array(1, model.hidden, of="float32"), array(tokens, model.ffn), digits(model.hidden)
    qkv_bias, o_bias = (
        array(1, n) if on else None for n, on in ((model.qkv_rows, model.qkv_bias), (model.hidden, model.o_bias))
    )
    up_bias, down_bias = (array(1, n) if model.mlp_bias else None for n in (model.up_rows, model.hidden))
    qkv, logits = array(tokens, model.qkv_rows), array(tokens, model.vocab, of="float32")
    linear_int8_tokens_norm(launcher, x, sums, *weight("qkv"), qkv, eps=model.eps, bias=qkv_bias)
    into: tuple[Any, ...] = (stream, gain, normed, sums, x)
    linear_int8_tokens_residual(launcher, digits(model.attention_width), *weight("o"), *into, bias=o_bias)
    made = digits(model.ffn)
    if model.activation == "xielu":
        alphas = array(2, of="float32")
        linear_int8_tokens_xielu(launcher, x, sums, *weight("up"), alphas, act, made, eps=model.eps)
    else:
        linear_int8_tokens_swiglu(launcher, x, sums, *weight("up"), act, made, eps=model.eps, bias=up_bias)
    linear_int8_tokens_residual(launcher, made, *weight("down", group), *into, bias=down_bias)
    linear_int8_tokens_norm(launcher, x, sums, *weight("lm_head", group), logits, eps=model.eps)
