"""Who may import whom: tileinfer_cli → tileinfer_core → kernels, and each heavy library in its one place.

Reads the import statements of every file, those inside functions too. A rule here is broken only by changing this
file, with a reason.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OURS = ("tileinfer_cli", "tileinfer_core", "kernels")

CLI_LIBRARIES = {"typer", "rich", "prompt_toolkit", "tileinfer_cli", "tileinfer_core"}
CORE_LIBRARIES = {
    "numpy",
    "ml_dtypes",
    "safetensors",
    "tokenizers",
    "jinja2",
    "huggingface_hub",
    "gguf",
    "cupy",
    "kernels",
    "tileinfer_core",
}
# cutile_cache is part of the cuda-tile distribution: the compiler tool keeps its cubins where cuda-tile does.
KERNEL_LIBRARIES = {"cuda", "cutile_cache", "numpy", "ml_dtypes", "kernels"}
# The tools that run or compile kernels on the host; a kernel's own file has cuda.tile and the standard library.
NUMPY_IN_KERNELS = ("interpreter", "compile", "catalogue", "lab")


def python_files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imported_modules(source: str) -> set[str]:
    """Full dotted names of everything a file imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide which package is meant"
            found.add(node.module or "")
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def libraries(path: Path) -> set[str]:
    """Top-level packages outside the standard library."""
    tops = {name.split(".")[0] for name in imported_modules(path.read_text("utf-8"))}
    return tops - sys.stdlib_module_names


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def offenders(package: str, allowed: set[str]) -> dict[str, set[str]]:
    found = {name_of(path): libraries(path) - allowed for path in python_files(package)}
    return {name: extra for name, extra in found.items() if extra}


@pytest.mark.parametrize(
    ("package", "allowed"),
    [("tileinfer_cli", CLI_LIBRARIES), ("tileinfer_core", CORE_LIBRARIES), ("kernels", KERNEL_LIBRARIES)],
)
def test_packages_import_what_their_layer_may(package: str, allowed: set[str]) -> None:
    assert offenders(package, allowed) == {}


def importers(library: str) -> set[str]:
    return {name_of(path) for package in OURS for path in python_files(package) if library in libraries(path)}


def test_only_render_imports_rich() -> None:
    assert importers("rich") == {"tileinfer_cli/render.py"}


def test_ml_dtypes_has_one_importer_in_each_layer() -> None:
    assert importers("ml_dtypes") <= {"tileinfer_core/dtypes.py", "kernels/interpreter/dtypes.py"}


@pytest.mark.parametrize(("library", "prefix"), [("cupy", None), ("kernels", "tileinfer_core/kernel_")])
def test_cupy_and_kernels_stay_in_the_cuda_backend(library: str, prefix: str | None) -> None:
    """Beside it, the kernel_….py files serve `tileinfer kernels`, on machines without a GPU."""
    core = {name for name in importers(library) if name.startswith("tileinfer_core/")}
    others = {name for name in core if not name.startswith("tileinfer_core/backends/cuda/")}
    assert {name for name in others if prefix is None or not name.startswith(prefix)} == set()


def test_numpy_stays_out_of_kernel_files() -> None:
    users = {name for name in importers("numpy") if name.startswith("kernels/")}
    assert {name for name in users if not name.removeprefix("kernels/").startswith(NUMPY_IN_KERNELS)} == set()


def test_the_cubin_cache_is_the_compiler_s_alone() -> None:
    assert importers("cutile_cache") <= {"kernels/compile.py", "kernels/cache.py"}


def test_command_files_are_short() -> None:
    long = {
        name_of(path): count
        for path in python_files("tileinfer_cli/commands")
        if (count := len(path.read_text("utf-8").splitlines())) > 80
    }
    assert long == {}


@pytest.mark.parametrize(
    ("line", "module"),
    [
        ("import numpy as np", "numpy"),
        ("def f():\n    from rich.table import Table", "rich.table"),
        ("if True:\n    import cuda.tile as ct", "cuda.tile"),
    ],
)
def test_the_reader_of_imports_sees_them(line: str, module: str) -> None:
    assert module in imported_modules(line)
