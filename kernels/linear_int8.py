"""INT8 weight products of a decode step: linear.py's five, for one token, with weights of one byte.

    linear_int8           y = x Wᵀ (+ bias)                       W[n, k] = scale[n, k // G] · w[n, k], w int8
    linear_int8_norm      the same with RMSNorm of the input folded in; also the LM head, y in float32
    linear_int8_swiglu    the same, then silu(gate)·up on interleaved rows
    linear_int8_xielu     the same, then xIELU
    linear_int8_residual  stream += x Wᵀ (+ bias), and what the next RMSNorm needs

As in kernels/linear.py a block keeps whole rows in registers and asks for them before it waits for the kernel before
it. What it does with them then, in two forms, is in kernels/int8_dot.py.

Refuses: columns that a 16-byte load does not divide (multiples of 16), groups that are no power of two from 16 up, more
than one token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cuda.tile as ct

from kernels.int8_digits import CHUNK, MAX_COLUMNS, chunk_columns
from kernels.int8_dot import (
    FORMS,
    Int8Config,
    block_dot,
    block_scales,
    block_token,
    block_weights,
    linear_int8_config,
    takes_digits,
)
from kernels.int8_scales import check_int8
from kernels.launch import check_array, with_hints
from kernels.linear import PLAIN, SWIGLU, XIELU, activated, alphas, check_square_sums, plain_tile
from kernels.notation import HALF, ZERO, Bool, Float, Int
from kernels.specs import ArraySpec, same_rows

if TYPE_CHECKING:
    from kernels.launch import Launcher
    from kernels.shapes import ModelShape


def int8_square_slots(arch: str, n: int, k: int, group: int | None = None) -> int:
    """Entries of the `square_sums` that linear_int8_residual writes, as kernels.linear.square_slots."""
    tile_n = linear_int8_config(arch, n, k, group, "linear_int8_residual").tile_n
    return max(4, 1 << (-(-n // tile_n) - 1).bit_length())


@ct.kernel
def linear_int8_kernel(
    w, scale, x, square_sums, extra, y, K: Int, NB: Int, EPS: Float, TN: Int, TK: Int, NK: Int, G: Int, FORM: Int,
    NORM: Bool, BIAS: Bool, ACT: Int, EVEN: Bool, PDL: Bool,
):  # fmt: skip
    """y[n] = act(Σ_k scale[n, k // G] w[n, k] x[k] / rms + bias[n]), rms² = Σ square_sums / K + ε.

    w [N, K] int8; scale float32, [1, N] for whole rows (G = 0) or [N, K / G]; x [1, K] half; square_sums [1, NB]
    float32 (NORM); extra: bias [1, N] (BIAS) or xIELU's two numbers [2] float32 (ACT = XIELU), else unused; y half or
    float32, [1, N], or [1, N / 2] where SWIGLU joins rows 2j and 2j+1. Grid: ceil(N / TN) blocks of TN rows. Products
    and sums in float32, one rounding at the store. EVEN: TN divides N and TK divides K, nothing is checked.
    """
    i = ct.bid(0)
    if PDL:
        ct.grid_dependency_control_launch_dependents()
    tiles = block_weights(w, i, TN, TK, NK, FORM, EVEN)
    scales = block_scales(scale, i, TN, TK, NK, G, FORM, EVEN)
    if BIAS:
        bias = ct.load(extra, index=(0, i), shape=(1, TN), padding_mode=ZERO, allow_tma=False).astype(ct.float32)
    numbers = alphas(extra, ACT)
    if PDL:
        ct.grid_dependency_control_wait()
    xs = block_token(x, TN, TK, NK, G, FORM, EVEN)
    SUMS = ct.static_eval(NB if NORM else 0)
    out, squares = block_dot(tiles, scales, x, xs, square_sums, TN, TK, NK, SUMS, G, FORM)
    if NORM:
        out = out * ct.rsqrt(squares * (1.0 / K) + EPS)
    if BIAS:
        out = out + bias
    out = activated(out, numbers, ACT, TN)
    ct.store(y, index=(0, i), tile=out.astype(y.dtype), allow_tma=False, check_bounds=not EVEN)


@ct.kernel
def linear_int8_residual_kernel(
    w, scale, x, extra, stream, gain, normed, square_sums, TN: Int, TK: Int, NK: Int, G: Int, FORM: Int, BIAS: Bool,
    EVEN: Bool, PDL: Bool,
):  # fmt: skip
    """stream[n] += Σ_k scale[n, k // G] w[n, k] x[k] + bias[n]; normed = stream·gain; square_sums[block] = Σ_n stream².

    w [N, K] int8; scale float32, [1, N] (G = 0) or [N, K / G]; x [1, K] half; stream [1, N] float32, read and written;
    gain [1, N] half or float32; normed [1, N] half; square_sums [1, ≥ blocks] float32. Grid: ceil(N / TN) blocks of TN
    rows. The stream stays float32; only normed is rounded. EVEN: TN divides N and TK divides K, nothing is checked.
    """
    i = ct.bid(0)
    if PDL:
        ct.grid_dependency_control_launch_dependents()
    tiles = block_weights(w, i, TN, TK, NK, FORM, EVEN)
    scales = block_scales(scale, i, TN, TK, NK, G, FORM, EVEN)
    g = plain_tile(gain, (0, i), (1, TN), EVEN).astype(ct.float32)
    if BIAS:
        bias = ct.load(extra, index=(0, i), shape=(1, TN), padding_mode=ZERO, allow_tma=False).astype(ct.float32)
    if PDL:
        ct.grid_dependency_control_wait()
    xs = block_token(x, TN, TK, NK, G, FORM, EVEN)
    old = plain_tile(stream, (0, i), (1, TN), EVEN)
    out, _ = block_dot(tiles, scales, x, xs, square_sums, TN, TK, NK, 0, G, FORM)
    out = out + old
    if BIAS:
        out = out + bias
    ct.store(stream, index=(0, i), tile=out, allow_tma=False, check_bounds=not EVEN)
    ct.store(normed, index=(0, i), tile=(out * g).astype(normed.dtype), allow_tma=False, check_bounds=not EVEN)
    squares = ct.sum(out * out, axis=1, keepdims=True)
    ct.store(square_sums, index=(0, i), tile=squares, allow_tma=False, check_bounds=False)


# -- wrappers


def linear_int8(
    launcher: Launcher, x: Any, w: Any, scale: Any, y: Any, *, bias: Any = None, config: Int8Config | None = None
) -> None:
    """y [1, N] = x [1, K] · (scale · w)ᵀ (+ bias [1, N]); w int8 [N, K], scale float32 [N, K / G]. y half or float32.

    Raises:
        ValueError, TypeError: an array's shape, layout, alignment or type is not what the kernel reads.
    """
    _launch(launcher, "linear_int8", x, w, scale, None, y, bias, PLAIN, 0.0, config)


def linear_int8_norm(
    launcher: Launcher, normed: Any, square_sums: Any, w: Any, scale: Any, y: Any, *, eps: float, bias: Any = None,
    config: Int8Config | None = None,
) -> None:  # fmt: skip
    """y [1, N] = RMSNorm(x) · (scale · w)ᵀ (+ bias), as kernels.linear.linear_norm.

    Raises:
        ValueError, TypeError: an array's shape, layout, alignment or type is not what the kernel reads.
    """
    _launch(launcher, "linear_int8_norm", normed, w, scale, square_sums, y, bias, PLAIN, eps, config)


def linear_int8_swiglu(
    launcher: Launcher, normed: Any, square_sums: Any, w: Any, scale: Any, y: Any, *, eps: float, bias: Any = None,
    config: Int8Config | None = None,
) -> None:  # fmt: skip
    """y [1, N/2] = silu(gate)·up of RMSNorm(x) · (scale · w)ᵀ; row 2j of w is gate row j, row 2j+1 is up row j,
    as of bias [1, N], which is added before.

    Raises:
        ValueError, TypeError: an array's shape, layout, alignment or type is not what the kernel reads.
    """
    _launch(launcher, "linear_int8_swiglu", normed, w, scale, square_sums, y, bias, SWIGLU, eps, config)


def linear_int8_xielu(
    launcher: Launcher, normed: Any, square_sums: Any, w: Any, scale: Any, alphas: Any, y: Any, *, eps: float,
    config: Int8Config | None = None,
) -> None:  # fmt: skip
    """y [1, N] = xIELU(RMSNorm(x) · (scale · w)ᵀ). alphas: float32 [2], see kernels.activation.

    Raises:
        ValueError, TypeError: an array's shape, layout, alignment or type is not what the kernel reads.
    """
    check_array("linear_int8_xielu: alphas", alphas, (2,), "float32")
    _launch(launcher, "linear_int8_xielu", normed, w, scale, square_sums, y, alphas, XIELU, eps, config)


def linear_int8_residual(
    launcher: Launcher, x: Any, w: Any, scale: Any, stream: Any, gain: Any, normed: Any, square_sums: Any, *,
    bias: Any = None, config: Int8Config | None = None,
) -> None:  # fmt: skip
    """stream [1, N] float32 += x [1, K] · (scale · w)ᵀ (+ bias), then normed = stream·gain and partial sums of squares.

    As kernels.linear.linear_residual; `int8_square_slots` is the length of square_sums.

    Raises:
        ValueError, TypeError: an array's shape, layout, alignment or type is not what the kernel reads.
    """
    op = "linear_int8_residual"
    n, k, group = check_int8_product(op, x, w, scale, bias)
    half = str(x.dtype)
    check_array(f"{op}: stream", stream, (1, n), "float32", align=16)
    check_array(f"{op}: gain", gain, (1, n), half, "float32", align=16)
    check_array(f"{op}: normed", normed, (1, n), half, align=16)
    slots = check_square_sums(op, square_sums, 1)
    config = (config or linear_int8_config(launcher.arch, n, k, group, op)).fitted(n)
    blocks = -(-n // config.tile_n)
    if slots < blocks:
        raise ValueError(f"{op}: square_sums has {slots} entries a token, its {blocks} blocks need as many")
    token, weights, scales, cut = _cut(op, config, x, w, scale, group)
    args = (weights, scales, token, x if bias is None else bias, stream, gain, normed, square_sums)
    _send(launcher, linear_int8_residual_kernel, config, n, k, (*args, *cut, bias is not None))


def _launch(
    launcher: Launcher, op: str, x: Any, w: Any, scale: Any, square_sums: Any, y: Any, extra: Any, act: int, eps: float,
    config: Int8Config | None,
) -> None:  # fmt: skip
    n, k, group = check_int8_product(op, x, w, scale, extra if act != XIELU else None)
    outputs = ("float32", str(x.dtype)) if act == PLAIN else (str(x.dtype),)
    check_array(f"{op}: y", y, (1, n // 2 if act == SWIGLU else n), *outputs, align=16)
    slots = 1 if square_sums is None else check_square_sums(op, square_sums, 1)
    config = (config or linear_int8_config(launcher.arch, n, k, group, op)).fitted(n)
    if act == SWIGLU and config.tile_n < 2:
        config = Int8Config(2, min(config.tile_k, 512), config.occupancy)
    token, weights, scales, cut = _cut(op, config, x, w, scale, group)
    norm, bias = square_sums is not None, extra is not None and act != XIELU
    args = (weights, scales, token, square_sums if norm else x, x if extra is None else extra, y, k, slots, float(eps))
    _send(launcher, linear_int8_kernel, config, n, k, (*args, *cut, norm, bias, act))


def _cut(
    op: str, config: Int8Config, x: Any, w: Any, scale: Any, group: int | None
) -> tuple[Any, Any, Any, tuple[int, ...]]:
    """Token, weights and scales as the kernel reads them; TN, TK, NK, G (0 for whole rows) and FORM."""
    n, k = (int(side) for side in w.shape)
    if config.form == "digits":
        _check_digits(op, config, n, k, group)
        chunk = chunk_columns(config.tile_n)
        w = w.reshape(n, k // chunk, chunk).transpose(1, 0, 2)
    else:
        tiles = config.tile_n // config.together
        w, x = w.reshape(n // tiles, tiles, k), same_rows(x, config.together)
        scale = scale.reshape(1, n) if group is None else scale.reshape(n // tiles, tiles, k // group)
    return x, w, scale, (config.tile_n, config.tile_k, -(-k // config.load), group or 0, FORMS[config.form])


def _check_digits(op: str, config: Int8Config, n: int, k: int, group: int | None) -> None:
    if k > MAX_COLUMNS:
        raise ValueError(f"{op}: {k} columns, the digits' int32 sums are exact up to {MAX_COLUMNS}")
    if not takes_digits(config.tile_n, n, k, group):
        groups = "" if group is None else f" in groups of {group}"
        raise ValueError(
            f"{op}: blocks of {config.tile_n} rows for {n} rows of {k} columns{groups}, expected 4, 8, 16 or 32 for "
            f"digits (16 and 32 if they divide the rows), and whole loads of {config.load} columns, with whole groups "
            f"of {CHUNK} or more in a load"
        )


def _send(launcher: Launcher, kernel: Any, config: Int8Config, n: int, k: int, args: tuple[Any, ...]) -> None:
    even = n % config.tile_n == 0 and k % config.load == 0
    hinted = kernel if config.occupancy is None else with_hints(kernel, occupancy=config.occupancy)
    launcher(hinted, (-(-n // config.tile_n), 1, 1), (*args, even, launcher.pdl))


def check_int8_product(op: str, x: Any, w: Any, scale: Any, bias: Any) -> tuple[int, int, int | None]:
    """Rows, columns, and columns of a group: None where a row has one scale."""
    n, k, group = check_int8(op, w, scale)
    check_array(f"{op}: x", x, (1, None), *HALF, align=16)
    if int(x.shape[1]) != k:
        raise ValueError(f"{op}: x has {x.shape[1]} columns, the weight expects {k}")
    if bias is not None:
        check_array(f"{op}: bias", bias, (1, n), str(x.dtype), "float32", align=16)
    return n, k, group


GROUP = 64  # columns of a scale in the down product and the head, as `tileinfer quantize` makes them


def model_launches(launcher: Launcher, model: ModelShape, dtype: str) -> None:
    """The products of a step with one scale a row; down product and head in groups too."""

    def array(*shape: int, of: str = dtype) -> ArraySpec:
        return ArraySpec(shape, of)

    def weight(name: str, group: int | None = None) -> tuple[ArraySpec, ArraySpec]:
        n, k = model.products[name]
        return array(n, k, of="int8"), array(n, k // (group or k), of="float32")

    def sums(name: str, group: int | None = None) -> ArraySpec:
        return array(1, int8_square_slots(launcher.arch, *model.products[name], group), of="float32")

    stream, normed = array(1, model.hidden, of="float32"), array(1, model.hidden)
    gain, act = array(1, model.hidden, of="float32"), array(1, model.ffn)
    qkv_bias = array(1, model.qkv_rows) if model.qkv_bias else None
    o_bias = array(1, model.hidden) if model.o_bias else None
    attended, qkv, o_sums = array(1, model.attention_width), array(1, model.qkv_rows), sums("o")
    linear_int8_residual(launcher, attended, *weight("o"), stream, gain, normed, o_sums, bias=o_bias)
    if model.activation == "xielu":
        linear_int8_xielu(launcher, normed, o_sums, *weight("up"), array(2, of="float32"), act, eps=model.eps)
    else:
        linear_int8_swiglu(launcher, normed, o_sums, *weight("up"), act, eps=model.eps)
    for group in (None, GROUP):
        down_sums, head = sums("down", group), weight("lm_head", group)
        logits = array(1, model.vocab, of="float32")
        linear_int8_norm(launcher, normed, down_sums, *weight("qkv"), qkv, eps=model.eps, bias=qkv_bias)
        linear_int8_residual(launcher, act, *weight("down", group), stream, gain, normed, down_sums)
        linear_int8_norm(launcher, normed, down_sums, *head, logits, eps=model.eps)
        linear_int8(launcher, normed, *head, logits)  # after a prefill, whose last norm is a kernel of its own
