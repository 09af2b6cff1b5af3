"""What the command that compiles ahead compiles is what the engine launches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("cuda.tile")

from kernels.catalogue import entries
from tests.checkpoints import quantization_config, write_checkpoint, write_quantised
from tests.reference import tiny_models
from tileinfer_core import kernel_tools
from tileinfer_core.backends.base import LoadOptions
from tileinfer_core.backends.cuda import load
from tileinfer_core.backends.cuda.interpreted import InterpretedDevice
from tileinfer_core.backends.cuda.warmup import KernelWarmup
from tileinfer_core.config import ModelConfig
from tileinfer_core.models.define import define_from_files
from tileinfer_core.progress import silent
from tileinfer_core.settings import Settings
from tileinfer_core.store import Store
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
    runner = load.load_runner(model, files, device, LoadOptions(4096, 2048), silent)
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


FORMATS = {
    "rows": {"Linear": None, "Embedding": None},
    "rows, down and head in groups": {"re:.*down_proj": 64, "re:.*embed_tokens": 64, "Linear": None},
    "the head alone in half": {"Linear": 32},
    "groups everywhere, narrow ones": {"Linear": 16, "Embedding": 16},
}


@pytest.mark.parametrize(("kv", "context"), [("bf16", 2048), ("int8", 2048), ("int8", 1984)])
@pytest.mark.parametrize("formats", FORMATS.values(), ids=FORMATS)
def test_every_kernel_of_an_int8_model_is_compiled_ahead(
    formats: dict[str, int | None], kv: str, context: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its own config, whatever context and chunk the engine then has: 32 pages of two heads, or 33, say."""
    section = quantization_config(formats, ignore=["lm_head"] if "Embedding" not in formats else [])
    sizes = {"head_dim": 64, "intermediate_size": 192, "max_position_embeddings": 8192}
    folder = write_quantised(tmp_path / "model", "qwen3-untied", section, **sizes)
    monkeypatch.setattr(load, "KernelWarmup", NoWarmup)
    device = InterpretedDevice()
    files = WeightFiles.open(folder)
    model, _ = define_from_files(ModelConfig.load(folder), files)
    runner = load.load_runner(model, files, device, LoadOptions(context, 512, kv), silent)
    warmup = KernelWarmup(runner.plans, runner.bucket_ends, device, runner.buffers["length"], runner.prefill_chunk)
    needed = {record.identity(): record.name for record in warmup.records()}
    home = tmp_path / "home"
    store = Store.from_settings(Settings.load({"HOME": str(home)}, home / "absent.toml"))
    found = list(entries(device.arch, models=kernel_tools.chosen_models([str(folder)], store)))
    ahead = {entry.record.identity() for entry in found}
    assert [name for identity, name in needed.items() if identity not in ahead] == []
    assert any("int8" in name or "digits" in name for name in needed.values())
    names = {entry.record.name for entry in found}
    assert "linear_tokens_kernel" not in names  # what another model of this shape would launch
    assert {entry.models for entry in found} == {(str(folder),)}
