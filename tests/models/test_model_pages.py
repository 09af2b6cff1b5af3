"""The pages of docs/models/: their tables are the code's numbers, and every real shape is one that TileInfer takes."""

from __future__ import annotations

import re

import pytest

from kernels.shapes import MODELS
from tests.models.model_tables import FAMILIES, PAGES, definition, with_tables
from tests.models.real_shapes import REAL
from tileinfer_core.aliases import SHIPPED
from tileinfer_core.estimates import weight_count
from tileinfer_core.kernel_tools import shape_of


@pytest.mark.parametrize("page", FAMILIES)
def test_tables_are_the_code_s_numbers(page):
    text = (PAGES / page).read_text("utf-8")
    assert text == with_tables(page, text), "write them anew: python -m tests.models.model_tables"


def test_every_real_shape_is_on_one_page():
    assert sorted(name for names in FAMILIES.values() for name in names) == sorted(REAL)


@pytest.mark.parametrize("name", REAL)
def test_the_gpu_engine_takes_every_real_shape(name):
    shape = shape_of(definition(name).config)
    if name in MODELS:
        assert shape == MODELS[name]


@pytest.mark.parametrize("name", [name for name in REAL if name[-1] == "B"])
def test_a_model_s_name_says_how_many_weights_it_has(name):
    """A wrong size in real_shapes.py would show here. Qwen3 and Qwen2.5 leave the embedding out of the small ones."""
    said = float(re.search(r"-([\d.]+)B$", name)[1])
    assert said * 0.9 < weight_count(definition(name)) / 1e9 < said * 1.35


def test_each_page_names_its_aliases():
    """An alias leads to a model of a family that has a page; the page says it."""
    pages = "".join((PAGES / page).read_text("utf-8") for page in FAMILIES)
    assert [alias for alias in SHIPPED if alias != "demo" and f"`{alias}`" not in pages] == []
