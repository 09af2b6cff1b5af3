"""What the inputs of each product look like on a calibration text, layer by layer, as compensate.py wants them.

The text goes through the model in float32 on the CPU, one layer at a time: memory holds one layer's weights, the hidden
states of the text, and Σ x·xᵀ of that layer's products. Each layer sees the unquantised layers before it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tileinfer_core.backends.numpy_backend import NumpyBackend
from tileinfer_core.backends.numpy_kv import NumpyPages
from tileinfer_core.backends.numpy_weights import load_arrays
from tileinfer_core.compensate import compensation
from tileinfer_core.errors import UsageError
from tileinfer_core.kv_cache import KvCache
from tileinfer_core.models.decoder import EMBEDDING, DecoderPass, bind_layer
from tileinfer_core.progress import silent
from tileinfer_core.tokenizer import Tokenizer
from tileinfer_core.weights import WeightFiles

if TYPE_CHECKING:
    from pathlib import Path

    from tileinfer_core.models.decoder import ModelDefinition

    Float32Array = np.ndarray[Any, np.dtype[np.float32]]
    Float64Array = np.ndarray[Any, np.dtype[np.float64]]
    Array = np.ndarray[Any, np.dtype[Any]]
    Factor = tuple[Float32Array, Array]

WINDOW = 1024
TOKENS = 4096  # of the text that are used: 8,192 gained nothing on SmolLM2-135M
LEAST_TOKENS = 128


class Calibration:
    """`factor(parameter)` for the parameters of a model, asked for in the order of the layers, the head last."""

    def __init__(self, folder: Path, model: ModelDefinition, text: str) -> None:
        self._model = model
        self._files = WeightFiles.open(folder)
        self._ops = _Listening(model)
        ids = Tokenizer.load(folder, model.config.vocab_size).encode(text, special=False)[:TOKENS]
        if len(ids) < LEAST_TOKENS:
            raise UsageError(f"the calibration text has {len(ids)} tokens; at least {LEAST_TOKENS} say anything")
        window = min(WINDOW, model.config.max_context)
        self._windows = [ids[start : start + window] for start in range(0, len(ids), window)]
        table = self._load(EMBEDDING)[EMBEDDING]
        self._hidden = [self._ops.embedding(table, window) for window in self._windows]  # of each window: [T, D]
        self._layer = -1
        self._sums: dict[str, Float64Array] = {}
        self._factors: dict[str, Factor] = {}

    def factor(self, parameter: str) -> Factor | None:
        """The factor of one parameter's rounding; None for an embedding that is not the head, which has no inputs."""
        if ".layers." in parameter:
            while self._layer < int(parameter.split(".")[2]):
                self._next_layer()
        elif parameter == EMBEDDING and not self._model.tied:
            return None
        elif parameter not in self._sums:
            self._head(parameter)
        if parameter not in self._factors:
            self._factors = {parameter: compensation(self._sums[parameter])}  # q, k and v share one
        return self._factors[parameter]

    def _load(self, *prefixes: str) -> dict[str, Float32Array]:
        wanted = tuple(p for p in self._model.parameters if p.name.startswith(prefixes))
        return load_arrays(wanted, self._files, silent)

    def _next_layer(self) -> None:
        """Every window through one layer, listening to its products' inputs."""
        self._layer += 1
        arrays = self._load(f"model.layers.{self._layer}.")
        weights = bind_layer(self._layer, arrays)
        self._ops.listen({id(array): name for name, array in arrays.items()})
        for i, ids in enumerate(self._windows):
            cache = KvCache(NumpyPages(self._model.structure, 1, len(ids)), len(ids))
            cache.reserve(len(ids))
            layer = DecoderPass(self._ops, self._model.structure, cache)
            self._hidden[i] = layer.layer(0, weights, self._hidden[i])
        self._sums = self._ops.sums

    def _head(self, parameter: str) -> None:
        norm = self._load("model.norm.weight")["model.norm.weight"]
        self._ops.listen({})
        total: Any = 0.0
        for hidden in self._hidden:
            total = total + gram(self._ops.rms_norm(hidden, norm, self._model.structure.rms_norm_eps))
        self._sums = {parameter: total}


class _Listening(NumpyBackend):
    """Adds up Σ x·xᵀ of the inputs of those products that it was told of."""

    def __init__(self, model: ModelDefinition) -> None:
        super().__init__(model.structure.rope, model.structure.head_dim)
        self._names: dict[int, str] = {}
        self.sums: dict[str, Float64Array] = {}

    def listen(self, names: dict[int, str]) -> None:
        self._names, self.sums = names, {}

    def linear(self, x: Float32Array, weight: Float32Array, bias: Float32Array | None) -> Float32Array:
        name = self._names[id(weight)]
        self.sums[name] = self.sums.get(name, 0.0) + gram(x)
        return super().linear(x, weight, bias)


def gram(x: Float32Array) -> Float64Array:
    """Σ x·xᵀ over the rows of x [T, K]: [K, K]. Added in float32 within a window, in float64 over windows."""
    return (x.T @ x).astype(np.float64)
