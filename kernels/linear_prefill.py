"""Products of many token rows with a weight matrix, y = x W^T, on the tensor cores, with what follows folded in.

Four forms of one product: plain (QKV, LM head), added to the float32 residual stream (O, down), SwiGLU over gate and
up rows (their products never reach memory), xIELU. A block owns a (TILE_M rows, TILE_N weight rows) tile of the result
and walks K; x and W arrive through TMA rings that the compiler builds. Tiles are numbered so that GROUP row tiles share
their weight tiles in the L2. A persistent configuration has only as many blocks as run at a time, each with several
tiles: the next one's x and W are on their way while one is stored.

It is not for decoding: for 1 to 8 rows kernels/linear.py is several times faster.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cuda.tile as ct

from kernels.activation import silu_times, xielu_of
from kernels.configs import config as table_config
from kernels.launch import check_array, with_hints
from kernels.notation import HALF, ZERO, Int
from kernels.specs import ArraySpec

if TYPE_CHECKING:
    from kernels.launch import Launcher
    from kernels.shapes import ModelShape


@dataclass(frozen=True)
class LinearPrefillConfig:
    """Tile sides and hints of one shape family.

    tile_m: token rows a block; tile_n: weight rows a block; tile_k: step along K; group: row tiles that share weight
    tiles; warps: num_worker_warps (4 or 8); ctas: blocks per cluster; occupancy: blocks a multiprocessor; latency: 1 to
    10, the depth of the TMA rings. 0 = the compiler's choice. persistent: under dependent launch as many blocks as run
    at a time, each with several tiles. split_gate: SwiGLU with two accumulators (sm_100, whose compiler cannot take
    interleaved columns apart).
    """

    tile_m: int = 128
    tile_n: int = 128
    tile_k: int = 64
    group: int = 8
    warps: int = 0
    ctas: int = 0
    occupancy: int = 0
    latency: int = 0
    persistent: bool = False
    split_gate: bool = False

    @property
    def hints(self) -> dict[str, int]:
        """What `replace_hints` takes; absent where the compiler chooses."""
        hints = {"num_worker_warps": self.warps, "num_ctas": self.ctas, "occupancy": self.occupancy}
        return {name: value for name, value in hints.items() if value}

    def loops(self, launcher: Launcher) -> bool:
        """Whether blocks walk over several tiles: only under dependent launch, for without it tileiras 13.4 gives the
        loop a third group of warps and too few registers (128x128x128: 496 bytes of stack).
        """
        return self.persistent and launcher.pdl

    def blocks(self, x: Any, w: Any, launcher: Launcher) -> int:
        """Blocks for x [T, K] and w [N, K]: one a tile; or, in a loop, the fewest that need no more rounds than a full
        device. The multiprocessors left over are the next launch's.
        """
        tiles = -(-int(x.shape[0]) // self.tile_m) * -(-int(w.shape[0]) // self.tile_n)
        rounds = -(-tiles // (launcher.processors * max(1, self.occupancy))) if self.loops(launcher) else 1
        return -(-tiles // rounds)


def tile_counts(x, w, TILE_M: Int, TILE_N: Int, TILE_K: Int):
    """Row and column tiles of the result."""
    return ct.num_tiles(x, axis=0, shape=(TILE_M, TILE_K)), ct.num_tiles(w, axis=0, shape=(TILE_N, TILE_K))


def each_tile(body, arrays, counts, constants, LOOP: Int):
    """`body(i, *arrays, constants)` for this block's tile i of the result, or for several of them."""
    if LOOP:
        rows, columns = counts
        for i in range(ct.bid(0), rows * columns, ct.num_blocks(0)):
            body(i, *arrays, constants)
    else:
        body(ct.bid(0), *arrays, constants)


def result_tile(i, rows, columns, GROUP: Int):
    """(m, n) of tile i: column tiles outermost in groups of GROUP row tiles, rows fastest."""
    group = i // (GROUP * columns)
    within = i - group * GROUP * columns
    first = group * GROUP
    height = ct.minimum(rows - first, GROUP)
    return first + within % height, within // height


def load_x(x, m, k, TILE_M: Int, TILE_K: Int, LATENCY: Int):
    """Tile [TILE_M, TILE_K] of x."""
    latency = ct.static_eval(LATENCY or None)
    return ct.load(x, index=(m, k), shape=(TILE_M, TILE_K), padding_mode=ZERO, latency=latency)


def load_w(w, k, n, TILE_K: Int, TILE_N: Int, LATENCY: Int):
    """Tile [TILE_K, TILE_N] of the weight's transpose."""
    latency = ct.static_eval(LATENCY or None)
    return ct.load(w, index=(k, n), shape=(TILE_K, TILE_N), order=(1, 0), padding_mode=ZERO, latency=latency)


def tile_product(i, x, w, bias, constants):
    """(product + bias, m, n) of tile i."""
    TILE_M, TILE_N, TILE_K, GROUP, LATENCY, BIAS = constants
    rows, columns = tile_counts(x, w, TILE_M, TILE_N, TILE_K)
    m, n = result_tile(i, rows, columns, GROUP)
    acc = ct.zeros((TILE_M, TILE_N), dtype=ct.float32)
    for k in range(ct.num_tiles(x, axis=1, shape=(TILE_M, TILE_K))):
        acc = ct.mma(load_x(x, m, k, TILE_M, TILE_K, LATENCY), load_w(w, k, n, TILE_K, TILE_N, LATENCY), acc)
    if BIAS:
        b = ct.load(bias, index=(n,), shape=(TILE_N,), padding_mode=ZERO, allow_tma=False)
        acc = acc + b.astype(ct.float32).reshape((1, TILE_N))
    return acc, m, n


def pairs_swiglu(products):
    """[M, N] float32, columns alternating gate and up -> [M, N / 2]."""
    M, N = products.shape
    pairs = products.reshape((M, N // 2, 2))
    gate = ct.extract(pairs, (0, 0, 0), (M, N // 2, 1)).reshape((M, N // 2))
    up = ct.extract(pairs, (0, 0, 1), (M, N // 2, 1)).reshape((M, N // 2))
    return silu_times(gate, up)


def plain_tile(i, x, w, bias, y, constants):
    """Tile i of y."""
    acc, m, n = tile_product(i, x, w, bias, constants)
    ct.store(y, index=(m, n), tile=acc.astype(y.dtype))


@ct.kernel
def linear_prefill_kernel(
    x, w, bias, y, TILE_M: Int, TILE_N: Int, TILE_K: Int, GROUP: Int, LATENCY: Int, BIAS: Int, LOOP: Int, PDL: Int
):
    """y = x W^T + bias.

    x [T, K], w [N, K], bias [N], y [T, N], all BF16 or all FP16.
    Grid: a block for each (TILE_M, TILE_N) tile of y, or fewer, each in a LOOP over tiles.
    float32 sums along K, one rounding at the store.
    Any T, N, K: loads past an edge read 0, stores past it are dropped.
    """
    if PDL:
        ct.grid_dependency_control_launch_dependents()
        ct.grid_dependency_control_wait()
    constants = (TILE_M, TILE_N, TILE_K, GROUP, LATENCY, BIAS)
    each_tile(plain_tile, (x, w, bias, y), tile_counts(x, w, TILE_M, TILE_N, TILE_K), constants, LOOP)


def residual_tile(i, x, w, bias, residual, constants):
    """Tile i of the residual stream."""
    acc, m, n = tile_product(i, x, w, bias, constants)
    residual.tiled_view(acc.shape).atomic_store_add((m, n), acc)


@ct.kernel
def linear_prefill_residual_kernel(
    x, w, bias, residual, TILE_M: Int, TILE_N: Int, TILE_K: Int, GROUP: Int, LATENCY: Int, BIAS: Int, LOOP: Int,
    PDL: Int,
):  # fmt: skip
    """residual += x W^T + bias.

    x [T, K], w [N, K], bias [N], BF16 or FP16; residual [T, N] float32, read and written in place.
    Grid: a block for each (TILE_M, TILE_N) tile of residual, or fewer, each in a LOOP over tiles; each element gets one
    add.
    float32 sums, no rounding to half precision. The add happens in the L2 (TMA reduction on sm_90 and newer): reading
    the tile, adding and storing it cost 100 us of 284 at 4096 x 4096 x 4096 on an H200.
    Any T, N, K: loads past an edge read 0, stores past it are dropped.
    """
    if PDL:
        ct.grid_dependency_control_launch_dependents()
        ct.grid_dependency_control_wait()
    constants = (TILE_M, TILE_N, TILE_K, GROUP, LATENCY, BIAS)
    each_tile(residual_tile, (x, w, bias, residual), tile_counts(x, w, TILE_M, TILE_N, TILE_K), constants, LOOP)


def swiglu_tile(i, x, w, bias, y, constants):
    """Tile i of the products, half as wide in y."""
    acc, m, n = tile_product(i, x, w, bias, constants)
    ct.store(y, index=(m, n), tile=pairs_swiglu(acc).astype(y.dtype))


@ct.kernel
def linear_prefill_swiglu_kernel(
    x, w, bias, y, TILE_M: Int, TILE_N: Int, TILE_K: Int, GROUP: Int, LATENCY: Int, BIAS: Int, LOOP: Int, PDL: Int
):
    """y = silu(x G^T + bias_g) * (x U^T + bias_u); gate and up rows interleaved, w[2j] = G[j], w[2j + 1] = U[j].

    x [T, K], w [2F, K], bias [2F], y [T, F], all BF16 or all FP16.
    Grid: a block for each (TILE_M, TILE_N / 2) tile of y, or fewer, each in a LOOP over tiles.
    float32 until the store. A thread's two neighbouring columns are its gate and up: no exchange between threads.
    Any T, F, K: loads past an edge read 0, stores past it are dropped.
    """
    if PDL:
        ct.grid_dependency_control_launch_dependents()
        ct.grid_dependency_control_wait()
    constants = (TILE_M, TILE_N, TILE_K, GROUP, LATENCY, BIAS)
    each_tile(swiglu_tile, (x, w, bias, y), tile_counts(x, w, TILE_M, TILE_N, TILE_K), constants, LOOP)


def split_swiglu_tile(i, x, w, bias, y, constants):
    """Tile i of y."""
    TILE_M, TILE_N, TILE_K, GROUP, LATENCY, BIAS = constants
    steps = ct.num_tiles(x, axis=1, shape=(TILE_M, TILE_K))
    rows, columns = tile_counts(x, w, TILE_M, TILE_N, TILE_K)
    m, n = result_tile(i, rows, columns, GROUP)
    gate = ct.zeros((TILE_M, TILE_N), dtype=ct.float32)
    up = ct.zeros((TILE_M, TILE_N), dtype=ct.float32)
    for k in range(steps):
        xt = load_x(x, m, k, TILE_M, TILE_K, LATENCY)
        gate = ct.mma(xt, load_w(w, k, n, TILE_K, TILE_N, LATENCY), gate)
        up = ct.mma(xt, load_w(w, steps + k, n, TILE_K, TILE_N, LATENCY), up)
    if BIAS:
        gate_b = ct.load(bias, index=(n, 0), shape=(TILE_N, 1), padding_mode=ZERO, allow_tma=False)
        up_b = ct.load(bias, index=(n, 1), shape=(TILE_N, 1), padding_mode=ZERO, allow_tma=False)
        gate = gate + gate_b.astype(ct.float32).reshape((1, TILE_N))
        up = up + up_b.astype(ct.float32).reshape((1, TILE_N))
    ct.store(y, index=(m, n), tile=silu_times(gate, up).astype(y.dtype))


@ct.kernel
def linear_prefill_split_swiglu_kernel(
    x, w, bias, y, TILE_M: Int, TILE_N: Int, TILE_K: Int, GROUP: Int, LATENCY: Int, BIAS: Int, LOOP: Int, PDL: Int
):
    """The same SwiGLU with two accumulators; w [F, 2K] and bias [F, 2] are views: row j = gate row j, then up row j.

    x [T, K], y [T, F], all BF16 or all FP16.
    Grid: a block for each (TILE_M, TILE_N) tile of y, or fewer, each in a LOOP over tiles.
    float32 until the store. Exists because tileiras 13.4 for sm_100 aborts on the other form's extract.
    K divisible by TILE_K (the wrapper checks); loads past the other edges read 0, stores past them are dropped.
    """
    if PDL:
        ct.grid_dependency_control_launch_dependents()
        ct.grid_dependency_control_wait()
    constants = (TILE_M, TILE_N, TILE_K, GROUP, LATENCY, BIAS)
    each_tile(split_swiglu_tile, (x, w, bias, y), tile_counts(x, w, TILE_M, TILE_N, TILE_K), constants, LOOP)


def xielu_tile(i, x, w, bias, alphas, y, constants):
    """Tile i of y."""
    acc, m, n = tile_product(i, x, w, bias, constants)
    positive = ct.load(alphas, index=(0,), shape=(), allow_tma=False)
    negative = ct.load(alphas, index=(1,), shape=(), allow_tma=False)
    ct.store(y, index=(m, n), tile=xielu_of(acc, positive, negative).astype(y.dtype))


@ct.kernel
def linear_prefill_xielu_kernel(
    x, w, bias, alphas, y, TILE_M: Int, TILE_N: Int, TILE_K: Int, GROUP: Int, LATENCY: Int, BIAS: Int, LOOP: Int,
    PDL: Int,
):  # fmt: skip
    """y = xIELU(x W^T + bias), by kernels/activation.py.

    x [T, K], w [N, K], bias [N], y [T, N], all BF16 or all FP16; alphas [2] float32.
    Grid: a block for each (TILE_M, TILE_N) tile of y, or fewer, each in a LOOP over tiles.
    float32 until the store.
    Any T, N, K: loads past an edge read 0, stores past it are dropped.
    """
    if PDL:
        ct.grid_dependency_control_launch_dependents()
        ct.grid_dependency_control_wait()
    constants = (TILE_M, TILE_N, TILE_K, GROUP, LATENCY, BIAS)
    each_tile(xielu_tile, (x, w, bias, alphas, y), tile_counts(x, w, TILE_M, TILE_N, TILE_K), constants, LOOP)


def linear_prefill(
    launcher: Launcher, x: Any, w: Any, y: Any, *, config: LinearPrefillConfig, bias: Any = None
) -> None:
    """y [T, N] = x [T, K] @ w [N, K]^T (+ bias [N]); one half-precision dtype for all.

    Raises:
        ValueError, TypeError: shape, dtype or layout.
    """
    rows, columns = _check("linear_prefill", x, w, bias)
    check_array("linear_prefill: y", y, (rows, columns), str(x.dtype), align=16)
    _launch(launcher, linear_prefill_kernel, (x, w), bias, (y,), config)


def linear_prefill_residual(
    launcher: Launcher, x: Any, w: Any, residual: Any, *, config: LinearPrefillConfig, bias: Any = None
) -> None:
    """residual [T, N] float32 += x [T, K] @ w [N, K]^T (+ bias [N]).

    Raises:
        ValueError, TypeError: shape, dtype or layout.
    """
    rows, columns = _check("linear_prefill_residual", x, w, bias)
    check_array("linear_prefill_residual: residual", residual, (rows, columns), "float32", align=16)
    _launch(launcher, linear_prefill_residual_kernel, (x, w), bias, (residual,), config)


def linear_prefill_swiglu(
    launcher: Launcher, x: Any, w: Any, y: Any, *, config: LinearPrefillConfig, bias: Any = None
) -> None:
    """y [T, F] = silu(gate) * up, gate and up rows of w [2F, K] (and bias [2F]) interleaved.

    Raises:
        ValueError, TypeError: shape, dtype or layout; K not divisible by tile_k where the config splits the gate.
    """
    rows, columns = _check("linear_prefill_swiglu", x, w, bias)
    if columns % 2:
        raise ValueError(f"linear_prefill_swiglu: w has {columns} rows, expected gate and up rows in pairs")
    check_array("linear_prefill_swiglu: y", y, (rows, columns // 2), str(x.dtype), align=16)
    if not config.split_gate:
        _launch(launcher, linear_prefill_swiglu_kernel, (x, w), bias, (y,), config)
        return
    k = int(x.shape[1])
    if k % config.tile_k:
        raise ValueError(f"linear_prefill_swiglu: K is {k}, expected a multiple of tile_k {config.tile_k}")
    pairs = w.reshape(columns // 2, 2 * k)
    pair_bias = None if bias is None else bias.reshape(columns // 2, 2)
    _launch(launcher, linear_prefill_split_swiglu_kernel, (x, pairs), pair_bias, (y,), config)


def linear_prefill_xielu(
    launcher: Launcher,
    x: Any,
    w: Any,
    alphas: Any,
    y: Any,
    *,
    config: LinearPrefillConfig,
    bias: Any = None,
) -> None:
    """y [T, N] = xIELU(x @ w^T + bias).

    alphas [2] float32: soft-plus of the model's alpha_p, and 0.5 + soft-plus of its alpha_n.

    Raises:
        ValueError, TypeError: shape, dtype or layout.
    """
    rows, columns = _check("linear_prefill_xielu", x, w, bias)
    check_array("linear_prefill_xielu: alphas", alphas, (2,), "float32")
    check_array("linear_prefill_xielu: y", y, (rows, columns), str(x.dtype), align=16)
    _launch(launcher, linear_prefill_xielu_kernel, (x, w), bias, (alphas, y), config)


def _check(op: str, x: Any, w: Any, bias: Any) -> tuple[int, int]:
    """(T, N) of a product whose inputs fit together."""
    check_array(f"{op}: x", x, (None, None), *HALF, align=16)
    check_array(f"{op}: w", w, (None, None), str(x.dtype), align=16)
    k = int(x.shape[1])
    if int(w.shape[1]) != k:
        raise ValueError(f"{op}: x has {k} columns, the weight expects {int(w.shape[1])}")
    if k % 8:
        raise ValueError(f"{op}: x has {k} columns, expected a multiple of 8 (rows of 16 bytes)")
    if bias is not None:
        check_array(f"{op}: bias", bias, (int(w.shape[0]),), str(x.dtype), align=16)
    return int(x.shape[0]), int(w.shape[0])


def _launch(
    launcher: Launcher,
    kernel: Any,
    inputs: tuple[Any, Any],
    bias: Any,
    outputs: tuple[Any, ...],
    c: LinearPrefillConfig,
) -> None:
    """One launch; without a bias the weight stands in for it, unread."""
    x, w = inputs
    constants = (c.tile_m, c.tile_n, c.tile_k, c.group, c.latency, int(bias is not None))
    args = (x, w, w if bias is None else bias, *outputs, *constants, int(c.loops(launcher)), int(launcher.pdl))
    launcher(with_hints(kernel, **c.hints), (c.blocks(x, w, launcher), 1, 1), args)


def model_launches(launcher: Launcher, model: ModelShape, dtype: str) -> None:
    """A layer's four products at the lengths where configurations change."""
    o_bias = ArraySpec(model.hidden, dtype) if model.o_bias else None
    qkv_bias = ArraySpec(model.qkv_rows, dtype) if model.qkv_bias else None
    up_bias, down_bias = (ArraySpec(n, dtype) if model.mlp_bias else None for n in (model.up_rows, model.hidden))
    for tokens in (64, 128, 256, 512, 1024, 2048, 4096):
        act, normed = ArraySpec((tokens, model.ffn), dtype), ArraySpec((tokens, model.hidden), dtype)
        attended, stream = ArraySpec((tokens, model.attention_width), dtype), ArraySpec(normed.shape, "float32")
        weights = {name: ArraySpec(shape, dtype) for name, shape in model.products.items()}

        def config(form: str, name: str, tokens: int = tokens) -> LinearPrefillConfig:
            n, k = model.products[name]
            return LinearPrefillConfig(**table_config(form, launcher.arch, tokens=tokens, n=n, k=k))

        qkv, of_qkv = ArraySpec((tokens, model.qkv_rows), dtype), config("linear_prefill", "qkv")
        linear_prefill(launcher, normed, weights["qkv"], qkv, config=of_qkv, bias=qkv_bias)
        of_o = config("linear_prefill_residual", "o")
        linear_prefill_residual(launcher, attended, weights["o"], stream, config=of_o, bias=o_bias)
        of_up = config(f"linear_prefill_{model.activation}", "up")
        if model.activation == "xielu":
            linear_prefill_xielu(launcher, normed, weights["up"], ArraySpec(2, "float32"), act, config=of_up)
        else:
            linear_prefill_swiglu(launcher, normed, weights["up"], act, config=of_up, bias=up_bias)
        of_down = config("linear_prefill_residual", "down")
        linear_prefill_residual(launcher, act, weights["down"], stream, config=of_down, bias=down_bias)
