"""The launches of each kind of step, as data: what a model declares of itself in, lists of kernel calls out.

    prefill(rows)   a chunk of `rows` tokens (padded) through all layers; its keys and values into the pages
    copies          INT8 weights in half precision, for chunks, where the memory plan has them
    head            the logits after the token whose stream is in `residual`
    sample          one id from the logits; moves length, step and the ring of ids on
    decode(context) embed the sampled id, all layers, logits, sample: a whole step without the host
    all_logits      the logits after every row of a block, for evaluation

Which kernels are called follows from LayerStructure: QK-norm or not, biases or not, a gated MLP or a plain one. A plan
launches nothing: wrappers are called with a RecordingLauncher, which checks shapes and keeps the calls.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from kernels.int8_scales import supported_group
from kernels.specs import RecordingLauncher
from tileinfer_core.backends.cuda import ops
from tileinfer_core.backends.cuda.weights import Weight, digit_limits
from tileinfer_core.errors import UnsupportedModelError
from tileinfer_core.models.decoder import layer_weight

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kernels.specs import Recorded
    from tileinfer_core.backends.cuda.device import Array
    from tileinfer_core.backends.cuda.kv_pool import KvPool
    from tileinfer_core.models.decoder import DecoderWeights, LayerWeights, ModelDefinition
    from tileinfer_core.models.structure import LayerStructure


def refuse_unsupported(structure: LayerStructure) -> None:
    """Raises UnsupportedModelError for shapes that the kernels don't take."""
    if structure.head_dim not in (64, 128):
        raise _unsupported(f"a head dimension of {structure.head_dim}", "64 and 128")
    group = structure.num_attention_heads // structure.num_key_value_heads
    if group > ops.MAX_GROUP:
        raise _unsupported(f"{group} query heads per key/value head", f"up to {ops.MAX_GROUP}")
    if structure.mlp_bias and structure.mlp == "plain":
        raise _unsupported("biases in the feed-forward products of a plain MLP", "biases of gated ones")
    for name, size in (("hidden_size", structure.hidden_size), ("intermediate_size", structure.intermediate_size)):
        if size % ops.SIZE_STEP:
            raise _unsupported(f"{name} {size}", f"multiples of {ops.SIZE_STEP}")


def refuse_formats(model: ModelDefinition) -> None:
    """Raises UnsupportedModelError for INT8 weights that the kernels don't take."""
    for parameter in model.parameters:
        if parameter.int8 is None:
            continue
        columns, size = parameter.shape[1], parameter.int8.group(parameter.shape[1])
        if columns % ops.INT8_STEP:
            raise _unsupported(f"INT8 rows of {columns} columns ({parameter.name})", f"multiples of {ops.INT8_STEP}")
        if not supported_group(size):
            raise _unsupported(f"INT8 in groups of {size} ({parameter.name})", "powers of two from 16 up")
    for product in ("o_proj", "down_proj"):  # their blocks' sums of squares have one place for all layers
        formats = {model.int8(product, layer) for layer in range(model.config.num_hidden_layers)}
        if len(formats) > 1:
            found = ", ".join(sorted(str(int8 or "half precision") for int8 in formats))
            raise _unsupported(f"a {product} that is {found} by the layer", "one format for all layers")


def _unsupported(what: str, supported: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"the CUDA kernels do not take {what}; supported: {supported}", hint="run this model with --backend cpu"
    )


class Plans:
    """Plans for one model in one set of arrays."""

    def __init__(
        self,
        model: ModelDefinition,
        weights: DecoderWeights[Array],
        pool: KvPool,
        block_table: Array,
        *,
        buffers: Mapping[str, Array],
        copies: Mapping[str, Array] = MappingProxyType({}),
        arch: str,
        pdl: bool,
        processors: int,
    ) -> None:
        self._structure = model.structure
        self._weights = weights
        self._pool = pool
        self._table = block_table
        self._b = buffers
        self._copies = copies
        self._digit_limits = digit_limits(model.structure, arch)
        self._arch = arch
        self._pdl = pdl
        self._processors = processors

    @property
    def weights(self) -> DecoderWeights[Array]:
        return self._weights

    @property
    def block_table(self) -> Array:
        """The device's, of the sequence in work."""
        return self._table

    def _pages(self, index: int) -> ops.Pages:
        return self._pool.k[index], self._pool.v[index], self._table, self._pool.scales[index]

    def _ops(self) -> ops.Ops:
        launcher = RecordingLauncher(self._arch, pdl=self._pdl, processors=self._processors)
        return ops.Ops(launcher, self._structure)

    def layers_of_every_kind(self) -> int:
        """How many of the first layers launch every kernel that any layer does: one where all are alike.

        Formats may differ by the layer. Weights in groups at a layer's start are widened behind the layer before: the
        first has none.
        """
        kinds = []
        for index in range(len(self._weights.layers)):
            products = self.products(index)
            formats = tuple(None if product.scale is None else tuple(product.scale.shape) for product in products)
            kinds.append((index == 0 and products[0].grouped, formats))
        return 1 + max(map(kinds.index, kinds))

    # -- prefill

    def prefill(self, rows: int, layers: int | None = None) -> list[Recorded]:
        """`layers` cuts the plan short, for a look at its kernels: see layers_of_every_kind."""
        o, b, w = self._ops(), self._b, self._weights
        x = b["rows_residual"][:rows]  # [T, D]
        o.embed_rows(b["token_ids"][:rows], Weight(w.embedding, w.embedding_scale), x)
        for index, layer in enumerate(w.layers[:layers]):
            self._prefill_layer(o, layer, index, x)
        return o.records

    def _prefill_layer(self, o: ops.Ops, w: LayerWeights[Array], index: int, x: Array) -> None:
        b, rows = self._b, x.shape[0]
        qkv, q, attention, act = (b[f"rows_{name}"][:rows] for name in ("qkv", "q", "attention", "act"))
        pages = self._pages(index)
        products = zip(self.products(index), self._digit_limits, strict=True)
        joined, out, gate_up, down = (product.for_chunk(rows, limit) for product, limit in products)
        normed = o.norm_rows_for(x, w.input_norm, joined, b)
        o.linear_rows(normed, joined, w.qkv_bias, qkv, b)
        o.widen_ahead("qkv", down, (out, gate_up), b)
        o.rope_rows(qkv, (w.q_norm, w.k_norm), b, pages, q)
        o.attend_rows(q, pages, b, attention)
        o.widen_ahead("attention", down, (out, gate_up), b)
        o.add_linear_rows(attention, out, w.o_bias, x, b)
        o.widen_ahead("o", down, (gate_up,), b)
        normed = o.norm_rows_for(x, w.post_norm, gate_up, b)
        if w.xielu is None:
            o.swiglu_rows(normed, gate_up, w.gate_up_bias, act, b)
        else:
            o.xielu_rows(normed, gate_up, w.xielu, act, b)
        o.add_linear_rows(act, down, w.down_bias, x, b)

    def products(self, index: int) -> tuple[Weight, Weight, Weight, Weight]:
        """qkv, o, gate_up and down of a layer."""
        w = self._weights.layers[index]

        def copy(product: str) -> Array:
            return self._copies.get(layer_weight(index, product))

        return (
            Weight(w.qkv, w.qkv_scale, copy("qkv_proj")),
            Weight(w.o, w.o_scale, copy("o_proj")),
            Weight(w.gate_up, w.gate_up_scale, copy("gate_up_proj")),
            Weight(w.down, w.down_scale, copy("down_proj")),
        )

    def copies(self, layers: int | None = None) -> list[Recorded]:
        """`layers` as for prefill."""
        o = self._ops()
        for index in range(len(self._weights.layers[:layers])):
            for weight in self.products(index):
                if weight.copy is not None:
                    o.widen(weight)
        return o.records

    def all_logits(self, first: int, rows: int, out: Array) -> list[Recorded]:
        """out [rows, V] float32, zeroed before, after rows `first` … of the last chunk."""
        o, b, w = self._ops(), self._b, self._weights
        normed = b["rows_normed"][first : first + rows]
        o.norm_rows(b["rows_residual"][first : first + rows], w.norm, normed)
        o.all_logits(normed, Weight(w.lm_head, w.lm_head_scale), out)
        return o.records

    # -- decode

    def head(self) -> list[Recorded]:
        o, b, w = self._ops(), self._b, self._weights
        o.head_row(w.norm, Weight(w.lm_head, w.lm_head_scale), b)
        return o.records

    def sample(self) -> list[Recorded]:
        o = self._ops()
        o.sample(self._b)
        return o.records

    def decode(self, context: int, layers: int | None = None) -> list[Recorded]:
        """One step for a sequence of at most `context` tokens with its own."""
        o, b, w = self._ops(), self._b, self._weights
        here = w.layers[:layers]
        norms = [layer.input_norm for layer in here[1:]] + [w.norm]
        o.embed_row(Weight(w.embedding, w.embedding_scale), w.layers[0].input_norm, b)
        for index, (layer, next_norm) in enumerate(zip(here, norms, strict=True)):
            qkv, out, gate_up, down = self.products(index)
            o.qkv_row(qkv, layer.qkv_bias, b)
            o.attend_row((layer.q_norm, layer.k_norm), self._pages(index), context, b)
            o.o_row(out, layer.o_bias, layer.post_norm, b)
            if layer.xielu is None:
                o.swiglu_row(gate_up, layer.gate_up_bias, b)
            else:
                o.xielu_row(gate_up, layer.xielu, b)
            o.down_row(down, layer.down_bias, next_norm, b)
        o.logits_row(Weight(w.lm_head, w.lm_head_scale), b)
        o.sample(b)
        return o.records
