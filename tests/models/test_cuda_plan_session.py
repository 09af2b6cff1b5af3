"""Engine and session on the CUDA backend, interpreted: chosen by name, loaded, chatting with its cache kept and cut."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from tests import scripted_model
from tests.scripted_model import write_scripted_model
from tileinfer_core.backends.cuda import load, probe
from tileinfer_core.backends.cuda.interpreted import InterpretedDevice
from tileinfer_core.cuda_probe import Gpu
from tileinfer_core.engine import Engine, EngineOptions, Request
from tileinfer_core.errors import BackendUnavailableError, OutOfMemoryError
from tileinfer_core.events import Finished, TextDelta
from tileinfer_core.sampling import SamplingParams
from tileinfer_core.session import Session

GREEDY = Request(SamplingParams(temperature=0))
SCRIPT = ["Tiles", " in", " order", "."]


class NoWarmup:
    unkept = None

    def __init__(self, *_args): ...
    def start(self): ...
    def finish(self, _on_progress):
        return 0.25


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """Engine.load as on a machine with a GPU, whose device is the interpreter."""
    monkeypatch.setattr(scripted_model, "HEAD_DIM", 64)
    monkeypatch.setattr(load, "KernelWarmup", NoWarmup)
    monkeypatch.setattr(probe, "cuda_status", lambda: probe.CudaStatus(Gpu("Interpreter", 1 << 30, (9, 0))))
    device = InterpretedDevice()
    monkeypatch.setitem(sys.modules, "tileinfer_core.backends.cuda.gpu", SimpleNamespace(GpuDevice=lambda: device))
    folder = write_scripted_model(tmp_path / "model", SCRIPT, context=512)
    return lambda **options: Engine.load(folder, EngineOptions(**options))


def test_auto_takes_the_gpu_and_an_answer_streams(engine):
    loaded = engine()
    assert (loaded.backend.name, loaded.backend.reason) == ("cuda", "Interpreter")
    assert loaded.context_length == 512
    events = list(loaded.generate(loaded.prompt_ids("Say it"), GREEDY))
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == "Tiles in order."
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert finished.reason == "stop"
    assert finished.usage.completion_tokens == 5
    assert finished.timings.compile_s == 0.25


def test_a_cupy_that_does_not_import_is_an_error_with_a_way_out(engine, monkeypatch):
    monkeypatch.setitem(sys.modules, "tileinfer_core.backends.cuda.gpu", None)
    with pytest.raises(BackendUnavailableError, match="can't be imported") as caught:
        engine()
    assert "--backend cpu" in caught.value.hint


def test_a_conversation_reuses_its_cache_and_gives_its_pages_back(engine):
    loaded = engine()
    session = Session(loaded)
    for _ in range(2):
        *_, finished = session.send("More", GREEDY)
        assert finished.text == "Tiles in order."
    assert finished.usage.reused_tokens > 16  # the first question; the answer's text is spelled in other tokens
    pool = loaded.runner.pool
    held = 512 - pool.free_tokens
    assert 0 < held <= 192
    session.clear()
    *_, finished = session.send("Again", GREEDY)
    assert finished.text == "Tiles in order."
    assert 512 - pool.free_tokens <= held


def test_an_answer_ends_where_the_context_does(engine):
    loaded = engine(context=64)
    prompt = loaded.prompt_ids("x" * 30)
    *_, finished = loaded.generate(prompt, Request(SamplingParams(temperature=0), ignore_eos=True))
    assert finished.reason == "context"
    assert finished.usage.prompt_tokens + finished.usage.completion_tokens == 64


def test_an_explicit_context_that_does_not_fit_is_refused_and_the_default_is_cut(engine, monkeypatch):
    monkeypatch.setattr("tileinfer_core.backends.cuda.memory.kv_bytes_per_token", lambda *_: 100_000)
    monkeypatch.setattr(InterpretedDevice, "memory", lambda _self: SimpleNamespace(free=430 << 20, total=1 << 30))
    with pytest.raises(OutOfMemoryError, match="512 tokens") as caught:
        engine(context=512)
    longest = engine().context_length
    assert 256 <= longest < 512
    assert caught.value.hint.startswith(f"use --context {longest}")
