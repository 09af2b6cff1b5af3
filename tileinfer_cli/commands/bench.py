"""`tileinfer bench`: how fast a model runs here, and what share of the memory's speed that is."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tileinfer_cli import opening, render
from tileinfer_cli.commandline import Cli
from tileinfer_cli.options import JsonFlag, ModelFlags, QuietFlag

if TYPE_CHECKING:
    from tileinfer_core.bench import BenchOptions, Loaded

NAME = "bench"
SHORT = "speed of prefill and decoding"
EXAMPLES = """
Examples:
  tileinfer bench -m qwen3:4b
  tileinfer bench --prefill 512 --prefill 4096 --decode-at 512 --decode-at 32000
  tileinfer bench --random-weights config.json --markdown
"""
Lengths = list[int] | None


def run(
    cli: Cli,
    *,
    where: ModelFlags,
    random_weights: Annotated[
        Path | None, typer.Option("--random-weights", metavar="CONFIG", help="A config.json: time its shape on noise.")
    ] = None,
    prefill: Annotated[Lengths, typer.Option("--prefill", metavar="N", help="Prompt length; may be repeated.")] = None,
    decode_at: Annotated[Lengths, typer.Option("--decode-at", metavar="N", help="Context; may be repeated.")] = None,
    tokens: Annotated[int, typer.Option("--tokens", metavar="N", help="Tokens decoded in a run.")] = 64,
    repeat: Annotated[int, typer.Option("--repeat", metavar="N", help="Runs; the median counts.")] = 5,
    greedy: Annotated[bool, typer.Option("--greedy", help="Take the likeliest token, not a top-k 20 draw.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    as_json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Measure prefill, decoding, the first token, and the memory's own speed in the same run."""
    from tileinfer_core.bench import BenchOptions, run_bench
    from tileinfer_core.sampling import SamplingParams

    base = BenchOptions(tokens=tokens, repetitions=repeat)
    options = BenchOptions(
        prefill=tuple(prefill or base.prefill),
        contexts=tuple(decode_at or base.contexts),
        tokens=tokens,
        repetitions=repeat,
        sampling=SamplingParams(temperature=0) if greedy else base.sampling,
    )
    name, loaded = _load(cli, where, random_weights, quiet=quiet)
    with render.Progress(cli.streams.err, quiet=quiet) as progress:
        report = run_bench(loaded.runner, loaded.model, options, load_s=loaded.load_s, on_progress=progress)
    document = {"model": name, "backend_reason": loaded.backend.reason, **opening.plain(report)}
    if as_json:
        render.print_json(cli.streams.out, document)
    else:
        _print(cli, document, options, markdown=markdown)


def _load(cli: Cli, where: ModelFlags, random_weights: Path | None, *, quiet: bool) -> tuple[str, "Loaded"]:
    """The model's name, and the model. Why `auto` took the CPU goes to stderr."""
    from tileinfer_core.bench import load_for_bench

    settings = opening.load_settings()
    options = opening.engine_options(where, settings)
    if random_weights is None:
        folder = opening.find_model(cli, settings, where.model)
        name, path = folder.name, folder.path
    else:
        name, path = f"random weights, {random_weights}", random_weights
    noise = random_weights is not None
    with render.Progress(cli.streams.err, quiet=quiet) as progress:
        loaded = load_for_bench(
            path, backend=options.backend, context=options.context, noise=noise, on_progress=progress
        )
    for warning in loaded.warnings:
        render.print_warning(cli.streams.err, warning)
    if options.backend == "auto" and loaded.backend.name == "cpu" and not quiet:
        render.print_note(cli.streams.err, f"on the CPU: {loaded.backend.reason}")
    return name, loaded


def _print(cli: Cli, document: dict[str, Any], options: "BenchOptions", *, markdown: bool) -> None:
    """A table on stdout; what it was measured with above it."""
    out, ceilings, first = cli.streams.out, document["ceilings"], document["first_token_s"]
    rows = [
        [f"prefill {entry['tokens']:,}", f"{entry['tok_s']['median']:,.1f}", _spread(entry["tok_s"]), "", "", ""]
        for entry in document["prefill"]
    ]
    rows += [_decode_row(entry) for entry in document["decode"]]
    draw = "greedy" if options.sampling.temperature == 0 else "top-k 20, top-p 0.95"
    lines = [
        f"{document['model']} on {document['device']} ({document['backend']})",
        f"median of {options.repetitions} runs of {options.tokens} tokens, {draw}",
        f"memory: copy {ceilings['copy'] / 1e9:,.0f} GB/s, read {ceilings['read'] / 1e9:,.0f} GB/s, in this run",
        f"load {document['load_s']:.2f} s, compile {document['compile_s']:.2f} s",
        f"first token of a 16-token prompt after {first['median'] * 1e3:.1f} ms, everything warm",
    ]
    header = ["", "tok/s", "spread", "ms a token", "GB a token", "of copy / read"]
    if markdown:
        out.write("".join(f"{line}  \n" for line in lines) + "\n")
        divider = ["---", *["---:"] * 5]
        out.write("".join(f"| {' | '.join(row)} |\n" for row in [header, divider, *rows]))
        return
    out.write("".join(f"{line}\n" for line in lines) + "\n")
    render.print_table(out, header, rows, right=range(1, 6))


def _decode_row(entry: dict[str, Any]) -> list[str]:
    share = f"{entry['share_of_copy'] * 100:.1f} % / {entry['share_of_read'] * 100:.1f} %"
    moved = f"{entry['bytes_per_token'] / 1e9:.3f}"
    speed = entry["tok_s"]
    context = f"decode at {entry['context']:,}"
    return [context, f"{speed['median']:,.1f}", _spread(speed), f"{entry['step_s'] * 1e3:.3f}", moved, share]


def _spread(speed: dict[str, Any]) -> str:
    return f"{speed['low']:,.1f}–{speed['high']:,.1f}"
