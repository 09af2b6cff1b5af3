"""What `show` says of a model: a document of plain values, made from the folder without loading a weight."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from tileinfer_cli.opening import plain
from tileinfer_core.settings import Setting
from tileinfer_core.units import bytes_text

if TYPE_CHECKING:
    from tileinfer_core.config import ModelConfig
    from tileinfer_core.models.decoder import ModelDefinition
    from tileinfer_core.models.structure import Parameter
    from tileinfer_core.settings import Settings
    from tileinfer_core.store import ModelFolder

# Bytes of a number in memory: the CPU computes in float32, the GPU in 16 bits.
_BYTES = {"cpu": 4, "cuda": 2}


def describe(folder: ModelFolder, settings: Settings) -> dict[str, Any]:
    """Where it is, its shape, the memory it needs on the backend that would run it, defaults with their origins."""
    from tileinfer_core.backends.select import choose_backend
    from tileinfer_core.config import ModelConfig
    from tileinfer_core.generation_config import GenerationConfig
    from tileinfer_core.models.define import define_from_files
    from tileinfer_core.receipt import read_receipt
    from tileinfer_core.sampling import resolve_sampling
    from tileinfer_core.weights import WeightFiles

    config = ModelConfig.load(folder.path)
    files = WeightFiles.open(folder.path)
    model, _ = define_from_files(config, files)
    backend = choose_backend(settings.backend.value)
    kv = kv_setting(config, settings)
    per_token = kv_bytes(config, backend.name, kv.value)
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
        "int8": int8_parts(model),
        "receipt": read_receipt(folder.path),
        "kv": plain(kv),
        "memory": {
            "weights_on_disk_bytes": sum(tensor.bytes for tensor in tensors),
            "weights_bytes": sum(weight_bytes(p, backend.name) for p in model.parameters),
            "decode_bytes_per_token": sum(
                weight_bytes(p, backend.name) for p in model.parameters if not model.only_looked_up(p.name)
            ),
            "kv_bytes_per_token": per_token,
            "kv_bytes_full_context": per_token * config.max_context,
        },
        "sampling": {name: plain(setting) for name, setting in sampling.items() if name != "seed"},
    }


def memory_rows(document: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(what, how much, of what) of such a document."""
    memory, kv, backend, size = document["memory"], document["kv"], document["backend"], bytes_text
    kept = "as float32; " if backend["name"] == "cpu" else ""
    on_disk = f"{size(memory['weights_on_disk_bytes'])} on disk as {', '.join(document['dtypes'])}"
    return [
        ("weights", size(memory["weights_bytes"]), kept + on_disk),
        ("each token", size(memory["kv_bytes_per_token"]), f"keys and values, {kept}kv {kv['value']} ({kv['origin']})"),
        ("full context", size(memory["kv_bytes_full_context"]), "keys and values"),
        ("read a token", size(memory["decode_bytes_per_token"]), "weights that decoding one token reads"),
        ("backend", backend["name"], backend["reason"]),
    ]


def kv_setting(config: ModelConfig, settings: Settings) -> Setting[str]:
    """How keys and values are kept, and who chose it."""
    if settings.kv.value is not None:
        return Setting(settings.kv.value, settings.kv.origin)
    return Setting(config.kv, "config.json") if config.kv else Setting("bf16", "default")


def kv_bytes(config: ModelConfig, backend: str, kv: str) -> int:
    """Of one token over all layers. The CPU rounds to INT8 and keeps float32; the GPU adds a scale to each head."""
    heads = 2 * config.num_hidden_layers * config.num_key_value_heads
    if backend == "cuda" and kv == "int8":
        return heads * (config.head_dim + 4)
    return heads * config.head_dim * _BYTES[backend]


def weight_bytes(parameter: Parameter, backend: str) -> int:
    """Memory of one array: the CPU has INT8 weights dequantised, the GPU as they are, with scales in float32."""
    count = math.prod(parameter.shape)
    if backend == "cpu":
        return 0 if parameter.is_scale else 4 * count
    return count * (1 if parameter.int8 else 4 if parameter.is_scale else _BYTES[backend])


def int8_parts(model: ModelDefinition) -> dict[str, list[str]]:
    """{format: the modules that have it}, layers counted together; "bf16" for matrices that are not INT8."""
    found: dict[str, list[str]] = {}
    for parameter in model.parameters:
        if len(parameter.shape) == 2 and not parameter.is_scale:
            kind = parameter.name.removesuffix(".weight").rpartition(".")[2]
            modules = found.setdefault(str(parameter.int8 or "not quantised"), [])
            if kind not in modules:
                modules.append(kind)
    return found
