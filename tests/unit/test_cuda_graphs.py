"""Steps are recorded once each, when first needed."""

from __future__ import annotations

import importlib
import sys
from itertools import count
from types import ModuleType, SimpleNamespace

import pytest

from tests.interrupts import interrupted
from tileinfer_core.backends.cuda.graphs import GraphCache


class Recorder:
    def __init__(self):
        self.log = []

    def run(self, step):
        self.log.append(("run", step))

    def record(self, step, carveout=None):
        self.log.append(("record", step))
        return self

    def launch(self):
        self.log.append("launch")


def test_a_step_is_planned_and_recorded_once():
    device, planned = Recorder(), []
    graphs = GraphCache(device)

    def plan():
        planned.append(1)
        return "step"

    for _ in range(3):
        graphs.launch("decode", plan)
    assert device.log == [("record", "step"), "launch", "launch", "launch"]
    assert len(planned) == 1
    assert len(graphs) == 1


def test_a_step_that_may_not_come_again_is_first_run_as_it_is():
    device = Recorder()
    graphs = GraphCache(device)
    for _ in range(3):
        graphs.launch(("prefill", 64), lambda: "step", after=1)
    assert device.log == [("run", "step"), ("record", "step"), "launch", "launch"]


def test_keys_do_not_meet():
    device = Recorder()
    graphs = GraphCache(device)
    graphs.launch(("decode", 16), lambda: "short")
    graphs.launch(("decode", 32), lambda: "long")
    assert [entry for entry in device.log if entry != "launch"] == [("record", "short"), ("record", "long")]


def runtime_that(state):
    """As much of CUDA as a capture needs: what is captured must be ended before anything else can be done."""
    error = type("CUDARuntimeError", (Exception,), {})

    def end(_stream):
        if not state.capturing:
            raise error
        state.capturing = False

    return SimpleNamespace(
        CUDARuntimeError=error,
        streamBeginCapture=lambda *_: vars(state).update(capturing=True),
        streamEndCapture=end,
        graphDestroy=lambda _graph: None,
        graphInstantiate=lambda _graph: 7,
        graphExecDestroy=lambda _graph: None,
    )


@pytest.fixture
def gpu_module(monkeypatch):
    """backends/cuda/gpu.py, on a machine without CuPy too; no other test finds it made of the stand-in."""
    name = "tileinfer_core.backends.cuda.gpu"
    if "cupy" not in sys.modules:
        stand_in = ModuleType("cupy")
        stand_in.cuda = SimpleNamespace(runtime=runtime_that(SimpleNamespace(capturing=False)))
        monkeypatch.setitem(sys.modules, "cupy", stand_in)
        monkeypatch.setitem(sys.modules, name, None)  # so that what was there, or nothing, comes back
        del sys.modules[name]
        monkeypatch.setattr(sys.modules["tileinfer_core.backends.cuda"], "gpu", None, raising=False)
    try:
        return importlib.import_module(name)
    except ImportError as error:
        pytest.skip(str(error))


def test_an_interrupt_at_any_instruction_leaves_no_stream_that_captures(gpu_module, monkeypatch):
    """The next copy to it would fail, and so every later answer."""
    for steps in count():
        state = SimpleNamespace(capturing=False)
        monkeypatch.setattr(gpu_module, "runtime", runtime_that(state))
        device = SimpleNamespace(_stream=SimpleNamespace(ptr=1), run=lambda _step: None)
        device._abandon_capture = lambda d=device: gpu_module.GpuDevice._abandon_capture(d)
        came = interrupted(lambda d=device: gpu_module.GpuDevice.record(d, ()), steps, inside=("cuda/gpu.py",))
        assert not state.capturing, f"after {steps} instructions"
        if not came:
            break
    assert steps > 20
