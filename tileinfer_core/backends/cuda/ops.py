"""The plan's vocabulary: one method per kernel call, with the arrays and configurations that the wrappers want.

Everything the engine knows of `kernels` by name is here. A method with "rows" in its name takes T tokens of a prefill
chunk, one with "row" the one token of a decode step, whose arrays are the named buffers (buffers.py):

    residual  float32, the stream         scaled  residual · the next norm's weight, in half precision
    o_sums, down_sums                     partial sums of residual², by the product that wrote the stream last

The norm is folded into the products: a product writes `scaled` and its sums, the next one divides by the root of them.

A Weight (weights.py) alone says which kernel reads it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from kernels.argmax import SampleOutputs
from kernels.attention_decode import attention_config, attention_decode, context_bucket, workspace_floats
from kernels.attention_prefill import AttentionPrefillConfig, attention_prefill
from kernels.configs import configured
from kernels.dequantise import dequantise
from kernels.digits import token_digits
from kernels.embedding import embedding, embedding_decode
from kernels.int8_scales import LOAD
from kernels.linear import linear, linear_norm, linear_residual, linear_swiglu, linear_xielu, square_slots
from kernels.linear_int8 import (
    int8_square_slots,
    linear_int8,
    linear_int8_norm,
    linear_int8_residual,
    linear_int8_swiglu,
    linear_int8_xielu,
)
from kernels.linear_prefill import (
    LinearPrefillConfig,
    linear_prefill,
    linear_prefill_residual,
    linear_prefill_swiglu,
    linear_prefill_xielu,
)
from kernels.linear_prefill_digits import (
    linear_prefill_digits,
    linear_prefill_digits_residual,
    linear_prefill_digits_swiglu,
    linear_prefill_digits_xielu,
)
from kernels.linear_prefill_int8 import linear_prefill_int8_residual
from kernels.norm import rms_norm, rms_norm_digits
from kernels.rope import qk_norm_rope_kv
from kernels.sampling import SampleConfig, SampleWorkspace, sample, sample_workspace_shapes
from kernels.widen_pages import widen_pages

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kernels.specs import Recorded, RecordingLauncher
    from tileinfer_core.backends.cuda.device import Array
    from tileinfer_core.backends.cuda.weights import Weight
    from tileinfer_core.models.decoder import ModelDefinition
    from tileinfer_core.models.structure import LayerStructure

    Buffers = Mapping[str, Array]
    Rows = Array | tuple[Array, Array]  # [T, K] in half precision, or as digits [2 T, K] int8 with their scales [T, 1]
    # keys, values, block table, and for an INT8 cache the scales of keys and values
    Pages = tuple[Array, Array, Array, tuple[Array, Array] | None]

Config = TypeVar("Config")

MAX_GROUP = 8  # query heads of a key/value head: the columns of one matrix product
SIZE_STEP = 8  # elements of a 16-byte load
INT8_STEP = LOAD
# Shares of a grouped product's weights that are widened behind earlier launches of its layer, the rest just before it.
AHEAD = {"qkv": 0.0, "attention": 0.3, "o": 0.3}
_SAMPLE_ARRAYS = ("adjusted", "run_maxima", "partials", "won_values", "won_ids", "sorted_values", "sorted_ids")


def workspace_specs(model: ModelDefinition, arch: str, context: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """What the kernels need for themselves: name -> shape and dtype. Names that end in _sums must start as zeros."""
    s, vocab = model.structure, model.config.vocab_size
    shapes = sample_workspace_shapes(vocab, configured(SampleConfig, "sample", arch, vocab=vocab))
    specs = {f"sample_{name}": spec for name, spec in shapes.items()}
    specs["o_sums"] = ((1, _slots(model, "o_proj", arch, s.q_size)), "float32")
    specs["down_sums"] = ((1, _slots(model, "down_proj", arch, s.intermediate_size)), "float32")
    specs["attention_floats"] = ((_attention_floats(s, arch, context),), "float32")
    return specs


def _slots(model: ModelDefinition, product: str, arch: str, columns: int) -> int:
    int8, rows = model.int8(product, 0), model.structure.hidden_size
    if int8 is None:
        return square_slots(arch, rows, columns)
    return int8_square_slots(arch, rows, columns, int8.group(columns))


def _attention_floats(s: LayerStructure, arch: str, context: int) -> int:
    """For a cache of either type."""
    heads, kv_heads = s.num_attention_heads, s.num_key_value_heads
    steps = [(end, int8) for end in bucket_ends(s, arch, context) for int8 in (False, True)]
    found = (attention_config(arch, kv_heads, end, int8=int8) for end, int8 in steps)
    return max(workspace_floats(config, heads, kv_heads, s.head_dim) for config in found)


def bucket_end(structure: LayerStructure, arch: str, length: int, context: int) -> int:
    """The longest sequence that the decode step for `length` tokens also serves, within the context."""
    end = context_bucket(arch, structure.num_key_value_heads, length)
    return context if end is None else min(end, context)


def bucket_ends(structure: LayerStructure, arch: str, context: int) -> list[int]:
    """Every bucket up to the context, the shortest first."""
    ends = [bucket_end(structure, arch, 1, context)]
    while ends[-1] < context:
        ends.append(bucket_end(structure, arch, ends[-1] + 1, context))
    return ends


def as_row(array: Array) -> Array:
    """[N] -> [1, N], as the one-token kernels take norms and biases."""
    return None if array is None else array.reshape(1, -1)


def _digit_arrays(x: Array, b: Buffers) -> tuple[Array, Array]:
    """Digits [2 T, K] and scales [T, 1] for x [T, K]."""
    rows, k = x.shape
    return b["rows_digits"][: 2 * rows * k].reshape(2 * rows, k), b["rows_digit_scales"][:rows]


class Ops:
    """Calls wrappers on a RecordingLauncher; `records` is the plan."""

    def __init__(self, launcher: RecordingLauncher, structure: LayerStructure) -> None:
        self._launcher = launcher
        self._s = structure
        self._heads: dict[str, Any] = {"kv_heads": structure.num_key_value_heads, "head_dim": structure.head_dim}
        self._ahead: tuple[Array, int] | None = None  # a weight, and how many of its rows have been widened

    @property
    def records(self) -> list[Recorded]:
        return self._launcher.records

    def widen(self, w: Weight) -> None:
        """The copy, from values and scales."""
        dequantise(self._launcher, w.values, w.scale, w.copy)

    # -- a prefill chunk of T tokens

    def embed_rows(self, ids: Array, table: Weight, x: Array) -> None:
        """x [T, D] float32."""
        embedding(self._launcher, ids, table.values, x, scale=table.scale)

    def norm_rows(self, x: Array, gain: Array, y: Array) -> None:
        """y [T, D] half = RMSNorm(x)."""
        rms_norm(self._launcher, x, as_row(gain), y, eps=self._s.rms_norm_eps)

    def norm_rows_for(self, x: Array, gain: Array, w: Weight, b: Buffers) -> Rows:
        """RMSNorm(x) as the product with `w` reads it: in digits where that has one scale a row."""
        if not w.in_digits:
            normed = b["rows_normed"][: x.shape[0]]
            self.norm_rows(x, gain, normed)
            return normed
        digits, scales = _digit_arrays(x, b)
        rms_norm_digits(self._launcher, x, as_row(gain), digits, scales, eps=self._s.rms_norm_eps)
        return digits, scales

    def linear_rows(self, x: Rows, w: Weight, bias: Array, y: Array, b: Buffers) -> None:
        """y [T, N] half."""
        self._product("", (linear_prefill, linear_prefill_digits), (x, w, bias), y, b)

    def add_linear_rows(self, x: Rows, w: Weight, bias: Array, stream: Array, b: Buffers) -> None:
        """stream [T, N] float32 += x · wᵀ."""
        self._product("_residual", (linear_prefill_residual, linear_prefill_digits_residual), (x, w, bias), stream, b)

    def swiglu_rows(self, x: Rows, w: Weight, bias: Array, y: Array, b: Buffers) -> None:
        """y [T, F] half."""
        self._product("_swiglu", (linear_prefill_swiglu, linear_prefill_digits_swiglu), (x, w, bias), y, b)

    def xielu_rows(self, x: Rows, w: Weight, numbers: Array, y: Array, b: Buffers) -> None:
        """y [T, F] half = xIELU(x · wᵀ) by a layer's [α_p, α_n, β, ε]."""
        self._product("_xielu", (linear_prefill_xielu, linear_prefill_digits_xielu), (x, w, None), y, b, numbers[:2])

    def all_logits(self, x: Array, w: Weight, out: Array) -> None:
        """out [T, V] float32 += x · wᵀ, of few rows: INT8 weights become half precision inside the product."""
        values, scale, _ = w
        family = "linear_prefill_residual" if scale is None else "linear_prefill_int8_residual"
        config = self._product_config(family, x, values)
        if scale is None:
            linear_prefill_residual(self._launcher, x, values, out, config=config)
        else:
            linear_prefill_int8_residual(self._launcher, x, values, scale, out, config=config)

    def _product(
        self, form: str, ops: tuple[Any, Any], inputs: tuple[Rows, Weight, Array], y: Array, b: Buffers, *more: Array
    ) -> None:
        """In half precision, with weights in groups widened first; or in digits, with one scale a row."""
        x, w, bias = inputs
        (values, scale, _), into = w, (*more, y)
        if w.in_digits:
            digits, scales = x if isinstance(x, tuple) else self._digits_of(x, b)
            config = self._product_config(f"linear_prefill_digits{form}", scales, values)
            ops[1](self._launcher, digits, scales, values, scale, *into, config=config, bias=bias)
            return
        if scale is not None:
            ahead, done = self._ahead or (None, 0)
            values = self._widen(w, b, done if ahead is values else 0, values.shape[0])
            self._ahead = None
        config = self._product_config(f"linear_prefill{form}", x, values)
        ops[0](self._launcher, x, values, *into, config=config, bias=bias)

    def widen_ahead(self, behind: str, w: Weight, between: Sequence[Weight], b: Buffers) -> None:
        """A share of the weights of a later product, where a launch leaves time.

        `between` are the weights of the products until then, which must leave the scratch array alone.
        """
        values = w.values
        rows = int(AHEAD[behind] * values.shape[0]) // 16 * 16  # whose scales begin at a multiple of 16 bytes
        if not (rows and w.grouped and all(other.in_digits for other in between) and self._scratch_is_free()):
            return
        first = self._ahead[1] if self._ahead else 0
        self._widen(w, b, first, first + rows)
        self._ahead = values, first + rows

    def _widen(self, w: Weight, b: Buffers, first: int, stop: int) -> Array:
        """[N, K] half, the weights; rows from `first` on are made now."""
        values, scale, _ = w
        wide = b["rows_weight"][: values.shape[0] * values.shape[1]].reshape(values.shape)
        part = slice(first, stop)
        if first < stop:
            early = self._scratch_is_free()
            dequantise(self._launcher, values[part], scale[part], wide[part], early=early)
        return wide

    def _digits_of(self, x: Array, b: Buffers) -> tuple[Array, Array]:
        """Rows of a kernel that writes half precision, by a launch of their own."""
        digits, scales = _digit_arrays(x, b)
        token_digits(self._launcher, x, digits, scales)
        return digits, scales

    def _scratch_is_free(self) -> bool:
        """Whether no launch that can still run has to do with `rows_weight`.

        All before the latest product in digits have ended, for that starts its dependents only once it has waited.
        """
        for record in reversed(self._launcher.records):
            if record.module == linear_prefill_digits.__module__:
                return True
            if record.module.startswith(linear_prefill.__module__):
                return False
        return False

    def _product_config(self, family: str, x: Array, w: Array) -> LinearPrefillConfig:
        """`x`: any array with a row for each token."""
        return self._configured(LinearPrefillConfig, family, tokens=x.shape[0], n=w.shape[0], k=w.shape[1])

    def _configured(self, kind: type[Config], family: str, **shape: int) -> Config:
        return configured(kind, family, self._launcher.arch, **shape)

    def rope_rows(self, qkv: Array, norms: tuple[Array, Array], b: Buffers, pages: Pages, q: Array) -> None:
        """Rotated queries to q [T, H·d], keys and values to the pages."""
        k, v, table, scales = pages
        q_norm, k_norm = map(as_row, norms)
        place = (b["cos"], b["sin"], b["start"], table)
        eps = self._s.rms_norm_eps
        qk_norm_rope_kv(self._launcher, qkv, q_norm, k_norm, *place, q, k, v, **self._heads, eps=eps, scales=scales)

    def attend_rows(self, q: Array, pages: Pages, b: Buffers, out: Array) -> None:
        """out [T, H·d]. The sequence's pages of an INT8 cache are widened first."""
        k, v, table, scales = pages
        if scales is not None:
            wide = b["wide_keys"], b["wide_values"]
            place = (table, b["start"])
            widen_pages(self._launcher, k, v, *place, *wide, tokens=q.shape[0], scales=scales, **self._heads)
            (k, v), table = wide, b["wide_table"]
        config = self._configured(AttentionPrefillConfig, "attention_prefill", head_dim=self._s.head_dim)
        attention_prefill(self._launcher, q, k, v, table, b["start"], out, config=config, **self._heads)

    # -- one token

    def head_row(self, gain: Array, w: Weight, b: Buffers) -> None:
        """The logits from `residual`, without folding: prefill leaves no sums."""
        self.norm_rows(b["residual"], gain, b["scaled"])
        values, scale, _ = w
        if scale is None:
            linear(self._launcher, b["scaled"], values, b["logits"])
        else:
            linear_int8(self._launcher, b["scaled"], values, scale, b["logits"])

    def embed_row(self, table: Weight, gain: Array, b: Buffers) -> None:
        args = (b["sampled"], table.values, as_row(gain), b["residual"], b["scaled"], b["down_sums"])
        embedding_decode(self._launcher, *args, scale=table.scale)

    def qkv_row(self, w: Weight, bias: Array, b: Buffers) -> None:
        self._normed((linear_norm, linear_int8_norm), w, b["down_sums"], b["qkv"], b, bias=as_row(bias))

    def swiglu_row(self, w: Weight, bias: Array, b: Buffers) -> None:
        self._normed((linear_swiglu, linear_int8_swiglu), w, b["o_sums"], b["act"], b, bias=as_row(bias))

    def xielu_row(self, w: Weight, numbers: Array, b: Buffers) -> None:
        """β and ε are the kernel's constants; the loader has checked them."""
        self._normed((linear_xielu, linear_int8_xielu), w, b["o_sums"], b["act"], b, numbers[:2])

    def logits_row(self, w: Weight, b: Buffers) -> None:
        self._normed((linear_norm, linear_int8_norm), w, b["down_sums"], b["logits"], b)

    def _normed(
        self, ops: tuple[Any, Any], w: Weight, sums: Array, y: Array, b: Buffers, *alphas: Array, **more: Any
    ) -> None:
        values, scale, _ = w
        eps = self._s.rms_norm_eps
        if scale is None:
            ops[0](self._launcher, b["scaled"], sums, values, *alphas, y, eps=eps, **more)
        else:
            ops[1](self._launcher, b["scaled"], sums, values, scale, *alphas, y, eps=eps, **more)

    def o_row(self, w: Weight, bias: Array, gain: Array, b: Buffers) -> None:
        self._add("attention", "o_sums", w, (bias, gain), b)

    def down_row(self, w: Weight, bias: Array, gain: Array, b: Buffers) -> None:
        self._add("act", "down_sums", w, (bias, gain), b)

    def _add(self, source: str, sums: str, w: Weight, vectors: tuple[Array, Array], b: Buffers) -> None:
        """residual += x · wᵀ (+ bias), and what the norm after it needs."""
        (values, scale, _), (bias, gain) = w, vectors
        into = (b["residual"], as_row(gain), b["scaled"], b[sums])
        if scale is None:
            linear_residual(self._launcher, b[source], values, *into, bias=as_row(bias))
        else:
            linear_int8_residual(self._launcher, b[source], values, scale, *into, bias=as_row(bias))

    def attend_row(self, norms: tuple[Array, Array], pages: Pages, context: int, b: Buffers) -> None:
        """Also writes this token's key and value. `context`: the longest sequence that the step serves."""
        k, v, table, scales = pages
        q_norm, k_norm = map(as_row, norms)
        place = (b["cos"], b["sin"], k, v, table, b["length"], b["attention_floats"])
        attention_decode(
            self._launcher, b["qkv"], q_norm, k_norm, *place, b["attention"], **self._heads, context=context,
            eps=self._s.rms_norm_eps, scales=scales,
        )  # fmt: skip

    def sample(self, b: Buffers) -> None:
        """An id from the logits by the settings on the device; greedy is temperature 0, in the same launches."""
        workspace = SampleWorkspace(**{name: b[f"sample_{name}"] for name in _SAMPLE_ARRAYS})
        ring = b["ring"]
        outputs = SampleOutputs(b["sampled"], b["length"], ring[0], ring[1].view("float32"))
        args = (b["logits"], b["token_state"], b["settings"], b["state"])
        config = self._configured(SampleConfig, "sample", vocab=b["logits"].shape[1])
        sample(self._launcher, *args, workspace, outputs, config=config)
