"""What the command that compiles ahead compiles is what the engine launches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("cuda.tile")

from kernels.catalogue import entries
from tests.checkpoints import write_checkpoint
from tests.reference import tiny_models
from tileinfer_core import kernel_tools
from tileinfer_core.backends.cuda import load
from tileinfer_core.backends.cuda.interpreted import InterpretedDevice
from tileinfer_core.backends.cuda.warmup import KernelWarmup
from tileinfer_core.config import ModelConfig
from tileinfer_core.models.define import define_from_files
from tileinfer_core.progress import silent
from tileinfer_core.weights import WeightFiles

if TYPE_CHECKING:
    from pathlib import Path


class NoWarmup:
    """In place of the thread that compiles while weights are read."""

    unkept = None

    def __init__(self, *_: Any) -> None: ...

    def start(self) -> None: ...

    def finish(self, _on_progress: Any) -> float:
        return 0.0


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
@pytest.mark.parametrize("variant", ["qwen3-tied", "llama-tied", "llama-biases"])
def test_every_kernel_of_the_engine_is_compiled_ahead(
    variant: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {**tiny_models.VARIANTS[variant], "head_dim": 64, "mlp_bias": False}
    arrays = {t: tiny_models._values(t, shape) for t, shape in tiny_models.shapes(config).items()}
    files = WeightFiles.open(write_checkpoint(tmp_path / "model", config, arrays, dtype=dtype))
    model, _ = define_from_files(ModelConfig.load(files.folder), files)
    monkeypatch.setattr(load, "KernelWarmup", NoWarmup)
    device = InterpretedDevice()
    runner = load.load_runner(model, files, device, context=4096, on_progress=silent, prefill_chunk=2048)
    length, chunk = runner.buffers["length"], runner.prefill_chunk
    needed = {
        record.identity(): record
        for record in KernelWarmup(runner.plans, runner.bucket_ends, device, length, chunk).records()
    }
    shape = ("tiny", kernel_tools.shape_of(model.config), "bfloat16" if dtype == "BF16" else "float16")
    ahead = {entry.record.identity() for entry in entries(device.arch, models=[shape])}
    missing = [identity[1:] for identity in needed if identity not in ahead]
    assert len(needed) > 20
    assert missing == []
