"""PyTorch, where it is installed, is not imported by a start: it costs seconds, and swallows a Ctrl-C."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import sys
import kernels.compile
assert "torch" not in sys.modules
from kernels.without_torch import without_torch
import torch
with without_torch():
    import torch as again
assert again is torch and sys.modules["torch"] is torch
"""


def test_loading_the_compiler_does_not_import_it(tmp_path: Path) -> None:
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("import sys\nprint('imported')\n")
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "imported\n"), done.stderr  # by the script's own import


def test_a_failing_block_leaves_no_trace() -> None:
    from kernels.without_torch import without_torch

    with pytest.raises(KeyError), without_torch():
        raise KeyError
    assert sys.modules.get("torch", "absent") is not None
