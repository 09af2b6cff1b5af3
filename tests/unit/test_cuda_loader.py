"""Weights on the device: joined, interleaved, in the kernels' types, in bounded pieces; damaged files are named."""

from __future__ import annotations

import numpy as np
import pytest

from tests.checkpoints import int8_tensors, write_int8_variant, write_variant
from tests.reference.tiny_models import tensors
from tileinfer_core.backends.cuda import loader
from tileinfer_core.backends.cuda.interpreted import InterpretedDevice
from tileinfer_core.backends.cuda.loader import allocate, load_weights, random_weights, storage_dtype
from tileinfer_core.config import ModelConfig
from tileinfer_core.errors import DamagedModelError
from tileinfer_core.models.define import define_from_files
from tileinfer_core.progress import silent
from tileinfer_core.weights import WeightFiles

NAME = "llama-biases"


def load(folder, on_progress=silent):
    files = WeightFiles.open(folder)
    model, _ = define_from_files(ModelConfig.load(folder), files)
    device = InterpretedDevice()
    half = storage_dtype(files)
    arrays = allocate(model, device, half)
    load_weights(model, files, arrays, device, on_progress)
    return model, arrays, half


@pytest.mark.parametrize(("stored", "half"), [("BF16", "bfloat16"), ("F16", "float16"), ("F32", "bfloat16")])
def test_arrays_are_joined_and_gate_and_up_interleaved(tmp_path, stored, half):
    _, arrays, found = load(write_variant(tmp_path, NAME, dtype=stored))
    assert found == half
    source, layer = tensors(NAME), "model.layers.1."
    qkv = np.concatenate([source[f"{layer}self_attn.{x}_proj.weight"] for x in "qkv"])
    np.testing.assert_array_equal(arrays[f"{layer}qkv_proj.weight"].astype(np.float32), qkv)
    both = arrays[f"{layer}gate_up_proj.weight"].astype(np.float32)
    np.testing.assert_array_equal(both[0::2], source[f"{layer}mlp.gate_proj.weight"])
    np.testing.assert_array_equal(both[1::2], source[f"{layer}mlp.up_proj.weight"])
    bias = arrays[f"{layer}gate_up_proj.bias"].astype(np.float32)
    np.testing.assert_array_equal(bias[1::2], source[f"{layer}mlp.up_proj.bias"])
    assert str(arrays[f"{layer}qkv_proj.weight"].dtype) == half
    assert str(arrays[f"{layer}input_layernorm.weight"].dtype) == "float32"


def test_small_pieces_give_the_same_arrays(tmp_path, monkeypatch):
    folder = write_variant(tmp_path, NAME, dtype="BF16")
    _, whole, _ = load(folder)
    monkeypatch.setattr(loader, "STAGE_BYTES", 500)
    monkeypatch.setattr(loader, "READ_BYTES", 100)
    events = []
    _, pieces, _ = load(folder, events.append)
    for name, array in whole.items():
        np.testing.assert_array_equal(array, pieces[name], err_msg=name)
    done = [event.done for event in events]
    assert len(done) > 100
    assert done == sorted(done)
    assert done[-1] == events[-1].total == WeightFiles.open(folder).total_bytes


def test_host_memory_is_two_stages_of_bounded_size(tmp_path, monkeypatch):
    class Measuring(InterpretedDevice):
        taken: list[int] = []  # noqa: RUF012

        def pinned(self, shape, dtype):
            self.taken.append(int(np.prod(shape)) * np.dtype(dtype).itemsize)
            return super().pinned(shape, dtype)

    monkeypatch.setattr(loader, "STAGE_BYTES", 4096)
    monkeypatch.setattr("tests.unit.test_cuda_loader.InterpretedDevice", Measuring)
    load(write_variant(tmp_path, NAME, dtype="BF16"))
    assert len(Measuring.taken) == 2
    assert max(Measuring.taken) <= 4096


def test_a_file_that_shrank_since_its_header_was_read_is_named(tmp_path):
    folder = write_variant(tmp_path, NAME, dtype="BF16")
    files = WeightFiles.open(folder)
    model, _ = define_from_files(ModelConfig.load(folder), files)
    device = InterpretedDevice()
    arrays = allocate(model, device, "bfloat16")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(DamagedModelError, match=r"model\.safetensors: cut off.*1,000 more bytes"):
        load_weights(model, files, arrays, device, silent)


def test_noise_fills_every_array(tmp_path):
    model, _, _ = load(write_variant(tmp_path, NAME, dtype="BF16"))
    device = InterpretedDevice()
    arrays = allocate(model, device, "bfloat16")
    random_weights(model, arrays, device)
    for name, array in arrays.items():
        values = array.astype(np.float32)
        assert np.isfinite(values).all(), name
        assert values.std() > 0, name


@pytest.mark.parametrize("piece", [None, 300])
@pytest.mark.parametrize("layout", ["int-quantized", "pack-quantized"])
def test_int8_weights_and_scales_are_joined_and_interleaved_alike(tmp_path, monkeypatch, layout, piece):
    if piece:
        monkeypatch.setattr(loader, "STAGE_BYTES", piece)
        monkeypatch.setattr(loader, "READ_BYTES", piece // 3)
    _, arrays, half = load(write_int8_variant(tmp_path, "qwen3-untied", layers=16, layout=layout))
    assert half == "bfloat16"
    stored, layer = int8_tensors(tensors("qwen3-untied"), 16, None), "model.layers.1."
    for kind in ("weight", "weight_scale"):
        qkv = np.concatenate([stored[f"{layer}self_attn.{x}_proj.{kind}"].astype(np.float32) for x in "qkv"])
        np.testing.assert_array_equal(arrays[f"{layer}qkv_proj.{kind}"].astype(np.float32), qkv)
        both = arrays[f"{layer}gate_up_proj.{kind}"].astype(np.float32)
        np.testing.assert_array_equal(both[0::2], stored[f"{layer}mlp.gate_proj.{kind}"].astype(np.float32))
        np.testing.assert_array_equal(both[1::2], stored[f"{layer}mlp.up_proj.{kind}"].astype(np.float32))
    assert str(arrays[f"{layer}down_proj.weight"].dtype) == "int8"
    assert str(arrays[f"{layer}down_proj.weight_scale"].dtype) == "float32"


def test_noise_of_an_int8_model_is_as_wide_as_any(tmp_path):
    model, _, _ = load(write_int8_variant(tmp_path, "qwen3-tied", head=32))
    device = InterpretedDevice()
    arrays = allocate(model, device, "bfloat16")
    random_weights(model, arrays, device)
    name = "model.layers.0.gate_up_proj.weight"
    assert len(np.unique(arrays[name])) > 100
    assert (arrays[name + "_scale"] > 0).all()
    assert 0.015 < (arrays[name] * arrays[name + "_scale"]).std() < 0.025
    assert arrays["model.embed_tokens.weight_scale"].shape == (160, 2)
