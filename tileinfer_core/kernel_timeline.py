"""A step as a picture: SVG, each kernel a block as wide as it takes, one row of blocks a layer or so.

Without times the width is bytes. Colours go by kernel, names and numbers are in the blocks' tooltips and the legend.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tileinfer_core.kernel_census import Census, CensusRow

WIDTH, LEFT, RIGHT, ROW, GAP, TOP = 1200, 70, 20, 16, 5, 64
ROWS = 24
COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1", "#76b7b2", "#edc948", "#9c755f", "#ff9da7", "#bab0ac")
SMALLEST = 0.4  # pixels


def timeline(census: Census) -> str:
    """The whole document."""
    timed = census.total_us is not None
    sizes = [_size(row, timed) for row in census.kernels]
    whole = sum(sizes) or 1.0
    colours = {
        name: COLOURS[i % len(COLOURS)] for i, name in enumerate(dict.fromkeys(k.kernel for k in census.kernels))
    }
    body = [*_blocks(census, sizes, whole, colours, timed)]
    bottom = TOP + ROWS * (ROW + GAP) + 10
    legend = [*_legend(census, sizes, colours, bottom, timed=timed)]
    height = bottom + 18 * (len(colours) + 1)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="12">\n<rect width="100%" height="100%" fill="#ffffff"/>\n'
    )
    return head + "\n".join([*_title(census, timed), *body, *legend]) + "\n</svg>\n"


def _size(row: CensusRow, timed: bool) -> float:
    return max(row.time_us or 0.0, 0.0) if timed else float(row.bytes)


def _title(census: Census, timed: bool) -> Iterator[str]:
    tokens = f"{census.tokens:,} token{'s' * (census.tokens != 1)}"
    what = f"{census.model}: {census.step} of {tokens}, context {census.context:,}"
    yield f'<text x="{LEFT}" y="24" font-size="16">{escape(what)}</text>'
    if timed:
        loop = f", {census.loop_us:,.0f} µs in a loop" if census.loop_us else ""
        second = (
            f"{census.gpu}, {len(census.kernels)} kernels, {census.total_us:,.0f} µs, sum {census.sum_us:,.0f} µs{loop}"
        )
    else:
        moved = sum(row.bytes for row in census.kernels)
        second = (
            f"{census.arch}, {len(census.kernels)} kernels, not timed: width is bytes, {moved / 1e6:,.0f} MB in all"
        )
    yield f'<text x="{LEFT}" y="44" fill="#555555">{escape(second)}</text>'


def _blocks(census: Census, sizes: list[float], whole: float, colours: dict[str, str], timed: bool) -> Iterator[str]:
    """Blocks one after the other, cut at the end of a row and going on in the next."""
    span, at = whole / ROWS, 0.0
    for line in range(ROWS):
        y = TOP + line * (ROW + GAP)
        label = f"{line * span:,.0f} µs" if timed else f"{line * span / 1e6:,.0f} MB"
        yield f'<text x="{LEFT - 6}" y="{y + 12}" text-anchor="end" fill="#555555" font-size="10">{label}</text>'
    for row, size in zip(census.kernels, sizes, strict=True):
        tip = escape(_tip(row))
        for line, start, stop in _pieces(at, at + size, span):
            x = LEFT + (WIDTH - LEFT - RIGHT) * start / span
            width = max((WIDTH - LEFT - RIGHT) * (stop - start) / span, SMALLEST)
            y = TOP + line * (ROW + GAP)
            yield (
                f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{ROW}" fill="{colours[row.kernel]}" '
                f'stroke="#ffffff" stroke-width="0.3"><title>{tip}</title></rect>'
            )
        at += size


def _pieces(start: float, stop: float, span: float) -> Iterator[tuple[int, float, float]]:
    """(row, start, stop within it) of an interval."""
    line = min(int(start // span), ROWS - 1)
    while line < ROWS:
        first, last = line * span, (line + 1) * span
        end = stop if line == ROWS - 1 else min(stop, last)
        yield line, max(start, first) - first, end - first
        if stop <= last or line == ROWS - 1:
            return
        line += 1


def _tip(row: CensusRow) -> str:
    parts = [f"{row.index} {row.kernel}", f"grid {'x'.join(map(str, row.grid))}", f"{row.bytes / 1e6:,.2f} MB"]
    if row.time_us is not None:
        parts.append(f"{row.time_us:.2f} µs")
    if row.share is not None:
        parts.append(f"{100 * row.share:.0f} % of the bound")
    parts.append(f"{row.registers} registers, {row.spills} spills")
    return "\n".join([*parts, *([row.config] if row.config else [])])


def _legend(census: Census, sizes: list[float], colours: dict[str, str], top: int, *, timed: bool) -> Iterator[str]:
    for line, (name, colour) in enumerate(colours.items()):
        own = [size for row, size in zip(census.kernels, sizes, strict=True) if row.kernel == name]
        unit = f"{sum(own):,.1f} µs" if timed else f"{sum(own) / 1e6:,.1f} MB"
        text = f"{name}: {len(own)} launches, {unit}, {100 * sum(own) / (sum(sizes) or 1.0):.1f} %"
        y = top + 18 * line
        yield f'<rect x="{LEFT}" y="{y}" width="12" height="12" fill="{colour}"/>'
        yield f'<text x="{LEFT + 18}" y="{y + 11}">{escape(text)}</text>'
