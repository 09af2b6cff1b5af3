"""The tables of shapes and memory in docs/models/, made from the code's own numbers for the shapes of real_shapes.py.

    python -m tests.models.model_tables        writes the tables into the pages

test_model_pages.py fails where a page's table is not the one made here.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from tests.models.real_shapes import REAL
from tileinfer_core.config import ModelConfig
from tileinfer_core.estimates import kv_bytes_per_token, total_bytes, weight_bytes, weight_count
from tileinfer_core.models.define import define_model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tileinfer_core.models.decoder import ModelDefinition

PAGES = Path(__file__).resolve().parents[2] / "docs" / "models"
FAMILIES: dict[str, tuple[str, ...]] = {
    "qwen.md": tuple(name for name in REAL if name.startswith("Qwen")),
    "llama.md": tuple(name for name in REAL if name.startswith(("Llama", "SmolLM2", "Mistral"))),
    "apertus.md": tuple(name for name in REAL if name.startswith("Apertus")),
}
SHORT = 4096


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, rule, *rows)) + "\n"


def definition(name: str) -> ModelDefinition:
    config = ModelConfig.from_dict(REAL[name], name)
    return define_model(config, tied=config.tie_word_embeddings)


def shapes(names: Sequence[str]) -> str:
    head = ["", "layers", "hidden", "feed-forward", "heads", "KV heads", "head", "vocabulary", "weights", "context"]
    rows = []
    for name in names:
        model = definition(name)
        c = model.config
        sizes = (c.num_hidden_layers, c.hidden_size, c.intermediate_size, c.num_attention_heads, c.num_key_value_heads)
        count = f"{weight_count(model) / 1e9:.2f} G" + (", tied" if model.tied else "")
        numbers = [f"{size:,}" for size in (*sizes, c.head_dim, c.vocab_size)]
        rows.append([name, *numbers, count, f"{c.max_context:,}"])
    return table(head, rows)


def memory(names: Sequence[str]) -> str:
    head = ["GB", "weights BF16", "INT8", "KV of 1,000 tokens", f"BF16, {SHORT:,} tokens", f"INT8, {SHORT:,}"]
    head += ["BF16, whole context", "INT8, whole context"]
    rows = []
    for name in names:
        model = definition(name)
        context = model.config.max_context
        kinds = ("bf16", "int8")
        sizes = [weight_bytes(model, kind) for kind in kinds] + [1000 * kv_bytes_per_token(model, "bf16")]
        sizes += [total_bytes(model, kind, length) for length in (SHORT, context) for kind in kinds]
        rows.append([name, *[f"{size / 1e9:.2f}" for size in sizes]])
    return table(head, rows)


MADE = {"shapes": shapes, "memory": memory}


def marked(marker: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- table: {marker} -->\n)(.*?)(?=\n(?!\|)|\Z)", re.DOTALL)


def with_tables(page: str, text: str) -> str:
    """The page's text with its tables made anew."""
    for marker, make in MADE.items():
        made = make(FAMILIES[page]).rstrip("\n")
        text, count = marked(marker).subn(lambda found, made=made: found[1] + made, text)  # type: ignore[misc]
        assert count == 1, f"{page} has {count} tables of {marker}"
    return text


if __name__ == "__main__":
    for name in FAMILIES:
        path = PAGES / name
        path.write_text(with_tables(name, path.read_text("utf-8")), "utf-8")
