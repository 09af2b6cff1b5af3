"""Weight products of a decode step: for one token every block keeps whole rows of W in registers.

    linear            y = x Wᵀ (+ bias)
    linear_norm       y = (x·g) Wᵀ / rms(x) (+ bias): RMSNorm of the input folded in; also the LM head, y in float32
    linear_swiglu     the same, then silu(gate)·up on interleaved rows, biases with them
    linear_xielu      the same, then xIELU
    linear_residual   stream += x Wᵀ (+ bias), and what the next RMSNorm needs: x·g and partial sums of squares

A block first asks for all its weights (plain 16-byte loads, all in flight at once), then waits for the kernel before it
(PDL), then reads x. So a product streams its weights while its predecessor finishes; docs/kernels.md has what this was
measured against. kernels/linear_tokens.py has the same products for 2 to 8 tokens.

RMSNorm is folded: the producer of the residual stream writes x·g in the weights' type and each block's Σx², the
consumer scales its sums by 1/rms at the end. x·g is rounded before it is scaled, where Transformers rounds after: an
ulp here and there.

Refuses: lengths that a 16-byte load does not divide (multiples of 8), more than one token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cuda.tile as ct

from kernels import configs
from kernels.activation import silu_times, xielu_of
from kernels.launch import check_array, with_hints
from kernels.notation import HALF, ZERO, Bool, Float, Int
from kernels.specs import ArraySpec

if TYPE_CHECKING:
    from kernels.launch import Launcher
    from kernels.shapes import ModelShape

PLAIN, SWIGLU, XIELU = 0, 1, 2


@dataclass(frozen=True)
class LinearConfig:
    """How one block of a product is cut.

    Attributes:
        tile_n: rows of W a block owns.
        tile_k: columns of one of its tiles; a row is ceil(K / tile_k) of them, all in registers. 256 puts a row into
            one warp (no sum across warps), 1024 spreads it over four.
        occupancy: blocks per SM the compiler should make room for; None leaves the registers alone.
    """

    tile_n: int
    tile_k: int
    occupancy: int | None = None


def linear_config(arch: str, n: int, k: int, family: str = "linear") -> LinearConfig:
    """The row of configs/<arch>.json for a weight of n rows and k columns, or the rule."""
    try:
        return LinearConfig(**configs.config(family, arch, n=n, k=k))
    except KeyError:
        return linear_rule(n, k)


def linear_rule(n: int, k: int) -> LinearConfig:
    """About 16 to 32 KiB of weights a block, two rows at least where they fit a quarter of the registers.

    On the H200 this is within 2 % of the best tile for K from 1,024 to 12,288.
    """
    tile_k = next((t for t in (256, 128, 64) if k % t == 0), 256)
    if k > 2560:
        tile_k = next((t for t in (1024, 512, 256) if k % t == 0), 1024)
    padded = -(-k // tile_k) * tile_k
    rows = max(1, 1 << ((16384 // padded).bit_length() - 1)) if padded <= 16384 else 1
    if padded > 4096:
        rows = 2 if padded <= 12288 else 1
    return LinearConfig(min(max(rows, 16 if tile_k <= 64 else 1), 16, 1 << (n - 1).bit_length()), tile_k)


def square_slots(arch: str, n: int, k: int) -> int:
    """Entries of the `square_sums` that linear_residual writes: its blocks, rounded up to a power of two.

    The consumer reads them all, so a buffer longer than this costs time.
    """
    tile_n = linear_config(arch, n, k, "linear_residual").tile_n
    return max(4, 1 << (-(-n // tile_n) - 1).bit_length())


def plain_tile(array, index, shape, EVEN: Bool):
    """A plain load. tileiras 13.4 refuses a padding mode beside check_bounds=False."""
    if EVEN:
        return ct.load(array, index=index, shape=shape, allow_tma=False, check_bounds=False)
    return ct.load(array, index=index, shape=shape, allow_tma=False, padding_mode=ZERO)


def weight_tiles(w, i, first, TN: Int, TK: Int, NK: Int, EVEN: Bool):
    """The block's rows of W from column tile `first` on, as a tuple; all loads are issued before one is used."""
    return tuple(plain_tile(w, (i, first + k), (TN, TK), EVEN) for k in ct.static_iter(range(NK)))


def dot(tiles, x, first, TN: Int, TK: Int, NK: Int, EVEN: Bool):
    """The token, from column tile `first` on, times the block's rows: [1, TN] float32."""
    total = ct.zeros((TN, TK), dtype=ct.float32)
    for k in ct.static_iter(range(NK)):
        xt = plain_tile(x, (0, first + k), (1, TK), EVEN)
        total = total + tiles[k].astype(ct.float32) * xt.astype(ct.float32)
    return ct.sum(total, axis=1).reshape((1, TN))


def alphas(extra, ACT: Int):
    """xIELU's two numbers, which nothing in a step writes; () for other activations."""
    numbers = ()
    if ACT == XIELU:
        numbers = tuple(ct.load(extra, index=(j,), shape=(1,), check_bounds=False) for j in ct.static_iter(range(2)))
    return numbers


def activated(out, numbers, ACT: Int, N: Int):
    """act(out [1, N]) float32; SWIGLU joins rows 2j and 2j + 1 into [1, N / 2]. One return: an early one is a loop."""
    if ACT == XIELU:
        out = xielu_of(out, numbers[0], numbers[1])
    if ACT == SWIGLU:
        pairs = out.reshape((N // 2, 2))
        gate = ct.extract(pairs, (0, 0), (N // 2, 1))
        up = ct.extract(pairs, (0, 1), (N // 2, 1))
        out = silu_times(gate, up).reshape((1, N // 2))
    return out


@ct.kernel
def linear_kernel(
    w, x, square_sums, extra, y, K: Int, NB: Int, EPS: Float, TN: Int, TK: Int, NK: Int, NORM: Bool, BIAS: Bool,
    ACT: Int, EVEN: Bool, PDL: Bool,
):  # fmt: skip
    """y[n] = act(Σ_k W[n, k] x[k] / rms + bias[n]), rms² = Σ square_sums / K + ε; SWIGLU joins rows 2j, 2j+1.

    w [N, K], x [1, K] half; square_sums [1, NB] float32 (NORM); extra: bias [1, N] (BIAS) or xIELU's two numbers
    [2] float32 (ACT = XIELU), else unused; y [1, N or N/2] half or float32. Grid: ceil(N / TN) blocks of TN rows.
    Products and sums in float32, one rounding at the store. EVEN: TN divides N and TK divides K, nothing is checked.
    """
    i = ct.bid(0)
    if PDL:
        ct.grid_dependency_control_launch_dependents()
    tiles = weight_tiles(w, i, 0, TN, TK, NK, EVEN)
    if BIAS:
        bias = ct.load(extra, index=(0, i), shape=(1, TN), padding_mode=ZERO, allow_tma=False).astype(ct.float32)
    numbers = alphas(extra, ACT)
    if PDL:
        ct.grid_dependency_control_wait()
    if NORM:
        sums = ct.load(square_sums, index=(0, 0), shape=(1, NB), allow_tma=False, check_bounds=False)
        scale = ct.rsqrt(ct.sum(sums, axis=1) * (1.0 / K) + EPS)
    out = dot(tiles, x, 0, TN, TK, NK, EVEN)
    if NORM:
        out = out * scale
    if BIAS:
        out = out + bias
    out = activated(out, numbers, ACT, TN)
    ct.store(y, index=(0, i), tile=out.astype(y.dtype), allow_tma=False, check_bounds=not EVEN)


@ct.kernel
def linear_residual_kernel(
    w, x, extra, stream, gain, normed, square_sums, TN: Int, TK: Int, NK: Int, BIAS: Bool, EVEN: Bool, PDL: Bool
):
    """stream[n] += Σ_k W[n, k] x[k] + bias[n]; normed = stream·gain; square_sums[block] = Σ_n stream².

    w [N, K], x [1, K] half; stream [1, N] float32, read and written; gain [1, N] half or float32; normed [1, N] half;
    square_sums [1, ≥ blocks] float32. Grid: ceil(N / TN) blocks of TN rows. The stream stays float32 from embedding to
    LM head; only normed is rounded. EVEN: TN divides N and TK divides K, nothing is checked.
    """
    i = ct.bid(0)
    if PDL:
        ct.grid_dependency_control_launch_dependents()
    tiles = weight_tiles(w, i, 0, TN, TK, NK, EVEN)
    g = plain_tile(gain, (0, i), (1, TN), EVEN).astype(ct.float32)
    if BIAS:
        bias = ct.load(extra, index=(0, i), shape=(1, TN), padding_mode=ZERO, allow_tma=False).astype(ct.float32)
    if PDL:
        ct.grid_dependency_control_wait()
    out = dot(tiles, x, 0, TN, TK, NK, EVEN) + plain_tile(stream, (0, i), (1, TN), EVEN)
    if BIAS:
        out = out + bias
    ct.store(stream, index=(0, i), tile=out, allow_tma=False, check_bounds=not EVEN)
    ct.store(normed, index=(0, i), tile=(out * g).astype(normed.dtype), allow_tma=False, check_bounds=not EVEN)
    squares = ct.sum(out * out, axis=1, keepdims=True)
    ct.store(square_sums, index=(0, i), tile=squares, allow_tma=False, check_bounds=False)


# -- wrappers


def linear(launcher: Launcher, x: Any, w: Any, y: Any, *, bias: Any = None, config: LinearConfig | None = None) -> None:
    """y [1, N] = x [1, K] · w [N, K]ᵀ (+ bias [1, N]). y is half or float32.

    Raises:
        ValueError, TypeError: an array's shape, layout, alignment or type is not what the kernel reads.
    """
    _launch(launcher, "linear", x, w, None, y, bias, PLAIN, 0.0, config)


def linear_norm(
    launcher: Launcher, normed: Any, square_sums: Any, w: Any, y: Any, *, eps: float, bias: Any = None,
    config: LinearConfig | None = None,
) -> None:  # fmt: skip
    """y [1, N] = RMSNorm(x) · wᵀ (+ bias), from normed = x·g [1, K] and square_sums [1, NB] that linear_residual or
    embedding_decode wrote. The QKV product and the LM head (y float32).

    Raises:
        ValueError, TypeError: an array's shape, layout, alignment or type is not what the kernel reads.
    """
    _launch(launcher, "linear_norm", normed, w, square_sums, y, bias, PLAIN, eps, config)


def linear_swiglu(
    launcher: Launcher, normed: Any, square_sums: Any, w: Any, y: Any, *, eps: float, bias: Any = None,
    config: LinearConfig | None = None,
) -> None:  # fmt: skip
    """y [1, N/2] = silu(gate)·up of RMSNorm(x) · wᵀ (+ bias [1, N]); row 2j of w is gate row j, row 2j+1 is up row j.

    Raises:
        ValueError, TypeError: an array's shape, layout, alignment or type is not what the kernel reads.
    """
    _launch(launcher, "linear_swiglu", normed, w, square_sums, y, bias, SWIGLU, eps, config)


def linear_xielu(
    launcher: Launcher, normed: Any, square_sums: Any, w: Any, alphas: Any, y: Any, *, eps: float,
    config: LinearConfig | None = None,
) -> None:  # fmt: skip
    """y [1, N] = xIELU(RMSNorm(x) · wᵀ). alphas: float32 [2], see kernels.activation.

    Raises:
        ValueError, TypeError: an array's shape, layout, alignment or type is not what the kernel reads.
    """
    check_array("linear_xielu: alphas", alphas, (2,), "float32")
    _launch(launcher, "linear_xielu", normed, w, square_sums, y, alphas, XIELU, eps, config)


def linear_residual(
    launcher: Launcher, x: Any, w: Any, stream: Any, gain: Any, normed: Any, square_sums: Any, *, bias: Any = None,
    config: LinearConfig | None = None,
) -> None:  # fmt: skip
    """stream [1, N] float32 += x [1, K] · w [N, K]ᵀ (+ bias), then normed = stream·gain and partial sums of squares.

    `gain` [1, N] is the weight of the RMSNorm that comes next. square_sums [1, NB]: NB a power of two, `square_slots`
    or more; entries past the blocks are never written and must be zero.

    Raises:
        ValueError, TypeError: an array's shape, layout, alignment or type is not what the kernel reads.
    """
    op = "linear_residual"
    n, k = check_product(op, x, w, bias)
    half = str(w.dtype)
    check_array(f"{op}: stream", stream, (1, n), "float32", align=16)
    check_array(f"{op}: gain", gain, (1, n), half, "float32", align=16)
    check_array(f"{op}: normed", normed, (1, n), half, align=16)
    slots = check_square_sums(op, square_sums, 1)
    config = config or linear_config(launcher.arch, n, k, op)
    blocks = -(-n // config.tile_n)
    if slots < blocks:
        raise ValueError(f"{op}: square_sums has {slots} entries a token, its {blocks} blocks need as many")
    even = n % config.tile_n == 0 and k % config.tile_k == 0
    args: tuple[Any, ...] = (w, x, x if bias is None else bias, stream, gain, normed, square_sums)
    args += (config.tile_n, config.tile_k)
    args += (-(-k // config.tile_k), bias is not None, even, launcher.pdl)
    launcher(_hinted(linear_residual_kernel, config), (blocks, 1, 1), args)


def _launch(
    launcher: Launcher, op: str, x: Any, w: Any, square_sums: Any, y: Any, extra: Any, act: int, eps: float,
    config: LinearConfig | None,
) -> None:  # fmt: skip
    n, k = check_product(op, x, w, extra if act != XIELU else None)
    outputs = ("float32", str(w.dtype)) if act == PLAIN else (str(w.dtype),)
    check_array(f"{op}: y", y, (1, n // 2 if act == SWIGLU else n), *outputs, align=16)
    slots = 1 if square_sums is None else check_square_sums(op, square_sums, 1)
    config = config or linear_config(launcher.arch, n, k, op)
    if act == SWIGLU and config.tile_n < 2:
        config = LinearConfig(2, config.tile_k, config.occupancy)
    even = n % config.tile_n == 0 and k % config.tile_k == 0
    norm, bias = square_sums is not None, extra is not None and act != XIELU
    args: tuple[Any, ...] = (w, x, square_sums if norm else x, x if extra is None else extra, y, k, slots, float(eps))
    args += (
        config.tile_n,
        config.tile_k,
        -(-k // config.tile_k),
        norm,
        bias,
        act,
        even,
        launcher.pdl,
    )
    launcher(_hinted(linear_kernel, config), (-(-n // config.tile_n), 1, 1), args)


def _hinted(kernel: Any, config: LinearConfig) -> Any:
    return kernel if config.occupancy is None else with_hints(kernel, occupancy=config.occupancy)


def check_product(op: str, x: Any, w: Any, bias: Any) -> tuple[int, int]:
    """Rows and columns of the weight."""
    check_array(f"{op}: w", w, (None, None), *HALF, align=16)
    n, k = w.shape
    check_array(f"{op}: x", x, (1, None), str(w.dtype), align=16)
    if x.shape[1] != k:
        raise ValueError(f"{op}: x has {x.shape[1]} columns, the weight expects {k}")
    if k % 8:
        raise ValueError(f"{op}: the weight has {k} columns, expected a multiple of 8 (16 bytes)")
    if bias is not None:
        check_array(f"{op}: bias", bias, (1, n), str(w.dtype), "float32", align=16)
    return n, k


def check_square_sums(op: str, square_sums: Any, tokens: int) -> int:
    """Slots a token; a power of two, for the sum is one tile."""
    check_array(f"{op}: square_sums", square_sums, (tokens, None), "float32", align=16)
    slots = int(square_sums.shape[1])
    if slots & (slots - 1) or slots < 4:
        raise ValueError(f"{op}: square_sums has {slots} entries a token, expected a power of two from 4 up")
    return slots


def model_launches(launcher: Launcher, model: ModelShape, dtype: str) -> None:
    """The five products of a step, in their order."""

    def array(*shape: int, of: str = dtype) -> ArraySpec:
        return ArraySpec(shape, of)

    weights = {name: array(*shape) for name, shape in model.products.items()}
    stream, normed = array(1, model.hidden, of="float32"), array(1, model.hidden)
    gain, act = array(1, model.hidden, of="float32"), array(1, model.ffn)
    o_sums, down_sums = (
        array(1, square_slots(launcher.arch, *model.products[name]), of="float32") for name in ("o", "down")
    )
    qkv_bias = array(1, model.qkv_rows) if model.qkv_bias else None
    o_bias = array(1, model.hidden) if model.o_bias else None
    up_bias, down_bias = (array(1, n) if model.mlp_bias else None for n in (model.up_rows, model.hidden))
    attended, logits = array(1, model.attention_width), array(1, model.vocab, of="float32")
    linear_norm(launcher, normed, down_sums, weights["qkv"], array(1, model.qkv_rows), eps=model.eps, bias=qkv_bias)
    linear_residual(launcher, attended, weights["o"], stream, gain, normed, o_sums, bias=o_bias)
    if model.activation == "xielu":
        linear_xielu(launcher, normed, o_sums, weights["up"], array(2, of="float32"), act, eps=model.eps)
    else:
        linear_swiglu(launcher, normed, o_sums, weights["up"], act, eps=model.eps, bias=up_bias)
    linear_residual(launcher, act, weights["down"], stream, gain, normed, down_sums, bias=down_bias)
    linear_norm(launcher, normed, down_sums, weights["lm_head"], logits, eps=model.eps)
    linear(launcher, normed, weights["lm_head"], logits)  # after a prefill, whose last norm is a kernel of its own
