"""What was compiled ahead starts the engine without compiling, and a compiler that takes too long is ended."""

from __future__ import annotations

import dataclasses
import os
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import cuda.tile as ct
import pytest
from cutile_cache._cache import cache_lookup

from kernels import compile as compiler
from kernels.cache import cache_dir, clear, entries
from kernels.compile import CompileTimeoutError, Recorded, compile_all, compile_one
from kernels.cubin_store import CubinStore
from kernels.processes import children
from kernels.specs import ArraySpec
from tests.checkpoints import quantization_config, write_checkpoint, write_quantised
from tests.kernels.kernels_for_tests import copy_kernel
from tests.reference import tiny_models
from tileinfer_core import kernel_tools
from tileinfer_core.backends.base import LoadOptions
from tileinfer_core.backends.cuda import load
from tileinfer_core.backends.cuda.interpreted import InterpretedDevice
from tileinfer_core.config import ModelConfig
from tileinfer_core.errors import CompilerTimeoutError, DiskError
from tileinfer_core.models.define import define_from_files
from tileinfer_core.progress import silent
from tileinfer_core.settings import Settings
from tileinfer_core.store import Store
from tileinfer_core.weights import WeightFiles


class ZeroedDevice(InterpretedDevice):
    """The warm-up's launches read what nothing has written yet."""

    def empty(self, shape: Any, dtype: str) -> Any:
        return self.zeros(shape, dtype)


def copy_record(length: int = 1024) -> Recorded:
    spec = ArraySpec(length, "float32")
    return Recorded(copy_kernel, (1, 1, 1), (spec, spec, 128, False))


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CUDA_TILE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


RECIPE = {"re:.*down_proj": 32, "re:.*embed_tokens": 32, "Linear": None}


def model_folder(folder: Path, *, int8: bool) -> Path:
    changes = {"head_dim": 64, "intermediate_size": 192, "max_position_embeddings": 4096}
    if int8:
        return write_quantised(folder, "qwen3-tied", quantization_config(RECIPE), **changes)
    config = {**tiny_models.VARIANTS["qwen3-tied"], **changes}
    arrays = {t: tiny_models._values(t, shape) for t, shape in tiny_models.shapes(config).items()}
    return write_checkpoint(folder, config, arrays, dtype="BF16")


@pytest.mark.parametrize(("int8", "half_copies"), [(False, True), (True, True), (True, False)])
def test_the_engine_starts_without_compiling(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, int8: bool, half_copies: bool
) -> None:
    """One real cubin stands for all, for their code does not matter here; the matrix makes their Tile IR."""
    files = WeightFiles.open(model_folder(tmp_path / "model", int8=int8))
    model, _ = define_from_files(ModelConfig.load(files.folder), files)
    code = compiler._tileiras(compiler._job(copy_record(), "sm_90"), 60)

    def job(record: Recorded, arch: str) -> Any:
        symbol = record.signature().symbol
        return compiler._Job(record, arch, symbol, b"", f"{record.name} {symbol} {record.hints}", False)

    monkeypatch.setattr(compiler, "_job", job)
    runs: list[str] = []
    monkeypatch.setattr(compiler, "_tileiras", lambda job, _timeout: runs.append(job.symbol) or code)
    store = Store.from_settings(Settings.load({"HOME": str(tmp_path)}, tmp_path / "absent.toml"))
    chosen = kernel_tools.chosen_models([str(files.folder)], store)
    ahead = list(kernel_tools.compile_kernels(["sm_90"], chosen, workers=1))
    assert len(runs) == len(ahead) > 20
    assert len(entries(own_cache)) == 2 * len(ahead)

    monkeypatch.setattr(compiler, "_job", lambda record, _arch: pytest.fail(f"Tile IR was made for {record.name}"))
    device = ZeroedDevice("sm_90")
    options = LoadOptions(4096, 2048, half_copies=half_copies)
    runner = load.load_runner(model, files, device, options, silent)
    assert runner.compile_s == 0
    assert (runner.copy_bytes > 0) == (int8 and half_copies)
    assert len(runs) == len(ahead)
    assert len(entries(own_cache)) == 2 * len(ahead)


def test_without_a_cache_nothing_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_TILE_CACHE_DIR", "off")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() is None
    for _ in range(2):
        assert not compile_one(copy_record(), "sm_90", disassemble="never").cached
    assert list(tmp_path.iterdir()) == []


def test_what_is_kept_needs_no_tile_ir(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its resources and whether it has a matrix product lie beside it: 20 to 750 ms a kernel."""
    first = compile_one(copy_record(), "sm_90", disassemble="never")
    real = compiler._job
    monkeypatch.setattr(compiler, "_job", lambda record, _arch: pytest.fail(f"Tile IR was made for {record.name}"))
    again = compile_one(copy_record(), "sm_90", disassemble="never")
    assert dataclasses.replace(again, seconds=first.seconds, cached=False, record=first.record) == first
    monkeypatch.setattr(compiler, "_job", real)
    store = CubinStore.beside_cache("sm_90")
    path = store.path(copy_kernel, first.symbol)
    assert path is not None
    path.unlink()
    found = cache_lookup(str(own_cache), compiler._job(copy_record(), "sm_90").key)
    store.keep(copy_kernel, first.symbol, found)  # as a launch does, which does not look for products
    assert compile_one(copy_record(), "sm_90", disassemble="never").cached
    kept = store.find(copy_kernel, first.symbol)
    assert kept is not None
    assert kept.uses_mma is False


def test_the_size_limit_holds_for_what_is_compiled_ahead(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    list(compile_all([copy_record()], "sm_90"))
    [own] = [entry for entry in entries(own_cache) if entry.store == "tileinfer"]
    monkeypatch.setenv("CUDA_TILE_CACHE_SIZE", str(3 * own.size))
    list(compile_all([copy_record(1000)], "sm_90"))
    found = entries(own_cache)
    assert sum(entry.size for entry in found) <= 3 * own.size
    assert len(found) == 2 or {entry.symbol for entry in found[:2]} == {copy_record(1000).signature().symbol}


@pytest.mark.parametrize("blob", [b"", b"no cubin", b"\x7fELF" + b"\xff" * 200, "text"])
def test_a_damaged_entry_of_the_compiler_s_cache_is_made_again(own_cache: Path, blob: Any) -> None:
    assert not compile_one(copy_record(), "sm_90", disassemble="never").cached
    for path in (own_cache / "tileinfer").iterdir():
        path.unlink()
    with sqlite3.connect(own_cache / "cache.db") as connection:
        connection.execute("UPDATE cache SET blob = ?", (blob,))
    connection.close()
    again = compile_one(copy_record(), "sm_90", disassemble="never")
    assert not again.cached
    assert again.resources.registers > 0
    assert compile_one(copy_record(), "sm_90", disassemble="never").cached


def norms(monkeypatch: pytest.MonkeyPatch) -> list[kernel_tools.CompiledKernel]:
    """A model of a few norms, compiled as the command does."""
    model = ("x", next(iter(kernel_tools.MODELS.values())), "float16")
    wanted = list(kernel_tools.catalogue.entries("sm_90", models=[model], families=["kernels.norm"]))
    monkeypatch.setattr(kernel_tools.catalogue, "entries", lambda *_, **__: wanted)
    return list(kernel_tools.compile_kernels(["sm_90"], [model], workers=1))


def test_what_can_not_be_kept_is_an_error_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its only purpose is that the next start finds something."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CUDA_TILE_CACHE_DIR", str(tmp_path / "file"))
    results = norms(monkeypatch)
    error = kernel_tools.failure(results)
    assert isinstance(error, DiskError)
    count = len(results)
    assert str(error) == f"{count} of {count} compiled kernels are not kept in {tmp_path / 'file'}: Not a directory"
    assert error.hint == "--cache-dir names another folder"


def test_a_limit_that_holds_no_model_is_an_error_of_the_command(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_TILE_CACHE_SIZE", "1")
    results = norms(monkeypatch)
    error = kernel_tools.failure(results)
    assert isinstance(error, DiskError)
    assert str(error).endswith(f"not kept in {own_cache}: the limit of 1 bytes is too small")
    assert error.hint == "--cache-size-bytes sets it"
    monkeypatch.setenv("CUDA_TILE_CACHE_SIZE", str(1 << 30))
    kept = norms(monkeypatch)
    assert kernel_tools.failure(kept) is None
    clear(own_cache)  # by another process, say, while they were compiled
    assert str(kernel_tools.failure(kept)).endswith("another process has removed them")
    kept = norms(monkeypatch)
    assert all(result.path is not None and Path(result.path).is_file() for result in kept)
    monkeypatch.setenv("CUDA_TILE_CACHE_DIR", "off")
    assert {result.path for result in norms(monkeypatch)} == {None}


def test_two_processes_at_once_fill_one_cache(own_cache: Path) -> None:
    program = "from tests.compile.test_ahead import *; assert not [e for e in compile_all([copy_record(n) for n in "
    program += "(1024, 1000, 1)], 'sm_90') if isinstance(e, Exception)]"
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    runs = [subprocess.Popen([sys.executable, "-c", program], env=environ) for _ in range(2)]
    assert [run.wait(timeout=120) for run in runs] == [0, 0]
    assert sorted(entry.store for entry in entries(own_cache)) == ["cuda-tile"] * 3 + ["tileinfer"] * 3
    assert list((own_cache / "tileinfer").glob(".*")) == []
    assert all(each.cached for each in compile_all([copy_record(1000), copy_record(1)], "sm_90"))


def test_a_time_out_is_an_error_of_its_own(own_cache: Path) -> None:
    with pytest.raises(CompileTimeoutError, match=r"copy_kernel for sm_90: .*its timeout of 0.01 s"):
        compile_one(copy_record(), "sm_90", timeout=0.01, disassemble="never")
    assert children(os.getpid()) == []
    assert entries(own_cache) == []


def runs(pid: int) -> bool:
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_time_out_ends_the_compiler_and_what_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """tileiras runs ptxas, which would go on by itself, for minutes."""
    script = tmp_path / "tileiras"
    script.write_text(f"#!/bin/sh\nsleep 60 &\necho $! > {tmp_path}/ptxas\nwait\n")
    script.chmod(0o755)
    found = dataclasses.replace(compiler._find_compiler_bin(), path=str(script))
    monkeypatch.setattr(compiler, "_find_compiler_bin", lambda: found)
    start = time.monotonic()
    with pytest.raises(ct.TileCompilerTimeoutError, match=r"exceeded its timeout of 2 s"):
        compiler._run_tileiras([], [], 2)  # in which a busy machine starts a shell
    assert time.monotonic() - start < 10
    below = int((tmp_path / "ptxas").read_text())
    while runs(below) and time.monotonic() - start < 20:  # a busy machine takes its time to end a killed process
        time.sleep(0.01)
    assert not runs(below)
    assert children(os.getpid()) == []


def test_a_time_out_as_the_command_reports_it(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_TILE_COMPILER_TIMEOUT_SEC", "0.01")
    error = kernel_tools.failure(norms(monkeypatch))
    assert isinstance(error, CompilerTimeoutError)
    assert error.exit_code == 8
    assert str(error).startswith("the compiler took longer than 0.01 s over rms_norm_kernel for sm_90, and was ended")
    assert error.hint == "--compiler-timeout-seconds gives it more time"
