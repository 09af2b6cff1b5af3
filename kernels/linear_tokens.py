"""Weight products of a verify step, half precision: linear.py's for 2 to 8 tokens, through the tensor cores.

    linear_tokens_norm      y = RMSNorm(x) Wᵀ (+ bias), the norm folded in as in kernels/linear.py; also the LM head
    linear_tokens_swiglu    the same, then silu(gate)·up on interleaved rows
    linear_tokens_xielu     the same, then xIELU
    linear_tokens_residual  stream += x Wᵀ (+ bias), and what the next RMSNorm needs

Two launches each. The first multiplies: weights on M, the tokens on N, of which there are always eight. A block owns
some rows and a share of the columns, so that products of few rows fill the GPU too; it asks for all its weights, by
plain loads, before it waits for the kernel before it: what fills a ring of TMA would wait too. The second
(kernels/tokens_join.py) adds the shares of a token and ends the product.

Arrays that a product reads tokens from have eight rows; those past the tokens are read, and what comes of them is
dropped.

Refuses: more than 8 tokens, lengths that a 16-byte load does not divide (multiples of 8).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cuda.tile as ct

from kernels.configs import configured
from kernels.digit_slices import MAX_TOKENS
from kernels.launch import check_array, with_hints
from kernels.linear import PLAIN, SWIGLU, XIELU, plain_tile
from kernels.notation import HALF, ZERO, Bool, Int
from kernels.specs import ArraySpec
from kernels.tokens_join import both, join, join_residual, shares_in, tokens_square_slots

if TYPE_CHECKING:
    from kernels.launch import Launcher
    from kernels.shapes import ModelShape
    from kernels.tokens_join import Launch

COLUMNS = 8  # the narrowest N of an mma; tile_n · COLUMNS must reach 512, else the product leaves the tensor cores
MOST_SHARES = 48  # whose loads a thread of the second launch has in flight at once


@dataclass(frozen=True)
class TokensConfig:
    """How one block of a product is cut.

    Attributes:
        tile_n: rows of W a block owns, 64 or 128.
        tile_k: columns of one load and product.
        steps: at most so many of them a block, a share of the columns; fewer where shares would not be equal.
        occupancy: blocks per SM the compiler should make room for; None leaves the registers alone.
    """

    tile_n: int = 64
    tile_k: int = 128
    steps: int = 4
    occupancy: int | None = None


def linear_tokens_config(arch: str, n: int, k: int) -> TokensConfig:
    """The row of configs/<arch>.json for a weight of n rows and k columns, or the rule."""
    return configured(TokensConfig, "linear_tokens", arch, n=n, k=k)


def cut(config: TokensConfig, k: int) -> tuple[int, int]:
    """Steps of a block and shares of k columns, all of the same number of tiles."""
    tiles = -(-k // config.tile_k)
    steps = next(s for s in range(min(config.steps, tiles), 0, -1) if tiles % s == 0)
    while tiles // steps > MOST_SHARES:
        steps = next(s for s in range(steps + 1, tiles + 1) if tiles % s == 0)
    return steps, tiles // steps


def part_floats(arch: str, tokens: int, n: int, k: int) -> int:
    """Length of the workspace `parts` for a product."""
    return cut(linear_tokens_config(arch, n, k), k)[1] * tokens * n


def token_tile(x, j, TK: Int, EVEN: Bool):
    """Columns j · TK … of the eight tokens, [TK, 8]."""
    if EVEN:
        return ct.load(x, index=(j, 0), shape=(TK, COLUMNS), order=(1, 0), allow_tma=False, check_bounds=False)
    return ct.load(x, index=(j, 0), shape=(TK, COLUMNS), order=(1, 0), allow_tma=False, padding_mode=ZERO)


@ct.kernel
def linear_tokens_kernel(w, x, parts, TN: Int, TK: Int, STEPS: Int, EVEN: Bool, PDL: Bool):
    """parts[p, t, n] = Σ_k w[n, k] x[t, k] over the p-th share of the columns.

    w [N, K], x [8, K] half; parts [shares, T, N] float32, T ≤ 8. Grid (ceil(N / TN), shares): TN rows, STEPS tiles of
    TK columns. Products of half in float32 sums. EVEN: TN divides N and TK divides K, and nothing is checked but the
    tokens; else edges read 0 and stores past N are dropped.
    """
    i, p = ct.bid(0), ct.bid(1)
    if PDL:
        ct.grid_dependency_control_launch_dependents()
    tiles = tuple(plain_tile(w, (i, p * STEPS + j), (TN, TK), EVEN) for j in ct.static_iter(range(STEPS)))
    if PDL:
        ct.grid_dependency_control_wait()
    xs = tuple(token_tile(x, p * STEPS + j, TK, EVEN) for j in ct.static_iter(range(STEPS)))
    total = ct.zeros((TN, COLUMNS), dtype=ct.float32)
    for j in ct.static_iter(range(STEPS)):
        total = ct.mma(tiles[j], xs[j], total)
    out = ct.permute(total, (1, 0)).reshape((1, COLUMNS, TN))
    ct.store(parts, index=(p, 0, i), tile=out, allow_tma=False)  # tokens past the last are dropped


# -- wrappers


def linear_tokens_norm(
    launcher: Launcher, normed: Any, square_sums: Any, w: Any, parts: Any, y: Any, *, eps: float, bias: Any = None,
    config: TokensConfig | None = None,
) -> None:  # fmt: skip
    """y [T, N] half or float32 = RMSNorm(x) · w [N, K]ᵀ (+ bias [1, N]), from normed = x·g [8, K] and square_sums
    [T, NB]; `parts` float32, a workspace of at least `part_floats`.

    Raises:
        ValueError, TypeError: an array's shape, layout, alignment or type is not what the kernels read.
    """
    _launch(launcher, "linear_tokens_norm", (normed, w, parts), square_sums, y, bias, PLAIN, eps, config)


def linear_tokens_swiglu(
    launcher: Launcher, normed: Any, square_sums: Any, w: Any, parts: Any, y: Any, *, eps: float, bias: Any = None,
    config: TokensConfig | None = None,
) -> None:  # fmt: skip
    """y [T, N/2] half = silu(gate)·up of RMSNorm(x) · wᵀ (+ bias [1, N]); row 2j of w is gate row j, row 2j+1 is up
    row j.

    Raises:
        ValueError, TypeError: an array's shape, layout, alignment or type is not what the kernels read.
    """
    _launch(launcher, "linear_tokens_swiglu", (normed, w, parts), square_sums, y, bias, SWIGLU, eps, config)


def linear_tokens_xielu(
    launcher: Launcher, normed: Any, square_sums: Any, w: Any, parts: Any, alphas: Any, y: Any, *, eps: float,
    config: TokensConfig | None = None,
) -> None:  # fmt: skip
    """y [T, N] half = xIELU(RMSNorm(x) · wᵀ). alphas: float32 [2], see kernels.activation.

    Raises:
        ValueError, TypeError: an array's shape, layout, alignment or type is not what the kernels read.
    """
    check_array("linear_tokens_xielu: alphas", alphas, (2,), "float32")
    _launch(launcher, "linear_tokens_xielu", (normed, w, parts), square_sums, y, alphas, XIELU, eps, config)


def linear_tokens_residual(
    launcher: Launcher, x: Any, w: Any, parts: Any, stream: Any, gain: Any, normed: Any, square_sums: Any, *,
    bias: Any = None, config: TokensConfig | None = None,
) -> None:  # fmt: skip
    """stream [T, N] float32 += x [8, K] · w [N, K]ᵀ (+ bias), then normed [T, N] = stream·gain and partial sums of
    squares.

    `gain` [1, N] is the weight of the RMSNorm that comes next. square_sums [T, NB]: NB a power of two,
    `tokens_square_slots` or more; entries past the blocks are never written and must be zero.

    Raises:
        ValueError, TypeError: an array's shape, layout, alignment or type is not what the kernels read.
    """
    op = "linear_tokens_residual"
    check_array(f"{op}: stream", stream, (None, None), "float32", align=16)
    product, room, _ = _product(launcher, op, (x, w, parts), int(stream.shape[0]), bias, config)
    end = join_residual(launcher, op, room, stream, gain, normed, square_sums, bias)
    both(launcher, product, end)


Inputs = tuple[Any, Any, Any]  # tokens, the weight, workspace


def _launch(
    launcher: Launcher, op: str, inputs: Inputs, square_sums: Any, y: Any, extra: Any, act: int, eps: float,
    config: TokensConfig | None,
) -> None:  # fmt: skip
    check_array(f"{op}: y", y, (None, None), "float32", *HALF, align=16)
    product, room, k = _product(launcher, op, inputs, int(y.shape[0]), extra if act != XIELU else None, config)
    both(launcher, product, join(launcher, op, room, square_sums, y, extra, act, k, eps))


def _product(
    launcher: Launcher, op: str, inputs: Inputs, tokens: int, bias: Any, config: TokensConfig | None
) -> tuple[Launch, Any, int]:
    """The product's launch, the shares [S, T, N] that it writes, columns of w."""
    x, w, parts = inputs
    check_array(f"{op}: w", w, (None, None), *HALF, align=16)
    n, k = map(int, w.shape)
    if k % 8:
        raise ValueError(f"{op}: the weight has {k} columns, expected a multiple of 8 (16 bytes)")
    if tokens > MAX_TOKENS:
        raise ValueError(f"{op}: {tokens} tokens, at most {MAX_TOKENS} fit; longer inputs are for prefill")
    check_array(f"{op}: x", x, (COLUMNS, k), str(w.dtype), align=16)
    if bias is not None:
        check_array(f"{op}: bias", bias, (1, n), *HALF, "float32", align=16)
    c = config or linear_tokens_config(launcher.arch, n, k)
    steps, shares = cut(c, k)
    room = shares_in(op, parts, shares, tokens, n)
    even = n % c.tile_n == 0 and k % c.tile_k == 0
    kernel = linear_tokens_kernel
    hinted = kernel if c.occupancy is None else with_hints(kernel, occupancy=c.occupancy)
    args = (w, x, room, c.tile_n, c.tile_k, steps, even, launcher.pdl)
    return (hinted, (-(-n // c.tile_n), shares, 1), args), room, k


def model_launches(launcher: Launcher, model: ModelShape, dtype: str) -> None:
    """The five products of a verify step of 8 tokens; numbers of tokens are told apart by nothing."""
    tokens = MAX_TOKENS

    def array(*shape: int, of: str = dtype) -> ArraySpec:
        return ArraySpec(shape, of)

    def weight(name: str) -> tuple[ArraySpec, ArraySpec]:
        n, k = model.products[name]
        return array(n, k), array(part_floats(launcher.arch, tokens, n, k), of="float32")

    sums = array(tokens, tokens_square_slots(model.hidden), of="float32")
    stream, normed = array(tokens, model.hidden, of="float32"), array(COLUMNS, model.hidden)
    gain, act = array(1, model.hidden, of="float32"), array(COLUMNS, model.ffn)
    qkv_bias, o_bias = (
        array(1, n) if on else None for n, on in ((model.qkv_rows, model.qkv_bias), (model.hidden, model.o_bias))
    )
    up_bias, down_bias = (array(1, n) if model.mlp_bias else None for n in (model.up_rows, model.hidden))
    qkv, logits = array(tokens, model.qkv_rows), array(tokens, model.vocab, of="float32")
    into: tuple[Any, ...] = (stream, gain, normed, sums)
    linear_tokens_norm(launcher, normed, sums, *weight("qkv"), qkv, eps=model.eps, bias=qkv_bias)
    linear_tokens_residual(launcher, array(COLUMNS, model.attention_width), *weight("o"), *into, bias=o_bias)
    if model.activation == "xielu":
        alphas = array(2, of="float32")
        linear_tokens_xielu(launcher, normed, sums, *weight("up"), alphas, act, eps=model.eps)
    else:
        linear_tokens_swiglu(launcher, normed, sums, *weight("up"), act, eps=model.eps, bias=up_bias)
    linear_tokens_residual(launcher, act, *weight("down"), *into, bias=down_bias)
    linear_tokens_norm(launcher, normed, sums, *weight("lm_head"), logits, eps=model.eps)
