"""Estimates of memory agree with what the backends take."""

from __future__ import annotations

import math

import pytest

from tests.checkpoints import write_variant
from tests.models.real_shapes import REAL
from tests.reference.tiny_models import VARIANTS
from tileinfer_core.backends.cuda import memory
from tileinfer_core.backends.numpy_backend import NumpyRunner
from tileinfer_core.config import ModelConfig
from tileinfer_core.estimates import kv_bytes_per_token, total_bytes, weight_bytes, weight_count
from tileinfer_core.models.define import define_from_files, define_model
from tileinfer_core.progress import silent
from tileinfer_core.quantize import execute_quantize, plan_quantize
from tileinfer_core.quantize_recipe import Recipe
from tileinfer_core.store import ModelFolder
from tileinfer_core.weights import WeightFiles


def define(config):
    config = ModelConfig.from_dict(config)
    return define_model(config, tied=config.tie_word_embeddings)


@pytest.mark.parametrize("name", ["Qwen3-0.6B", "Apertus-8B", "Qwen2.5-7B"])
def test_bf16_is_what_the_gpu_engine_plans(name):
    model = define(REAL[name])
    planned, estimate = memory.weight_bytes(model, 2), weight_bytes(model, "bf16")
    assert 0 <= planned - estimate <= 512 * len(model.parameters)  # each array is padded
    assert kv_bytes_per_token(model, "bf16") == memory.kv_bytes_per_token(model, 2)


@pytest.mark.parametrize("name", ["llama-tied", "apertus-biases", "qwen2-untied"])
def test_float32_is_what_the_cpu_takes(name):
    model = define(VARIANTS[name])
    runner = NumpyRunner.with_noise(model)
    assert weight_bytes(model, "float32") == runner.weight_bytes == 4 * weight_count(model)
    assert kv_bytes_per_token(model, "float32") == runner.kv_bytes_per_token


@pytest.mark.parametrize("embedding", ["int8", "bf16"])
@pytest.mark.parametrize("name", ["llama-tied", "qwen2-untied"])
def test_a_quantised_model_takes_what_it_has(tmp_path, name, embedding):
    source = write_variant(tmp_path / "source", name, dtype="BF16")
    plan = plan_quantize(ModelFolder("m", source, "local", None), tmp_path / "int8", "m", Recipe(16, embedding))
    stored = {t.name: t.bytes for part in plan.parts for t in part.targets() if not t.name.endswith("weight_shape")}
    if plan.model.tied:
        stored.pop("lm_head.weight_scale", None)  # the embedding's, a second time
    execute_quantize(plan, None, silent)
    model, _ = define_from_files(ModelConfig.load(tmp_path / "int8"), WeightFiles.open(tmp_path / "int8"))
    assert weight_bytes(model, "int8") == sum(stored.values())


def test_int8_is_a_byte_for_each_element_of_a_matrix_and_its_scales():
    model = define(REAL["Llama-3.2-1B"])
    matrices = [p.shape for p in model.parameters if len(p.shape) == 2]
    bytes_of = sum(map(math.prod, matrices))
    estimate = weight_bytes(model, "int8")
    assert bytes_of < estimate < 1.02 * bytes_of
    assert total_bytes(model, "int8", 1000) == estimate + 1000 * kv_bytes_per_token(model, "bf16")
