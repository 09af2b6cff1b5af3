"""How things look: messages, aligned columns, JSON, progress. The only file that imports Rich, and only when a column
of wide characters needs it.

Nothing is parsed as markup, highlighted or turned into emoji: a name such as `a[q8]` or `:smile:` appears as it is.
Output is append-only except for one progress line on a terminal, which is gone before anything else is written.
"""

from __future__ import annotations

import json
import math
import re
import textwrap
import time
from typing import TYPE_CHECKING, Any, Literal, Self

from tileinfer_cli.terminal import neutralise
from tileinfer_core import units

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import TracebackType

    from tileinfer_cli.terminal import TextStream
    from tileinfer_core.findings import Finding
    from tileinfer_core.progress import ProgressEvent

BOLD, DIM, RED, YELLOW, GREEN = "1", "2", "31", "33", "32"
bytes_text = units.bytes_text
_GAP = "   "
_NARROWEST = 24  # columns that a text needs to be read in
_STATUS_SGR = {"ok": GREEN, "info": DIM, "warning": YELLOW, "problem": RED}
_SHOW_AFTER_S = 0.15  # shorter work leaves no trace on the terminal
_REDRAW_AFTER_S = 0.1
_LONGEST = 1200  # characters of an error's message
_BAR = 24  # cells


def print_error(err: TextStream, message: str, hint: str | None) -> None:
    err.styled("error:", f"{BOLD};{RED}")
    err.write(f" {_folded(err, _shortened(message), used=7)}\n")
    if hint:
        err.write(f"  {_folded(err, _shortened(hint), used=2)}\n")


def print_warning(err: TextStream, message: str) -> None:
    err.end_line()
    err.styled("warning:", YELLOW)
    err.write(f" {_folded(err, _shortened(message), used=9)}\n")


def print_note(err: TextStream, message: str) -> None:
    err.end_line()
    err.styled(_folded(err, message, used=0), DIM)
    err.write("\n")


def _shortened(text: str) -> str:
    """A damaged file may hold a name of a million characters, which its error repeats."""
    if len(text) <= _LONGEST:
        return text
    kept = _LONGEST // 2
    return f"{text[:kept]} [… {len(text) - 2 * kept:,} characters …] {text[-kept:]}"


def _folded(stream: TextStream, text: str, *, used: int) -> str:
    """The text, on a terminal broken between words; later lines are indented by two. Words stay whole, for copying."""
    text = neutralise(text)
    if not stream.look.terminal:
        return text
    return "\n  ".join(_wrapped(" " * used + text, max(stream.columns, 20)))[used:]


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False, replace_whitespace=False)


def _hanging(stream: TextStream, text: str, start: int) -> str:
    """The last text of a line, from column `start` on: on a terminal folded, later lines begin in the same column.

    Where there is no room for a column, all of it goes to the next line.
    """
    room = stream.columns - start if stream.look.terminal else 0
    if not stream.look.terminal or _cells(text) <= room:
        return text
    if room >= _NARROWEST:
        return ("\n" + " " * start).join(_wrapped(text, room))
    return "".join(f"\n    {line}" for line in _wrapped(text, max(stream.columns - 4, _NARROWEST)))


def print_json(out: TextStream, document: Any) -> None:
    """One document. JSON escapes C0 itself; DEL, C1 and lone surrogates are escaped here: it may reach a terminal.
    It has no infinity and no NaN: they become null."""
    text = json.dumps(_finite(document), ensure_ascii=False, indent=2, allow_nan=False)
    out.write(re.sub(r"[\x7f-\x9f\ud800-\udfff]", lambda match: f"\\u{ord(match[0]):04x}", text) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


def seconds_text(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _cells(text: str) -> int:
    """Width on a terminal: two columns for each CJK character and emoji."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def print_table(
    out: TextStream, header: Sequence[str], rows: Sequence[Sequence[str]], *, right: Iterable[int] = ()
) -> None:
    """Aligned columns. The header is bold on a terminal. Nothing is cut: on a terminal the last column is folded where
    it is text, and what is too long still is left to the terminal."""
    rows = [[neutralise(cell) for cell in row] for row in rows]
    widths = [max(_cells(row[i]) for row in [header, *rows]) for i in range(len(header))]
    right, last = set(right), len(header) - 1
    start = sum(widths[:-1]) + last * len(_GAP)

    def line(row: Sequence[str]) -> str:
        padded = [
            " " * (width - _cells(cell)) + cell if i in right else cell + " " * (width - _cells(cell))
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        if last not in right:
            padded[last] = _hanging(out, row[last], start)
        return re.sub(r" +(?=\n|$)", "", _GAP.join(padded))

    out.styled(line(header), BOLD)
    out.write("\n")
    for row in rows:
        out.write(line(row) + "\n")


def print_pairs(out: TextStream, pairs: Sequence[tuple[str, str, str | None]], *, indent: str = "") -> None:
    """`name  value  origin` with names and values aligned; the origin is dim."""
    name_width = max((_cells(name) for name, _, _ in pairs), default=0)
    with_origin = [_cells(value) for _, value, origin in pairs if origin]
    value_width = max(with_origin, default=0)
    start = len(indent) + name_width + len(_GAP)
    for name, value, origin in pairs:
        shown = neutralise(value) if origin else _hanging(out, neutralise(value), start)
        out.write(f"{indent}{name}{' ' * (name_width - _cells(name))}{_GAP}{shown}")
        if origin:
            out.write(" " * (value_width - _cells(value)) + _GAP)
            out.styled(_hanging(out, neutralise(origin), start + value_width + len(_GAP)), DIM)
        out.write("\n")


def print_heading(out: TextStream, text: str) -> None:
    out.styled(neutralise(text), BOLD)
    out.write("\n")


def print_findings(out: TextStream, findings: Sequence[Finding]) -> None:
    """One line for each finding, its cure on the next."""
    status_width = max((len(finding.status) for finding in findings), default=0)
    name_width = max((_cells(finding.name) for finding in findings), default=0)
    for finding in findings:
        out.styled(finding.status.ljust(status_width), _STATUS_SGR[finding.status])
        name = neutralise(finding.name) + " " * (name_width - _cells(finding.name))
        start = status_width + name_width + 2 * len(_GAP)
        out.write(f"{_GAP}{name}{_GAP}{_hanging(out, neutralise(_shortened(finding.detail)), start)}\n")
        if finding.cure:
            out.write(f"{' ' * (status_width + name_width)}{_GAP * 2}fix: {neutralise(finding.cure)}\n")


class Progress:
    """Shows ProgressEvents on stderr: one moving line on a terminal, plain lines elsewhere.

    `lasting` work (a download) keeps a line for each finished task, and has plain lines where nothing can move.
    Other work (loading, reading the prompt) leaves no trace, and is silent where nothing can move.

    The line is drawn by the events themselves, and the cursor stays visible: neither a thread nor a hidden cursor may
    outlive Ctrl-C (Rich's moving line left both, where Ctrl-C came while that line went away).
    """

    def __init__(self, err: TextStream, *, lasting: bool = False, quiet: bool = False) -> None:
        self._err = err
        self._lasting = lasting
        self._quiet = quiet
        self._started = time.monotonic()
        self._drawn = False
        self._next_draw = 0.0
        self._task: str | None = None
        self._quarter = 0
        self._task_started = 0.0
        self._task_first = 0  # what was done already when the task began: a pull goes on where it stopped

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> Literal[False]:
        self.close()
        return False

    def close(self) -> None:
        """Takes the moving line away. Called before anything else is written; interrupted, it can be called again."""
        if self._drawn:
            self._err.redraw("")
            self._drawn = False
            self._task = None

    def __call__(self, event: ProgressEvent) -> None:
        if self._quiet:
            return
        if self._err.look.motion:
            self._move(event)
        elif self._lasting:
            self._plain(event)

    def _begin(self, event: ProgressEvent) -> bool:
        """Whether the event is the first of its task."""
        if event.task == self._task:
            return False
        self._task, self._task_started, self._task_first = event.task, time.monotonic(), event.done
        self._quarter = -1
        return True

    def _move(self, event: ProgressEvent) -> None:
        now = time.monotonic()
        if not self._drawn and now - self._started < _SHOW_AFTER_S:
            return
        is_new, is_last = self._begin(event), event.done == event.total
        if is_new or is_last or now >= self._next_draw:
            self._drawn = True
            self._err.redraw(self._line(event))
            self._next_draw = now + _REDRAW_AFTER_S
        if self._lasting and is_last:
            self._err.redraw("")
            self._err.write(f"{neutralise(event.task)}{_GAP}{_amount(event)}\n")

    def _line(self, event: ProgressEvent) -> str:
        """Task, bar, amount, rate, time left, as far as there is room: a line that wraps can't be redrawn."""
        task, amount = neutralise(event.task), _amount(event) + self._rate(event)
        parts = [task, _bar(event, colour=self._err.look.colour), amount, self._left(event)]
        widths = [_cells(task), _BAR if event.total else 0, _cells(amount), _cells(parts[3])]
        for dropped in (1, 3, 2):
            if sum(widths) + len(_GAP) * (sum(map(bool, widths)) - 1) < self._err.columns:
                break
            parts[dropped], widths[dropped] = "", 0
        else:
            parts[0] = task[: max(self._err.columns // 2 - 1, 0)]  # a character has two cells at most
        return _GAP.join(filter(None, parts))

    def _plain(self, event: ProgressEvent) -> None:
        """A line when a task starts, at each quarter, and when it ends."""
        self._begin(event)
        quarter = 4 * event.done // event.total if event.total else 0
        if quarter > self._quarter:
            self._quarter = quarter
            percent = f"{_GAP}{100 * event.done // event.total} %" if event.total else ""
            rate = self._rate(event)
            left = _GAP + text if rate and (text := self._left(event)) else ""
            self._err.write(f"{neutralise(event.task)}{_GAP}{_amount(event)}{percent}{rate}{left}\n")

    def _rate(self, event: ProgressEvent) -> str:
        """Bytes a second since the task began; nothing for work that is soon over."""
        speed = self._speed(event)
        return f"{_GAP}{bytes_text(round(speed))}/s" if speed and event.unit == "bytes" else ""

    def _left(self, event: ProgressEvent) -> str:
        """The time that the rest takes at the present speed, once that means something."""
        speed = self._speed(event)
        if not speed or not event.total or event.done >= event.total:
            return ""
        return f"{seconds_text((event.total - event.done) / speed)} left"

    def _speed(self, event: ProgressEvent) -> float | None:
        """Units a second since the task began; None in its first second, and where nothing is done."""
        seconds, done = time.monotonic() - self._task_started, event.done - self._task_first
        return done / seconds if seconds >= 1 and done > 0 else None


def _bar(event: ProgressEvent, *, colour: bool) -> str:
    if not event.total:
        return ""
    full = min(_BAR * event.done // event.total, _BAR)
    rest = _BAR - full
    return "━" * full + (f"\x1b[90m{'━' * rest}\x1b[0m" if colour and rest else " " * rest)


def _amount(event: ProgressEvent) -> str:
    written = bytes_text if event.unit == "bytes" else "{:,}".format
    unit = "" if event.unit == "bytes" else f" {event.unit}"
    total = f" of {written(event.total)}" if event.total and event.done != event.total else ""
    return f"{written(event.done)}{total}{unit}"
