"""`tileinfer show`: one model's shape, its memory need, its defaults and where each came from."""

from typing import Any

from tileinfer_cli import opening, render
from tileinfer_cli.commandline import Cli
from tileinfer_cli.describe import describe, memory_rows
from tileinfer_cli.options import JsonFlag, ModelArgument
from tileinfer_cli.receipt_table import receipt_pairs

NAME = "show"
SHORT = "a model's shape, memory need and defaults"
EXAMPLES = """
Examples:
  tileinfer show demo
  tileinfer show qwen3:0.6b --json
"""


def run(cli: Cli, model: ModelArgument, *, as_json: JsonFlag = False) -> None:
    """Show a model's shape, the memory it needs here, and each default with its origin."""
    settings = opening.load_settings()
    document = describe(opening.find_model(cli, settings, model), settings)
    if as_json:
        render.print_json(cli.streams.out, document)
    else:
        _print(cli, document)


def _print(cli: Cli, document: dict[str, Any]) -> None:
    out, config = cli.streams.out, document["config"]
    heads = (
        f"{config['num_attention_heads']} of {config['head_dim']}, {config['num_key_value_heads']} for keys and values"
    )
    render.print_heading(out, document["model"])
    where: list[tuple[str, str, str | None]] = [("folder", document["path"], document["kind"])]
    if document["revision"]:
        where.append(("revision", document["revision"], None))
    render.print_pairs(out, where, indent="  ")
    render.print_heading(out, "\nShape")
    shape = {
        "type": config["model_type"],
        "layers": f"{config['num_hidden_layers']:,}",
        "hidden": f"{config['hidden_size']:,}, feed-forward {config['intermediate_size']:,}",
        "heads": heads,
        "vocabulary": f"{config['vocab_size']:,}" + (", embedding tied" if config["tie_word_embeddings"] else ""),
        "context": f"{document['context']:,} tokens",
    }
    render.print_pairs(out, [(name, value, None) for name, value in shape.items()], indent="  ")
    render.print_heading(out, "\nMemory")
    render.print_pairs(out, memory_rows(document), indent="  ")
    if len(document["int8"]) > 1 or "not quantised" not in document["int8"]:
        _print_int8(cli, document)
    render.print_heading(out, "\nDefaults")
    defaults = [(name, f"{setting['value']:g}", setting["origin"]) for name, setting in document["sampling"].items()]
    render.print_pairs(out, defaults, indent="  ")


def _print_int8(cli: Cli, document: dict[str, Any]) -> None:
    """Which modules are INT8, and what the receipt says of the loss."""
    out = cli.streams.out
    render.print_heading(out, "\nINT8")
    pairs = [(name, ", ".join(modules)) for name, modules in document["int8"].items()]
    quantization = document["config"]["quantization"]
    if quantization and quantization["quantised_activations"]:
        pairs.append(("activations", "8 bits for each token by config.json; computed more exactly here"))
    if document["receipt"]:
        pairs += receipt_pairs(document["receipt"])
    render.print_pairs(out, [(name, value, None) for name, value in pairs], indent="  ")
