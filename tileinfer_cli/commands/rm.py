"""`tileinfer rm`: frees the disk space of one model."""

from tileinfer_cli import opening, render
from tileinfer_cli.commandline import Cli
from tileinfer_cli.options import JsonFlag, StoredModelArgument

NAME = "rm"
SHORT = "remove a model"
EXAMPLES = """
Examples:
  tileinfer rm demo
"""


def run(cli: Cli, model: StoredModelArgument, *, as_json: JsonFlag = False) -> None:
    """Remove a model from TileInfer's own store. Folders, .gguf files and the Hugging Face cache are left alone."""
    freed = opening.open_store(opening.load_settings()).remove(model)
    if as_json:
        render.print_json(cli.streams.out, {"model": model, "freed_bytes": freed})
    else:
        what = f"the converted copy of {model}" if model.lower().endswith(".gguf") else model
        render.print_note(cli.streams.err, f"removed {what}: {render.bytes_text(freed)} freed")
