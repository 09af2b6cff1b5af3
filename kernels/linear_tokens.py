"""Weight products for 2 to 8 tokens (a verify step) through the tensor cores: weights on M, tokens on N.

The same products and fused endings as kernels/linear.py, which chooses between the two forms. W comes through a TMA
ring in tiles of tile_n × tile_k, tokens are padded to 8 columns by the load. The sum over K is in
one block: split, somebody must add the parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import cuda.tile as ct

from kernels.activation import silu_times, xielu_of

Int: TypeAlias = ct.Constant[int]
Bool: TypeAlias = ct.Constant[bool]
Float: TypeAlias = ct.Constant[float]
ZERO = ct.PaddingMode.ZERO
COLUMNS = 8  # the narrowest N of an mma; tile_n · COLUMNS must reach 512, else the product leaves the tensor cores
SWIGLU, XIELU = 1, 2  # as in kernels.linear


@dataclass(frozen=True)
class TokensConfig:
    """tile_n: rows of W a block owns, at least 64. tile_k: columns a step. occupancy sets the depth of the TMA ring."""

    tile_n: int = 64
    tile_k: int = 128
    occupancy: int | None = 4


def _product(w, x, i, TN: Int, TK: Int, NK: Int):
    """[TN, 8] float32: the block's rows times the tokens. Edges of W and x are filled with zeros."""
    total = ct.zeros((TN, COLUMNS), dtype=ct.float32)
    for k in range(NK):
        wt = ct.load(w, index=(i, k), shape=(TN, TK), padding_mode=ZERO)
        xt = ct.load(x, index=(k, 0), shape=(TK, COLUMNS), order=(1, 0), padding_mode=ZERO)
        total = ct.mma(wt, xt, total)
    return total


def _scales(square_sums, K: Int, NB: Int, EPS: Float):
    """1 / rms of each token, [1, 8]; columns past the tokens hold 1/√ε, which nothing reads."""
    sums = ct.load(square_sums, index=(0, 0), shape=(COLUMNS, NB), padding_mode=ZERO, allow_tma=False)
    return ct.rsqrt(ct.sum(sums, axis=1).reshape((1, COLUMNS)) * (1.0 / K) + EPS)


@ct.kernel
def linear_tokens_kernel(
    w, x, square_sums, extra, y, K: Int, NB: Int, EPS: Float, TN: Int, TK: Int, NK: Int, NORM: Bool, BIAS: Bool,
    ACT: Int, PDL: Bool,
):  # fmt: skip
    """y[t, n] = act(Σ_k W[n, k] x[t, k] / rms_t + bias[n]) as in linear_kernel, for up to 8 tokens.

    w [N, K], x [T, K] half; square_sums [T, NB] float32; extra: bias [1, N] or xIELU's numbers [2]; y [T, N or N/2].
    Grid: ceil(N / TN) blocks of TN rows. Products of half in float32 sums, one rounding at the store.
    Tiles may hang over N, K and T: zeros in, nothing out.
    """
    i = ct.bid(0)
    if PDL:
        ct.grid_dependency_control_launch_dependents()
        ct.grid_dependency_control_wait()
    out = _product(w, x, i, TN, TK, NK)
    if NORM:
        out = out * _scales(square_sums, K, NB, EPS)
    if BIAS:
        out = out + ct.load(
            extra, index=(i, 0), shape=(TN, 1), order=(1, 0), padding_mode=ZERO, allow_tma=False
        ).astype(ct.float32)
    if ACT == XIELU:
        positive = ct.load(extra, index=(0,), shape=(1,), check_bounds=False).reshape((1, 1))
        negative = ct.load(extra, index=(1,), shape=(1,), check_bounds=False).reshape((1, 1))
        out = xielu_of(out, positive, negative)
    if ACT == SWIGLU:
        pairs = out.reshape((TN // 2, 2, COLUMNS))
        gate = ct.extract(pairs, (0, 0, 0), (TN // 2, 1, COLUMNS)).reshape((TN // 2, COLUMNS))
        up = ct.extract(pairs, (0, 1, 0), (TN // 2, 1, COLUMNS)).reshape((TN // 2, COLUMNS))
        out = silu_times(gate, up)
    ct.store(y, index=(i, 0), tile=out.astype(y.dtype), order=(1, 0), allow_tma=False)


@ct.kernel
def linear_residual_tokens_kernel(
    w, x, extra, stream, gain, normed, square_sums, TN: Int, TK: Int, NK: Int, BIAS: Bool, PDL: Bool
):
    """stream += x Wᵀ + bias, normed = stream·gain, square_sums[t, block] = Σ stream², as in linear_residual_kernel.

    w [N, K], x [T, K] half; stream [T, N] float32, read and written; gain, bias [1, N]; normed [T, N] half; square_sums
    [T, ≥ blocks] float32. Grid: ceil(N / TN) blocks of TN rows. float32 but for the product's operands and normed.
    Tiles may hang over N, K and T: zeros in, nothing out.
    """
    i = ct.bid(0)
    if PDL:
        ct.grid_dependency_control_launch_dependents()
    g = ct.load(gain, index=(i, 0), shape=(TN, 1), order=(1, 0), padding_mode=ZERO, allow_tma=False).astype(ct.float32)
    if PDL:
        ct.grid_dependency_control_wait()
    old = ct.load(stream, index=(i, 0), shape=(TN, COLUMNS), order=(1, 0), padding_mode=ZERO, allow_tma=False)
    out = _product(w, x, i, TN, TK, NK) + old
    if BIAS:
        out = out + ct.load(
            extra, index=(i, 0), shape=(TN, 1), order=(1, 0), padding_mode=ZERO, allow_tma=False
        ).astype(ct.float32)
    ct.store(stream, index=(i, 0), tile=out, order=(1, 0), allow_tma=False)
    ct.store(normed, index=(i, 0), tile=(out * g).astype(normed.dtype), order=(1, 0), allow_tma=False)
    row = i * TN + ct.arange(TN, dtype=ct.int32).reshape((TN, 1))
    squares = ct.sum(ct.where(row < w.shape[0], out * out, 0.0), axis=0, keepdims=True)
    ct.store(square_sums, index=(i, 0), tile=squares, order=(1, 0), allow_tma=False)


def kernel_and_args(
    config: TokensConfig,
    w: Any,
    x: Any,
    square_sums: Any,
    extra: Any,
    y: Any,
    act: int,
    eps: float,
    bias: bool,
    pdl: bool,
) -> tuple[Any, int, tuple[Any, ...]]:
    """linear_tokens_kernel with blocks and arguments, for arrays that kernels.linear has checked."""
    n, k = w.shape
    slots = 1 if square_sums is None else int(square_sums.shape[1])
    args: tuple[Any, ...] = (w, x, x if square_sums is None else square_sums, x if extra is None else extra, y)
    args += (k, slots, float(eps))
    args += (config.tile_n, config.tile_k, -(-k // config.tile_k), square_sums is not None, bias, act, pdl)
    return linear_tokens_kernel, -(-n // config.tile_n), args


def residual_kernel_and_args(
    config: TokensConfig, w: Any, x: Any, bias: Any, stream: Any, gain: Any, normed: Any, square_sums: Any, pdl: bool
) -> tuple[Any, int, tuple[Any, ...]]:
    """linear_residual_tokens_kernel with blocks and arguments, for arrays that kernels.linear has checked."""
    n, k = w.shape
    args: tuple[Any, ...] = (w, x, x if bias is None else bias, stream, gain, normed, square_sums)
    args += (config.tile_n, config.tile_k)
    args += (-(-k // config.tile_k), bias is not None, pdl)
    return linear_residual_tokens_kernel, -(-n // config.tile_n), args
