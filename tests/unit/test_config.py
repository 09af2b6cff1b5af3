"""config.json: what is read, what is refused as damaged, what is refused as unsupported, always by name."""

from __future__ import annotations

import json

import pytest

from tests.reference.tiny_models import VARIANTS
from tileinfer_core.config import ModelConfig
from tileinfer_core.errors import DamagedModelError, ModelError, UnsupportedModelError
from tileinfer_core.models.rope import inverse_frequencies

LLAMA = VARIANTS["llama-tied"]
QWEN3 = VARIANTS["qwen3-untied"]
APERTUS = VARIANTS["apertus-llama3"]


def load(**changes):
    return ModelConfig.from_dict({**LLAMA, **changes})


def without(table, *names):
    return {key: value for key, value in table.items() if key not in names}


# head_dim


def test_an_explicit_head_dim_wins_over_the_quotient():
    config = load(hidden_size=2560, num_attention_heads=32, num_key_value_heads=8, head_dim=128)
    assert (config.head_dim, config.q_size, config.kv_size) == (128, 4096, 1024)


@pytest.mark.parametrize("changes", [{"head_dim": None}, {}])
def test_null_and_absent_head_dim_mean_the_quotient(changes):
    assert load(hidden_size=2560, num_attention_heads=32, num_key_value_heads=8, **changes).head_dim == 80


def test_a_head_dim_that_does_not_follow_is_damage():
    with pytest.raises(DamagedModelError, match="hidden_size must be a multiple of num_attention_heads"):
        load(hidden_size=66)
    with pytest.raises(DamagedModelError, match="head_dim must be even"):
        load(head_dim=15)


# rope


@pytest.mark.parametrize(
    ("rope", "theta"),
    [
        ({"rope_theta": 500000.0, "rope_scaling": None}, 5e5),
        ({"rope_theta": 1000000}, 1e6),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 250000.0}}, 2.5e5),
        ({"rope_parameters": {"rope_theta": 250000.0}}, 2.5e5),
        ({"rope_theta": 7e4, "rope_parameters": {"rope_type": "default", "rope_theta": 7e4}}, 7e4),
        ({"rope_theta": 7e4, "rope_parameters": {"rope_type": "default"}}, 7e4),
    ],
)
def test_the_base_frequency_is_read_from_either_place(rope, theta):
    config = ModelConfig.from_dict({**without(LLAMA, "rope_theta", "rope_scaling"), **rope})
    assert (config.rope.type, config.rope.theta) == ("default", theta)


def test_two_base_frequencies_that_differ_are_damage():
    with pytest.raises(DamagedModelError, match=r"rope_theta is 10000 at the top and 500000 in the rope object"):
        load(rope_parameters={"rope_type": "default", "rope_theta": 5e5})


@pytest.mark.parametrize("rope", [{}, {"rope_theta": None}, {"rope_parameters": {"rope_type": "default"}}])
def test_an_absent_base_frequency_is_damage_and_never_a_default(rope):
    with pytest.raises(DamagedModelError, match="no rope_theta"):
        ModelConfig.from_dict({**without(LLAMA, "rope_theta"), **rope})


def test_two_rope_objects_that_differ_are_damage():
    with pytest.raises(DamagedModelError, match=r"rope_parameters and rope_scaling differ: factor is 2\.0 and 4\.0"):
        load(
            rope_parameters={"rope_type": "linear", "factor": 2.0}, rope_scaling={"rope_type": "linear", "factor": 4.0}
        )
    with pytest.raises(DamagedModelError, match="rope_type 'llama3' and type 'linear'"):
        load(rope_scaling={"rope_type": "llama3", "type": "linear", "factor": 2.0})


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_both_names_of_the_rope_type_are_read(key):
    assert load(rope_scaling={key: "linear", "factor": 4.0}).rope.factor == 4.0


@pytest.mark.parametrize("form", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("kind", ["longrope", "su", "mrope", "proportional", "", "Linear"])
def test_an_unknown_rope_type_is_refused_by_name(form, kind):
    with pytest.raises(UnsupportedModelError, match=f"rope type '{kind}'") as caught:
        load(**{form: {"rope_type": kind, "factor": 4.0}})
    assert "default, linear, dynamic, llama3, yarn" in caught.value.hint


def test_rope_options_that_nothing_reads_are_refused():
    with pytest.raises(UnsupportedModelError, match="mrope_section"):
        load(rope_scaling={"rope_type": "default", "mrope_section": [1, 2]})
    with pytest.raises(UnsupportedModelError, match=r"differs by layer type \(full_attention, sliding_attention\)"):
        load(rope_parameters={"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}})


@pytest.mark.parametrize(
    ("rope", "name"),
    [
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": 0}, "factor"),
        ({"rope_type": "linear", "factor": float("nan")}, "factor"),
        ({"rope_type": "linear", "factor": "8"}, "factor"),
        ({"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0}, "low_freq_factor"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}, "high_freq_factor"),
        ({"rope_type": "yarn", "factor": 4.0, "truncate": "no"}, "truncate"),
        ({"rope_type": 3}, "rope_type"),
        ([4.0], "rope_scaling"),
    ],
)
def test_rope_values_that_cannot_be_are_damage(rope, name):
    with pytest.raises(DamagedModelError, match=name):
        load(rope_scaling=rope)


def test_yarn_stretches_the_context_and_dynamic_does_not():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert load(max_position_embeddings=40960, rope_scaling=yarn).max_context == 131072
    assert load(rope_scaling={"rope_type": "dynamic", "factor": 4.0}).max_context == 256


# What changes the result and is not there


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "gpt_neox"}, "gpt_neox"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "gelu_pytorch_tanh"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}}, "partial_rotary_factor"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"num_experts": 128}, "num_experts"),
        ({"qk_norm": True}, "qk_norm"),
        ({"hidden_act": "xielu"}, "xielu"),
        ({"layer_types": ["linear_attention"]}, "linear_attention"),
        ({"attention_chunk_size": 8192}, "attention_chunk_size"),
        ({"use_qk_norm": True}, "use_qk_norm"),
        ({"embedding_multiplier": 12.0}, "embedding_multiplier"),
        ({"no_rope_layers": [1, 1, 0]}, "no_rope_layers"),
    ],
)
def test_what_would_change_the_result_is_refused_by_name(changes, named):
    with pytest.raises(UnsupportedModelError) as caught:
        load(**changes)
    assert named in str(caught.value)
    assert caught.value.exit_code == 7


def test_the_list_of_supported_model_types_is_shown():
    with pytest.raises(UnsupportedModelError) as caught:
        load(model_type="mamba")
    assert (
        caught.value.hint == "supported model types: apertus, apertus1p5, apertus1p5_text, llama, mistral, qwen2, qwen3"
    )


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_act": "silu"}, "activation 'silu'"),
        ({"qk_norm": False}, "qk_norm False"),
        ({"post_norm": True}, "post_norm True"),
        ({"mlp_bias": True}, "mlp_bias True"),
    ],
)
def test_an_apertus_that_is_built_otherwise_is_refused_by_name(changes, named):
    ModelConfig.from_dict({**APERTUS, "post_norm": False, "qk_norm": True, "mlp_bias": False})
    with pytest.raises(UnsupportedModelError, match=named):
        ModelConfig.from_dict({**APERTUS, **changes})


@pytest.mark.parametrize("rope", [{"rope_scaling": None}, {}, {"rope_parameters": {}}])
def test_an_apertus_without_a_rope_object_is_damage(rope):
    """Transformers 4 and 5 read it differently."""
    table = {**without(APERTUS, "rope_scaling"), "rope_theta": 12e6, **rope}
    with pytest.raises(DamagedModelError, match="neither rope_parameters nor rope_scaling"):
        ModelConfig.from_dict(table)


@pytest.mark.parametrize(
    "changes",
    [
        {"attn_logit_softcapping": None},
        {"partial_rotary_factor": 1.0},
        {"num_experts": 0},
        {"quantization_config": None},
        {"qk_norm": False, "post_norm": False},
        {"hidden_act": "swish"},
    ],
)
def test_the_same_options_without_effect_are_accepted(changes):
    load(**changes)


# Models of several parts


def test_the_text_config_is_the_model():
    table = VARIANTS["apertus1p5"]
    config = ModelConfig.from_dict({**table, "eos_token_id": [2, 68], "max_position_embeddings": 1})
    assert (config.model_type, config.hidden_size, config.max_context) == ("apertus1p5", 64, 256)
    assert (config.vocab_size, config.embedding_rows, config.eos_token_ids) == (160, 208, (2, 68))
    for inner in (None, "x", [], {"hidden_size": 64}):
        with pytest.raises(ModelError):
            ModelConfig.from_dict({**table, "text_config": inner})
    with pytest.raises(UnsupportedModelError, match="text_config"):
        load(text_config=table["text_config"])


def test_a_head_may_have_fewer_rows_than_the_embedding_only_in_apertus():
    for rows in (100, 208):
        assert ModelConfig.from_dict({**VARIANTS["apertus1p5-text"], "output_vocab_size": rows}).vocab_size == rows
    with pytest.raises(DamagedModelError, match="output_vocab_size must be a whole number from 1 to 208"):
        ModelConfig.from_dict({**VARIANTS["apertus1p5-text"], "output_vocab_size": 209})
    with pytest.raises(DamagedModelError, match="tie_word_embeddings must be false beside output_vocab_size 160"):
        ModelConfig.from_dict({**VARIANTS["apertus1p5-text"], "tie_word_embeddings": True})
    with pytest.raises(UnsupportedModelError, match="output_vocab_size 100"):
        load(output_vocab_size=100)


# Sliding windows


@pytest.mark.parametrize("changes", [{}, {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}])
def test_a_window_ends_the_context_at_its_length(changes):
    assert load(sliding_window=64, **changes).max_context == 64
    assert load(sliding_window=512, **changes).max_context == 256


@pytest.mark.parametrize(
    "changes",
    [
        {"use_sliding_window": False, "sliding_window": 64},
        {"use_sliding_window": True, "sliding_window": None},
        {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 3},
        {"layer_types": ["full_attention"] * 3, "sliding_window": 64},
        {"sliding_window": 0},
        {"sliding_window": -1},
    ],
)
def test_a_window_that_is_not_in_use_ends_nothing(changes):
    assert load(**changes).max_context == 256


@pytest.mark.parametrize("name", ["qwen2-untied", "qwen3-untied"])
def test_a_qwen_window_is_in_use_only_when_asked_for(name):
    table = {**VARIANTS[name], "sliding_window": 64}
    assert ModelConfig.from_dict(table).max_context == 256
    assert ModelConfig.from_dict({**table, "use_sliding_window": True}).max_context == 256  # from layer 28 on
    asked = ModelConfig.from_dict({**table, "use_sliding_window": True, "max_window_layers": 1})
    assert (asked.sliding_window, asked.max_context) == (64, 64)


def test_mistral_has_a_window_unless_it_says_otherwise():
    table = {**without(VARIANTS["mistral"], "sliding_window"), "max_position_embeddings": 32768}
    assert ModelConfig.from_dict(table).max_context == 4096
    assert ModelConfig.from_dict({**table, "sliding_window": None}).max_context == 32768


def test_what_is_absent_is_what_the_model_type_says():
    assert ModelConfig.from_dict(without(QWEN3, "head_dim")).head_dim == 128
    assert ModelConfig.from_dict(VARIANTS["qwen2-tied"]).head_dim == 16
    heads = {"num_attention_heads": 64, "hidden_size": 4096}
    for name, expected in (("qwen3-untied", 32), ("qwen2-untied", 32), ("mistral", 8), ("llama-tied", 64)):
        table = {**without(VARIANTS[name], "num_key_value_heads"), **heads}
        assert ModelConfig.from_dict(table).num_key_value_heads == expected


# End-of-sequence ids


@pytest.mark.parametrize(
    ("value", "ids"), [(2, (2,)), ([2, 0], (2, 0)), ([2, 2], (2,)), (None, ()), ([], ()), (-1, ())]
)
def test_end_of_sequence_ids_come_as_number_list_or_null(value, ids):
    assert load(eos_token_id=value).eos_token_ids == ids


@pytest.mark.parametrize("value", ["2", True, [2, "3"], [[2]], 2.0, [-2], 1 << 40])
def test_other_end_of_sequence_ids_are_damage(value):
    with pytest.raises(DamagedModelError, match="eos_token_id"):
        load(eos_token_id=value)


# Absurd values


@pytest.mark.parametrize(
    "name",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
    ],
)
@pytest.mark.parametrize("value", [0, -1, 1 << 40, 64.0, "64", True, [64], {}, float("nan"), float("inf"), 10**400])
def test_an_absurd_size_is_damage(name, value):
    with pytest.raises(DamagedModelError, match=f"{name} must be a whole number from"):
        load(**{name: value})


@pytest.mark.parametrize("name", ["vocab_size", "hidden_size", "intermediate_size", "rms_norm_eps", "hidden_act"])
def test_a_missing_field_is_damage_by_its_name(name):
    for table in (without(LLAMA, name), {**LLAMA, name: None}):
        with pytest.raises(DamagedModelError, match=f"no {name}, which this model needs"):
            ModelConfig.from_dict(table)


@pytest.mark.parametrize("value", [0, 3, 8, -2, "2"])
def test_kv_heads_must_divide_the_heads(value):
    with pytest.raises(DamagedModelError, match="num_key_value_heads"):
        load(num_key_value_heads=value)


@pytest.mark.parametrize("value", [0, -1e-5, float("nan"), float("inf"), "1e-5", 2.0, 10**400])
def test_an_impossible_epsilon_is_damage(value):
    with pytest.raises(DamagedModelError, match="rms_norm_eps must be a number from"):
        load(rms_norm_eps=value)


@pytest.mark.parametrize("name", ["tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window"])
def test_flags_are_true_or_false(name):
    with pytest.raises(DamagedModelError, match=f"{name} must be true or false, found 'yes'"):
        load(**{name: "yes"})


def test_a_long_wrong_value_is_shown_shortened():
    with pytest.raises(DamagedModelError) as caught:
        load(hidden_size="x" * 10_000)
    assert len(str(caught.value)) < 200


def test_fields_that_nothing_reads_are_kept_by_name():
    assert load(pretraining_tp=1, initializer_range=0.02).unread == ("initializer_range", "pretraining_tp")


HOSTILE = [
    None,
    True,
    0,
    1,
    -1,
    2,
    1 << 40,
    10**400,
    0.5,
    float("nan"),
    float("inf"),
    "",
    "x",
    [],
    [None],
    {},
    {"a": {}},
]
ROPES = [
    {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "linear", "factor": 2.0, "original_max_position_embeddings": 64},
]


def refuses_or_builds(table):
    """A config is refused by a ModelError or can be built; nothing else comes out of it."""
    try:
        config = ModelConfig.from_dict(table)
    except ModelError:
        return
    inverse_frequencies(config.rope, config.head_dim)
    assert config.max_context >= 1


@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: repr(value)[:12])
def test_any_field_may_hold_anything(value):
    for name in [
        *QWEN3,
        "sliding_window",
        "layer_types",
        "quantization_config",
        "mlp_bias",
        "rope_parameters",
        "dtype",
    ]:
        refuses_or_builds({**QWEN3, name: value})
    for rope in ROPES:
        for name in [*rope, "rope_theta", "truncate", "attention_factor", "type", "partial_rotary_factor"]:
            refuses_or_builds({**QWEN3, "rope_scaling": {**rope, name: value}})


# The file


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (json.dumps(LLAMA).encode()[:-9], "not JSON"),
        (b"[]", "expected a JSON object, found list"),
        (b"null", "expected a JSON object, found NoneType"),
        (b"\xff\xfe{}", "not JSON"),
        (b'{"a": 1, "a": 2}', "the key 'a' is there twice"),
        (b'{"x": {"a": 1, "a": 1}}', "the key 'a' is there twice"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": 1' + b"0" * 5000 + b"}", "not JSON"),
        (b'{"a": 1} {', "not JSON"),
    ],
)
def test_a_damaged_file_is_one_line_with_its_name(tmp_path, raw, message):
    path = tmp_path / "config.json"
    path.write_bytes(raw)
    with pytest.raises(DamagedModelError) as caught:
        ModelConfig.load(tmp_path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_byte_order_mark_is_accepted(tmp_path):
    (tmp_path / "config.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(LLAMA).encode())
    assert ModelConfig.load(tmp_path).hidden_size == 64


def test_a_missing_config_and_a_huge_one_are_damage(tmp_path):
    with pytest.raises(DamagedModelError, match=r"config\.json: missing"):
        ModelConfig.load(tmp_path)
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(5 << 20)
    with pytest.raises(DamagedModelError, match="expected at most"):
        ModelConfig.load(tmp_path)


def test_a_folder_in_place_of_the_file_is_damage(tmp_path):
    (tmp_path / "config.json").mkdir()
    with pytest.raises(DamagedModelError, match="can't be read"):
        ModelConfig.load(tmp_path)
