# ruff: noqa: N802 - the driver names its functions
"""Doctor on machines this one is not: drivers, compilers and packages are stand-ins, the conclusions are real."""

from __future__ import annotations

import importlib.metadata
import json
import os
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tileinfer_core import cuda_probe, doctor
from tileinfer_core.cuda_probe import Compiler, Driver, Gpu
from tileinfer_core.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tileinfer_core.findings import Finding

H200 = Gpu("NVIDIA H200", 150_754_820_096, (9, 0))
GOOD = Driver(None, (13, 0), "580.95.05", (H200,))
PIP_TILEIRAS = Compiler(Path("/x/tileiras"), True, "13.4", frozenset({"sm_90", "sm_120"}))


def settings(tmp_path: Path, **environ: str) -> Settings:
    base = {"HOME": str(tmp_path), "TILEINFER_HOME": str(tmp_path / "models"), **environ}
    return Settings.load(base, tmp_path / "config.toml")


def only(findings: Iterable[Finding]) -> Finding:
    [finding] = list(findings)
    return finding


def script(folder: Path, name: str, body: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


class FakeCuda:
    """libcuda's calls, answering for one GPU."""

    def __init__(self, code: int = 0, version: int = 13000) -> None:
        self.code, self.version = code, version

    def cuInit(self, _flags: int) -> int:
        return self.code

    def cuDriverGetVersion(self, out: Any) -> int:
        out._obj.value = self.version
        return 0

    def cuDeviceGetCount(self, out: Any) -> int:
        out._obj.value = 1
        return 0

    def cuDeviceGet(self, out: Any, index: int) -> int:
        out._obj.value = index
        return 0

    def cuDeviceGetName(self, out: Any, _size: int, _device: Any) -> int:
        out.value = b"NVIDIA H200"
        return 0

    def cuDeviceTotalMem_v2(self, out: Any, _device: Any) -> int:
        out._obj.value = H200.memory_bytes
        return 0

    def cuDeviceGetAttribute(self, out: Any, attribute: int, _device: Any) -> int:
        out._obj.value = {75: 9, 76: 0}[attribute]
        return 0


# Probes


def test_the_driver_through_its_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script(tmp_path, "nvidia-smi", "echo 580.95.05")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(cuda_probe, "load_libcuda", FakeCuda)
    assert cuda_probe.probe_driver() == GOOD
    assert H200.arch == "sm_90"


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(cuda_probe, "load_libcuda", missing)
    driver = cuda_probe.probe_driver()
    finding = only(doctor.check_driver(driver))
    assert finding.status == "info"
    assert "models run on the CPU" in finding.detail


@pytest.mark.parametrize(("code", "says"), [(100, "sees no GPU"), (803, "restart the machine"), (999, "nvidia-smi")])
def test_a_driver_that_does_not_start(monkeypatch: pytest.MonkeyPatch, code: int, says: str) -> None:
    monkeypatch.setattr(cuda_probe, "load_libcuda", lambda: FakeCuda(code))
    finding = only(doctor.check_driver(cuda_probe.probe_driver()))
    assert finding.status == "problem"
    assert f"cuInit failed with {code}" in finding.detail
    assert says in finding.detail


def test_programs_that_fail_or_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cuda_probe.run([str(script(tmp_path, "fails", "exit 3"))]) is None
    assert cuda_probe.run([str(tmp_path / "absent")]) is None
    assert cuda_probe.run([str(script(tmp_path, "fine", "echo yes"))]) == "yes\n"


def test_tileiras_on_the_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cuda_probe, "_pip_tileiras", lambda: None)
    body = 'case "$1" in --version) echo "tools, release 13.2, V13.2.1";; *) echo "  =sm_90 - SM 90";; esac'
    path = script(tmp_path, "tileiras", body)
    for environ in ({"PATH": str(tmp_path)}, {"PATH": "/nowhere", "CUDA_HOME": str(tmp_path.parent)}):
        found = cuda_probe.find_compiler(environ)
        if "CUDA_HOME" in environ:
            assert found is None  # it looks in bin/ of CUDA_HOME
        else:
            assert found == Compiler(path, False, "13.2", frozenset({"sm_90"}))
    (tmp_path / "bin").mkdir()
    path.rename(tmp_path / "bin/tileiras")
    found = cuda_probe.find_compiler({"PATH": "/nowhere", "CUDA_HOME": str(tmp_path)})
    assert found is not None
    assert found.path == tmp_path / "bin/tileiras"


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        ("version.json", json.dumps({"cuda": {"name": "CUDA SDK", "version": "12.4.1"}}), (12, 4)),
        ("include/cuda.h", "#define CUDA_VERSION 13010\n", (13, 1)),
        ("include/cuda.h", "nothing", None),
        ("readme", "", None),
    ],
)
def test_toolkit_versions(tmp_path: Path, file: str, text: str, expected: tuple[int, int] | None) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(text)
    assert cuda_probe.toolkit_version(tmp_path) == expected


# Conclusions


def test_a_good_gpu_machine() -> None:
    findings = list(doctor.check_driver(GOOD))
    assert [finding.status for finding in findings] == ["ok", "ok"]
    assert "580.95.05" in findings[0].detail
    assert findings[1].detail == "NVIDIA H200, 140.4 GiB, sm_90"


@pytest.mark.parametrize(
    ("driver", "says"),
    [
        (Driver(None, (12, 4), "550.54", (H200,)), "for CUDA up to 12.4; 13.0 is needed"),
        (Driver(None, (13, 0), "580.1", ()), "the driver shows no GPU"),
        (Driver(None, (13, 0), "580.1", (Gpu("Tesla T4", 2**34, (7, 5)),)), "cuTile needs sm_80 or newer"),
    ],
)
def test_gpu_machines_with_a_fault(driver: Driver, says: str) -> None:
    assert [f.detail for f in doctor.check_driver(driver) if f.status == "problem" and says in f.detail]


def packages(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    table = {name.replace("_", "-"): version for name, version in versions.items()}
    monkeypatch.setattr(cuda_probe, "distribution", table.get)


@pytest.mark.parametrize(("has_gpu", "status"), [(True, "problem"), (False, "info")])
def test_missing_packages_matter_only_with_a_gpu(monkeypatch: pytest.MonkeyPatch, has_gpu: bool, status: str) -> None:
    packages(monkeypatch)
    findings = list(doctor.check_packages(has_gpu=has_gpu))
    assert [(f.name, f.status) for f in findings] == [("cuda-tile", status), ("cupy", status)]
    assert all(bool(f.cure) is has_gpu for f in findings)


@pytest.mark.parametrize(
    ("cupy", "status", "cure"),
    [
        ({"cupy_cuda13x": "14.2"}, "ok", None),
        ({"cupy": "14.2"}, "ok", None),
        ({"cupy_cuda12x": "13.6"}, "problem", "pip uninstall cupy-cuda12x"),
        ({"cupy_cuda12x": "13.6", "cupy_cuda13x": "14.2"}, "problem", "pip uninstall cupy-cuda12x"),
    ],
)
def test_cupy(monkeypatch: pytest.MonkeyPatch, cupy: dict[str, str], status: str, cure: str | None) -> None:
    packages(monkeypatch, cuda_tile="1.7.0", **cupy)
    finding = list(doctor.check_packages(has_gpu=True))[-1]
    assert finding.status == status
    assert (finding.cure or "").startswith(cure or "")


def test_tileiras(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_probe, "mismatched_packages", lambda: None)
    assert only(doctor.check_compiler(PIP_TILEIRAS, GOOD)).status == "ok"
    assert only(doctor.check_compiler(None, GOOD)).cure == doctor.INSTALL_CUDA
    assert only(doctor.check_compiler(None, Driver(fault="none"))).status == "info"
    older = Compiler(Path("/x/tileiras"), False, "13.1", frozenset({"sm_100"}))
    assert "can't compile for sm_90" in only(doctor.check_compiler(older, GOOD)).detail
    broken = Compiler(Path("/x/tileiras"), False, None, frozenset())
    assert "does not run" in only(doctor.check_compiler(broken, GOOD)).detail


def test_tileiras_packages_that_do_not_match(monkeypatch: pytest.MonkeyPatch) -> None:
    packages(monkeypatch, nvidia_cuda_tileiras="13.4.92", nvidia_cuda_nvcc="13.0.1", nvidia_nvvm="13.4.92")
    first = next(iter(doctor.check_compiler(None, GOOD)))
    assert first.status == "problem"
    assert "nvidia-cuda-nvcc 13.0.1" in first.detail
    packages(monkeypatch, nvidia_cuda_tileiras="13.4.92", nvidia_cuda_nvcc="13.4.1", nvidia_nvvm="13.4.2")
    assert cuda_probe.mismatched_packages() is None


@pytest.mark.parametrize(
    ("version", "compiler", "status"),
    [
        ("12.4.0", PIP_TILEIRAS, "warning"),
        ("12.4.0", Compiler(Path("/usr/bin/tileiras"), False, "13.4", frozenset()), "problem"),
        ("13.1.0", PIP_TILEIRAS, "ok"),
    ],
)
def test_an_older_toolkit(tmp_path: Path, version: str, compiler: Compiler, status: str) -> None:
    (tmp_path / "version.json").write_text(json.dumps({"cuda": {"version": version}}))
    finding = only(doctor.check_toolkits({"CUDA_HOME": str(tmp_path)}, compiler))
    assert finding.status == status
    assert finding.cure == (None if status == "ok" else "unset CUDA_HOME")
    assert list(doctor.check_toolkits({}, compiler)) == []
    empty = only(doctor.check_toolkits({"CUDA_PATH": str(tmp_path / "none")}, compiler))
    assert (empty.status, empty.cure) == ("warning", "unset CUDA_PATH")


def test_our_kernels_folder_alone() -> None:
    assert only(doctor.check_kernels_package()).status == "ok"


def test_the_hugging_face_package_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = importlib.metadata.distribution
    home = Path(doctor.__file__).resolve().parent.parent

    def pretend(folder: Path) -> None:
        found = types.SimpleNamespace(version="0.9.0", locate_file=lambda name: folder / name)
        monkeypatch.setattr(importlib.metadata, "distribution", lambda n: found if n == "kernels" else real(n))

    pretend(tmp_path)
    finding = only(doctor.check_kernels_package())
    assert finding.status == "warning"
    pretend(home)
    finding = only(doctor.check_kernels_package())
    assert finding.status == "problem"
    assert "kernels 0.9.0 of Hugging Face overwrote files" in finding.detail
    assert "pip uninstall kernels" in (finding.cure or "")


def test_kernels_imported_from_elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = types.SimpleNamespace(origin=str(tmp_path / "kernels/__init__.py"))
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda _name: spec)
    finding = only(doctor.check_kernels_package())
    assert finding.status == "problem"
    assert f"imported from {tmp_path / 'kernels'}" in finding.detail


def test_folders(tmp_path: Path) -> None:
    assert {f.status for f in doctor.check_folders(settings(tmp_path))} == {"ok", "info"}
    [kept] = doctor.check_kernel_cache(settings(tmp_path, TILEINFER_CACHE_DIR=str(tmp_path / "k")), {})
    assert (kept.status, kept.detail) == ("info", f"{tmp_path / 'k'} (TILEINFER_CACHE_DIR): 0 B of 2.1 GB")
    [off] = doctor.check_kernel_cache(settings(tmp_path), {"CUDA_TILE_CACHE_DIR": "off"})
    assert off.status == "warning"
    assert off.detail.startswith("off (CUDA_TILE_CACHE_DIR)")
    assert not (tmp_path / "models").exists()  # looking makes nothing
    (tmp_path / "file").touch()
    findings = list(doctor.check_folders(settings(tmp_path, TILEINFER_HOME=str(tmp_path / "file/models"))))
    assert findings[0].status == "problem"
    assert "is not a folder" in findings[0].detail
    assert "TILEINFER_HOME" in (findings[0].cure or "")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    assert doctor.write_fault(tmp_path / "models") == "Permission denied"


def test_incomplete_models_are_named(tmp_path: Path) -> None:
    partial = tmp_path / "models" / "org--model.partial"
    partial.mkdir(parents=True)
    findings = list(doctor.check_models(settings(tmp_path)))
    assert [(f.status, f.cure) for f in findings] == [("info", None), ("warning", "tileinfer pull org/model")]


def test_the_token_itself_is_never_shown(tmp_path: Path) -> None:
    assert "none" in only(doctor.check_token({"HOME": str(tmp_path)})).detail
    finding = only(doctor.check_token({"HF_TOKEN": "hf_secret"}))
    assert "hf_secret" not in finding.detail


def test_the_whole_diagnosis_here(tmp_path: Path) -> None:
    findings = doctor.diagnose(settings(tmp_path), {"HOME": str(tmp_path), "PATH": os.environ["PATH"]})
    assert [f.name for f in findings][:2] == ["python", "driver"]
    assert {"backend", "models folder", "kernels", "hub token"} <= {f.name for f in findings}
    assert all("\n" not in f.detail for f in findings)
    assert all(f.cure or f.status != "warning" for f in findings)
