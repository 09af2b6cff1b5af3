"""A census as a table: one line for each kind of launch, or for each launch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tileinfer_cli import opening, render

if TYPE_CHECKING:
    from tileinfer_cli.terminal import TextStream
    from tileinfer_core.kernel_census import Census

_TIMES = ("TIME", "ALONE", "GAP", "BOUND", "GB/S", "SHARE")
_WORDS = ("KERNEL", "GRID", "CONFIGURATION")


def print_census(out: TextStream, census: Census, *, every: bool) -> None:
    from tileinfer_core.kernel_census import by_kind

    timed = census.total_us is not None
    tokens = "1 token" if census.tokens == 1 else f"{census.tokens:,} tokens"
    where = f"{census.arch}, {census.gpu}" if census.gpu else f"{census.arch}, not timed"
    render.print_heading(out, f"{census.model}: {census.step} of {tokens}, context {census.context:,}; {where}")
    rows: list[dict[str, Any]] = [opening.plain(row) for row in census.kernels] if every else by_kind(census)
    first = "#" if every else "LAUNCHES"
    header = [
        first,
        "KERNEL",
        "GRID",
        *(_TIMES if timed else ()),
        "MB",
        "REGISTERS",
        "SHARED",
        "SPILLS",
        "CONFIGURATION",
    ]
    table = [_row(row, row["index"] if every else row["launches"], timed) for row in rows]
    render.print_table(out, header, table, right=[i for i, name in enumerate(header) if name not in _WORDS])
    out.write(f"{len(census.kernels)} launches, {sum(row.bytes for row in census.kernels) / 1e6:,.1f} MB")
    if census.total_us is not None and census.sum_us is not None and census.loop_us is not None:
        off = 100 * (census.sum_us / census.total_us - 1)
        out.write(
            f"; step {census.total_us:,.1f} µs, sum of the launches {census.sum_us:,.1f} µs ({off:+.1f} %), "
            f"{census.loop_us:,.1f} µs a step in a loop; copy {(census.copy_bytes_per_s or 0) / 1e9:,.0f} GB/s"
        )
    out.write("\n\n")


def _row(row: dict[str, Any], number: int, timed: bool) -> list[str]:
    times = [_number(row[name], 2) for name in ("time_us", "alone_us", "gap_us", "bound_us")] if timed else []
    rates = [_number(row["gb_s"], 0), "" if row["share"] is None else f"{100 * row['share']:.0f} %"] if timed else []
    grid = "x".join(map(str, row["grid"]))
    needs = [str(row[name]) for name in ("registers", "shared_bytes", "spills")]
    return [
        str(number),
        row["kernel"],
        grid,
        *times,
        *rates,
        f"{row['bytes'] / 1e6:,.3f}",
        *needs,
        row["config"] or "-",
    ]


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:,.{digits}f}"
