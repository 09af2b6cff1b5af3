"""A step as a picture: SVG, a row for each layer, each launch a block as wide as it takes.

    solid    the launch's bound: its bytes at the copy speed, or its operations
    pale     what it takes beyond

Without times the width is bytes, and all of it is solid. Colours go by kind of launch (kernel, grid, bytes); the legend
has their numbers, a block's tooltip its own. What comes before the first layer and after the last has rows of its own,
cut where they are longer than the longest layer.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tileinfer_core.kernel_census import Census, CensusRow

    Kind = tuple[str, tuple[int, ...], int]

WIDTH, LEFT, RIGHT, ROW, GAP, TOP = 1200, 150, 20, 13, 3, 84
COLOURS = (
    "#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1", "#76b7b2", "#d4a017", "#9c755f", "#ff9da7", "#7f7f7f",
    "#1f5f8b", "#8c9c2c", "#a23b72", "#2f4b26",
)  # fmt: skip
PALE = 0.35
SMALLEST = 0.5  # pixels
TICKS = 6


class _Line(NamedTuple):
    """A row of the picture: what stands before it, and its launches with their sizes."""

    name: str
    blocks: tuple[tuple[CensusRow, float], ...]

    @property
    def size(self) -> float:
        return sum(size for _, size in self.blocks)


def timeline(census: Census) -> str:
    """The whole document."""
    timed = census.total_us is not None
    colours = {kind: COLOURS[i % len(COLOURS)] for i, kind in enumerate(dict.fromkeys(map(_kind, census.kernels)))}
    lines = _lines(census.kernels, timed)
    scale = max((line.size for line in lines if line.name.startswith("layer")), default=0.0)
    scale = scale or max(line.size for line in lines) or 1.0
    rows = [piece for line in lines for piece in _cut(line, scale)]
    body = [*_axis(scale, len(rows), timed)]
    for number, row in enumerate(rows):
        body += _row(row, TOP + number * (ROW + GAP), scale, colours, timed)
    bottom = TOP + len(rows) * (ROW + GAP) + 24
    legend = [*_legend(census, colours, bottom, timed)]
    height = bottom + 18 * (len(colours) + 1)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="12">\n<rect width="100%" height="100%" fill="#ffffff"/>\n'
    )
    return head + "\n".join([*_title(census, timed), *body, *legend]) + "\n</svg>\n"


def _kind(row: CensusRow) -> Kind:
    return row.kernel, row.grid, row.bytes


def _size(row: CensusRow, timed: bool) -> float:
    return max(row.time_us or 0.0, 0.0) if timed else float(row.bytes)


def layers(kinds: Sequence[object]) -> list[tuple[int, int]]:
    """(first, last + 1) of each repetition of the pattern that a step repeats; [] where nothing is repeated.

    A layer has some kind of launch once: the period is the distance of two of the rarest that occur twice or more.
    """
    places: dict[object, list[int]] = {}
    for index, kind in enumerate(kinds):
        places.setdefault(kind, []).append(index)
    repeated = [found for found in places.values() if len(found) > 1]
    if not repeated:
        return []
    rarest = min(repeated, key=len)
    period, start = rarest[1] - rarest[0], min(found[0] for found in repeated)
    pattern = list(kinds[start : start + period])
    found = []
    while list(kinds[start : start + period]) == pattern:
        found.append((start, start + period))
        start += period
    return found


def _lines(kernels: Sequence[CensusRow], timed: bool) -> list[_Line]:
    found = layers([_kind(row) for row in kernels])
    if not found:
        return [_line("", kernels, timed)]
    before = [_line("before", kernels[: found[0][0]], timed)]
    between = [_line(f"layer {number}", kernels[first:stop], timed) for number, (first, stop) in enumerate(found)]
    after = [_line("after", kernels[found[-1][1] :], timed)]
    return [line for line in (*before, *between, *after) if line.blocks]


def _line(name: str, rows: Sequence[CensusRow], timed: bool) -> _Line:
    return _Line(name, tuple((row, _size(row, timed)) for row in rows))


class _Piece(NamedTuple):
    """Part of a block within a row: where it begins and ends, and up to where it is solid."""

    row: CensusRow
    start: float
    stop: float
    solid: float


class _Row(NamedTuple):
    text: str
    pieces: list[_Piece]


def _cut(line: _Line, scale: float) -> list[_Row]:
    """Rows of at most `scale`, the blocks cut at their ends."""
    rows, at = [_Row(line.name, [])], 0.0
    for row, size in line.blocks:
        bound = size if row.bound_us is None else min(row.bound_us, size)
        start, stop = at, at + size
        while True:  # once for a launch that is hidden behind the one before
            first = int((start + 1e-9 * scale) // scale) * scale
            if len(rows) <= round(first / scale):
                rows.append(_Row("", []))
            end = min(stop, first + scale)
            solid = min(max(at + bound, start), end)
            rows[-1].pieces.append(_Piece(row, start - first, end - first, solid - first))
            start = end
            if stop - start <= 1e-9 * scale:
                break
        at = stop
    return rows


def _title(census: Census, timed: bool) -> Iterator[str]:
    tokens = f"{census.tokens:,} token{'s' * (census.tokens != 1)}"
    what = f"{census.model}: {census.step} of {tokens}, context {census.context:,}"
    yield f'<text x="{LEFT}" y="24" font-size="16">{escape(what)}</text>'
    if timed:
        loop = f", {census.loop_us:,.0f} µs in a loop" if census.loop_us else ""
        sums = f"{census.total_us:,.0f} µs, sum {census.sum_us:,.0f} µs{loop}"
        how = "solid: the launch's bound, pale: what it takes beyond"
        second = f"{census.gpu}, {len(census.kernels)} launches, {sums}; {how}"
    else:
        moved = sum(row.bytes for row in census.kernels)
        second = (
            f"{census.arch}, {len(census.kernels)} launches, not timed: width is bytes, {moved / 1e6:,.0f} MB in all"
        )
    yield f'<text x="{LEFT}" y="44" fill="#555555">{escape(second)}</text>'


def _x(at: float, scale: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * at / scale


def _axis(scale: float, rows: int, timed: bool) -> Iterator[str]:
    """Marks at round numbers."""
    unit = 1.0 if timed else 1e6
    step = _round_step(scale / unit / TICKS)
    bottom = TOP + rows * (ROW + GAP)
    count = int(scale / unit / step + 1e-9)
    for mark in range(count + 1):
        x = _x(mark * step * unit, scale)
        text = f"{mark * step:g}" + (f" {'µs' if timed else 'MB'}" if mark in (0, count) else "")
        yield f'<line x1="{x:.1f}" y1="{TOP - 6}" x2="{x:.1f}" y2="{bottom}" stroke="#dddddd"/>'
        yield f'<text x="{x:.1f}" y="{TOP - 10}" text-anchor="middle" fill="#555555" font-size="10">{text}</text>'


def _round_step(least: float) -> float:
    """1, 2 or 5 times a power of ten."""
    power = 10.0 ** (len(f"{int(max(least, 1))}") - 1)
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least)


def _row(row: _Row, y: int, scale: float, colours: dict[Kind, str], timed: bool) -> Iterator[str]:
    size = sum(piece.stop - piece.start for piece in row.pieces)
    number = f"{size:,.1f} µs" if timed else f"{size / 1e6:,.1f} MB"
    text = f"{row.text}  {number}" if row.text else number
    yield f'<text x="{LEFT - 8}" y="{y + 10}" text-anchor="end" fill="#555555" font-size="10">{escape(text)}</text>'
    for piece in row.pieces:
        colour, tip = colours[_kind(piece.row)], escape(_tip(piece.row))
        x, solid, stop = _x(piece.start, scale), _x(piece.solid, scale), _x(piece.stop, scale)
        yield f"<g><title>{tip}</title>"
        yield _rect(x, y, max(stop - x, SMALLEST), colour, PALE)
        yield _rect(x, y, solid - x, colour, 1.0)
        yield f'<line x1="{x:.2f}" y1="{y}" x2="{x:.2f}" y2="{y + ROW}" stroke="#ffffff" stroke-width="0.6"/></g>'


def _rect(x: float, y: int, width: float, colour: str, opacity: float) -> str:
    return f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{ROW}" fill="{colour}" fill-opacity="{opacity:g}"/>'


def _tip(row: CensusRow) -> str:
    parts = [f"{row.index} {row.kernel}", f"grid {'x'.join(map(str, row.grid))}", f"{row.bytes / 1e6:,.2f} MB"]
    if row.time_us is not None:
        parts.append(f"{row.time_us:.2f} µs")
    if row.share is not None:
        parts.append(f"{100 * row.share:.0f} % of the bound")
    parts.append(f"{row.registers} registers, {row.spills} spills")
    return "\n".join([*parts, *([row.config] if row.config else [])])


def _legend(census: Census, colours: dict[Kind, str], top: int, timed: bool) -> Iterator[str]:
    whole = sum(_size(row, timed) for row in census.kernels) or 1.0
    for line, (kind, colour) in enumerate(colours.items()):
        own = [row for row in census.kernels if _kind(row) == kind]
        y = top + 18 * line
        yield f'<rect x="{LEFT}" y="{y}" width="12" height="12" fill="{colour}"/>'
        yield f'<text x="{LEFT + 18}" y="{y + 11}">{escape(_legend_text(own, whole, timed))}</text>'


def _legend_text(own: Sequence[CensusRow], whole: float, timed: bool) -> str:
    first, size = own[0], sum(_size(row, timed) for row in own)
    grid = "x".join(map(str, first.grid))
    text = f"{first.kernel}, grid {grid}, {first.bytes / 1e6:,.2f} MB: {len(own)} launch{'es' * (len(own) != 1)}"
    if not timed:
        return f"{text}, {size / 1e6:,.1f} MB, {100 * size / whole:.1f} %"
    bound = sum(row.bound_us or 0.0 for row in own)
    return (
        f"{text} of {size / len(own):,.2f} µs, bound {bound / len(own):,.2f} µs; {100 * size / whole:.1f} % of the step"
    )
