"""`tileinfer show`: one model's shape, its memory need, its defaults and where each came from."""

from typing import TYPE_CHECKING, Any

from tileinfer_cli import opening, render
from tileinfer_cli.commandline import Cli
from tileinfer_cli.options import JsonFlag, ModelArgument

if TYPE_CHECKING:
    from tileinfer_core.config import ModelConfig

NAME = "show"
SHORT = "a model's shape, memory need and defaults"
EXAMPLES = """
Examples:
  tileinfer show demo
  tileinfer show qwen3:0.6b --json
"""
_CACHE_BYTES = {"cpu": 4, "cuda": 2}  # keys and values are float32 on the CPU, 16 bits wide on the GPU


def run(cli: Cli, model: ModelArgument, *, as_json: JsonFlag = False) -> None:
    """Show a model's shape, the memory it needs here, and each default with its origin."""
    from tileinfer_core.backends.select import choose_backend
    from tileinfer_core.config import ModelConfig
    from tileinfer_core.generation_config import GenerationConfig
    from tileinfer_core.sampling import resolve_sampling
    from tileinfer_core.weights import WeightFiles

    settings = opening.load_settings()
    folder = opening.find_model(cli, settings, model)
    config = ModelConfig.load(folder.path)
    files = WeightFiles.open(folder.path)
    backend = choose_backend(settings.backend.value)
    per_token = 2 * config.num_hidden_layers * config.kv_size * _CACHE_BYTES[backend.name]
    sampling = resolve_sampling({}, settings, GenerationConfig.load(folder.path))
    tensors = [files.info(name) for name in files.names]
    document: dict[str, Any] = {
        "model": folder.name,
        "path": str(folder.path),
        "kind": folder.kind,
        "revision": folder.revision,
        "config": opening.plain(config),
        "dtypes": sorted({tensor.dtype for tensor in tensors}),
        "backend": opening.plain(backend),
        "memory": {
            "weights_bytes": sum(tensor.bytes for tensor in tensors),
            "kv_bytes_per_token": per_token,
            "kv_bytes_full_context": per_token * config.max_context,
        },
        "sampling": {name: opening.plain(setting) for name, setting in sampling.items() if name != "seed"},
    }
    if as_json:
        render.print_json(cli.streams.out, document)
    else:
        _print(cli, config, document)


def _print(cli: Cli, config: "ModelConfig", document: dict[str, Any]) -> None:
    out, memory = cli.streams.out, document["memory"]
    heads = f"{config.num_attention_heads} of {config.head_dim}, {config.num_key_value_heads} for keys and values"
    size = render.bytes_text
    render.print_heading(out, document["model"])
    where: list[tuple[str, str, str | None]] = [("folder", document["path"], document["kind"])]
    if document["revision"]:
        where.append(("revision", document["revision"], None))
    render.print_pairs(out, where, indent="  ")
    render.print_heading(out, "\nShape")
    shape = {
        "type": config.model_type,
        "layers": f"{config.num_hidden_layers:,}",
        "hidden": f"{config.hidden_size:,}, feed-forward {config.intermediate_size:,}",
        "heads": heads,
        "vocabulary": f"{config.vocab_size:,}" + (", embedding tied" if config.tie_word_embeddings else ""),
        "context": f"{config.max_context:,} tokens",
    }
    render.print_pairs(out, [(name, value, None) for name, value in shape.items()], indent="  ")
    render.print_heading(out, "\nMemory")
    needs = [
        ("weights", size(memory["weights_bytes"]), "on disk, " + ", ".join(document["dtypes"])),
        ("each token", size(memory["kv_bytes_per_token"]), "keys and values"),
        ("full context", size(memory["kv_bytes_full_context"]), "keys and values"),
        ("backend", document["backend"]["name"], document["backend"]["reason"]),
    ]
    render.print_pairs(out, needs, indent="  ")
    render.print_heading(out, "\nDefaults")
    defaults = [(name, f"{setting['value']:g}", setting["origin"]) for name, setting in document["sampling"].items()]
    render.print_pairs(out, defaults, indent="  ")
