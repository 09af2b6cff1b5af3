"""A probe's result as a table: times where there are any, then what the compiler made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tileinfer_cli import render

if TYPE_CHECKING:
    from tileinfer_cli.terminal import TextStream
    from tileinfer_core.kernel_probe import ProbeResult

_TIMES = ("MIN", "MEDIAN", "MEAN", "LAUNCH", "BITS")
_CODE = ("IR", "CODE", "REGISTERS", "SHARED", "SPILLS", "THREADS", "PARAMETERS", "KERNELS", "SIZE", "TENSOR CORES")
_WORDS = ("VARIANT", "BITS", "IR", "CODE", "TENSOR CORES")


def print_probe(out: TextStream, result: ProbeResult) -> None:
    """MIN … MEAN and LAUNCH are microseconds; variants with one letter under CODE are the same instructions."""
    timed = result.gpu is not None
    render.print_heading(out, f"{result.name}: {result.question}")
    out.write(f"{result.arch}, {result.gpu or 'not timed'}\n")
    header = ["VARIANT", *(_TIMES if timed else ()), *_CODE]
    rows = [_row(row, timed) for row in result.as_dict()["variants"]]
    render.print_table(out, header, rows, right=[i for i, name in enumerate(header) if name not in _WORDS])
    out.write("\n")


def _row(row: dict[str, Any], timed: bool) -> list[str]:
    if row["error"]:
        return [row["variant"], *[""] * (len(_TIMES) * timed), f"did not compile: {row['error']}", *[""] * 9]
    return [row["variant"], *(_times(row["times_us"]) if timed else ()), *_code(row)]


def _times(times: dict[str, Any] | None) -> list[str]:
    if times is None:
        return ["", "", "", "", ""]
    if times["error"]:
        return ["", "", "", "", times["error"]]
    bits = {None: "first", True: "equal", False: "differ"}[times["bits"]]
    return [*(f"{times[name]:.2f}" for name in ("least", "median", "mean", "launch")), bits]


def _code(row: dict[str, Any]) -> list[str]:
    spills = row["stack_bytes"] + (row["local_loads"] or 0) + (row["local_stores"] or 0)
    cores = row["tensor_core"]
    counted = "not counted" if cores is None else ", ".join(f"{name} {n}" for name, n in cores.items()) or "-"
    numbers = (row["registers"], row["shared_bytes"], spills, row["threads"], row["parameters"], row["kernels"])
    size = "" if row["instructions"] is None else str(row["instructions"])
    return [row["ir"], row["letter"], *map(str, numbers), size, counted]
