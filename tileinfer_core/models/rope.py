"""Inverse frequencies and cos/sin tables of rotary position embeddings, as Transformers computes them.

The rounding is part of the contract. A float32 angle at position 12,000 has a step of 1e-3, so tables made in
float64 would differ from every other implementation's by more than the tolerance on logits. Hence: frequencies in
float32, the angle a float32 product, cos and sin of that angle exact and rounded once.

Sources: RoFormer (arXiv 2104.09864), YaRN (arXiv 2309.00071), the Llama 3.1 reference code for "llama3".
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tileinfer_core.rope_config import RopeConfig

    Float32Array = np.ndarray[Any, np.dtype[np.float32]]


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Float32Array, float]:
    """The inverse frequencies [head_dim / 2] and the factor that cos and sin are multiplied by."""
    pos_freqs = _position_frequencies(rope.theta, head_dim)
    inv_freq = np.float32(1) / pos_freqs
    if rope.type == "linear":
        return inv_freq / np.float32(rope.factor), 1.0
    if rope.type == "llama3":
        return _llama3(rope, inv_freq), 1.0
    if rope.type == "yarn":
        return _yarn(rope, pos_freqs, head_dim), _yarn_attention_factor(rope)
    return inv_freq, 1.0


def cos_sin(inv_freq: Float32Array, scale: float, start: int, stop: int) -> tuple[Float32Array, Float32Array]:
    """cos and sin at positions start … stop - 1: two arrays [stop - start, head_dim / 2]."""
    positions = np.arange(start, stop, dtype=np.float32)
    angles = (positions[:, None] * inv_freq).astype(np.float64)  # rounded to float32 first
    factor = np.float32(scale)
    return np.cos(angles).astype(np.float32) * factor, np.sin(angles).astype(np.float32) * factor


def _position_frequencies(theta: float, head_dim: int) -> Float32Array:
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    powers: Float32Array = np.asarray(theta ** exponents.astype(np.float64), np.float32)
    return powers


def _llama3(rope: RopeConfig, inv_freq: Float32Array) -> Float32Array:
    """Long waves divided by the factor, short ones kept, those between interpolated smoothly.

    PyTorch divides a number by a tensor as reciprocal times number: two roundings, kept here.
    """
    original = rope.original_max_position_embeddings
    factor = np.float32(rope.factor)
    low, high = rope.low_freq_factor, rope.high_freq_factor
    one = np.float32(1)
    wavelength = one / inv_freq * np.float32(2 * math.pi)
    scaled = np.where(wavelength > np.float32(original / low), inv_freq / factor, inv_freq)
    smooth = (one / wavelength * np.float32(original) - np.float32(low)) / np.float32(high - low)
    between = (one - smooth) * scaled / factor + smooth * scaled
    is_between = (wavelength >= np.float32(original / high)) & (wavelength <= np.float32(original / low))
    return np.where(is_between, between, scaled).astype(np.float32)


def _yarn(rope: RopeConfig, pos_freqs: Float32Array, head_dim: int) -> Float32Array:
    """A ramp over the dimensions from extrapolation (kept) to interpolation (divided by the factor)."""
    extrapolated = np.float32(1) / pos_freqs
    interpolated = np.float32(1) / (np.float32(rope.factor) * pos_freqs)
    low, high = _yarn_range(rope, head_dim)
    ramp = (np.arange(head_dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    keep = np.float32(1) - np.clip(ramp, 0, 1)
    return np.asarray(interpolated * (np.float32(1) - keep) + extrapolated * keep)


def _yarn_range(rope: RopeConfig, head_dim: int) -> tuple[float, float]:
    def dimension(rotations: float) -> float:
        turns = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    return low, high if high != low else high + 0.001


def _yarn_attention_factor(rope: RopeConfig) -> float:
    def scale(mscale: float) -> float:
        return 0.1 * mscale * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)
