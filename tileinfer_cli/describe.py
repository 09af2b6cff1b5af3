"""What `show` says of a model: a document of plain values, made from the folder without loading a weight."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from tileinfer_cli.opening import plain

if TYPE_CHECKING:
    from tileinfer_core.settings import Settings
    from tileinfer_core.store import ModelFolder

# Bytes of a number in memory: the CPU computes in float32, the GPU in 16 bits.
_BYTES = {"cpu": 4, "cuda": 2}


def describe(folder: ModelFolder, settings: Settings) -> dict[str, Any]:
    """Where it is, its shape, the memory it needs on the backend that would run it, defaults with their origins."""
    from tileinfer_core.backends.select import choose_backend
    from tileinfer_core.config import ModelConfig
    from tileinfer_core.generation_config import GenerationConfig
    from tileinfer_core.sampling import resolve_sampling
    from tileinfer_core.weights import WeightFiles

    config = ModelConfig.load(folder.path)
    files = WeightFiles.open(folder.path)
    backend = choose_backend(settings.backend.value)
    per_token = 2 * config.num_hidden_layers * config.kv_size * _BYTES[backend.name]
    sampling = resolve_sampling({}, settings, GenerationConfig.load(folder.path))
    tensors = [files.info(name) for name in files.names]
    return {
        "model": folder.name,
        "path": str(folder.path),
        "kind": folder.kind,
        "revision": folder.revision,
        "context": config.max_context,
        "config": plain(config),
        "dtypes": sorted({tensor.dtype for tensor in tensors}),
        "backend": plain(backend),
        "memory": {
            "weights_on_disk_bytes": sum(tensor.bytes for tensor in tensors),
            "weights_bytes": sum(math.prod(tensor.shape) for tensor in tensors) * _BYTES[backend.name],
            "kv_bytes_per_token": per_token,
            "kv_bytes_full_context": per_token * config.max_context,
        },
        "sampling": {name: plain(setting) for name, setting in sampling.items() if name != "seed"},
    }
