"""What the decode families take from the tables, and what the rules give where the tables are silent."""

from __future__ import annotations

import pytest

from kernels import configs
from kernels.attention_decode import CONTEXTS, attention_config, attention_rule, context_bucket
from kernels.carveout import step_carveout
from kernels.linear import linear_config, linear_rule, square_slots
from kernels.shapes import MODELS

ARCHS = ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", MODELS)
def test_every_product_has_a_configuration(arch: str, name: str) -> None:
    for product, (n, k) in MODELS[name].products.items():
        config = linear_config(arch, n, k, "linear_residual" if product in ("o", "down") else "linear_norm")
        assert config.tile_n & (config.tile_n - 1) == 0
        assert config.tile_k & (config.tile_k - 1) == 0
        assert config.tile_n * -(-k // config.tile_k) * config.tile_k <= 32768  # 64 KiB a block, half the registers


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", MODELS)
def test_every_shape_has_a_row_of_its_own(arch: str, name: str) -> None:
    """For each target a table of its own, whose rows say how they were chosen; a rule in code is for other models."""
    model, table = MODELS[name], configs.table(arch)
    assert table.source == arch
    up = f"linear_{model.activation}"
    families = {
        "qkv": "linear_norm",
        "o": "linear_residual",
        "up": up,
        "down": "linear_residual",
        "lm_head": "linear_norm",
    }
    for product, family in families.items():
        n, k = model.products[product]
        assert table.row(family, n=n, k=k).when == {"n": n, "k": k}
    for context in (*CONTEXTS, 1 << 30):
        assert (
            table.row("attention_decode", kv_heads=model.kv_heads, context=context).when["kv_heads"] == model.kv_heads
        )
    for tokens in (64, 512, 4096):
        for product, form in (("qkv", ""), ("o", "_residual"), ("up", f"_{model.activation}")):
            n, k = model.products[product]
            table.row(f"linear_prefill{form}", tokens=tokens, n=n, k=k)
    table.row("attention_prefill", head_dim=model.head_dim)
    table.row("sample", vocab=model.vocab)
    table.row("argmax", vocab=model.vocab)


@pytest.mark.parametrize("arch", ARCHS)
def test_rows_say_how_they_were_chosen(arch: str) -> None:
    rows = [row for family in configs.table(arch).families.values() for row in family]
    assert {row.chosen for row in rows} == ({"measured", "rule"} if arch == "sm_90" else {"rule"})
    assert all((row.us is not None) == (row.chosen == "measured") for row in rows)


@pytest.mark.parametrize(("n", "k"), [(7, 72), (576, 576), (151936, 5120), (4096, 30000), (2, 8)])
def test_rule_for_unknown_shapes(n: int, k: int) -> None:
    config = linear_rule(n, k)
    assert config.tile_n >= 1
    assert config.tile_n * config.tile_k >= 1
    assert square_slots("sm_90", n, k) * config.tile_n >= n


def test_context_buckets() -> None:
    assert [context_bucket("sm_90", 8, c) for c in (1, 512, 513, 641, 769, 2048, 2049, 32768)] == [
        512,
        512,
        640,
        768,
        1024,
        2048,
        None,
        None,
    ]
    assert attention_config("sm_90", 8, 32768).splits == 32
    assert attention_rule(3, 1 << 30).splits * 3 <= 256
    assert attention_rule(32, 512).form == "page"
    assert attention_rule(32, 1024).form == "loop"


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kv_heads", [1, 3, 8, 32])
def test_an_int8_cache_has_the_same_graphs(arch: str, kv_heads: int) -> None:
    """An engine's buckets do not ask what its cache is made of."""
    for context in (*CONTEXTS, 1 << 30):
        half, int8 = (attention_config(arch, kv_heads, context, int8=kind) for kind in (False, True))
        assert (int8.form, int8.positions) == (half.form, half.positions)
        assert int8.apart == (arch == "sm_100")  # elsewhere the columns of one product can be split


def test_carveout_is_measured_or_left_to_the_driver() -> None:
    assert step_carveout("sm_90", 1024) == 14
    assert step_carveout("sm_90", 1000) is None
    assert step_carveout("sm_90", 1024, int8=True) == 14
    assert step_carveout("sm_90", 1000, int8=True) is None
    assert step_carveout("sm_90", 2560, int8=True) == step_carveout("sm_90", 2560, 2048, int8=True) == 43


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("hidden", [576, 1000, 1024, 2560, 4096])
def test_a_long_context_has_room_for_two_rings(hidden: int, int8: bool) -> None:
    """Whatever the model: 132 KiB for half-precision pages, 164 KiB for two pages of INT8 a step."""
    for context in (2049, 4096, 40960):
        assert step_carveout("sm_90", hidden, context, int8=int8) == 50
        assert step_carveout("sm_90", hidden, context, int8=int8, int8_cache=True) == 58
    assert step_carveout("sm_80", hidden, 4096, int8=int8) is None


def test_a_carveout_of_no_known_target() -> None:
    assert step_carveout("sm_80", 1024) is None
