"""A config and the weight files' headers make a model, or say everything that does not fit."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.checkpoints import load_runner, write_checkpoint, write_variant
from tests.reference.tiny_models import VARIANTS, prompt, tensors
from tileinfer_core.config import ModelConfig
from tileinfer_core.engine import Engine
from tileinfer_core.errors import DamagedModelError, ModelError, UnsupportedModelError
from tileinfer_core.models import MODEL_TYPES
from tileinfer_core.models.define import define_from_files, define_model
from tileinfer_core.weights import WeightFiles

TIED, UNTIED = "llama-tied", "qwen3-untied"


def define(folder):
    return define_from_files(ModelConfig.load(folder), WeightFiles.open(folder))


def logits(folder, name):
    runner = load_runner(folder)
    return runner.logits(runner.new_cache(64), prompt(name, 9))


# Tied embeddings


def test_a_tied_model_without_lm_head_uses_the_embedding(tmp_path):
    model, warnings = define(write_variant(tmp_path, TIED))
    assert model.tied
    assert not warnings
    assert "lm_head.weight" not in {parameter.name for parameter in model.parameters}


def test_an_equal_stored_lm_head_is_ignored(tmp_path):
    arrays = tensors(TIED)
    write_checkpoint(tmp_path, VARIANTS[TIED], {**arrays, "lm_head.weight": arrays["model.embed_tokens.weight"]})
    model, warnings = define(tmp_path)
    assert model.tied
    assert not warnings


def test_a_different_stored_lm_head_is_used_and_reported(tmp_path):
    arrays = tensors(TIED)
    head = arrays["model.embed_tokens.weight"][::-1].copy()
    write_checkpoint(tmp_path / "both", VARIANTS[TIED], {**arrays, "lm_head.weight": head})
    model, warnings = define(tmp_path / "both")
    assert not model.tied
    assert len(warnings) == 1
    assert "the stored one is used" in warnings[0]
    plain = logits(write_variant(tmp_path / "tied", TIED), TIED)
    np.testing.assert_allclose(logits(tmp_path / "both", TIED), plain[:, ::-1], atol=1e-5)


def test_an_untied_model_without_lm_head_is_incomplete(tmp_path):
    arrays = tensors(UNTIED)
    del arrays["lm_head.weight"]
    write_checkpoint(tmp_path, VARIANTS[UNTIED], arrays)
    with pytest.raises(ModelError, match=r"1 missing: lm_head\.weight"):
        define(tmp_path)


# What does not fit


def test_a_head_dim_that_q_proj_contradicts_is_said_in_those_words(tmp_path):
    config = {**VARIANTS["llama-head-dim"], "head_dim": None}
    write_checkpoint(tmp_path, config, tensors("llama-head-dim"))
    with pytest.raises(DamagedModelError, match=r"head_dim is 16 by config\.json .* q_proj has 96 rows") as caught:
        define(tmp_path)
    assert "head_dim 24" in caught.value.hint


def test_everything_that_does_not_fit_is_said_at_once(tmp_path):
    arrays = tensors(UNTIED)
    arrays["model.layers.1.mlp.up_proj.weight"] = arrays["model.layers.1.mlp.up_proj.weight"][:-1]
    del arrays["model.layers.2.self_attn.q_norm.weight"]
    arrays["model.layers.0.self_attn.sinks"] = np.zeros(4, np.float32)
    write_checkpoint(tmp_path, VARIANTS[UNTIED], arrays)
    with pytest.raises(ModelError) as caught:
        define(tmp_path)
    for part in ("1 missing", "q_norm", "1 unexpected", "sinks", "1 of another shape", "[111, 64], expected [112, 64]"):
        assert part in str(caught.value)


def test_a_bias_that_the_config_does_not_announce_is_unexpected(tmp_path):
    write_variant(tmp_path, "llama-biases", attention_bias=False)
    with pytest.raises(ModelError, match="12 unexpected"):
        define(tmp_path)


def test_rotary_buffers_of_old_exporters_are_left_alone(tmp_path):
    buffers = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": np.zeros(8, np.float32) for i in range(3)}
    write_checkpoint(tmp_path, VARIANTS[TIED], {**tensors(TIED), **buffers})
    assert not define(tmp_path)[1]


def test_quantised_storage_is_refused(tmp_path):
    write_checkpoint(tmp_path, VARIANTS[TIED], tensors(TIED), dtype="I8")
    with pytest.raises(ModelError, match="of another type"):
        define(tmp_path)


@pytest.mark.parametrize(
    ("changes", "named"), [({"model_type": "gemma2"}, "'gemma2'"), ({"final_logit_softcapping": 30.0}, "softcapping")]
)
def test_what_is_not_supported_is_refused_before_a_weight_is_looked_for(tmp_path, changes, named):
    (tmp_path / "config.json").write_text(json.dumps({**VARIANTS[TIED], **changes}))
    with pytest.raises(UnsupportedModelError, match=named) as caught:
        Engine.load(tmp_path)
    assert "supported" in caught.value.hint


# What a model declares


@pytest.mark.parametrize("name", VARIANTS)
def test_the_parameters_cover_every_stored_tensor_once(name):
    model = define_model(ModelConfig.from_dict(VARIANTS[name]), tied=bool(VARIANTS[name].get("tie_word_embeddings")))
    specs = [spec for parameter in model.parameters for spec in parameter.parts]
    stored = {key: value.shape for key, value in tensors(name).items() if ".vision_tokenizer." not in key}
    assert {spec.name: spec.shape for spec in specs} == stored
    assert len({parameter.name for parameter in model.parameters}) == len(model.parameters)


def test_joined_parts_are_stated_in_order():
    model = define_model(ModelConfig.from_dict(VARIANTS["qwen3-tied"]), tied=True)
    shapes = {parameter.name: parameter.shape for parameter in model.parameters}
    assert shapes["model.layers.0.qkv_proj.weight"] == (4 * 32 + 2 * 2 * 32, 64)
    assert shapes["model.layers.0.gate_up_proj.weight"] == (2 * 112, 64)
    joined = next(p for p in model.parameters if p.name == "model.layers.0.qkv_proj.weight")
    assert [part.name.split(".")[-2] for part in joined.parts] == ["q_proj", "k_proj", "v_proj"]


def test_the_structure_says_what_a_planning_backend_must_know():
    llama = define_model(ModelConfig.from_dict(VARIANTS["llama-biases"]), tied=False).structure
    qwen3 = define_model(ModelConfig.from_dict(VARIANTS["qwen3-untied"]), tied=False).structure
    qwen2 = define_model(ModelConfig.from_dict(VARIANTS["qwen2-untied"]), tied=False).structure
    apertus = define_model(ModelConfig.from_dict(VARIANTS["apertus-biases"]), tied=False).structure
    assert (llama.qk_norm, llama.qkv_bias, llama.o_bias, llama.mlp_bias) == (False, True, True, True)
    assert (qwen3.qk_norm, qwen3.qkv_bias, qwen3.o_bias, qwen3.mlp_bias) == (True, True, True, False)
    assert (qwen2.qk_norm, qwen2.qkv_bias, qwen2.o_bias, qwen2.mlp_bias) == (False, True, False, False)
    assert (apertus.qk_norm, apertus.mlp, apertus.activation) == (True, "plain", "xielu")
    assert (qwen3.mlp, qwen3.activation, qwen3.norm_placement) == ("gated", "silu", "pre")


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_every_registered_model_type_has_goldens(model_type):
    assert [name for name in VARIANTS if VARIANTS[name]["model_type"] == model_type]


def test_an_apertus_without_stored_constants_has_the_usual_ones(tmp_path):
    name = "apertus-llama3"
    arrays = {k: v for k, v in tensors(name).items() if not k.endswith(("act_fn.beta", "act_fn.eps"))}
    without = logits(write_checkpoint(tmp_path / "without", VARIANTS[name], arrays), name)
    np.testing.assert_allclose(without, logits(write_variant(tmp_path / "with", name), name), rtol=0, atol=1e-5)


def test_of_a_model_that_also_sees_only_the_text_is_read(tmp_path):
    name = "apertus1p5"
    model, warnings = define(write_variant(tmp_path / "whole", name))
    assert not warnings
    shapes = {parameter.name: parameter.shape for parameter in model.parameters}
    assert shapes["model.embed_tokens.weight"] == shapes["lm_head.weight"] == (160, 64)
    assert model.parameters[0].parts[0].name == "model.language_model.embed_tokens.weight"
    arrays = tensors(name)
    write_checkpoint(tmp_path / "more", VARIANTS[name], {**arrays, "model.video.weight": np.zeros(4, np.float32)})
    with pytest.raises(ModelError, match=r"1 unexpected: model\.video\.weight"):
        define(tmp_path / "more")
    arrays["model.language_model.embed_tokens.weight"] = arrays["model.language_model.embed_tokens.weight"][:160]
    write_checkpoint(tmp_path / "less", VARIANTS[name], arrays)
    with pytest.raises(ModelError, match=r"\[160, 64\], expected \[208, 64\]"):
        define(tmp_path / "less")


def test_an_apertus_without_its_alphas_is_incomplete(tmp_path):
    arrays = {k: v for k, v in tensors("apertus-tied").items() if "1.mlp.act_fn.alpha_n" not in k}
    write_checkpoint(tmp_path, VARIANTS["apertus-tied"], arrays)
    with pytest.raises(ModelError, match=r"1 missing: model\.layers\.1\.mlp\.act_fn\.alpha_n"):
        define(tmp_path)
