"""The two protocols between models, backends and the decode loop.

    Backend   the operations a model's forward pass is written in; T is the backend's array type
    Runner    a model with its weights on a backend: what the decode loop and the evaluation drive

The NumPy backend runs a model's forward pass operation by operation. A backend with a plan of its own (fused kernels,
captured graphs) builds it from the model's LayerStructure and implements only Runner's side by it; the decode loop
can't tell the difference.

Letters in shapes: T tokens of this call, D hidden size, H query heads, K key/value heads, d head dimension,
F feed-forward size, V vocabulary rows, C tokens in the cache with those of this call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    import numpy as np

    from tileinfer_core.kv_cache import KvCache
    from tileinfer_core.models.structure import LayerStructure
    from tileinfer_core.sampling import Sampled, SamplingParams

    Float32Array = np.ndarray[Any, np.dtype[np.float32]]
    BoolArray = np.ndarray[Any, np.dtype[np.bool_]]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How a model is held in memory.

    `context` is what the user asked for: a backend that plans its memory refuses one that does not fit, and without it
    finds the longest that does. `prefill_chunk` None is the backend's own choice. `kv` "int8" keeps keys and values in
    INT8, "bf16" as the model has them. `half_copies` lets a GPU keep INT8 weights in half precision too, for prompts,
    in memory that nothing else needs.
    """

    context: int | None = None
    prefill_chunk: int | None = None
    kv: str = "bf16"
    half_copies: bool = True


class Backend(Protocol[T]):
    """Operations on arrays that stay on the device. Weights are [rows out, columns in], as stored."""

    def embedding(self, table: T, token_ids: Sequence[int]) -> T:
        """Rows of table [V, D] -> [T, D]."""

    def rms_norm(self, x: T, weight: T, eps: float) -> T:
        """x / sqrt(mean(x²) + eps) * weight over the last axis; x [..., D], weight [D] -> [..., D]."""

    def linear(self, x: T, weight: T, bias: T | None) -> T:
        """x [T, K] · weight [N, K]ᵀ + bias [N] -> [T, N]."""

    def split_qkv(self, qkv: T, structure: LayerStructure) -> tuple[T, T, T]:
        """qkv [T, (H + 2K)·d] -> q [T, H, d], k [T, K, d], v [T, K, d]; views where the backend can."""

    def rope(self, x: T, start: int) -> T:
        """Rotary embedding of x [T, heads, d] at positions start … start + T - 1, halves rotated (GPT-NeoX form).

        The tables come from the RopeConfig of the model that was loaded.
        """

    def write_kv(self, cache: KvCache, layer: int, k: T, v: T) -> None:
        """Store k and v [T, K, d] of one layer after the committed tokens of `cache`, into its reserved pages."""

    def attention(self, q: T, cache: KvCache, layer: int) -> T:
        """Causal attention of q [T, H, d] over the C keys and values of one layer, scale 1/sqrt(d) -> [T, H·d].

        Row t sees the committed tokens and the first t + 1 of those just written.
        """

    def gated_activation(self, gate_up: T, activation: str) -> T:
        """act(gate) * up; gate_up [T, 2F] with the gate first -> [T, F]."""

    def xielu(self, x: T, numbers: T) -> T:
        """xIELU of x [T, F] by a layer's [α_p, α_n, β, ε] (models/xielu.py). x is spent."""

    def add(self, x: T, y: T) -> T:
        """x + y [T, D]. x is spent: the result may lie in its memory."""

    def last_row(self, x: T) -> T:
        """x [T, D] -> [1, D]."""


@runtime_checkable
class Warns(Protocol):
    """A runner that may notice something the user should know while it decodes."""

    def take_warnings(self) -> tuple[str, ...]:
        """What has been noticed since the last call."""


class Runner(Protocol):
    """One loaded model and the memory for its sequences. Not thread-safe: one call at a time."""

    @property
    def backend_name(self) -> str:
        """ "cpu" or "cuda"."""

    @property
    def weight_bytes(self) -> int:
        """Memory that the weights take on the device."""

    @property
    def copy_bytes(self) -> int:
        """Memory that copies of INT8 weights in half precision take besides, for prompts."""

    @property
    def step_weight_bytes(self) -> int:
        """What a decoded token reads of them: all but an embedding that is not the head."""

    @property
    def kv_bytes_per_token(self) -> int:
        """Memory that one token's keys and values take over all layers."""

    @property
    def context_limit(self) -> int | None:
        """The longest sequence that the device's memory allows; None where nothing but the model limits it."""

    @property
    def prefill_chunk(self) -> int:
        """Tokens of a prompt that one step takes best."""

    @property
    def compile_s(self) -> float:
        """Seconds spent compiling kernels so far; 0 where nothing is compiled."""

    def new_cache(self, max_tokens: int) -> KvCache:
        """An empty cache whose sequence may grow to `max_tokens`; memory is taken as it grows."""

    def prefill(self, cache: KvCache, token_ids: Sequence[int]) -> None:
        """Append one chunk of tokens to the sequence. The logits of its last token wait for `decode`."""

    def decode(
        self, cache: KvCache, params: SamplingParams, valid_ids: BoolArray | None, prompt_tokens: int
    ) -> Generator[Sampled, None, None]:
        """Sample the tokens after the last prefill, one per `next`, until the caller closes the iterator.

        `valid_ids` [V] masks ids that must not be sampled; None: all may. The first `prompt_tokens` ids of the sequence
        are the prompt, the others output: penalties and the random counter (seed, number of output ids) depend on it.
        When the iterator is closed, `cache` holds all ids that it yielded except possibly the last one.

        Raises:
            ContextLengthError: asked for a token beyond cache.max_tokens.
        """

    def logits(self, cache: KvCache, token_ids: Sequence[int]) -> Float32Array:
        """Append one chunk of tokens and return the logits after each of them, on the host: [T, V]."""

    def close(self) -> None:
        """Free the device's memory. The runner can't be used afterwards."""
