"""The arithmetic of the lab's timers, with CuPy's clock replaced by one that charges known times.

What a GPU really takes is for a GPU; here a graph takes a fixed overhead and so much for each launch in it.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pytest

pytest.importorskip("cuda.tile")

from kernels.interpreter import InterpreterLauncher
from kernels.lab.code import report
from kernels.lab.probe import find
from tileinfer_core.backends.cuda.census_steps import Step

if TYPE_CHECKING:
    from pathlib import Path

OVERHEAD = 7.5  # µs of a graph before its first launch
MODULES = ("gpu", "probe_times", "census_times")


class Clock:
    """Microseconds on the device."""

    def __init__(self) -> None:
        self.now = 0.0
        self.cost: Any = lambda _launch: 1.0

    def replay(self, launches: list[Any]) -> None:
        self.now += OVERHEAD + sum(self.cost(launch) for launch in launches)


class Event:
    clock: Clock

    def __init__(self, **_: Any) -> None:
        self.at = 0.0

    def record(self, _stream: Any = None) -> None:
        self.at = self.clock.now

    def synchronize(self) -> None: ...


class Stream:
    """Runs launches in the interpreter at once; a captured graph is their list."""

    ptr = 1
    captured: list[Any] | None = None

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def begin_capture(self) -> None:
        Stream.captured = []

    def end_capture(self) -> Any:
        launches, Stream.captured = Stream.captured or [], None
        return SimpleNamespace(launch=lambda _stream: self.clock.replay(launches))

    def synchronize(self) -> None: ...


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A stand-in for CuPy over NumPy, and the modules that import it, made anew and forgotten afterwards."""
    made = Clock()
    monkeypatch.setattr(Event, "clock", made, raising=False)
    runtime = SimpleNamespace(CUDARuntimeError=RuntimeError)
    cuda = SimpleNamespace(
        runtime=runtime,
        Event=Event,
        Stream=lambda **_: Stream(made),
        Device=lambda *_: SimpleNamespace(synchronize=lambda: None),
        get_elapsed_time=lambda start, stop: (stop.at - start.at) / 1e3,
    )
    fake = ModuleType("cupy")
    names = {"cuda": cuda, "ndarray": np.ndarray, "empty": np.empty, "asarray": np.asarray, "asnumpy": np.array}
    names |= {"get_default_memory_pool": lambda: SimpleNamespace(free_all_blocks=lambda: None)}
    for name, value in names.items():
        setattr(fake, name, value)
    monkeypatch.setitem(sys.modules, "cupy", fake)
    for name in MODULES:
        monkeypatch.delitem(sys.modules, f"tileinfer_core.backends.cuda.{name}", raising=False)
    yield made
    for name in MODULES:
        sys.modules.pop(f"tileinfer_core.backends.cuda.{name}", None)


def module(name: str) -> Any:
    return importlib.import_module(f"tileinfer_core.backends.cuda.{name}")


def shrink(probe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time the small sizes, which the interpreter can run."""
    arrays, variants = probe.arrays(small=True), probe.variants(small=True)
    monkeypatch.setattr(type(probe), "arrays", lambda _self, *, small: arrays)
    monkeypatch.setattr(type(probe), "variants", lambda _self, *, small: variants)


def test_variants_are_timed_by_launch(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    times = module("probe_times")
    [probe] = find(["topk"])
    shrink(probe, monkeypatch)
    interpreter = InterpreterLauncher("sm_90")
    told: list[Any] = []

    def launch(kernel: Any, grid: Any, args: Any, *, stream: int, arch: str, dependent: bool) -> None:
        told.append((stream, arch, dependent))
        if Stream.captured is None:
            interpreter(kernel, grid, args)
        else:
            Stream.captured.append(kernel._pyfunc.__name__)

    monkeypatch.setattr(times, "launch", launch)
    monkeypatch.setattr(times, "GpuDevice", lambda: SimpleNamespace(arch="sm_90", name="a GPU"))
    monkeypatch.setattr(times, "HOST_ROUNDS", 1)
    cost = {"one_block": 40.0, "chunk_winners": 3.0, "winners_of_winners": 2.0}
    clock.cost = cost.__getitem__
    timer = times.ProbeTimer()
    monkeypatch.setattr(timer, "_poison", lambda array: array.fill(0))
    monkeypatch.setattr(timer, "_copy", np.copyto)
    alone, two, small_chunks = timer.time(probe)
    assert (alone.error, two.error, small_chunks.error) == (None, None, None)
    repeats = int(times.GRAPH_US / (40.0 + OVERHEAD))
    assert alone.median == pytest.approx(40.0 + OVERHEAD / repeats)
    repeats = int(times.GRAPH_US / (5.0 + OVERHEAD))
    assert (two.least, two.median, two.mean) == pytest.approx([5.0 + OVERHEAD / repeats] * 3)
    assert (alone.bits, two.bits, small_chunks.bits) == (None, True, True)
    assert two.launches == 2 * repeats * times.REPLAYS
    assert all(each.launch > 0 for each in (alone, two))
    assert set(told) == {(1, "sm_90", False)}


def test_a_variant_that_differs_is_an_error_not_a_time(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    times = module("probe_times")
    [probe] = find(["helpers"])
    monkeypatch.setattr(times, "GpuDevice", lambda: SimpleNamespace(arch="sm_90", name="a GPU"))
    shrink(probe, monkeypatch)
    names = itertools.count()
    monkeypatch.setattr(times, "launch", lambda _k, _g, args, **_: args[1].fill(next(names)))
    timer = times.ProbeTimer()
    monkeypatch.setattr(timer, "_poison", lambda array: array.fill(np.nan))
    monkeypatch.setattr(timer, "_copy", np.copyto)
    first, *others = timer.time(probe)
    assert first.error is None
    assert all("differs by" in str(each.error) and each.median == 0 for each in others)


class FakeDevice:
    """Graphs that take what their launches cost; a launch is a string."""

    arch, name = "sm_90", "a GPU"

    def __init__(self, clock: Clock) -> None:
        self.clock, self.stream, self.lengths = clock, Stream(clock), 0

    def empty(self, shape: Any, _dtype: str) -> Any:
        return np.zeros(1)

    def clear(self, _array: Any) -> None:
        self.clock.now += 60.0  # not between the events

    def copy_in(self, _target: Any, _source: Any) -> None:
        self.lengths += 1

    def run(self, _launches: Any) -> None: ...

    def record(self, launches: Any, _carveout: Any = None) -> Any:
        return SimpleNamespace(launch=lambda: self.clock.replay(list(launches)))


def stepped(clock: Clock, monkeypatch: pytest.MonkeyPatch, layers: int) -> tuple[Any, FakeDevice, list[str]]:
    """A step of so many layers, whose kernels take what is said of them; "down" grows with the layer."""
    times = module("census_times")
    monkeypatch.setattr(times, "label", lambda launch: launch.split()[0])
    monkeypatch.setattr(times, "moved_bytes", lambda launch, _step: 20 << 20 if "down" in launch else 1 << 20)
    device = FakeDevice(clock)
    cost = {"embed": 1.5, "qkv": 4.0, "down": 6.0, "head": 70.0}
    clock.cost = lambda launch: cost[launch.split()[0]] + (int(launch.split()[1]) if "down" in launch else 0)
    body = [f"{name} {layer}" for layer in range(layers) for name in ("qkv", "down")]
    return times, device, ["embed", *body, "head"]


@pytest.mark.parametrize("layers", [2, 40])
def test_a_step_is_cut_into_what_each_launch_adds(clock: Clock, monkeypatch: pytest.MonkeyPatch, layers: int) -> None:
    times, device, launches = stepped(clock, monkeypatch, layers)
    runner = SimpleNamespace(device=device, carveout=lambda _context: None, buffers={"length": None})
    seen: list[int] = []
    found = times.StepTimer(runner, Step("decode", 1, 512), seen.append).time(launches)
    assert found.overhead == pytest.approx(OVERHEAD)
    wanted = [clock.cost(launch) for launch in launches]
    assert found.added == pytest.approx(wanted)
    assert sum(found.added) == pytest.approx(found.whole) == pytest.approx(sum(wanted))
    down = sum(wanted[4:-1:2]) / (layers - 1)  # the first of a chain sets the start
    assert found.alone == pytest.approx([1.5, *[4.0, down] * layers, 70.0])
    assert found.loop == pytest.approx(sum(wanted) + OVERHEAD)
    assert seen == [*range(12, len(launches), 12), len(launches)]
    assert device.lengths > len(launches) * times.REPLAYS


def test_a_cut_graph_begins_far_enough_before_its_launches(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the L2 of weights, or the step's beginning."""
    times, device, launches = stepped(clock, monkeypatch, 40)
    runner = SimpleNamespace(device=device, carveout=lambda _context: None, buffers={"length": None})
    windows = list(times.StepTimer(runner, Step("decode", 1, 512))._windows(launches))
    assert [first for _, first, _ in windows] == list(range(0, 82, 12))
    assert [stop for _, _, stop in windows] == [*range(12, 82, 12), 82]
    for begin, first, _ in windows:
        moved = sum(times.moved_bytes(launch, None) for launch in launches[begin:first])
        assert begin == 0 or moved >= times.WINDOW_BYTES
        assert moved < times.WINDOW_BYTES + (21 << 20)
    assert windows[-1][0] > 40


def test_a_variant_that_reads_its_output_finds_nothing_right_there(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chain reads what it writes: a launch that does nothing must not find the result of the variant before."""
    times = module("probe_times")
    [probe] = find(["dependent_launch"])
    shrink(probe, monkeypatch)
    interpreter = InterpreterLauncher("sm_90")

    def launch(kernel: Any, grid: Any, args: Any, **_: Any) -> None:
        if args[-1] == probe.module.NO_PDL:
            interpreter(kernel, grid, args)

    monkeypatch.setattr(times, "launch", launch)
    monkeypatch.setattr(times, "GpuDevice", lambda: SimpleNamespace(arch="sm_90", name="a GPU"))
    timer = times.ProbeTimer()
    monkeypatch.setattr(timer, "_copy", np.copyto)
    monkeypatch.setattr(timer, "_time", lambda variant, *_: times.Times(variant.name))
    found = {each.variant: each.error for each in timer.time(probe)}
    assert {found.pop(f"{size}: plain launches") for size in ("4,096", "1,024")} == {None}
    assert len(found) == 10
    assert all("differs by" in str(error) for error in found.values())


def test_a_launch_that_fails_while_capturing_leaves_the_stream_free(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = module("probe_times")
    [probe] = find(["helpers"])
    shrink(probe, monkeypatch)
    interpreter = InterpreterLauncher("sm_90")

    def launch(kernel: Any, grid: Any, args: Any, **_: Any) -> None:
        if Stream.captured is None:
            interpreter(kernel, grid, args)
        elif kernel._pyfunc.__name__ == "one_helper":
            raise RuntimeError("out of something")
        else:
            Stream.captured.append(kernel)

    monkeypatch.setattr(times, "launch", launch)
    monkeypatch.setattr(times, "GpuDevice", lambda: SimpleNamespace(arch="sm_90", name="a GPU"))
    timer = times.ProbeTimer()
    monkeypatch.setattr(timer, "_poison", lambda array: array.fill(np.nan))
    monkeypatch.setattr(timer, "_copy", np.copyto)
    errors = {each.variant: each.error for each in timer.time(probe)}
    assert errors.pop("one helper") == "RuntimeError: out of something"
    assert set(errors.values()) == {None}
    assert Stream.captured is None


def test_a_loop_of_steps_ends_where_the_step_s_graph_does(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every whole step makes the sequence longer; a graph is for no longer one, and there are no pages past it."""
    times = module("census_times")
    monkeypatch.setattr(times, "label", lambda launch: launch)
    monkeypatch.setattr(times, "moved_bytes", lambda *_: 1)
    device = FakeDevice(clock)
    lengths: list[int] = []
    monkeypatch.setattr(device, "copy_in", lambda _target, source: lengths.append(int(source[0])))
    runner = SimpleNamespace(device=device, carveout=lambda _context: None, buffers={"length": None})
    times.StepTimer(runner, Step("decode", 1, 512)).time(["embed", "head"])
    assert lengths[-1] + times.WHOLE_REPLAYS - 1 == max(lengths) == 512


def test_the_sampler_of_a_census_has_settings(clock: Clock) -> None:
    times = module("census_times")
    told: list[Any] = []
    cache = SimpleNamespace(reserve=told.append, block_table=[1])
    runner = SimpleNamespace(
        device=FakeDevice(clock), buffers={"start": None, "length": None}, new_cache=lambda _n: cache
    )
    runner.show_pages = runner.show_sampling = told.append
    times.prepare(runner, Step("decode", 1, 512), "settings")
    assert told == ["settings", 512, [1]]


@pytest.mark.parametrize("name", ["helpers", "padding", "dependent_launch", "reduced_axis_first", "language", "shapes"])
def test_a_bug_report_runs_by_itself(
    name: str, clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The saved file, with nothing of this project: each variant is held against the first, and timed."""
    [probe] = find([name])
    told: list[bool] = []

    def launch(_stream: int, grid: Any, kernel: Any, args: Any, *, programmatic_dependent_launch: bool) -> None:
        told.append(programmatic_dependent_launch)
        if Stream.captured is None:
            InterpreterLauncher("sm_90", pdl=programmatic_dependent_launch)(kernel, grid, args)
        else:
            Stream.captured.append(kernel)

    monkeypatch.setattr("cuda.tile.launch", launch)
    (tmp_path / "report.py").write_text(report(probe), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("report", tmp_path / "report.py")
    assert spec is not None
    assert spec.loader is not None
    saved = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(saved)
    small_arrays, small_variants = saved.arrays(True), saved.variants(True)
    monkeypatch.setattr(saved, "arrays", lambda _small: small_arrays)
    monkeypatch.setattr(saved, "variants", lambda _small: small_variants)
    saved.main("")
    lines = capsys.readouterr().out.splitlines()
    assert [line[:60].strip() for line in lines] == list(small_variants)
    assert all(float(line.rpartition(" ")[2]) < 0.05 for line in lines)
    assert set(told) == {about.get("pdl", False) for about in small_variants.values()}
    saved.main(list(small_variants)[-1])
    assert len(capsys.readouterr().out.splitlines()) == 1
