"""Steps are recorded once each, when first needed."""

from __future__ import annotations

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
