"""Progress in plain lines: a line for each quarter, with the rate and the time left where they mean anything."""

from __future__ import annotations

import io

import pytest

from tileinfer_cli import render
from tileinfer_cli.terminal import TextStream
from tileinfer_core.progress import ProgressEvent


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(render.time, "monotonic", lambda: now[0])
    return now


def lines(clock, events):
    file = io.TextIOWrapper(raw := io.BytesIO(), "utf-8")
    stream = TextStream(file, {}, name="stderr", required=False)
    with render.Progress(stream, lasting=True) as progress:
        for seconds, done in events:
            clock[0] = 100.0 + seconds
            progress(ProgressEvent("quantize", done, 400_000_000, "bytes"))
    return raw.getvalue().decode().splitlines()


def test_rate_and_time_left(clock):
    shown = lines(clock, [(0, 0), (2, 100_000_000), (4, 200_000_000), (8, 400_000_000)])
    assert shown == [
        "quantize   0 B of 400.0 MB   0 %",
        "quantize   100.0 MB of 400.0 MB   25 %   50.0 MB/s   6.0 s left",
        "quantize   200.0 MB of 400.0 MB   50 %   50.0 MB/s   4.0 s left",
        "quantize   400.0 MB   100 %   50.0 MB/s",
    ]


def test_work_that_goes_on_counts_only_what_is_new(clock):
    shown = lines(clock, [(0, 300_000_000), (2, 350_000_000), (4, 400_000_000)])
    assert shown[-1] == "quantize   400.0 MB   100 %   25.0 MB/s"


def test_short_work_has_no_rate(clock):
    assert lines(clock, [(0, 0), (0.5, 400_000_000)])[-1] == "quantize   400.0 MB   100 %"
