"""INT8 models on the NumPy backend: scale · int8 bit for bit, and logits as those of the dequantised model."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.checkpoints import (
    int8_tensors,
    load_runner,
    packed,
    packed_words,
    quantization_config,
    write_checkpoint,
    write_int8_variant,
)
from tests.int8_oracle import dequantise, quantise
from tests.reference.tiny_models import VARIANTS, prompt, tensors
from tileinfer_core.backends import numpy_weights
from tileinfer_core.backends.numpy_weights import load_arrays
from tileinfer_core.completeness import quantization
from tileinfer_core.config import ModelConfig
from tileinfer_core.errors import DamagedModelError, ModelError, UnsupportedModelError
from tileinfer_core.models.define import define_from_files
from tileinfer_core.progress import silent
from tileinfer_core.quantization import Int8
from tileinfer_core.weights import WeightFiles

TIED, UNTIED, BIASED = "llama-tied", "qwen3-untied", "llama-biases"


def define(folder):
    files = WeightFiles.open(folder)
    return define_from_files(ModelConfig.load(folder), files)[0], files


def dequantised(name, layers, head):
    """The model's float32 tensors after quantisation and back, by the oracle."""
    stored = int8_tensors(tensors(name), layers, head)
    return {
        key: dequantise(array, stored[key + "_scale"].astype(np.float32)) if array.dtype == np.int8 else array
        for key, array in stored.items()
        if not key.endswith("_scale")
    }


@pytest.mark.parametrize("layout", ["int-quantized", "pack-quantized"])
@pytest.mark.parametrize(("layers", "head"), [(None, None), (16, None), (None, 8), (8, 32)])
@pytest.mark.parametrize("name", [TIED, UNTIED])
def test_weights_are_the_oracles_bit_for_bit(tmp_path, name, layers, head, layout):
    model, files = define(write_int8_variant(tmp_path, name, layers=layers, head=head, layout=layout))
    arrays = load_arrays(model.parameters, files, silent)
    assert not any("scale" in key for key in arrays)
    expected = dequantised(name, layers, head)
    for parameter in model.parameters:
        if not parameter.is_scale:
            joined = np.concatenate([expected[part.name] for part in parameter.parts])
            assert np.array_equal(arrays[parameter.name], joined), parameter.name


@pytest.mark.parametrize("layout", ["int-quantized", "pack-quantized"])
def test_small_pieces_give_the_same_weights(tmp_path, monkeypatch, layout):
    model, files = define(write_int8_variant(tmp_path, UNTIED, layers=16, head=8, layout=layout))
    whole = load_arrays(model.parameters, files, silent)
    monkeypatch.setattr(numpy_weights, "BLOCK", 300)
    pieces = load_arrays(model.parameters, files, silent)
    assert all(np.array_equal(whole[name], pieces[name]) for name in whole)


@pytest.mark.parametrize("name", [TIED, BIASED, UNTIED])
def test_logits_are_those_of_the_dequantised_model(tmp_path, name):
    int8 = load_runner(write_int8_variant(tmp_path / "int8", name, head=16, dtype="F32"))
    plain = load_runner(write_checkpoint(tmp_path / "plain", VARIANTS[name], dequantised(name, None, 16)))
    ids = prompt(name, 12)
    np.testing.assert_array_equal(int8.logits(int8.new_cache(32), ids), plain.logits(plain.new_cache(32), ids))


# Packed weights


def test_packed_weights_are_read_as_the_int8_they_are(tmp_path):
    """By the names and shapes of plain ones, -128 and 127 among them; other words of the file stay what they are."""
    q = np.arange(-128, 128, dtype=np.int8).reshape(16, 16)
    arrays = {
        "a.weight_packed": packed_words(q),
        "a.weight_shape": np.array([16, 16]),
        "b.weight_packed": packed_words(q),
        "flat.weight_packed": np.zeros(3, np.int32),
        "float.weight_packed": np.zeros((2, 2), np.float32),
    }
    files = WeightFiles.open(write_checkpoint(tmp_path, {}, arrays))
    assert files.names == {"a.weight", "b.weight", *(name for name in arrays if name[0] == "f")}
    for name in ("a.weight", "b.weight"):
        info = files.info(name)
        assert (info.shape, info.dtype, info.bytes, info.packed) == ((16, 16), "int8", 256, True)
        np.testing.assert_array_equal(files.read(name), q)
        np.testing.assert_array_equal(files.read(name), q)  # the file is not what was flipped


def test_a_weight_that_is_there_twice_is_damage(tmp_path):
    stored = int8_tensors(tensors(TIED), None, None)
    name = "model.layers.0.mlp.up_proj.weight"
    arrays = packed(stored) | {name: stored[name]}
    config = {**VARIANTS[TIED], "quantization_config": quantization_config({"Linear": None, "Embedding": None})}
    with pytest.raises(DamagedModelError, match=r"up_proj\.weight is there twice, once packed"):
        define(write_checkpoint(tmp_path, config, arrays))


def test_packed_weights_of_another_shape_are_refused(tmp_path):
    folder = write_int8_variant(tmp_path, TIED, layout="pack-quantized")
    config = json.loads((folder / "config.json").read_text())
    with pytest.raises(ModelError, match=r"gate_proj\.weight has \[112, 64\], expected \[96, 64\]"):
        define(rewritten(folder, intermediate_size=config["intermediate_size"] - 16))


@pytest.mark.parametrize("words", [slice(None, None, 2), slice(None, -1)])
def test_packed_weights_of_fewer_bits_or_with_padding_are_refused_by_name(tmp_path, words):
    """By the config where it says so; else by the tensors, which have too few columns or too many."""
    stored = packed(int8_tensors(tensors(TIED), None, None))
    name = "model.layers.0.mlp.up_proj.weight_packed"
    stored[name] = stored[name][:, words]
    columns = 4 * stored[name].shape[1]
    section = quantization_config({"Linear": None, "Embedding": None}, format="pack-quantized")
    folder = write_checkpoint(tmp_path, {**VARIANTS[TIED], "quantization_config": section}, stored)
    with pytest.raises(ModelError, match=rf"up_proj\.weight has \[112, {columns}\], expected \[112, 64\]"):
        define(folder)
    section["config_groups"]["group_0"]["weights"]["num_bits"] = 4
    with pytest.raises(UnsupportedModelError, match="weights of 4 bits"):
        define(rewritten(folder, quantization_config=section))


def test_a_packed_head_beside_a_tied_embedding(tmp_path):
    """Stored again although it is tied: an equal one is ignored, another one is the head."""
    stored = int8_tensors(tensors(TIED), None, None)
    again = {name.replace("model.embed_tokens", "lm_head"): stored[name] for name in stored if "embed" in name}
    section = quantization_config({"Linear": None, "Embedding": None}, format="pack-quantized")
    config = {**VARIANTS[TIED], "quantization_config": section}
    model, _ = define(write_checkpoint(tmp_path / "equal", config, packed(stored | again)))
    assert model.tied
    again["lm_head.weight"] = -again["lm_head.weight"]
    model, _ = define(write_checkpoint(tmp_path / "other", config, packed(stored | again)))
    assert not model.tied
    assert model.int8("lm_head") == Int8()


@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
def test_scales_of_every_float_type(tmp_path, dtype):
    arrays = int8_tensors(tensors(TIED), None, None)
    arrays = {name: array.astype(dtype) if name.endswith("_scale") else array for name, array in arrays.items()}
    config = {**VARIANTS[TIED], "quantization_config": quantization_config({"Linear": None, "Embedding": None})}
    model, files = define(write_checkpoint(tmp_path, config, arrays, "BF16"))
    name = "model.layers.1.mlp.down_proj.weight"
    expected = dequantise(arrays[name], arrays[name + "_scale"].astype(np.float32))
    loaded = load_arrays(model.parameters, files, silent)
    assert np.array_equal(loaded["model.layers.1.down_proj.weight"], expected)


def test_a_definition_says_which_products_are_int8(tmp_path):
    model, _ = define(write_int8_variant(tmp_path, UNTIED, layers=None, head=32))
    assert model.int8("qkv_proj", 0) == model.int8("down_proj", 2) == Int8()
    assert model.int8("lm_head") == model.int8("embedding") == Int8(32)
    names = [parameter.name for parameter in model.parameters]
    scale = model.parameters[names.index("model.layers.1.qkv_proj.weight") + 1]
    assert scale.name == "model.layers.1.qkv_proj.weight_scale"
    assert scale.is_scale
    assert scale.shape == (256, 1)


def test_part_of_a_model_may_be_int8(tmp_path):
    """The head left alone, as most quantised models on the Hub have it."""
    arrays = tensors(UNTIED)
    stored = int8_tensors(arrays, None, None)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        stored[name] = arrays[name]
        del stored[name + "_scale"]
    section = quantization_config({"Linear": None}, ignore=["lm_head"])
    folder = write_checkpoint(tmp_path, {**VARIANTS[UNTIED], "quantization_config": section}, stored, "BF16")
    model, files = define(folder)
    assert model.int8("lm_head") is None
    assert model.int8("o_proj", 1) == Int8()
    loaded = load_arrays(model.parameters, files, silent)
    assert np.array_equal(loaded["lm_head.weight"], arrays["lm_head.weight"])


def test_zero_points_that_are_zero_are_ignored_and_others_refused(tmp_path):
    arrays = int8_tensors(tensors(TIED), None, None)
    name = "model.layers.0.self_attn.o_proj.weight_zero_point"
    config = {**VARIANTS[TIED], "quantization_config": quantization_config({"Linear": None, "Embedding": None})}
    define(write_checkpoint(tmp_path / "zero", config, {**arrays, name: np.zeros((64, 1), np.int8)}))
    with pytest.raises(UnsupportedModelError, match=r"o_proj\.weight_zero_point is not zero"):
        define(write_checkpoint(tmp_path / "one", config, {**arrays, name: np.ones((64, 1), np.int8)}))


def rewritten(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def test_int8_tensors_without_a_quantization_config_are_refused(tmp_path):
    with pytest.raises(ModelError, match=r"22 of another type: model\.embed_tokens\.weight is int8, expected"):
        define(rewritten(write_int8_variant(tmp_path, TIED), quantization_config=None))


def test_a_quantization_config_without_int8_tensors_is_refused(tmp_path):
    config = {**VARIANTS[TIED], "quantization_config": quantization_config({"Linear": None})}
    with pytest.raises(ModelError, match=r"21 missing: .*weight_scale.* 21 of another type: .* expected int8"):
        define(write_checkpoint(tmp_path, config, tensors(TIED)))


def test_a_frozen_model_that_is_in_half_precision_is_refused(tmp_path):
    """Rounded weights that were never made INT8; the config alone does not tell."""
    section = quantization_config({"Linear": None}, quantization_status="frozen")
    arrays = int8_tensors(tensors(TIED), None, None)
    arrays = {name: array.astype(np.float32) if array.dtype == np.int8 else array for name, array in arrays.items()}
    with pytest.raises(ModelError, match=r"21 of another type: .* is bfloat16, expected int8"):
        define(write_checkpoint(tmp_path, {**VARIANTS[TIED], "quantization_config": section}, arrays, "BF16"))


def test_the_sections_name_in_older_files(tmp_path):
    folder = write_int8_variant(tmp_path, TIED, head=16)
    config = json.loads((folder / "config.json").read_text())
    config["compression_config"] = config.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(config))
    model, _ = define(folder)
    assert (model.int8("lm_head"), model.int8("o_proj", 1)) == (Int8(16), Int8())
    assert quantization(folder) == "int8"


def test_scales_of_another_shape_are_refused(tmp_path):
    section = quantization_config({"Linear": 16, "Embedding": None})
    with pytest.raises(ModelError, match=r"weight_scale has \[64, 1\], expected \[64, 4\]"):
        define(rewritten(write_int8_variant(tmp_path, TIED), quantization_config=section))


def test_groups_that_do_not_divide_are_refused_with_both_numbers(tmp_path):
    section = quantization_config({"Linear": 48, "Embedding": None})
    with pytest.raises(UnsupportedModelError, match="groups of 48, which do not divide its 64 columns"):
        define(rewritten(write_int8_variant(tmp_path, TIED), quantization_config=section))


def test_one_product_has_one_format(tmp_path):
    section = quantization_config({"Linear": None, "Embedding": None}, ignore=["re:.*k_proj"])
    with pytest.raises(UnsupportedModelError, match=r"quantised differently: .*k_proj\.weight: not quantised"):
        define(rewritten(write_int8_variant(tmp_path, TIED), quantization_config=section))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_scale_that_is_not_finite_is_damage(tmp_path, bad):
    arrays = int8_tensors(tensors(TIED), None, None)
    name = "model.layers.2.mlp.gate_proj.weight_scale"
    arrays[name] = arrays[name].copy()
    arrays[name][5] = bad
    config = {**VARIANTS[TIED], "quantization_config": quantization_config({"Linear": None, "Embedding": None})}
    with pytest.raises(DamagedModelError, match=r"gate_proj\.weight_scale has values that are not finite"):
        define(write_checkpoint(tmp_path, config, arrays))


def test_the_oracle_never_uses_minus_128_and_rounds_half_to_even():
    scale = np.float32(0.5)
    weight = np.array([[127, 0.5, 1.5, 2.5, -0.5, -1.5, -127, 126.5]], np.float32) * scale
    q, scales = quantise(weight)
    assert scales[0, 0] == scale
    assert q.tolist() == [[127, 0, 2, 2, 0, -2, -127, 126]]
    q, scales = quantise(np.zeros((2, 8), np.float32))
    assert not q.any()
    assert (scales == 1).all()
