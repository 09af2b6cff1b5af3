"""The verify step: 2 to 8 tokens at once, as speculative decoding would check them. The engine has no such step yet.

The products are those of several tokens, for weights in half precision (kernels/linear_tokens.py) and in INT8
(kernels/linear_int8_tokens.py), product by product as the model has them; attention is prefill's. INT8 products read
their tokens in digits. The kernel that makes a token makes its digits where it can; else a kernel of their own does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kernels.digit_slices import digit_shapes, digit_slices, slices
from kernels.embedding import embedding_decode
from kernels.int8_tokens import NARROWEST
from kernels.linear_int8_tokens import (
    linear_int8_tokens_norm,
    linear_int8_tokens_residual,
    linear_int8_tokens_swiglu,
    linear_int8_tokens_xielu,
)
from kernels.linear_tokens import (
    COLUMNS,
    linear_tokens_norm,
    linear_tokens_residual,
    linear_tokens_swiglu,
    linear_tokens_xielu,
    part_floats,
)
from kernels.specs import RecordingLauncher
from kernels.tokens_join import tokens_square_slots
from tileinfer_core.backends.cuda import ops
from tileinfer_core.backends.cuda.weights import Weight
from tileinfer_core.errors import UsageError
from tileinfer_core.models.decoder import EMBEDDING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kernels.digit_slices import Digits
    from kernels.specs import Recorded
    from tileinfer_core.backends.cuda.device import Array
    from tileinfer_core.backends.cuda.runner import CudaRunner
    from tileinfer_core.models.decoder import LayerWeights, ModelDefinition

SOURCES = ("normed", "attention", "act")  # what products read, each of a width of its own


def verify_step(runner: CudaRunner, model: ModelDefinition, tokens: int) -> tuple[list[Recorded], Array]:
    """T tokens from `token_ids` at positions `start` … through all layers; and where the logits [T, V] will be.

    Raises:
        UsageError: INT8 in groups that the products of several tokens do not take.
    """
    for parameter in model.parameters:
        size = None if parameter.int8 is None else parameter.int8.group(parameter.shape[1])
        looked_up = parameter.name == EMBEDDING and not model.tied
        if size is not None and size < NARROWEST and not looked_up:
            raise UsageError(f"a verify step takes INT8 in groups of {NARROWEST} columns or more, found {size}")
    b, weights = runner.buffers, runner.plans.weights
    step = _Step(runner, model, tokens)
    table = Weight(weights.embedding, weights.embedding_scale)
    step.embed(b["token_ids"][:tokens], table, weights.layers[0].input_norm)
    norms = [layer.input_norm for layer in weights.layers[1:]] + [weights.norm]
    for index, (layer, next_norm) in enumerate(zip(weights.layers, norms, strict=True)):
        qkv, out, gate_up, down = runner.plans.products(index)
        step.normed(qkv, "down_sums", "qkv", layer.qkv_bias)
        step.attend(layer, index)
        step.add("attention", out, "o_sums", (layer.o_bias, layer.post_norm))
        step.feed_forward(gate_up, layer)
        step.add("act", down, "down_sums", (layer.down_bias, next_norm))
    step.normed(Weight(weights.lm_head, weights.lm_head_scale), "down_sums", "logits", None)
    return step.records, step.arrays["logits"]


class _Step:
    """The step's launches as they are recorded. `_fresh`: sources whose digits are those of their last values."""

    def __init__(self, runner: CudaRunner, model: ModelDefinition, tokens: int) -> None:
        device = runner.device
        self._runner, self._eps = runner, model.structure.rms_norm_eps
        self._go = RecordingLauncher(device.arch, pdl=device.pdl)
        self._ops = ops.Ops(self._go, model.structure)
        self.arrays, self._tokens = _arrays(runner, model, tokens), tokens
        self._digits: dict[str, Digits] = {}
        for source in SOURCES:
            values, scales = digit_shapes(tokens, int(self.arrays[source].shape[1]))
            self._digits[source] = device.zeros(values, "int8"), device.zeros(scales, "float32")
        self._fresh: set[str] = set()

    @property
    def records(self) -> list[Recorded]:
        return self._go.records

    def _rows(self, source: str) -> Array:
        """The tokens' own of the eight rows."""
        return self.arrays[source][: self._tokens]

    def _digits_of(self, source: str) -> Digits:
        if source not in self._fresh:
            digit_slices(self._go, self._rows(source), self._digits[source])
            self._fresh.add(source)
        return self._digits[source]

    def embed(self, ids: Array, table: Weight, gain: Array) -> None:
        into = (self.arrays["stream"], self._rows("normed"), self.arrays["down_sums"])
        embedding_decode(self._go, ids, table.values, ops.as_row(gain), *into, scale=table.scale)

    def normed(self, w: Weight, sums: str, out: str, bias: Array) -> None:
        """QKV and the logits, of RMSNorm of the stream."""
        (values, scale, _), a = w, self.arrays
        more: dict[str, Any] = {"eps": self._eps, "bias": ops.as_row(bias)}
        if scale is None:
            linear_tokens_norm(self._go, a["normed"], a[sums], values, a["parts"], a[out], **more)
            return
        x = self._digits_of("normed")
        linear_int8_tokens_norm(self._go, x, a[sums], values, scale, a["parts"], a[out], **more)

    def attend(self, layer: LayerWeights[Array], index: int) -> None:
        """Prefill's: the tokens' keys and values into the pages, then their attention."""
        a, runner, plans = self.arrays, self._runner, self._runner.plans
        pages = (runner.pool.k[index], runner.pool.v[index], plans.block_table, runner.pool.scales[index])
        self._ops.rope_rows(a["qkv"], (layer.q_norm, layer.k_norm), runner.buffers, pages, a["q"])
        self._ops.attend_rows(a["q"], pages, runner.buffers, self._rows("attention"))
        self._fresh.discard("attention")

    def feed_forward(self, w: Weight, layer: LayerWeights[Array]) -> None:
        """act = silu(gate)·up or xIELU(up) of RMSNorm of the stream."""
        (values, scale, _), a, eps = w, self.arrays, self._eps
        alphas = () if layer.xielu is None else (layer.xielu[:2],)
        more = {"bias": ops.as_row(layer.gate_up_bias)} if layer.xielu is None else {}
        if scale is None:
            half: Any = linear_tokens_swiglu if layer.xielu is None else linear_tokens_xielu
            half(self._go, a["normed"], a["o_sums"], values, a["parts"], *alphas, self._rows("act"), eps=eps, **more)
            self._fresh.discard("act")
            return
        made = None if layer.down_scale is None else self._digits["act"]
        given = (self._digits_of("normed"), a["o_sums"], values, scale, a["parts"], *alphas, self._rows("act"), made)
        int8: Any = linear_int8_tokens_swiglu if layer.xielu is None else linear_int8_tokens_xielu
        int8(self._go, *given, eps=eps, **more)
        self._fresh.add("act")

    def add(self, source: str, w: Weight, sums: str, vectors: tuple[Array, Array]) -> None:
        """stream += x · wᵀ (+ bias), and what the norm after it needs."""
        (values, scale, _), (bias, gain), a = w, vectors, self.arrays
        into = (a["stream"], ops.as_row(gain), self._rows("normed"), a[sums])
        if scale is None:
            linear_tokens_residual(self._go, a[source], values, a["parts"], *into, bias=ops.as_row(bias))
            self._fresh.discard("normed")
            return
        x, made = self._digits_of(source), self._digits["normed"]
        linear_int8_tokens_residual(self._go, x, values, scale, a["parts"], *into, made, bias=ops.as_row(bias))
        self._fresh.add("normed")


def _arrays(runner: CudaRunner, model: ModelDefinition, tokens: int) -> Mapping[str, Array]:
    s, device, vocab = model.structure, runner.device, model.config.vocab_size
    half = str(runner.buffers["rows_normed"].dtype)
    qkv_rows, up_rows = s.q_size + 2 * s.kv_size, (1 if s.mlp == "plain" else 2) * s.intermediate_size

    products = [(qkv_rows, s.hidden_size), (s.hidden_size, s.q_size), (up_rows, s.hidden_size)]
    products += [(s.hidden_size, s.intermediate_size), (vocab, s.hidden_size)]
    parts = max(max(slices(k) * tokens * n, part_floats(device.arch, tokens, n, k)) for n, k in products)
    sums = (tokens, tokens_square_slots(s.hidden_size))
    return {
        "stream": device.zeros((tokens, s.hidden_size), "float32"),  # [T, D]
        "normed": device.zeros((COLUMNS, s.hidden_size), half),  # [8, D]
        "o_sums": device.zeros(sums, "float32"),
        "down_sums": device.zeros(sums, "float32"),
        "qkv": device.zeros((tokens, qkv_rows), half),  # [T, (H + 2K)·d]
        "q": device.zeros((tokens, s.q_size), half),  # [T, H·d]
        "attention": device.zeros((COLUMNS, s.q_size), half),  # [8, H·d]
        "act": device.zeros((COLUMNS, s.intermediate_size), half),  # [8, F]
        "logits": device.zeros((tokens, vocab), "float32"),  # [T, V]
        "parts": device.zeros((parts,), "float32"),  # shares of the product in work
    }
