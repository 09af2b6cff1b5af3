"""The memory plan: what is counted, the largest context that fits, and what the refusals say."""

from __future__ import annotations

import re

import pytest

from kernels import configs
from tests.checkpoints import quantization_config
from tests.reference.tiny_models import VARIANTS
from tileinfer_core.backends.cuda.buffers import buffer_bytes, buffer_specs
from tileinfer_core.backends.cuda.memory import (
    FREE_SHARE,
    SPARE_SHARE,
    kv_bytes_per_token,
    pages_for,
    plan_memory,
    weight_bytes,
)
from tileinfer_core.backends.cuda.warmup import PREFILL_ROWS
from tileinfer_core.backends.cuda.weights import COPIED, worth_a_copy
from tileinfer_core.config import ModelConfig
from tileinfer_core.errors import OutOfMemoryError
from tileinfer_core.models.define import define_model

CONFIG = {**VARIANTS["qwen3-tied"], "max_position_embeddings": 4096}
MODEL = define_model(ModelConfig.from_dict(CONFIG), tied=True)
WEIGHTS = weight_bytes(MODEL, 2)
PER_TOKEN = kv_bytes_per_token(MODEL, 2)
BUFFERS = 10_000


def plan(free, asked=None):
    return plan_memory(
        MODEL, asked=asked, free=free, item=2, buffer_bytes=lambda context: BUFFERS + context, headroom=0
    )


def need(context):
    return WEIGHTS + pages_for(context) * 64 * PER_TOKEN + BUFFERS + context


def test_a_token_takes_its_keys_and_values_of_every_layer():
    assert PER_TOKEN == 2 * 3 * 2 * 32 * 2  # K and V, layers, heads, head dimension, bytes


def test_the_models_own_context_is_taken_where_it_fits():
    found = plan(need(4096))
    assert (found.context, found.pages, found.total) == (4096, 65, need(4096))


def test_without_a_wish_the_context_is_cut_to_the_largest_that_fits():
    for context in (1024, 1088, 4032):
        assert plan(need(context)).context == context
        assert plan(need(context) - 1).context == context - 64


def test_an_explicit_context_is_kept_or_refused_never_cut():
    assert plan(need(1000), asked=1000).context == 1000
    with pytest.raises(OutOfMemoryError) as error:
        plan(need(1000) - 1, asked=1000)
    assert "1,000 tokens" in str(error.value)
    assert error.value.exit_code == 8
    advised = int(re.search(r"--context (\d+)", error.value.hint).group(1))
    assert plan(need(1000) - 1, asked=advised).context == advised
    with pytest.raises(OutOfMemoryError):
        plan(need(1000) - 1, asked=advised + 64)


def test_no_useful_context_names_the_other_ways_out():
    with pytest.raises(OutOfMemoryError, match="weights") as error:
        plan(WEIGHTS)
    assert "--backend cpu" in error.value.hint


def test_int8_weights_count_a_byte_and_their_scales_four():
    section = quantization_config({"Linear": None, "Embedding": 16})
    model = define_model(ModelConfig.from_dict({**CONFIG, "quantization_config": section}), tied=True)
    matrices = sum(p.shape[0] * p.shape[1] for p in MODEL.parameters if len(p.shape) == 2)
    assert matrices < weight_bytes(model, 2) < 1.2 * matrices + 512 * len(model.parameters)
    assert weight_bytes(model, 2) < WEIGHTS * 0.75


def test_an_int8_cache_counts_a_byte_and_a_scale_for_each_head():
    assert kv_bytes_per_token(MODEL, 1) == 2 * 3 * 2 * (32 + 4)
    found = plan_memory(MODEL, asked=640, free=1 << 30, item=2, kv_item=1, buffer_bytes=lambda _: 0, headroom=0)
    assert found.kv_bytes == pages_for(640) * 64 * kv_bytes_per_token(MODEL, 1)
    assert found.weight_bytes == WEIGHTS


@pytest.mark.parametrize("context", [256, 4096, 5000])
def test_an_int8_cache_counts_a_layers_keys_and_values_in_half_precision(context):
    """Of whole pages, as many as the block table has entries."""
    plain, wide = (
        buffer_bytes(buffer_specs(MODEL, "sm_90", context, 256, "bfloat16", kv=kv)) for kv in ("bf16", "int8")
    )
    layer = PER_TOKEN // MODEL.config.num_hidden_layers
    assert context * layer < wide - plain < (context + 18 * 64) * layer + 2048


def int8_model(targets, **changes):
    config = {**CONFIG, **changes, "quantization_config": quantization_config(targets)}
    return define_model(ModelConfig.from_dict(config), tied=True)


GROUPED = int8_model({"Linear": None, "Embedding": 16, "re:.*down_proj": 16})
LAYERS, HIDDEN, INNER = CONFIG["num_hidden_layers"], CONFIG["hidden_size"], CONFIG["intermediate_size"]
DOWN = 2 * LAYERS * HIDDEN * INNER  # bytes in half precision


def with_copies(model, spare, products=COPIED, used=0):
    """A plan that leaves `spare` bytes of a device on which other programs use `used`, with copies."""
    at = {"asked": 640, "item": 2, "buffer_bytes": lambda _: BUFFERS, "headroom": 0}
    free = plan_memory(model, free=1 << 40, **at).total + spare
    return plan_memory(model, free=free, **at).with_copies(model, products, item=2, device_bytes=free + used)


def test_copies_take_no_more_than_their_share_of_the_device():
    found = with_copies(GROUPED, SPARE_SHARE * DOWN)
    assert (found.copied, found.copy_bytes) == (("down_proj",), DOWN)
    assert found.total == found.free - (SPARE_SHARE - 1) * DOWN
    without = with_copies(GROUPED, SPARE_SHARE * DOWN - 1)
    assert "down_proj" not in without.copied
    assert without.copy_bytes < DOWN
    assert with_copies(GROUPED, 0).copied == ()
    assert with_copies(GROUPED, 0).total == with_copies(GROUPED, 0).free


def test_other_programs_change_nothing_until_they_leave_little():
    """What is copied decides how a prompt's sums round, and so what a seed gives."""
    used = (SPARE_SHARE - FREE_SHARE) * DOWN
    assert with_copies(GROUPED, FREE_SHARE * DOWN, used=used).copied == ("down_proj",)
    assert "down_proj" not in with_copies(GROUPED, FREE_SHARE * DOWN - 1, used=1 << 30).copied


def test_all_products_are_copied_where_there_is_room():
    found = with_copies(GROUPED, 1 << 30)
    matrices = sum(p.shape[0] * p.shape[1] for p in GROUPED.parameters if "proj.weight" in p.name and not p.is_scale)
    assert found.copied == COPIED
    assert found.copy_bytes == 2 * matrices
    assert with_copies(MODEL, 1 << 30, worth_a_copy(MODEL, "sm_90", 2048)).copied == ()  # nothing is INT8


def test_what_is_copied_is_what_a_chunk_would_read():
    rows = int8_model({"Linear": None, "Embedding": 16})
    kept = int8_model({"re:.*down_proj": 16})
    assert worth_a_copy(GROUPED, "sm_90", 2048) == list(COPIED)
    assert worth_a_copy(GROUPED, "sm_90", 128) == ["down_proj"]  # the others go in digits
    assert worth_a_copy(GROUPED, "sm_89", 2048) == ["down_proj"]
    assert worth_a_copy(rows, "sm_90", 2048) == list(COPIED)
    assert worth_a_copy(rows, "sm_89", 2048) == []
    assert worth_a_copy(kept, "sm_90", 2048) == ["down_proj"]


@pytest.mark.parametrize("arch", configs.targets())
def test_kernels_change_at_lengths_that_are_compiled_ahead(arch):
    """A limit within a range would leave the range's end to compile in an answer."""
    for row in configs.table(arch).families["digit_limits"]:
        assert set(row.config.values()) <= set(PREFILL_ROWS)


def test_copies_leave_no_scratch_for_what_is_copied():
    def names(copied):
        return set(buffer_specs(GROUPED, "sm_90", 640, 256, "bfloat16", copied=copied))

    assert names(()) - names(("down_proj",)) == {"rows_weight"}
    assert names(("o_proj",)) == names(())
