"""quantization_config: what it says of each module, and what is refused by name."""

from __future__ import annotations

import copy

import pytest

from tests.checkpoints import quantization_config
from tileinfer_core.errors import DamagedModelError, UnsupportedModelError
from tileinfer_core.quantization import Int8, read_quantization

LINEAR, EMBEDDING, HEAD = "model.layers.3.mlp.up_proj", "model.embed_tokens", "lm_head"


def read(section):
    return read_quantization(section, "config.json")


def changed(path, value):
    """A good section with one field replaced; dots lead into config_groups.group_0."""
    section = copy.deepcopy(quantization_config({"Linear": None}))
    *way, last = path.split(".")
    group = section["config_groups"]["group_0"]
    place = group if path.split(".")[0] in group else section
    for step in way:
        place = place[step]
    place[last] = value
    return section


@pytest.mark.parametrize("section", [None, {}])
def test_no_section_means_not_quantised(section):
    assert read(section) is None


def test_a_class_names_all_its_modules():
    found = read(quantization_config({"Linear": None}, ignore=["lm_head"]))
    assert found.of(LINEAR) == Int8()
    assert found.of(EMBEDDING) is None
    assert found.of(HEAD) is None


def test_names_go_before_patterns_before_classes():
    groups = {"Linear": None, "re:.*down_proj": 64, "model.layers.0.mlp.down_proj": 32, "Embedding": 16}
    found = read(quantization_config(groups))
    assert found.of(LINEAR) == Int8()
    assert found.of("model.layers.3.mlp.down_proj") == Int8(64)
    assert found.of("model.layers.0.mlp.down_proj") == Int8(32)
    assert found.of(EMBEDDING) == Int8(16)


def test_ignore_takes_patterns():
    found = read(quantization_config({"Linear": 128}, ignore=["re:.*self_attn.*"]))
    assert found.of("model.layers.3.self_attn.q_proj") is None
    assert found.of(LINEAR) == Int8(128)


def test_what_llm_compressor_writes_for_w8a8():
    """Activations quantised per token while the model runs: the weights are the same."""
    inputs = {
        "num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True, "group_size": None,
        "block_structure": None, "actorder": None, "observer": None, "observer_kwargs": {},
    }  # fmt: skip
    section = changed("input_activations", inputs) | {
        "global_compression_ratio": 1.4, "kv_cache_scheme": None, "ignore": ["lm_head"], "version": "0.10.2",
        "sparsity_config": {}, "transform_config": {},
    }  # fmt: skip
    found = read(section)
    assert found.of(LINEAR) == Int8()
    assert found.quantised_activations


@pytest.mark.parametrize("layout", ["int-quantized", "naive-quantized", "pack-quantized"])
@pytest.mark.parametrize("size", [None, 128])
def test_every_layout_of_8_bits(layout, size):
    assert read(quantization_config({"Linear": size}, format=layout)).of(LINEAR) == Int8(size)


def test_what_older_files_call_a_compressed_model():
    assert read(quantization_config({"Linear": None}, quantization_status="frozen")).of(LINEAR) == Int8()


def test_the_format_of_a_group_wins():
    assert read(changed("config_groups", {
        "g": {**changed("format", "x")["config_groups"]["group_0"], "format": "int-quantized"}
    }) | {"format": "mixed-precision"}).of(LINEAR) == Int8()  # fmt: skip


@pytest.mark.parametrize("method", ["fp8", "awq", "gptq", "bitsandbytes", "hqq", None, 3])
def test_other_methods_are_refused_by_name(method):
    with pytest.raises(UnsupportedModelError, match=repr(method)):
        read({"quant_method": method, "bits": 4})


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("format", "float-quantized", "'float-quantized'"),
        ("format", None, "format None"),
        ("quantization_status", "calibration", "'calibration'"),
        ("sparsity_config", {"format": "sparse-24-bitmask"}, "sparsity_config"),
        ("kv_cache_scheme", {"num_bits": 8, "type": "float"}, "kv_cache_scheme"),
        ("transform_config", {"config_groups": {"R1": {}}}, "transform_config"),
        ("weights.num_bits", 4, "4 bits"),
        ("weights.type", "float", "type 'float'"),
        ("weights.symmetric", False, "asymmetric"),
        ("weights.dynamic", True, "dynamic weights"),
        ("weights.actorder", "group", "actorder"),
        ("weights.strategy", "tensor", "'tensor'"),
        ("weights.strategy", "block", "'block'"),
        ("weights.group_size", 128, "group_size 128"),
        ("input_activations", {"num_bits": 8, "type": "int", "dynamic": False}, "static activation scales"),
        ("input_activations", {"num_bits": 8, "type": "float", "dynamic": True}, "activations of 8 bits, float"),
        ("output_activations", {"num_bits": 8}, "output_activations"),
        ("targets", ["re:(a+)+$"], r"\(a\+\)\+"),
        ("targets", ["re:" + ".*" * 5], "pattern"),
    ],
)
def test_other_ways_of_quantising_are_refused_by_name(path, value, named):
    with pytest.raises(UnsupportedModelError, match=named) as caught:
        read(changed(path, value))
    assert "int-quantized and pack-quantized" in caught.value.hint


@pytest.mark.parametrize("size", [0, -1, 4, 1 << 17, "128", 64.0, True, None])
def test_a_group_size_that_can_not_be(size):
    section = changed("weights.strategy", "group")
    section["config_groups"]["group_0"]["weights"]["group_size"] = size
    with pytest.raises(UnsupportedModelError, match="group_size"):
        read(section)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("config_groups", {}),
        ("config_groups", []),
        ("config_groups", {"a": 3}),
        ("targets", None),
        ("targets", "Linear"),
        ("targets", [3]),
        ("targets", ["re:("]),
        ("ignore", "lm_head"),
        ("weights", None),
        ("input_activations", 8),
    ],
)
def test_a_section_that_is_none_is_damage(path, value):
    with pytest.raises(DamagedModelError):
        read(changed(path, value))


@pytest.mark.parametrize("section", [3, [], "int8", True])
def test_a_section_of_another_type_is_damage(section):
    with pytest.raises(DamagedModelError, match="quantization_config must be an object"):
        read(section)
