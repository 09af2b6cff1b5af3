"""`tileinfer kernels list|compile` as a process: what it prints, what it refuses, and how it ends."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.checkpoints import write_checkpoint
from tests.reference import tiny_models

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("cuda.tile")

# One process with a fault put into it: no compiler anywhere, or one that refuses a kernel.
WITHOUT_COMPILER = "from tileinfer_core import cuda_probe; cuda_probe._pip_tileiras = lambda: None"
REFUSING = """
import kernels.compile
real = kernels.compile._job
def refuse(record, arch):
    if record.name == "rms_norm_kernel":
        raise kernels.compile._explain(record, arch, RuntimeError("registers [bold]ran out[/bold]"))
    return real(record, arch)
kernels.compile._job = refuse
store = kernels.compile.CubinStore
find = store.find
store.find = lambda self, kernel, symbol: None if symbol.startswith("rms_norm_kernel") else find(self, kernel, symbol)
"""


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder small enough to compile for in seconds."""
    config = {**tiny_models.VARIANTS["qwen3-tied"], "head_dim": 64}
    arrays = {t: tiny_models._values(t, shape) for t, shape in tiny_models.shapes(config).items()}
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "model", config, arrays, dtype="BF16")


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One cache for the file, so that each kernel is compiled once."""
    return str(tmp_path_factory.mktemp("cutile-cache"))


@pytest.fixture
def with_fault(environment, cache):
    """with_fault(PRELUDE, *arguments): the command line after a piece of Python."""

    def run(prelude: str, *args: str) -> subprocess.CompletedProcess[str]:
        program = f"{prelude}\nimport sys\nfrom tileinfer_cli.app import run\nsys.exit(run(sys.argv[1:]))"
        environ = environment | {"CUDA_TILE_CACHE_DIR": cache, "PATH": "/usr/bin:/bin"}
        command = [sys.executable, "-c", program, *args]
        return subprocess.run(command, capture_output=True, text=True, env=environ, timeout=200, check=False)

    return run


def test_list_names_every_kernel_with_its_formula(tileinfer) -> None:
    result = tileinfer("kernels", "list", "--arch", "sm_80", "--json")
    assert (result.code, result.err) == (0, "")
    kernels = {kernel["kernel"]: kernel for kernel in json.loads(result.out)["sm_80"]}
    assert {"linear_kernel", "linear_tokens_kernel", "attention_page_kernel", "sample_draw_kernel"} <= set(kernels)
    assert kernels["embedding_kernel"]["formula"] == "stream[t, j] = table[ids[t], j] (· scale[ids[t], j // G])."
    assert kernels["xielu_kernel"]["models"] == ["Apertus-8B"]
    assert all(kernel["variants"] >= 1 for kernel in kernels.values())


def test_list_as_a_table(tileinfer) -> None:
    result = tileinfer("kernels", "list", "--arch", "sm_90,sm_103", "--model", "qwen3-4b")
    assert result.code == 0
    lines = result.out.splitlines()
    assert lines[0].split() == ["ARCH", "FAMILY", "KERNEL", "VARIANTS", "COMPUTES"]
    assert {line.split()[0] for line in lines[1:]} == {"sm_90", "sm_103"}
    assert "xielu" not in result.out
    assert result.err == (
        "no kernel configurations for sm_103: using those of sm_100, the nearest older architecture\n"
    )


def test_compile_reports_what_each_kernel_needs_and_keeps_it(tileinfer, tiny: Path, cache: str) -> None:
    arguments = ("kernels", "compile", "--arch", "sm_80", "--model", tiny)
    first = tileinfer(*arguments, "--json", CUDA_TILE_CACHE_DIR=cache, timeout=200)
    assert first.code == 0, first.err
    found = json.loads(first.out)
    assert {kernel["arch"] for kernel in found} == {"sm_80"}
    assert all(kernel["models"] == [str(tiny)] and kernel["error"] is None for kernel in found)
    assert all(0 < kernel["registers"] <= 255 and kernel["spills"] == 0 for kernel in found)
    product = next(kernel for kernel in found if kernel["kernel"] == "attention_page_kernel")
    assert product["tensor_core"] == ["HMMA"]
    assert next(kernel for kernel in found if kernel["kernel"] == "rms_norm_kernel")["tensor_core"] == []
    assert not any(kernel["cached"] for kernel in found)
    assert first.err.splitlines()[0] == f"compile kernels   0 of {len(found)} kernels   0 %"
    assert first.err.splitlines()[-1] == f"compile kernels   {len(found)} kernels   100 %"

    again = tileinfer(*arguments, "-q", CUDA_TILE_CACHE_DIR=cache, timeout=200)
    assert (again.code, again.err) == (0, "")
    header, *rows = again.out.splitlines()
    assert header.split()[:6] == ["ARCH", "KERNEL", "REGISTERS", "SHARED", "SPILLS", "TENSOR"]
    assert len(rows) == len(found)
    assert all("cached" in row for row in rows)


def test_a_kernel_that_does_not_compile(with_fault, tiny: Path) -> None:
    """Kernel, target and the compiler's words, as they are; the other kernels are compiled and shown."""
    done = with_fault(REFUSING, "kernels", "compile", "--arch", "sm_80", "--model", str(tiny), "-q")
    assert done.returncode == 1
    assert done.stderr.startswith("error: rms_norm_kernel for sm_80 did not compile (and 1 more): registers [bold]ran")
    assert "embedding_kernel" in done.stdout
    assert "rms_norm_kernel" not in done.stdout


@pytest.mark.parametrize(
    "command",
    [["compile"], ["explain", "rms_norm", "-m", "Qwen3-0.6B"], ["census", "-m", "Qwen3-0.6B"], ["probe", "padding"]],
    ids=lambda command: command[0],
)
def test_no_compiler(command: list[str], with_fault) -> None:
    done = with_fault(WITHOUT_COMPILER, "kernels", *command, "--arch", "sm_90")
    assert done.returncode == 8
    assert done.stdout == ""
    assert done.stderr == (
        'error: tileiras, the compiler of the kernels: not found\n  pip install "cuda-tile[tileiras]"\n'
    )


@pytest.mark.parametrize(
    ("args", "message", "hint"),
    [
        (["--arch", "sm_91"], "no architecture 'sm_91'", "did you mean sm_90"),
        (["--arch", "sm_90", "--arch", "sm_70"], "no architecture 'sm_70'", "sm_"),
        (["--arch", "hopper"], "no architecture 'hopper'", "known: sm_80, sm_86"),
        (["--arch", "sm_90", "-m", "Qwen3-5B"], "no model 'Qwen3-5B'", "did you mean Qwen3-8B or Qwen3-4B"),
        (["--arch", "sm_90", "-m", "qwen3:5b"], "no model 'qwen3:5b'", "did you mean qwen3:"),
        (["--arch", "sm_90", "--workers", "0"], "--workers must be from 1 to 256, found 0", None),
        ([], "no GPU here whose architecture to take", "--arch sm_90"),
    ],
)
def test_refusals(args: list[str], message: str, hint: str | None, tileinfer) -> None:
    if not args and _has_gpu():
        pytest.skip("the GPU here is the default")
    result = tileinfer("kernels", "compile", *args)
    assert (result.code, result.out) == (2, "")
    assert message in result.err
    assert hint is None or hint in result.err
    assert len(result.err.splitlines()) <= 2


def test_a_shape_that_the_kernels_do_not_take(tileinfer, hello: Path) -> None:
    result = tileinfer("kernels", "compile", "--arch", "sm_90", "--model", hello)
    assert result.code == 7
    assert result.err.startswith("error: the CUDA kernels do not take")


@pytest.mark.parametrize("name", ["Qwen3-0.6B", "qwen3:0.6b", "Qwen/Qwen3-0.6B"])
def test_a_model_by_any_of_its_names(name: str, tileinfer) -> None:
    result = tileinfer("kernels", "list", "--arch", "sm_80", "--model", name, "--json")
    assert result.code == 0
    assert {model for kernel in json.loads(result.out)["sm_80"] for model in kernel["models"]} == {
        name if name != "qwen3:0.6b" else "Qwen/Qwen3-0.6B"
    }


def test_the_cache_is_listed_limited_and_cleared(tileinfer, tiny: Path, cache: str, tmp_path: Path) -> None:
    where = ("--cache-dir", tmp_path / "kernels")
    shutil.copytree(cache, tmp_path / "kernels")  # what the tests before have compiled
    done = tileinfer("kernels", "compile", "--arch", "sm_80", "--model", tiny, "-q", *where, timeout=200)
    assert done.code == 0, done.err
    document = json.loads(tileinfer("kernels", "cache", "--json", *where).out)
    assert document["location"] == str(tmp_path / "kernels")
    assert document["settings"]["cache_dir"]["origin"] == "--cache-dir"
    assert document["settings"]["cache_size_bytes"] == {"value": 2**31, "origin": "default"}
    entries = document["entries"]
    assert {entry["target"] for entry in entries} == {"sm_80"}
    assert {entry["store"] for entry in entries} == {"cuda-tile", "tileinfer"}
    assert all(entry["compiler"].startswith("tileiras 13.") for entry in entries)
    assert "rms_norm_kernel" in {entry["kernel"] for entry in entries}
    assert document["size_bytes"] == sum(entry["size"] for entry in entries) > 2**20

    small = {"TILEINFER_CACHE_SIZE_BYTES": str(2**20)}
    trimmed = tileinfer("kernels", "cache", "--trim", *where, **small)
    assert trimmed.code == 0
    assert trimmed.err.startswith("removed ")
    heading, *settings = trimmed.out.splitlines()[:5]
    assert heading.endswith("of 1.0 MB")
    assert [line.split() for line in settings][3] == ["cache_size_bytes", "1048576", "TILEINFER_CACHE_SIZE_BYTES"]
    assert sum(e["size"] for e in json.loads(tileinfer("kernels", "cache", "--json", *where).out)["entries"]) <= 2**20
    cleared = tileinfer("kernels", "cache", "--clear", "--json", *where)
    assert json.loads(cleared.out)["entries"] == []


def test_no_cache_at_all(tileinfer, tmp_path: Path) -> None:
    result = tileinfer("kernels", "cache", "--no-disk-cache", "--cache-dir", tmp_path / "none")
    assert (result.code, result.err) == (0, "")
    assert result.out.splitlines()[0].endswith("none: 0 compiled kernels, 0 B of 2.1 GB")
    assert result.out.splitlines()[2].split() == ["disk_cache", "off", "--no-disk-cache"]
    refused = tileinfer("kernels", "cache", "--clear", "--trim")
    assert refused.code == 2


def test_a_kernel_that_takes_too_long(tileinfer, tiny: Path, tmp_path: Path) -> None:
    limit = {"TILEINFER_COMPILER_TIMEOUT_SECONDS": "0.001", "TILEINFER_CACHE_DIR": str(tmp_path / "empty")}
    result = tileinfer("kernels", "compile", "--arch", "sm_80", "--model", tiny, "-q", **limit)
    assert result.code == 8
    message, hint = result.err.splitlines()
    assert message.startswith("error: the compiler took longer than 0.001 s over ")
    assert hint == "  --compiler-timeout-seconds gives it more time"


def _has_gpu() -> bool:
    from tileinfer_core.kernel_tools import this_gpu

    return this_gpu() is not None


def test_probes_are_listed_and_run_without_a_gpu(tileinfer, tmp_path: Path) -> None:
    listed = tileinfer("kernels", "probe", "--list")
    assert listed.code == 0
    assert "padding" in listed.out
    where = ("--arch", "sm_80", "--save", tmp_path / "code", "--cache-dir", tmp_path / "cache")
    shown = tileinfer("kernels", "probe", "helpers", "-q", *where, timeout=200)
    assert (shown.code, shown.err.splitlines()[-1:]) == (0, [f"Tile IR and SASS of every variant: {tmp_path / 'code'}"])
    lines = shown.out.splitlines()
    assert lines[0] == "helpers: Do helper functions and closures cost anything?"
    assert lines[2].split()[:4] == ["VARIANT", "IR", "CODE", "REGISTERS"]
    assert len(lines) == 9
    [result] = json.loads(tileinfer("kernels", "probe", "helpers", "--json", "-q", *where).out)
    assert result["compared"] == 4
    assert [row["ir"] for row in result["variants"][:3]] == ["A", "A", "A"]
    assert all(row["times_us"] is None for row in result["variants"])
    assert (tmp_path / "code/sm_80/helpers/report.py").is_file()
    assert (tmp_path / "code/sm_80/helpers/closure/closure.tileir").is_file()
    refused = tileinfer("kernels", "probe", "nothing", "--arch", "sm_90")
    assert refused.code == 2
    assert refused.err.startswith("error: no probe 'nothing'; known: dependent_launch, ")


def test_a_kernel_is_explained(tileinfer) -> None:
    arguments = ("kernels", "explain", "rms_norm", "--arch", "sm_90", "-m", "Qwen3-4B")
    asked = ("--launch", "x=float32[511,2560] y=bfloat16[511,2560]", "--launch", "PDL=true")
    [found] = json.loads(tileinfer(*arguments, *asked, "--json").out)
    assert found["kernel"] == "rms_norm_kernel"
    assert [form["against"] for form in found["specialisations"]] == [None, 1]
    assert found["specialisations"][1]["differs"][0] == "x: length of axis 0 1 (constant), there divisible by 16"
    new, same = found["launches"]
    assert new["same_as"] is None
    assert new["differs"][0] == "x: length of axis 0 not divisible by 16, there divisible by 16"
    assert same["same_as"] == 1
    assert same["differs"] == []
    text = tileinfer(*arguments, *asked).out
    assert "a new form, would be compiled" in text
    assert "   form 1\n" in text
    wrong = tileinfer(*arguments, "--launch", "q=float32[1]")
    assert wrong.code == 2
    assert "is no argument of rms_norm_kernel; known: x, gain, y" in wrong.err
    assert tileinfer("kernels", "explain", "rmsnorm", "--arch", "sm_90").code == 2


def test_a_census_without_a_gpu(tileinfer, tiny: Path, cache: str, tmp_path: Path) -> None:
    arguments = ("kernels", "census", "--arch", "sm_80", "-q", "--cache-dir", cache)
    shown = tileinfer(*arguments, "-m", tiny, "--svg", tmp_path / "step.svg", timeout=200)
    assert shown.code == 0, shown.err
    lines = shown.out.splitlines()
    assert lines[0].endswith("decode of 1 token, context 512; sm_80, not timed")
    assert lines[1].split() == ["LAUNCHES", "KERNEL", "GRID", "MB", "REGISTERS", "SHARED", "SPILLS", "CONFIGURATION"]
    assert (tmp_path / "step.svg").read_text().startswith("<svg ")
    [found] = json.loads(tileinfer(*arguments, "--random-weights", tiny / "config.json", "--json", timeout=200).out)
    assert found["total_us"] is None
    assert len(found["kernels"]) > 10
    assert all(kernel["registers"] > 0 for kernel in found["kernels"])
    refused = tileinfer(*arguments, "-m", tiny, "--step", "verify", "--tokens", "20")
    assert refused.code == 2
    assert "a verify step takes 1 to 8 tokens, found 20" in refused.err
