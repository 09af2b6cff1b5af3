"""Rotary position embedding on half-split heads, with RMSNorm of the head before it where the model has one.

    x' = x / sqrt(mean(x²) + ε) · gain                                   (qk-norm, optional)
    out[:d/2] = x'[:d/2] cos - x'[d/2:] sin,   out[d/2:] = x'[d/2:] cos + x'[:d/2] sin

as Hugging Face's rotate_half does it (Su et al., 2021). cos and sin are float32 tables [positions, head_dim / 2], which
the engine fills once: scaling of frequencies (Llama 3, YaRN) is in the tables, not here.

`rotated` is what the attention and KV-write kernels call; `rope_queries` is prefill's kernel for the query heads. Keys
are rotated on their way into the cache (kernels/kv_write.py), `qk_norm_rope_kv` does both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cuda.tile as ct

from kernels.kv_write import kv_write
from kernels.launch import Together, check_array
from kernels.notation import ZERO, Bool, Float, Int
from kernels.paged_cache import check_heads, check_rope, optional_gain
from kernels.rope_tiles import gain_halves, rotated
from kernels.specs import ArraySpec

if TYPE_CHECKING:
    from kernels.launch import Launcher
    from kernels.shapes import ModelShape

ROWS = 16  # tokens of one block: 16 x 128 keeps 16 elements a thread


@ct.kernel
def rope_queries_kernel(qkv, gain, cos, sin, start, out, R: Int, D: Int, EPS: Float, NORM: Bool, PDL: Bool):
    """out[t, h] = RoPE(norm(qkv[t, h]) · gain, position start + t) for the query heads.

    qkv [T, heads + 2 kv_heads, D] half, gain [1, D], cos and sin [positions, D/2] float32, start [1] int32,
    out [T, heads, D] half. Grid (ceil(T / R), heads): a block owns R tokens of one head.
    float32 inside, one rounding at the store. Tokens may hang over T: zeros in, nothing out; positions are clamped.
    """
    i, h = ct.bid(0), ct.bid(1)
    if PDL:
        ct.grid_dependency_control_launch_dependents()
    g0, g1 = gain_halves(gain, D, NORM)
    first = ct.load(start, index=(0,), shape=(), check_bounds=False).item()
    if PDL:
        ct.grid_dependency_control_wait()
    position = first + i * R + ct.arange(R, dtype=ct.int32).reshape((R, 1))
    position = ct.minimum(position, cos.shape[0] - 1)
    column = ct.arange(D // 2, dtype=ct.int32).reshape((1, D // 2))
    c = ct.gather(cos, (position, column), check_bounds=False)
    s = ct.gather(sin, (position, column), check_bounds=False)
    x0 = ct.load(qkv, index=(i, h, 0), shape=(R, 1, D // 2), padding_mode=ZERO, allow_tma=False).reshape((R, D // 2))
    x1 = ct.load(qkv, index=(i, h, 1), shape=(R, 1, D // 2), padding_mode=ZERO, allow_tma=False).reshape((R, D // 2))
    a, b = rotated(x0, x1, g0, g1, c, s, D, EPS, NORM)
    ct.store(out, index=(i, h, 0), tile=a.astype(out.dtype).reshape((R, 1, D // 2)), allow_tma=False)
    ct.store(out, index=(i, h, 1), tile=b.astype(out.dtype).reshape((R, 1, D // 2)), allow_tma=False)


def rope_queries(
    launcher: Launcher, qkv: Any, gain: Any, cos: Any, sin: Any, start: Any, out: Any, *, kv_heads: int, head_dim: int,
    eps: float = 1e-6,
) -> None:  # fmt: skip
    """out [T, heads · head_dim] = the query heads of qkv [T, (heads + 2 kv_heads) · head_dim], normed and rotated.

    gain [1, head_dim] or None; start: int32 [1] in device memory, the position of token 0.

    Raises:
        ValueError, TypeError: an array's shape, layout, alignment or type is not what the kernel reads.
    """
    op = "rope_queries"
    tokens, heads = check_heads(op, qkv, kv_heads, head_dim)
    check_rope(op, cos, sin, start, head_dim)
    check_array(f"{op}: out", out, (tokens, heads * head_dim), str(qkv.dtype), align=16)
    gain_array = optional_gain(op, gain, cos, head_dim, str(qkv.dtype))
    x = qkv.reshape(tokens, heads + 2 * kv_heads, head_dim)
    args = (x, gain_array, cos, sin, start, out.reshape(tokens, heads, head_dim), ROWS, head_dim, float(eps))
    launcher(rope_queries_kernel, (-(-tokens // ROWS), heads, 1), (*args, gain is not None, launcher.pdl))


def qk_norm_rope_kv(
    launcher: Launcher, qkv: Any, q_gain: Any, k_gain: Any, cos: Any, sin: Any, start: Any, block_table: Any,
    queries: Any, k_pool: Any, v_pool: Any, *, kv_heads: int, head_dim: int, eps: float = 1e-6,
    scales: tuple[Any, Any] | None = None,
) -> None:  # fmt: skip
    """What a prefill chunk does between the QKV product and attention: rotated queries out, keys and values cached.

    Two launches: rope_queries, then kernels.kv_write.kv_write.

    Raises:
        ValueError, TypeError: an array's shape, layout, alignment or type is not what the kernels read.
    """
    together = Together(launcher)
    rope_queries(together, qkv, q_gain, cos, sin, start, queries, kv_heads=kv_heads, head_dim=head_dim, eps=eps)
    kv_write(
        together, qkv, k_gain, cos, sin, start, block_table, k_pool, v_pool, kv_heads=kv_heads, head_dim=head_dim,
        eps=eps, scales=scales,
    )  # fmt: skip
    together.launch()


def model_launches(launcher: Launcher, model: ModelShape, dtype: str) -> None:
    """A chunk of 512 tokens."""
    start = ArraySpec(1, "int32")
    qkv, queries = ArraySpec((512, model.qkv_rows), dtype), ArraySpec((512, model.attention_width), dtype)
    gain = ArraySpec((1, model.head_dim), "float32") if model.qk_norm else None
    cos, sin = (ArraySpec((4096, model.head_dim // 2), "float32") for _ in range(2))
    rope_queries(
        launcher, qkv, gain, cos, sin, start, queries, kv_heads=model.kv_heads, head_dim=model.head_dim, eps=model.eps
    )
