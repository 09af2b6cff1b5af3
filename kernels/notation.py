"""Names that every kernel file writes the same way: annotations of compile-time constants, padding, types, sizes."""

from __future__ import annotations

from typing import TypeAlias

import cuda.tile as ct

Int: TypeAlias = ct.Constant[int]
Bool: TypeAlias = ct.Constant[bool]
Float: TypeAlias = ct.Constant[float]

ZERO = ct.PaddingMode.ZERO
NEG_INF = ct.PaddingMode.NEG_INF

HALF = ("bfloat16", "float16")  # types of weights and activations; one of them throughout a model
PAGE = 64  # positions of a page of the KV cache; with fewer, the products over it leave the tensor cores
LOG2E = 1.4426950408889634  # exp(x) = exp2(x · LOG2E): the hardware has exp2
