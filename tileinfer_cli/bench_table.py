"""The figures of `tileinfer bench` as a table, aligned or in Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tileinfer_cli import render

if TYPE_CHECKING:
    from tileinfer_cli.terminal import TextStream
    from tileinfer_core.bench import BenchOptions

HEADER = ["", "tok/s", "spread", "ms a token", "GB a token", "of copy / read"]


def print_report(out: TextStream, document: dict[str, Any], options: BenchOptions, *, markdown: bool) -> None:
    """What was measured with, then a row for each figure."""
    ceilings, first = document["ceilings"], document["first_token_s"]
    rows = [
        [f"prefill {entry['tokens']:,}", f"{entry['tok_s']['median']:,.1f}", _spread(entry["tok_s"]), "", "", ""]
        for entry in document["prefill"]
    ]
    rows += [_decode_row(entry) for entry in document["decode"]]
    runs = options.repetitions
    draw = "greedy" if options.sampling.temperature == 0 else "top-k 20, top-p 0.95"
    copies, weights = document["copy_bytes"], f"weights {document['weight_bytes'] / 1e9:,.2f} GB"
    lines = [
        f"{document['model']} on {document['device']} ({document['backend']})",
        f"{'median of ' * (runs > 1)}{runs} run{'s' * (runs > 1)} of {options.tokens} tokens, {draw}",
        f"memory: copy {ceilings['copy'] / 1e9:,.0f} GB/s, read {ceilings['read'] / 1e9:,.0f} GB/s, in this run",
        f"{weights}, and {copies / 1e9:,.2f} GB of them in half precision, for prompts" if copies else weights,
        f"load {document['load_s']:.2f} s, compile {document['compile_s']:.2f} s",
        f"first token of a 16-token prompt after {first['median'] * 1e3:.1f} ms, everything warm",
    ]
    if not markdown:
        out.write("".join(f"{line}\n" for line in lines) + "\n")
        render.print_table(out, HEADER, rows, right=range(1, 6))
        return
    out.write("".join(f"{line}  \n" for line in lines) + "\n")
    divider = ["---", *["---:"] * 5]
    out.write("".join(f"| {' | '.join(row)} |\n" for row in [HEADER, divider, *rows]))


def _decode_row(entry: dict[str, Any]) -> list[str]:
    share = f"{entry['share_of_copy'] * 100:.1f} % / {entry['share_of_read'] * 100:.1f} %"
    moved = f"{entry['bytes_per_token'] / 1e9:.3f}"
    speed = entry["tok_s"]
    context = f"decode at {entry['context']:,}"
    return [context, f"{speed['median']:,.1f}", _spread(speed), f"{entry['step_s'] * 1e3:.3f}", moved, share]


def _spread(speed: dict[str, Any]) -> str:
    return f"{speed['low']:,.1f}–{speed['high']:,.1f}"


def print_ratios(out: TextStream, document: dict[str, Any], *, markdown: bool) -> None:
    """How many times as fast a model is as the one it is measured against."""
    other = document["against"]
    rows = [
        [f"{task} {mine[length]:,}", f"{mine['tok_s']['median'] / theirs['tok_s']['median']:.2f} ×"]
        for task, kind, length in (("prefill", "prefill", "tokens"), ("decode at", "decode", "context"))
        for mine, theirs in zip(document[kind], other[kind], strict=True)
    ]
    header = [f"{document['model']} against {other['model']}", "speed"]
    if not markdown:
        render.print_table(out, header, rows, right=[1])
        return
    out.write("".join(f"| {' | '.join(row)} |\n" for row in [header, ["---", "---:"], *rows]))
