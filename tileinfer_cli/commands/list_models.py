"""`tileinfer list`: the models on this disk."""

from tileinfer_cli import opening, render
from tileinfer_cli.commandline import Cli
from tileinfer_cli.options import JsonFlag

NAME = "list"
SHORT = "the models on disk"
EXAMPLES = """
Examples:
  tileinfer list
  tileinfer list --json | jq -r '.[].name'
"""


def run(cli: Cli, *, as_json: JsonFlag = False) -> None:
    """List the models on disk: TileInfer's own and those of the Hugging Face cache."""
    settings = opening.load_settings()
    models = opening.open_store(settings).list()
    if as_json:
        render.print_json(cli.streams.out, [opening.plain(model) for model in models])
        return
    if not models:
        render.print_note(
            cli.streams.err, f"no models in {settings.models_dir.value}; get one with: tileinfer pull demo"
        )
        return
    rows = [
        [
            model.name,
            render.bytes_text(model.bytes),
            model.quantization or "-",
            "complete" if model.complete else "incomplete",
            model.kind,
            ", ".join(alias for alias in model.aliases if alias != model.name),
        ]
        for model in models
    ]
    render.print_table(cli.streams.out, ["NAME", "SIZE", "QUANTIZATION", "FILES", "PLACE", "ALIASES"], rows, right=[1])
