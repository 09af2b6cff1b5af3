"""The numbers of xIELU (arXiv 2411.13010): what is stored for a layer, and what its kernels work with.

    x > 0    α_p x² + β x                                 α_p = softplus(alpha_p)
    x ≤ 0    α_n (expm1(min(x, ε)) - x) + β x             α_n = β + softplus(alpha_n)

Stored are alpha_p and alpha_n [1] and, as buffers, beta and eps; files without the buffers have Transformers' values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tileinfer_core.models.structure import Parameter
from tileinfer_core.weights import TensorSpec

if TYPE_CHECKING:
    from tileinfer_core.weights import WeightFiles

    Float32Array = np.ndarray[Any, np.dtype[np.float32]]

BETA, EPSILON = 0.5, -1e-6
AS_TRAINED = (0.8, 0.8, BETA, EPSILON)  # where training starts: for a model of noise


def xielu_parameter(name: str, prefix: str) -> Parameter:
    """The array [α_p, α_n, β, ε] of the layer whose activation is stored under `prefix`."""
    alphas = [TensorSpec(f"{prefix}.{alpha}", (1,)) for alpha in ("alpha_p", "alpha_n")]
    buffers = [TensorSpec(f"{prefix}.{buffer}", (), optional=True) for buffer in ("beta", "eps")]
    return Parameter(name, (*alphas, *buffers), form="xielu")


def read_xielu(parameter: Parameter, files: WeightFiles) -> Float32Array:
    """[α_p, α_n, β, ε] float32."""

    def number(spec: TensorSpec, default: float) -> float:
        return float(files.read(spec.name).reshape(-1)[0]) if spec.name in files.names else default

    alpha_p, alpha_n, beta, epsilon = (
        number(spec, default) for spec, default in zip(parameter.parts, AS_TRAINED, strict=True)
    )
    positive, negative = np.logaddexp(0.0, alpha_p), beta + np.logaddexp(0.0, alpha_n)
    return np.array([positive, negative, beta, epsilon], np.float32)
