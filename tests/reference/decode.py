"""What the decode kernels must give, in float64 from the same rounded inputs; rounded where the kernels round."""

from __future__ import annotations

import numpy as np

PAGE = 64


def rope_tables(positions: int, head_dim: int, theta: float = 1e6) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin [positions, head_dim / 2] float32."""
    angle = np.arange(positions)[:, None] * theta ** (-np.arange(head_dim // 2) / (head_dim // 2))
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def rms_norm(x: np.ndarray, gain: np.ndarray, eps: float) -> np.ndarray:
    x = x.astype(np.float64)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * gain.astype(np.float64)


def product(x: np.ndarray, w: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    """[T, N] = x [T, K] · w [N, K]ᵀ + bias."""
    out = x.astype(np.float64) @ w.astype(np.float64).T
    return out if bias is None else out + bias.astype(np.float64)


def swiglu(pairs: np.ndarray) -> np.ndarray:
    """silu(gate)·up; columns alternate gate, up."""
    gate, up = pairs[:, 0::2].astype(np.float64), pairs[:, 1::2].astype(np.float64)
    return gate / (1 + np.exp(-gate)) * up


def xielu(x: np.ndarray, alphas: np.ndarray) -> np.ndarray:
    """alphas = [α_p, α_n]; β = 0.5, ε = -1e-6."""
    x, (positive, negative) = x.astype(np.float64), alphas.astype(np.float64)
    low = negative * (np.expm1(np.minimum(x, -1e-6)) - x) + 0.5 * x
    return np.where(x > 0, positive * x * x + 0.5 * x, low)


def rotated(x: np.ndarray, gain: np.ndarray | None, cos: np.ndarray, sin: np.ndarray, eps: float = 1e-6) -> np.ndarray:
    """Heads x [T, H, d], normed with `gain` [1, d] where given, rotated by rows cos, sin [T, d/2]."""
    x = x.astype(np.float64) if gain is None else rms_norm(x, gain, eps)
    a, b = np.split(x, 2, axis=-1)
    c, s = cos[:, None].astype(np.float64), sin[:, None].astype(np.float64)
    return np.concatenate([a * c - b * s, b * c + a * s], axis=-1)


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """q [H, d] over k, v [n, Hkv, d]: [H, d]."""
    group = q.shape[0] // k.shape[1]
    out = np.empty(q.shape)
    for h in range(q.shape[0]):
        scores = k[:, h // group].astype(np.float64) @ q[h] / np.sqrt(q.shape[1])
        weights = np.exp(scores - scores.max())
        out[h] = weights / weights.sum() @ v[:, h // group].astype(np.float64)
    return out


def pools_of(keys: np.ndarray, values: np.ndarray, table: np.ndarray, pages: int) -> tuple[np.ndarray, np.ndarray]:
    """Paged K [pages·Hkv·64, d] and V [pages·Hkv·d, 64] holding keys, values [n, Hkv, d] at positions 0 … n - 1."""
    n, heads, d = keys.shape
    k_pool = np.zeros((pages, heads, PAGE, d), keys.dtype)
    v_pool = np.zeros((pages, heads, d, PAGE), values.dtype)
    for p in range(n):
        k_pool[table[p // PAGE], :, p % PAGE] = keys[p]
        v_pool[table[p // PAGE], :, :, p % PAGE] = values[p]
    return k_pool.reshape(-1, d), v_pool.reshape(-1, PAGE)


def cached(
    k_pool: np.ndarray, v_pool: np.ndarray, table: np.ndarray, heads: int, n: int
) -> tuple[np.ndarray, np.ndarray]:
    """The inverse of `pools_of`: keys and values [n, Hkv, d] of positions 0 … n - 1."""
    d = k_pool.shape[1]
    k, v = k_pool.reshape(-1, heads, PAGE, d), v_pool.reshape(-1, heads, d, PAGE)
    positions = np.arange(n)
    return k[table[positions // PAGE], :, positions % PAGE], v[table[positions // PAGE], :, :, positions % PAGE]
