"""SwiGLU and xIELU: as functions inside the fused products, and as kernels of their own for prefill.

xIELU (Huang and Schlag, 2024; Apertus) with β = 0.5 and ε = -1e-6:

    x > 0    α_p x² + β x
    x ≤ 0    α_n (expm1(min(x, ε)) - x) + β x

α_p = softplus(alpha_p) and α_n = β + softplus(alpha_n) of the model's two numbers: the engine makes float32 [α_p, α_n]
once a layer. expm1 is exp(x) - 1 here, a series near 0 where that cancels.

Refuses: rows that a 16-byte load does not divide.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cuda.tile as ct

from kernels.launch import check_array
from kernels.notation import HALF, LOG2E, ZERO, Bool, Int
from kernels.specs import ArraySpec

if TYPE_CHECKING:
    from kernels.launch import Launcher
    from kernels.shapes import ModelShape

BETA = 0.5
EPSILON = -1e-6


@dataclass(frozen=True)
class ActivationConfig:
    """Outputs of one block, in a row. Every element is independent: 1,024 keeps 8 a thread."""

    tile: int = 1024


def silu_times(gate, up):
    """silu(gate) · up, float32, within 1e-5: a third of the instructions of an exact division and `ct.exp`."""
    power = ct.exp2(gate * -LOG2E, flush_to_zero=True)
    return ct.truediv(gate, 1.0 + power, rounding_mode=ct.RoundingMode.APPROX, flush_to_zero=True) * up


def xielu_of(x, positive, negative):
    """xIELU of a float32 tile; α_p and α_n broadcast against it."""
    low = ct.minimum(x, EPSILON)
    series = low * (1.0 + low * (0.5 + low * (1.0 / 6.0)))  # within 2e-9 of expm1 for |x| < 0.015
    expm1 = ct.where(low > -0.015, series, ct.exp(low) - 1.0)
    return ct.where(x > 0.0, positive * x * x, negative * (expm1 - x)) + BETA * x


@ct.kernel
def swiglu_kernel(gate_up, y, C: Int, PDL: Bool):
    """y[t, j] = silu(gate_up[t, 2j]) · gate_up[t, 2j+1].

    gate_up [T, 2F], y [T, F] half. Grid (ceil(F / C), T): a block owns C outputs of one token.
    float32 inside, one rounding at the store. A tile may hang over F: zeros in, nothing out.
    """
    i, t = ct.bid(0), ct.bid(1)
    if PDL:
        ct.grid_dependency_control_launch_dependents()
        ct.grid_dependency_control_wait()
    pairs = ct.load(gate_up, index=(t, i), shape=(1, 2 * C), padding_mode=ZERO, allow_tma=False)
    pairs = pairs.astype(ct.float32).reshape((C, 2))
    out = silu_times(ct.extract(pairs, (0, 0), (C, 1)), ct.extract(pairs, (0, 1), (C, 1)))
    ct.store(y, index=(t, i), tile=out.reshape((1, C)).astype(y.dtype), allow_tma=False)


@ct.kernel
def xielu_kernel(x, alphas, y, C: Int, PDL: Bool):
    """y[t, j] = xIELU(x[t, j]) with alphas = [α_p, α_n].

    x, y [T, F] half; alphas [2] float32. Grid (ceil(F / C), T): a block owns C outputs of one token.
    float32 inside, one rounding at the store. A tile may hang over F: zeros in, nothing out.
    """
    i, t = ct.bid(0), ct.bid(1)
    if PDL:
        ct.grid_dependency_control_launch_dependents()
    positive = ct.load(alphas, index=(0,), shape=(1,), check_bounds=False)
    negative = ct.load(alphas, index=(1,), shape=(1,), check_bounds=False)
    if PDL:
        ct.grid_dependency_control_wait()
    tile = ct.load(x, index=(t, i), shape=(1, C), padding_mode=ZERO, allow_tma=False).astype(ct.float32)
    ct.store(y, index=(t, i), tile=xielu_of(tile, positive, negative).astype(y.dtype), allow_tma=False)


def swiglu(launcher: Launcher, gate_up: Any, y: Any, *, config: ActivationConfig | None = None) -> None:
    """y [T, F] from gate_up [T, 2F], whose columns alternate gate, up.

    Raises:
        ValueError, TypeError: an array's shape, layout, alignment or type is not what the kernel reads.
    """
    config = config or ActivationConfig()
    check_array("swiglu: y", y, (None, None), *HALF, align=16)
    tokens, width = y.shape
    check_array("swiglu: gate_up", gate_up, (tokens, 2 * width), str(y.dtype), align=16)
    _check_width("swiglu", width)
    launcher(swiglu_kernel, (-(-width // config.tile), tokens, 1), (gate_up, y, config.tile, launcher.pdl))


def xielu(launcher: Launcher, x: Any, alphas: Any, y: Any, *, config: ActivationConfig | None = None) -> None:
    """y [T, F] = xIELU(x [T, F]), alphas float32 [2].

    Raises:
        ValueError, TypeError: an array's shape, layout, alignment or type is not what the kernel reads.
    """
    config = config or ActivationConfig()
    check_array("xielu: y", y, (None, None), *HALF, align=16)
    tokens, width = y.shape
    check_array("xielu: x", x, (tokens, width), str(y.dtype), align=16)
    check_array("xielu: alphas", alphas, (2,), "float32")
    _check_width("xielu", width)
    launcher(xielu_kernel, (-(-width // config.tile), tokens, 1), (x, alphas, y, config.tile, launcher.pdl))


def _check_width(op: str, width: int) -> None:
    if width % 8:
        raise ValueError(f"{op}: rows of {width} elements, expected a multiple of 8 (16 bytes)")


def model_launches(launcher: Launcher, model: ModelShape, dtype: str) -> None:
    """The activation of a prompt in chunks of 512 tokens."""
    y = ArraySpec((512, model.ffn), dtype)
    if model.activation == "xielu":
        xielu(launcher, ArraySpec((512, model.ffn), dtype), ArraySpec(2, "float32"), y)
    else:
        swiglu(launcher, ArraySpec((512, 2 * model.ffn), dtype), y)
