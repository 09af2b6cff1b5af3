"""Which backend runs, and why: what a machine lacks is named, and nothing is replaced in silence."""

from __future__ import annotations

import pytest

from tileinfer_core import cuda_probe
from tileinfer_core.backends import select
from tileinfer_core.backends.cuda import probe
from tileinfer_core.cuda_probe import Driver, Gpu
from tileinfer_core.errors import BackendUnavailableError, UsageError

GPU = Gpu("NVIDIA Test", 24 << 30, (9, 0))
GOOD = Driver(None, (13, 0), None, (GPU,))
PACKAGES = ("cupy", "cuda.tile")


@pytest.fixture
def machine(monkeypatch):
    """Set what the machine has; returns the status."""
    forget = probe.cuda_status.cache_clear

    def make(driver, packages=PACKAGES, compiler="/opt/tileiras"):
        monkeypatch.setattr(cuda_probe, "probe_driver", lambda *, with_smi: driver if not with_smi else None)
        monkeypatch.setattr(probe.importlib.util, "find_spec", lambda name: name if name in packages else None)
        monkeypatch.setattr(cuda_probe, "compiler_path", lambda _environ: (compiler, False))
        forget()
        return probe.cuda_status()

    yield make
    forget()


def test_auto_takes_a_complete_machine(machine):
    assert machine(GOOD).problem is None
    assert select.choose_backend("auto") == select.BackendChoice("cuda", "NVIDIA Test", has_gpu=True)
    assert select.choose_backend("cuda") == select.BackendChoice("cuda", "asked for", has_gpu=True)


@pytest.mark.parametrize(
    ("driver", "options", "words"),
    [
        (Driver(fault="no NVIDIA driver on this machine"), {}, "no NVIDIA driver"),
        (Driver(None, (13, 0)), {}, "shows no GPU"),
        (Driver(None, (13, 0), None, (Gpu("Old", 1, (7, 5)),)), {}, "sm_75"),
        (Driver(None, (12, 4), None, (GPU,)), {}, "CUDA 12.4"),
        (GOOD, {"packages": ("cuda.tile",)}, "CuPy not installed"),
        (GOOD, {"packages": ()}, "CuPy and cuda-tile not installed"),
        (GOOD, {"compiler": None}, "tileiras not installed"),
    ],
)
def test_what_is_missing_is_named(machine, driver, options, words):
    assert words in machine(driver, **options).problem
    choice = select.choose_backend("auto")
    assert choice.name == "cpu"
    assert choice.has_gpu == bool(driver.gpus)
    assert words in choice.reason
    with pytest.raises(BackendUnavailableError) as caught:
        select.choose_backend("cuda")
    assert words in str(caught.value)
    assert caught.value.exit_code == 8
    assert "doctor" in caught.value.hint


def test_a_hidden_gpu_is_told_from_none(machine, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "CUDA_VISIBLE_DEVICES is ''" in machine(Driver(None, (13, 0))).problem


def test_cpu_is_what_it_says_and_looks_at_nothing(monkeypatch):
    monkeypatch.setattr(cuda_probe, "probe_driver", lambda **_: pytest.fail("not asked for"))
    assert select.choose_backend("cpu").name == "cpu"


@pytest.mark.parametrize("name", ["gpu", "", "CPU", "cuda:0"])
def test_another_name_is_a_usage_error(name):
    with pytest.raises(UsageError, match="auto, cuda, cpu"):
        select.choose_backend(name)
