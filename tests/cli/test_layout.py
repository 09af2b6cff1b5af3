"""Columns on terminals of any width, and in pipes."""

from __future__ import annotations

import pytest

from tileinfer_cli.render import print_findings, print_pairs, print_table
from tileinfer_core.findings import Finding

TEXT = "no usable GPU: no NVIDIA driver on this machine (libcuda is not there)"


@pytest.fixture
def terminal(recorded, monkeypatch: pytest.MonkeyPatch):
    def of_width(columns: int):
        monkeypatch.setenv("COLUMNS", str(columns))
        return recorded(tty=True, environ={"TERM": "xterm", "NO_COLOR": "1", "COLUMNS": str(columns)})

    return of_width


def columns_of_words(shown: str) -> set[int]:
    """Where the lines after the first begin."""
    return {len(line) - len(line.lstrip()) for line in shown.splitlines()[1:]}


def show(streams, what: str) -> str:
    if what == "pairs":
        print_pairs(streams.out, [("backend", TEXT, None)], indent="  ")
    elif what == "origins":
        print_pairs(streams.out, [("backend", "cpu", TEXT)], indent="  ")
    elif what == "findings":
        print_findings(streams.out, [Finding("backend", "ok", TEXT)])
    else:
        print_table(streams.out, ["PROBE", "QUESTION"], [["tma", TEXT]])
    return streams.stdout


@pytest.mark.parametrize(("what", "start"), [("pairs", 12), ("origins", 18), ("findings", 15), ("table", 8)])
def test_a_long_text_is_folded_between_words_and_keeps_its_column(what: str, start: int, terminal) -> None:
    shown = show(terminal(60), what)
    assert max(map(len, shown.splitlines())) <= 60
    assert " ".join(TEXT.split()) in " ".join(shown.split())
    lines = shown.splitlines()[1 if what == "table" else 0 :]
    assert columns_of_words("\n".join(lines)) == {start}


@pytest.mark.parametrize("what", ["pairs", "origins", "findings", "table"])
def test_without_room_for_a_column_the_text_has_lines_of_its_own(what: str, terminal) -> None:
    shown = show(terminal(32), what)
    assert max(map(len, shown.splitlines())) <= 32
    assert " ".join(TEXT.split()) in " ".join(shown.split())


@pytest.mark.parametrize("what", ["pairs", "origins", "findings", "table"])
def test_a_pipe_has_a_line_for_each_row(what: str, recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    assert TEXT in show(recorded(tty=False), what)


def test_a_cure_is_never_folded_for_it_is_copied(terminal) -> None:
    cure = "pip install --force-reinstall --upgrade 'cuda-tile[tileiras]>=1.7,<1.8'"
    streams = terminal(40)
    print_findings(streams.out, [Finding("tileiras", "problem", "not found", cure)])
    assert cure in streams.stdout
