"""The NumPy backend: float32 on the CPU, matrix products through BLAS. What runs without a GPU, and the oracle for one.

It executes a model's operations one by one, on float32 arrays, and keeps no state but the rope tables and
the threads of its products; the weights and the running sequence belong to NumpyRunner.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np

from tileinfer_core.backends.numpy_kv import NumpyPages
from tileinfer_core.backends.numpy_products import Products
from tileinfer_core.backends.numpy_weights import load_arrays
from tileinfer_core.errors import OutOfMemoryError
from tileinfer_core.kv_cache import KvCache
from tileinfer_core.models.decoder import DecoderWeights, ModelDefinition, bind, forward, logits
from tileinfer_core.models.rope import cos_sin, inverse_frequencies
from tileinfer_core.models.xielu import AS_TRAINED
from tileinfer_core.sampling import Sampler

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    from tileinfer_core.models.structure import LayerStructure, Parameter
    from tileinfer_core.progress import OnProgress
    from tileinfer_core.rope_config import RopeConfig
    from tileinfer_core.sampling import Sampled, SamplingParams
    from tileinfer_core.weights import WeightFiles

    Float32Array = np.ndarray[Any, np.dtype[np.float32]]
    BoolArray = np.ndarray[Any, np.dtype[np.bool_]]

SCORE_FLOATS = 1 << 19  # 2 MiB of attention scores at a time: they stay in the cache between softmax's passes
MIN_QUERY_ROWS = 16  # below this the products of a block become too thin


class NumpyBackend:
    """Backend[np.ndarray] for one model's rotary embedding."""

    def __init__(self, rope: RopeConfig, head_dim: int, *, kv: str = "bf16") -> None:
        self._inv_freq, self._rope_scale = inverse_frequencies(rope, head_dim)
        self._tables = self._make_tables(256)
        self.products = Products()
        self._rounded_kv = kv == "int8"

    def embedding(self, table: Float32Array, token_ids: Sequence[int]) -> Float32Array:
        return cast("Float32Array", table[np.asarray(token_ids)])  # [T, D], a copy

    def rms_norm(self, x: Float32Array, weight: Float32Array, eps: float) -> Float32Array:
        if len(x) == 1 and x.ndim == 2:  # one dot product: 2.3 µs against 4.8 µs
            row = x[0]
            return x * (weight * np.float32(1 / np.sqrt(np.dot(row, row) / row.size + eps)))
        mean = np.einsum("...d,...d->...", x, x)[..., None] / np.float32(x.shape[-1])
        return cast("Float32Array", x / np.sqrt(mean + np.float32(eps)) * weight)

    def linear(self, x: Float32Array, weight: Float32Array, bias: Float32Array | None) -> Float32Array:
        y = self.products.one_row(weight, x[0])[None] if len(x) == 1 else self.products.rows(x, weight)
        if bias is not None:
            y += bias
        return y

    def split_qkv(
        self, qkv: Float32Array, structure: LayerStructure
    ) -> tuple[Float32Array, Float32Array, Float32Array]:
        heads = qkv.reshape(len(qkv), -1, structure.head_dim)  # [T, H + 2K, d]
        first_k = structure.num_attention_heads
        first_v = first_k + structure.num_key_value_heads
        return heads[:, :first_k], heads[:, first_k:first_v], heads[:, first_v:]

    def rope(self, x: Float32Array, start: int) -> Float32Array:
        tokens, heads, head_dim = x.shape
        stop = start + tokens
        if stop > len(self._tables[0]):
            self._tables = self._make_tables(max(stop, 2 * len(self._tables[0])))
        cos, sin = self._tables
        halves = x.reshape(tokens, heads, 2, head_dim // 2)
        rotated = halves * cos[start:stop]
        rotated += halves[:, :, ::-1] * sin[start:stop]
        return rotated.reshape(tokens, heads, head_dim)

    def _make_tables(self, positions: int) -> tuple[Float32Array, Float32Array]:
        """cos [C, 1, 1, d/2] and (-sin, sin) [C, 1, 2, d/2]: the rotation's minus is in the table."""
        cos, sin = cos_sin(self._inv_freq, self._rope_scale, 0, positions)
        return cos[:, None, None], np.stack((-sin, sin), axis=1)[:, None]

    def write_kv(self, cache: KvCache, layer: int, k: Float32Array, v: Float32Array) -> None:
        pages = cast("NumpyPages", cache.store)
        start, stop = cache.length, cache.length + len(k)
        if self._rounded_kv:
            k, v = through_int8(k), through_int8(v)
        pages.keys[layer][:, start:stop] = k.transpose(1, 0, 2)
        pages.values[layer][:, start:stop] = v.transpose(1, 0, 2)

    def attention(self, q: Float32Array, cache: KvCache, layer: int) -> Float32Array:
        pages = cast("NumpyPages", cache.store)
        keys, values = pages.keys[layer], pages.values[layer]
        tokens, heads, head_dim = q.shape
        kv_heads, group = len(keys), heads // len(keys)
        start = cache.length
        scaled = q.reshape(tokens, kv_heads, group, head_dim) * np.float32(head_dim**-0.5)
        if tokens == 1:
            return _attend_one(scaled[0], keys[:, : start + 1], values[:, : start + 1]).reshape(1, -1)
        by_head = scaled.transpose(1, 2, 0, 3)  # [K, G, T, d]
        out = np.empty((tokens, kv_heads, group, head_dim), np.float32)
        rows = max(MIN_QUERY_ROWS, SCORE_FLOATS // (heads * (start + tokens)))
        for first in range(0, tokens, rows):
            last = min(first + rows, tokens)
            seen = start + last
            block = by_head[:, :, first:last].reshape(kv_heads, -1, head_dim)  # [K, G·rows, d]
            part = _attend(block, keys[:, :seen], values[:, :seen], last - first)
            out[first:last] = part.reshape(kv_heads, group, last - first, head_dim).transpose(2, 0, 1, 3)
        return out.reshape(tokens, -1)

    def gated_activation(self, gate_up: Float32Array, activation: str) -> Float32Array:
        assert activation == "silu"  # noqa: S101 - config.py refuses the others by name
        inner = gate_up.shape[1] // 2
        gate = gate_up[:, :inner]
        y = np.exp(-gate)  # inf gives the right limit: 0
        y += np.float32(1)
        np.divide(gate, y, out=y)
        y *= gate_up[:, inner:]
        return cast("Float32Array", y)

    def xielu(self, x: Float32Array, numbers: Float32Array) -> Float32Array:
        positive, negative, beta, epsilon = numbers
        y = np.expm1(np.minimum(x, epsilon))
        y -= x
        y *= negative
        np.copyto(y, positive * x * x, where=x > 0)
        x *= beta
        y += x
        return cast("Float32Array", y)

    def add(self, x: Float32Array, y: Float32Array) -> Float32Array:
        x += y
        return x

    def last_row(self, x: Float32Array) -> Float32Array:
        return x[-1:]


def through_int8(x: Float32Array) -> Float32Array:
    """x [..., d] as INT8 with a float32 scale for each row of d keeps it: scale = largest |x| / 127, half to even."""
    scale = np.maximum(np.abs(x).max(axis=-1, keepdims=True) / np.float32(127), np.float32(2**-100))
    return cast("Float32Array", np.rint(x * (np.float32(1) / scale)) * scale)


def _attend(q: Float32Array, keys: Float32Array, values: Float32Array, rows: int) -> Float32Array:
    """softmax(q · keysᵀ) · values for q [K, G·rows, d], already scaled; keys, values [K, C, d] -> [K, G·rows, d].

    Row t of a group must not see the last rows - 1 - t keys.
    """
    scores = np.matmul(q, keys.transpose(0, 2, 1))  # [K, G·rows, C]
    if rows > 1:
        tail = scores.reshape(len(q), -1, rows, scores.shape[2])[..., -rows:]
        tail += np.triu(np.full((rows, rows), -np.inf, np.float32), 1)
    total = _exponentials(scores)
    out = np.matmul(scores, values)
    out /= total
    return cast("Float32Array", out)


def _attend_one(q: Float32Array, keys: Float32Array, values: Float32Array) -> Float32Array:
    """The same for one token: q [K, G, d] -> [K, G, d].

    As matrix · vector products, called from inside NumPy: 60 µs a layer at 540 tokens of 3 x 3 heads of 64, against
    73 µs as calls of np.dot and 99 µs as thin matrix products (OpenBLAS 0.3.31, its AVX2 kernels, the cache cold).
    """
    scores = np.matvec(keys[:, None], q)  # [K, G, C]
    total = _exponentials(scores)
    out = np.vecmat(scores, values[:, None])
    out /= total
    return cast("Float32Array", out)


def _exponentials(scores: Float32Array) -> Float32Array:
    """exp(scores - max) in place; returns the sums over the last axis, kept as an axis of 1."""
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    return cast("Float32Array", scores.sum(axis=-1, keepdims=True))


class NumpyRunner:
    """Runner on the CPU."""

    backend_name = "cpu"
    compile_s = 0.0
    context_limit = None
    prefill_chunk = 512

    def __init__(self, model: ModelDefinition, arrays: Mapping[str, Float32Array], *, kv: str = "bf16") -> None:
        self._model = model
        self._ops = NumpyBackend(model.structure.rope, model.structure.head_dim, kv=kv)
        self._weights: DecoderWeights[Float32Array] = bind(model, arrays)
        self._next_logits: tuple[KvCache, int, Float32Array] | None = None  # of which sequence, at which length
        sizes = {name: array.nbytes for name, array in arrays.items()}
        self.weight_bytes = sum(sizes.values())
        self.copy_bytes = 0
        self.step_weight_bytes = sum(sizes[name] for name in sizes if not model.only_looked_up(name))
        self.kv_bytes_per_token = 2 * 4 * model.structure.kv_size * model.config.num_hidden_layers

    @classmethod
    def with_noise(cls, model: ModelDefinition, seed: int = 0, *, kv: str = "bf16") -> NumpyRunner:
        """Weights that mean nothing, for timing a shape: normal with a width of 0.02, norms at 1."""
        rng = np.random.default_rng(seed)

        def noise(parameter: Parameter) -> Float32Array:
            if parameter.form == "xielu":
                return np.array(AS_TRAINED, np.float32)
            if len(parameter.shape) == 1:
                return np.ones(parameter.shape, np.float32)
            return rng.standard_normal(parameter.shape, np.float32) * np.float32(0.02)

        arrays = {parameter.name: noise(parameter) for parameter in model.parameters if not parameter.is_scale}
        return cls(model, arrays, kv=kv)

    @classmethod
    def load(
        cls, model: ModelDefinition, files: WeightFiles, on_progress: OnProgress, *, kv: str = "bf16"
    ) -> NumpyRunner:
        """Read the weights as float32. Raises OutOfMemoryError and ModelError."""
        return cls(model, load_arrays(model.parameters, files, on_progress), kv=kv)

    def new_cache(self, max_tokens: int) -> KvCache:
        layers = self._model.config.num_hidden_layers
        return KvCache(NumpyPages(self._model.structure, layers, max_tokens), max_tokens)

    def prefill(self, cache: KvCache, token_ids: Sequence[int]) -> None:
        def layers() -> Float32Array:
            return self._ops.last_row(self._append(cache, token_ids))

        def head(hidden: Float32Array) -> Float32Array:
            return logits(self._ops, self._model, self._weights, hidden)

        last = self._ops.products.token(layers, head) if len(token_ids) == 1 else head(layers())
        self._next_logits = (cache, cache.length, last[0])

    def decode(
        self, cache: KvCache, params: SamplingParams, valid_ids: BoolArray | None, prompt_tokens: int
    ) -> Generator[Sampled, None, None]:
        sampler = Sampler(params, valid_ids)
        while True:
            assert self._next_logits is not None  # noqa: S101 - prefill comes first
            owner, length, row = self._next_logits
            assert owner is cache and length == cache.length  # noqa: S101, PT018 - and nothing in between
            sampled = sampler.sample(row, cache.token_ids, cache.length - prompt_tokens)
            yield sampled
            self.prefill(cache, [sampled.id])

    def logits(self, cache: KvCache, token_ids: Sequence[int]) -> Float32Array:
        return logits(self._ops, self._model, self._weights, self._append(cache, token_ids))

    def _append(self, cache: KvCache, token_ids: Sequence[int]) -> Float32Array:
        cache.reserve(len(token_ids))
        try:
            with np.errstate(over="ignore"):
                hidden = forward(self._ops, self._model, self._weights, cache, token_ids)
        except MemoryError:
            raise OutOfMemoryError(
                f"no memory for a step of {len(token_ids):,} tokens after {cache.length:,} held",
                hint="shorten the prompt, set a smaller --context, or use a smaller model",
            ) from None
        cache.commit(token_ids)
        return hidden

    def close(self) -> None:
        self._next_logits = None
        self._ops.products.close()
        del self._weights
