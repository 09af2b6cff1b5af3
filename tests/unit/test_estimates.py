"""Estimates of memory agree with what the backends take."""

from __future__ import annotations

import math

import pytest

from tests.models.real_shapes import REAL
from tests.reference.tiny_models import VARIANTS
from tileinfer_core.backends.cuda import memory
from tileinfer_core.backends.numpy_backend import NumpyRunner
from tileinfer_core.config import ModelConfig
from tileinfer_core.estimates import kv_bytes_per_token, total_bytes, weight_bytes, weight_count
from tileinfer_core.models.define import define_model


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


def test_int8_is_a_byte_for_each_element_of_a_matrix_and_its_scales():
    model = define(REAL["Llama-3.2-1B"])
    matrices = [p.shape for p in model.parameters if len(p.shape) == 2]
    bytes_of = sum(map(math.prod, matrices))
    estimate = weight_bytes(model, "int8")
    assert bytes_of < estimate < 1.02 * bytes_of
    assert total_bytes(model, "int8", 1000) == estimate + 1000 * kv_bytes_per_token(model, "bf16")
