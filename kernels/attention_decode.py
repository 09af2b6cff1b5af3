"""Attention of one token over the paged cache: head norm, RoPE, KV write, scores, soft-max, values; then the merge.

    out[h] = Σ_p softmax_p(q_h · k_p / √d) v_p        over positions 0 … length - 1, the last one being this token's

Two launches: splits of the context in parallel blocks, then one block per query head that merges them. The new token
has a block of its own, which also writes its key and value into the cache; the others read only older positions, so
nothing waits inside the launch. Soft-max in base 2: log2(e)/√d is in the queries.

Two forms, chosen by the context a graph is captured for (`attention_config`):

- **page**: one page (64 positions) a block, no loop. Keys and values come by plain loads *before* the PDL wait, so that
  only q's way is left after it. Shortest up to 2,048 positions.
- **loop**: a fixed number of blocks a head shares the pages evenly, pages come through a TMA ring. For any length.

An INT8 cache (a key and a value are int8 rows with a float32 scale each) has a kernel of its own, which widens nothing:
kernels/attention_int8.py.

Keys (64 × d) and transposed values (d × 64) stand on the matrix unit's M side, the query heads of one KV head are up to
8 columns on its N side (below 16 × 8 and M·N = 512 the compiler leaves the tensor cores).

Refuses: head_dim other than 64 and 128, more than 8 query heads a KV head, more than one token (a verify step of
several goes through kernels/attention_prefill.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import cuda.tile as ct

from kernels import configs
from kernels.attention_int8 import MAX_PAGES, attention_int8_kernel
from kernels.attention_tiles import COLUMNS, NEVER, columns, new_token, own_position, queries, store_split
from kernels.launch import Together, check_array, with_hints
from kernels.notation import PAGE, Bool, Float, Int
from kernels.paged_cache import check_heads, check_pools, check_rope, optional_gain, pool_specs
from kernels.specs import ArraySpec

if TYPE_CHECKING:
    from kernels.launch import Launcher
    from kernels.shapes import ModelShape

CONTEXTS = (512, 640, 768, 1024, 2048)  # largest contexts of the page form's graphs; beyond, one graph serves all


@dataclass(frozen=True)
class AttentionConfig:
    """How one context bucket is attended to.

    Attributes:
        form: "page" or "loop", see above.
        splits: blocks a KV head, a power of two or the sum of two (the merge). For "page" the pages of the bucket.
        occupancy: blocks per SM of the loop form; sets the depth of its TMA ring.
        pages, latency: of an INT8 cache in the loop form, pages of a step and the compiler's hint for its TMA ring.
        apart: an INT8 product's two digits in products of their own. tileiras 13.4 for sm_100 cannot split a product's
            columns ("make_tmem_copy").
    """

    form: Literal["page", "loop"]
    splits: int
    occupancy: int | None = None
    pages: int = 1
    latency: int = 1
    apart: bool = False

    @property
    def positions(self) -> int | None:
        """The longest context it can attend to; None for any."""
        return self.splits * PAGE if self.form == "page" else None


def attention_config(arch: str, kv_heads: int, context: int, *, int8: bool = False) -> AttentionConfig:
    """The form for contexts up to `context` (a whole graph's bucket): configs/<arch>.json, or the rule.

    An INT8 cache has rows of its own where they are better, always with the same buckets.
    """
    bucket = next((c for c in CONTEXTS if context <= c), 1 << 30)
    shape = {"kv_heads": kv_heads, "context": bucket}
    try:
        found = AttentionConfig(**configs.config("attention_decode", arch, **shape))
    except KeyError:
        found = attention_rule(kv_heads, bucket)
    if not int8:
        return found
    try:
        return replace(found, **configs.config("attention_decode_int8", arch, **shape))
    except KeyError:
        return found


def attention_rule(kv_heads: int, bucket: int) -> AttentionConfig:
    """A page a block while that is at most 256 blocks; then 256 blocks that loop, two for each SM of an H200."""
    if bucket <= CONTEXTS[-1] and bucket // PAGE * kv_heads <= 256:
        return AttentionConfig("page", bucket // PAGE)
    return AttentionConfig("loop", max(8, min(128, 1 << (256 // kv_heads).bit_length() - 1)), 4)


def context_bucket(arch: str, kv_heads: int, context: int) -> int | None:
    """The longest context that the graph for `context` also serves: its bucket's end, None for any length."""
    return attention_config(arch, kv_heads, context).positions


def workspace_floats(config: AttentionConfig, heads: int, kv_heads: int, head_dim: int) -> int:
    """float32 elements that attention_decode needs between its two launches."""
    return (config.splits + 1) * (heads * head_dim + kv_heads * 2 * COLUMNS)


@ct.kernel
def attention_page_kernel(
    q, k, v, q_gain, k_gain, cos, sin, k_pool, v_pool, table, length, out, stats, HKV: Int, S: Int, D: Int, EPS: Float,
    NORM: Bool, PDL: Bool,
):  # fmt: skip
    """Split s < S: page s of the sequence, all 64 slots, masked beyond the cached positions. Split S: the new token.

    q [HKV, group, D], k, v [HKV, D] half; gains [1, D]; cos, sin [positions, D/2] float32; k_pool [pages HKV 64, D],
    v_pool [pages HKV D, 64] half, or int8 (INT8 > 0) with k_scales, v_scales [pages HKV, 64] float32; table [≥ S],
    length [1] int32; out [HKV, S+1, group, D], stats [HKV, S+1, 2, 8] float32. Grid (HKV, S + 1). Scores and sums
    float32, q and soft-max weights rounded to half for the matrix unit.
    Masked slots are read and multiplied by 0: pools must hold finite numbers everywhere.
    """
    h, s = ct.bid(0), ct.bid(1)
    if PDL:
        ct.grid_dependency_control_launch_dependents()
    pos, c, sn, g0, g1 = own_position(length, cos, sin, q_gain, D, NORM)
    if s < S:
        page = ct.load(table, index=(s,), shape=(), check_bounds=False).item() * HKV + h
        keys = ct.load(k_pool, index=(page, 0), shape=(PAGE, D), allow_tma=False, check_bounds=False)
        values = ct.load(v_pool, index=(page, 0), shape=(D, PAGE), allow_tma=False, check_bounds=False)
        if PDL:
            ct.grid_dependency_control_wait()
        a, b = queries(q, h, g0, g1, c, sn, D, EPS, NORM)
        scores = ct.mma(keys, columns(a, b, q.dtype), ct.zeros((PAGE, COLUMNS), dtype=ct.float32))
        at = s * PAGE + ct.arange(PAGE, dtype=ct.int32).reshape((PAGE, 1))
        scores = ct.where(at < pos, scores, NEVER)
        m = ct.max(scores, axis=0, keepdims=True)
        p = ct.where(at < pos, ct.exp2(scores - m), 0.0)  # a page of masked slots only would weigh 1 a slot
        acc = ct.mma(values, p.astype(q.dtype), ct.zeros((D, COLUMNS), dtype=ct.float32))
        store_split(out, stats, h, s, acc, m, ct.sum(p, axis=0, keepdims=True), COLUMNS, D)
    else:
        new_token(
            q, k, v, k_gain, k_pool, v_pool, table, out, stats, h, pos, g0, g1, c, sn, HKV, S, D, EPS, NORM, PDL
        )  # fmt: skip


@ct.kernel
def attention_loop_kernel(
    q, k, v, q_gain, k_gain, cos, sin, k_pool, v_pool, table, length, out, stats, HKV: Int, S: Int, D: Int, EPS: Float,
    NORM: Bool, PDL: Bool,
):  # fmt: skip
    """Split s < S: its even share of the pages, one after the other, running soft-max. Split S: the new token.

    Arrays and rounding as in attention_page_kernel, table of any length. Grid (HKV, S + 1). A split without pages
    stores a weight of 0. Masked slots are read and multiplied by 0: pools must hold finite numbers everywhere.
    """
    h, s = ct.bid(0), ct.bid(1)
    if PDL:
        ct.grid_dependency_control_launch_dependents()
    pos, c, sn, g0, g1 = own_position(length, cos, sin, q_gain, D, NORM)
    if s < S:
        pages = ct.cdiv(pos, PAGE)
        share = ct.cdiv(pages, S)
        if PDL:
            ct.grid_dependency_control_wait()
        a, b = queries(q, h, g0, g1, c, sn, D, EPS, NORM)
        side = columns(a, b, q.dtype)
        slot = ct.arange(PAGE, dtype=ct.int32).reshape((PAGE, 1))
        m = ct.full((1, COLUMNS), NEVER, dtype=ct.float32)
        l = ct.zeros((1, COLUMNS), dtype=ct.float32)
        acc = ct.zeros((D, COLUMNS), dtype=ct.float32)
        for i in range(s * share, ct.minimum((s + 1) * share, pages)):
            page = ct.load(table, index=(i,), shape=(), check_bounds=False).item() * HKV + h
            keys = ct.load(k_pool, index=(page, 0), shape=(PAGE, D), check_bounds=False)
            values = ct.load(v_pool, index=(page, 0), shape=(D, PAGE), check_bounds=False)
            scores = ct.mma(keys, side, ct.zeros((PAGE, COLUMNS), dtype=ct.float32))
            scores = ct.where(slot + i * PAGE < pos, scores, NEVER)
            higher = ct.maximum(m, ct.max(scores, axis=0, keepdims=True))
            old = ct.exp2(m - higher)
            p = ct.exp2(scores - higher)
            acc = acc * old + ct.mma(values, p.astype(q.dtype), ct.zeros((D, COLUMNS), dtype=ct.float32))
            l = l * old + ct.sum(p, axis=0, keepdims=True)
            m = higher
        store_split(out, stats, h, s, acc, m, l, COLUMNS, D)
    else:
        new_token(
            q, k, v, k_gain, k_pool, v_pool, table, out, stats, h, pos, g0, g1, c, sn, HKV, S, D, EPS, NORM, PDL
        )  # fmt: skip


def _splits(out, stats, h, g, i, N: Int, D: Int):
    """Sums [N, D], maxima and weights [N, 1] of the N splits from i · N on, one query head."""
    parts = ct.load(out, index=(h, i, g, 0), shape=(1, N, 1, D), allow_tma=False, check_bounds=False).reshape((N, D))
    m = ct.load(stats, index=(h, i, 0, g), shape=(1, N, 1, 1), allow_tma=False, check_bounds=False).reshape((N, 1))
    l = ct.load(stats, index=(h, i, 1, g), shape=(1, N, 1, 1), allow_tma=False, check_bounds=False).reshape((N, 1))
    return parts, m, l


@ct.kernel
def attention_merge_kernel(out, stats, x, G: Int, A: Int, B: Int, D: Int, PDL: Bool):
    """x[h] = Σ_s w_s out_s / Σ_s w_s l_s with w_s = 2^(m_s - max m), over S = A + B splits and the new token's.

    out [HKV, S+1, G, D], stats [HKV, S+1, 2, 8] float32 (m, l), x [1, HKV G D] half. Grid (HKV, G): one query head.
    float32, one rounding at the store. A and B are powers of two, A > B or B = 0; nothing is checked.
    """
    h, g = ct.bid(0), ct.bid(1)
    if PDL:
        ct.grid_dependency_control_launch_dependents()
        ct.grid_dependency_control_wait()
    new, m1, l1 = _splits(out, stats, h, g, A + B, 1, D)
    parts, m, l = _splits(out, stats, h, g, 0, A, D)
    top = ct.maximum(ct.max(m, axis=0, keepdims=True), m1)
    w, w1 = ct.exp2(m - top), ct.exp2(m1 - top)
    total = ct.sum(parts * w, axis=0, keepdims=True) + new * w1
    weight = ct.sum(l * w, axis=0, keepdims=True) + l1 * w1
    if B > 0:
        parts, m, l = _splits(out, stats, h, g, A // B, B, D)
        higher = ct.maximum(ct.max(m, axis=0, keepdims=True), top)
        w, old = ct.exp2(m - higher), ct.exp2(top - higher)
        total = ct.sum(parts * w, axis=0, keepdims=True) + total * old
        weight = ct.sum(l * w, axis=0, keepdims=True) + weight * old
    ct.store(x, index=(0, h * G + g), tile=(total / weight).astype(x.dtype), allow_tma=False, check_bounds=False)


def attention_decode(
    launcher: Launcher, qkv: Any, q_gain: Any, k_gain: Any, cos: Any, sin: Any, k_pool: Any, v_pool: Any,
    block_table: Any, length: Any, workspace: Any, out: Any, *, kv_heads: int, head_dim: int, context: int,
    eps: float = 1e-6, scales: tuple[Any, Any] | None = None, config: AttentionConfig | None = None,
) -> None:  # fmt: skip
    """out [1, heads · head_dim] = attention of the token in qkv [1, (heads + 2 kv_heads) · head_dim].

    Writes the token's key and value into the pools at position length - 1.

    Args:
        q_gain, k_gain: weights [1, head_dim] of the head norms, or None for both.
        block_table: int32, page of each 64 positions; at least `splits` entries for the page form.
        length: int32 [1] in device memory, cached positions with this token. At least 1, at most `context`.
        workspace: float32, at least `workspace_floats` elements.
        context: the longest context that this launch (or the graph it is captured in) must serve.
        scales: of the keys and of the values where the pools are int8, float32 [pages · kv_heads, 64] each.

    Under PDL, length, block_table, the pools and their scales are read before the wait: nothing earlier in the same
    graph may write them, except this kernel for its own layer's.

    Raises:
        ValueError, TypeError: an array's shape, layout, alignment or type is not what the kernels read.
    """
    op = "attention_decode"
    tokens, heads = check_heads(op, qkv, kv_heads, head_dim)
    group, half = heads // kv_heads, str(qkv.dtype)
    config = config or attention_config(launcher.arch, kv_heads, context, int8=scales is not None)
    if tokens != 1:
        raise ValueError(f"{op}: qkv has {tokens} tokens, expected 1")
    if group > COLUMNS:
        raise ValueError(f"{op}: {group} query heads a KV head, at most {COLUMNS} fit")
    if (q_gain is None) != (k_gain is None):
        raise ValueError(f"{op}: a head norm on queries or keys alone, expected on both or neither")
    check_rope(op, cos, sin, length, head_dim)
    check_pools(op, k_pool, v_pool, block_table, kv_heads, head_dim, half, scales)
    check_array(f"{op}: out", out, (1, heads * head_dim), half, align=16)
    _check_context(op, config, context, cos, block_table)
    parts, stats = _workspace(op, workspace, config, heads, kv_heads, head_dim)
    q = qkv.reshape(-1)[: heads * head_dim].reshape(kv_heads, group, head_dim)
    k, v = (qkv.reshape(heads + 2 * kv_heads, head_dim)[heads + i * kv_heads :][:kv_heads] for i in (0, 1))
    gains = [optional_gain(op, g, c, head_dim, half) for g, c in ((q_gain, cos), (k_gain, sin))]
    args = (q, k, v, *gains, cos, sin, k_pool, v_pool, *(scales or ()), block_table, length, parts, stats)
    kernel = attention_page_kernel if config.form == "page" else attention_loop_kernel
    digits: tuple[int, ...] = ()
    if scales is not None:
        kernel = attention_int8_kernel
        width = 4 if group <= 4 and not config.apart else 8
        digits = (config.form == "loop", config.pages, config.latency, width, config.apart)
    constants = (kv_heads, config.splits, *digits, head_dim, float(eps), q_gain is not None, launcher.pdl)
    if config.occupancy is not None:
        kernel = with_hints(kernel, occupancy=config.occupancy)
    together = Together(launcher)
    together(kernel, (kv_heads, config.splits + 1, 1), (*args, *constants))
    merge = (parts, stats, out, group, *_powers(config.splits), head_dim, launcher.pdl)
    together(attention_merge_kernel, (kv_heads, group, 1), merge)
    together.launch()


def _powers(count: int) -> tuple[int, int]:
    """The two largest powers of two in `count`, the second 0 where it is one: what a merge sums as one tile each."""
    first = 1 << max(count.bit_length() - 1, 0)
    rest = count - first
    return first, (1 << (rest.bit_length() - 1) if rest else 0)


def _check_context(op: str, config: AttentionConfig, context: int, cos: Any, block_table: Any) -> None:
    if config.splits < 1 or sum(_powers(config.splits)) != config.splits:
        raise ValueError(f"{op}: {config.splits} splits, expected a power of two or the sum of two")
    if not 1 <= config.pages <= MAX_PAGES:
        raise ValueError(f"{op}: {config.pages} pages a step, expected 1 to {MAX_PAGES}, whose sums fit int32")
    if context < 1:
        raise ValueError(f"{op}: context is {context}, expected at least 1")
    if config.positions is not None and context > config.positions:
        raise ValueError(f"{op}: {config.splits} splits of one page hold {config.positions} positions, not {context}")
    pages = int(block_table.shape[0])
    need = config.splits if config.form == "page" else -(-context // PAGE)
    if pages < need:
        raise ValueError(f"{op}: block_table has {pages} entries, expected at least {need}")
    if int(cos.shape[0]) < context:
        raise ValueError(f"{op}: cos and sin have {cos.shape[0]} positions, expected at least {context}")


def _workspace(op: str, workspace: Any, config: AttentionConfig, heads: int, kv_heads: int, head_dim: int) -> Any:
    """Partial sums [kv_heads, splits + 1, group, head_dim]; their maxima and weights [kv_heads, splits + 1, 2, 8]."""
    need = workspace_floats(config, heads, kv_heads, head_dim)
    check_array(f"{op}: workspace", workspace, (None,), "float32", align=16)
    if workspace.shape[0] < need:
        raise ValueError(f"{op}: workspace has {workspace.shape[0]} elements, expected at least {need}")
    slots = config.splits + 1
    sums = slots * heads * head_dim
    parts = workspace[:sums].reshape(kv_heads, slots, heads // kv_heads, head_dim)
    return parts, workspace[sums:need].reshape(kv_heads, slots, 2, COLUMNS)


def model_launches(launcher: Launcher, model: ModelShape, dtype: str) -> None:
    """One token in each context bucket, over a half-precision cache."""
    launch_each_bucket(model, dtype, None, launcher)


def launch_each_bucket(
    model: ModelShape, dtype: str, scales: tuple[ArraySpec, ArraySpec] | None, launcher: Launcher
) -> None:
    """One token of a model of that shape in each context bucket; over an INT8 cache with scales."""
    gain = ArraySpec((1, model.head_dim), "float32") if model.qk_norm else None
    cos, sin = (ArraySpec((4096, model.head_dim // 2), "float32") for _ in range(2))
    k_pool, v_pool = pool_specs(model, dtype if scales is None else "int8")
    qkv, out = ArraySpec((1, model.qkv_rows), dtype), ArraySpec((1, model.attention_width), dtype)
    for context in (*CONTEXTS, 4096):
        config = attention_config(launcher.arch, model.kv_heads, context, int8=scales is not None)
        workspace = ArraySpec(workspace_floats(config, model.heads, model.kv_heads, model.head_dim), "float32")
        arrays = (qkv, gain, gain, cos, sin, k_pool, v_pool, ArraySpec(64, "int32"), ArraySpec(1, "int32"))
        attention_decode(
            launcher, *arrays, workspace, out, kv_heads=model.kv_heads, head_dim=model.head_dim, context=context,
            eps=model.eps, scales=scales,
        )  # fmt: skip
