"""docs/adding_a_model.md does what it says: blocks taken from the page run a model that TileInfer does not ship."""

from __future__ import annotations

import importlib.util
import re
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

import tileinfer_core.config
import tileinfer_core.models
import tileinfer_core.models.define
from tests.checkpoints import load_runner, write_checkpoint
from tests.models.test_goldens import GOLDENS, TOLERANCE, last_rows
from tests.reference import tiny_models
from tests.reference.tiny_models import EXAMPLES, GREEDY_STEPS, prompt, tensors
from tileinfer_core.backends.base import LoadOptions
from tileinfer_core.backends.cuda import load
from tileinfer_core.backends.cuda.interpreted import InterpretedDevice
from tileinfer_core.config import ModelConfig
from tileinfer_core.errors import UnsupportedModelError
from tileinfer_core.models.define import define_from_files
from tileinfer_core.progress import silent
from tileinfer_core.sampling import SamplingParams
from tileinfer_core.weights import WeightFiles

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "adding_a_model.md").read_text("utf-8")
NAME = "seed-oss"


def block(marker):
    """The code block that follows <!-- marker -->."""
    found = re.search(rf"^<!-- {re.escape(marker)} -->\n```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None, marker
    return found[1]


@pytest.fixture
def registered(tmp_path, monkeypatch):
    """The page's file and its line in the registry."""
    path = tmp_path / "seed_oss.py"
    path.write_text(block("file: tileinfer_core/models/seed_oss.py"))
    ((model_type, module_name),) = eval("{" + block("registry") + "}").items()
    spec = importlib.util.spec_from_file_location(module_name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, module_name, module)
    table = {**tileinfer_core.models.MODEL_TYPES, model_type: module_name}
    for user in (tileinfer_core.models, tileinfer_core.config, tileinfer_core.models.define):
        monkeypatch.setattr(user, "MODEL_TYPES", table)


def test_the_page_s_variant_is_the_one_with_goldens():
    assert eval("{" + block("variant") + "}", vars(tiny_models)) == {NAME: EXAMPLES[NAME]}


def test_without_its_file_the_model_is_refused():
    with pytest.raises(UnsupportedModelError, match="'seed_oss' is not supported"):
        ModelConfig.from_dict(EXAMPLES[NAME])


@pytest.mark.usefixtures("registered")
def test_logits_and_tokens_equal_transformers(tmp_path):
    runner = load_runner(write_checkpoint(tmp_path / "model", EXAMPLES[NAME], tensors(NAME)))
    ids = prompt(NAME, 70, int(GOLDENS[f"{NAME}/salt"]))
    golden = GOLDENS[f"{NAME}/logits"]
    np.testing.assert_allclose(last_rows(runner, ids, len(golden)), golden, rtol=0, atol=TOLERANCE)
    cache = runner.new_cache(256)
    runner.prefill(cache, ids)
    steps = runner.decode(cache, SamplingParams(temperature=0.0), None, len(ids))
    assert [s.id for s in islice(steps, GREEDY_STEPS)] == GOLDENS[f"{NAME}/greedy"].tolist()


@pytest.mark.usefixtures("registered")
def test_the_gpu_engine_follows_by_structure(tmp_path, monkeypatch):
    class NoWarmup:
        unkept = None

        def __init__(self, *_args): ...
        def start(self): ...
        def finish(self, _on_progress):
            return 0.0

    monkeypatch.setattr(load, "KernelWarmup", NoWarmup)
    files = WeightFiles.open(write_checkpoint(tmp_path / "model", EXAMPLES[NAME], tensors(NAME), dtype="F16"))
    model, _ = define_from_files(ModelConfig.load(files.folder), files)
    device = InterpretedDevice()
    runner = load.load_runner(model, files, device, LoadOptions(128, 128), silent)
    ids = prompt(NAME, 70, int(GOLDENS[f"{NAME}/salt"]))
    golden = GOLDENS[f"{NAME}/logits"]
    np.testing.assert_allclose(last_rows(runner, ids, len(golden)), golden, rtol=0, atol=0.03)


@pytest.mark.usefixtures("registered")
def test_an_option_that_the_file_does_not_compute_is_refused():
    with pytest.raises(UnsupportedModelError, match="attention_out_bias True"):
        ModelConfig.from_dict({**EXAMPLES[NAME], "attention_out_bias": True})
    table = {key: value for key, value in EXAMPLES[NAME].items() if key not in ("attention_bias", "head_dim")}
    config = ModelConfig.from_dict(table)
    assert (config.attention_bias, config.head_dim) == (True, 128)
