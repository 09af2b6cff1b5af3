"""What is said about a machine's GPU, driver and packages, and which backend follows from it."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest

from tileinfer_core.backends import select
from tileinfer_core.backends.cuda import probe
from tileinfer_core.errors import BackendUnavailableError, UsageError
from tileinfer_core.findings import Finding


class Driver:
    """libcuda as ctypes shows it."""

    def __init__(self, *, init=0, devices=1, version=13000, arch=(9, 0)):
        self.init, self.devices, self.version = init, devices, version
        self.attributes = {75: arch[0], 76: arch[1]}

    def cuInit(self, _flags):  # noqa: N802
        return self.init

    def cuDeviceGetCount(self, count):  # noqa: N802
        count._obj.value = self.devices
        return 0

    def cuDriverGetVersion(self, version):  # noqa: N802
        version._obj.value = self.version
        return 0

    def cuDeviceGet(self, device, index):  # noqa: N802
        device._obj.value = index
        return 0

    def cuDeviceGetName(self, name, _size, _device):  # noqa: N802
        name.value = b"NVIDIA Test"
        return 0

    def cuDeviceTotalMem_v2(self, memory, _device):  # noqa: N802
        memory._obj.value = 24 << 30
        return 0

    def cuDeviceGetAttribute(self, value, attribute, _device):  # noqa: N802
        value._obj.value = self.attributes[attribute]
        return 0


@pytest.fixture
def machine(monkeypatch):
    """Set what the machine has; returns the status."""
    forget = probe.cuda_status.cache_clear

    def make(driver, packages=("cupy", "cuda.tile"), tileiras=True):
        def library(_name):
            if driver is None:
                raise OSError("not found")
            return driver

        monkeypatch.setattr(ctypes, "CDLL", library)
        monkeypatch.setattr(
            probe.importlib.util, "find_spec", lambda name: SimpleNamespace() if name in packages else None
        )
        monkeypatch.setattr(probe, "find_tileiras", lambda: probe.Path("/opt/tileiras") if tileiras else None)
        forget()
        return probe.cuda_status()

    yield make
    forget()


def test_a_complete_machine_is_usable(machine):
    status = machine(Driver())
    assert status.usable
    assert (status.gpu.name, status.gpu.arch) == ("NVIDIA Test", 90)
    assert [finding.name for finding in status.findings] == ["GPU", "driver", "CuPy", "cuda-tile", "tileiras"]
    assert select.choose_backend("auto") == select.BackendChoice("cuda", "NVIDIA Test")


@pytest.mark.parametrize(
    ("driver", "options", "name", "words"),
    [
        (None, {}, "GPU", "no NVIDIA driver"),
        (Driver(init=100), {}, "GPU", "no NVIDIA GPU"),
        (Driver(init=999), {}, "GPU", "CUDA error 999"),
        (Driver(devices=0), {}, "GPU", "no NVIDIA GPU"),
        (Driver(arch=(7, 5)), {}, "GPU", "sm_75"),
        (Driver(version=12040), {}, "driver", "CUDA 12.4"),
        (Driver(), {"packages": ("cuda.tile",)}, "CuPy", "not installed"),
        (Driver(), {"packages": ("cupy",)}, "cuda-tile", "not installed"),
        (Driver(), {"tileiras": False}, "tileiras", "compiler is not installed"),
    ],
)
def test_what_is_missing_is_named_and_auto_says_it(machine, driver, options, name, words):
    status = machine(driver, **options)
    assert not status.usable
    assert status.problem.name == name
    assert words in status.problem.detail
    choice = select.choose_backend("auto")
    assert choice.name == "cpu"
    assert words in choice.reason
    with pytest.raises(BackendUnavailableError) as error:
        select.choose_backend("cuda")
    assert words in str(error.value)
    assert "doctor" in error.value.hint


def test_cpu_is_never_looked_into(machine, monkeypatch):
    machine(None)
    monkeypatch.setattr(probe, "cuda_status", lambda: pytest.fail("not asked for"))
    assert select.choose_backend("cpu").name == "cpu"
    with pytest.raises(UsageError):
        select.choose_backend("tpu")


def test_an_older_toolkit_in_cuda_home_is_a_warning(machine, monkeypatch, tmp_path):
    (tmp_path / "version.json").write_text('{"cuda": {"version": "12.4.1"}}')
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    status = machine(Driver())
    assert status.usable
    assert status.findings[-1] == Finding(
        "CUDA_HOME",
        "warning",
        f"names CUDA 12.4 ({tmp_path}), older than the compiler: kernels may not compile",
        "unset CUDA_HOME",
    )
