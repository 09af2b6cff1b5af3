"""The head of the table of `tileinfer bench`."""

from __future__ import annotations

import io

import pytest

from tileinfer_cli.bench_table import print_report
from tileinfer_cli.terminal import TextStream
from tileinfer_core.bench import BenchOptions

DOCUMENT = {
    "model": "demo-int8", "device": "a GPU", "backend": "cuda", "load_s": 1.0, "compile_s": 0.0, "prefill": [],
    "decode": [], "first_token_s": {"median": 0.002}, "ceilings": {"copy": 4e12, "read": 4.5e12},
    "weight_bytes": 7_730_000_000,
}  # fmt: skip


@pytest.mark.parametrize(
    ("copies", "says"),
    [
        (0, "\nweights 7.73 GB\n"),
        (13_890_000_000, "\nweights 7.73 GB, and 13.89 GB of them in half precision, for prompts\n"),
    ],
)
def test_memory_of_the_weights_and_their_copies(copies, says):
    text = io.TextIOWrapper(io.BytesIO(), "utf-8")
    out = TextStream(text, {}, name="stdout", required=True)
    print_report(out, {**DOCUMENT, "copy_bytes": copies}, BenchOptions(), markdown=False)
    assert says.encode() in text.buffer.getvalue()
