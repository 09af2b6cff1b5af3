"""The folders that `quantize` writes, read by Transformers through compressed-tensors. Skipped without those packages.

pip install torch transformers compressed-tensors
"""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")

from tests.checkpoints import load_runner, write_variant  # noqa: E402
from tests.reference.tiny_models import VARIANTS, prompt  # noqa: E402
from tileinfer_core.progress import silent  # noqa: E402
from tileinfer_core.quantize import execute_quantize, plan_quantize  # noqa: E402
from tileinfer_core.quantize_recipe import Recipe  # noqa: E402
from tileinfer_core.store import ModelFolder  # noqa: E402


@pytest.mark.parametrize("size", [None, 0, 16])
@pytest.mark.parametrize("name", ["llama-tied", "llama-head-dim", "qwen3-tied", "qwen3-untied"])
def test_transformers_computes_the_same_logits(tmp_path, name, size):
    """In float32 on both sides: scale · int8 is exact there, and the rest differs by rounding."""
    source = write_variant(tmp_path / "source", name, dtype="BF16")
    plan = plan_quantize(ModelFolder("m", source, "local", None), tmp_path / "int8", "m", Recipe(size))
    execute_quantize(plan, None, silent)
    ids = prompt(name, 24)
    runner = load_runner(tmp_path / "int8")
    mine = runner.logits(runner.new_cache(32), ids)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "int8", dtype=torch.float32)
    quantised = [module for module in theirs.modules() if hasattr(module, "quantization_scheme")]
    assert len(quantised) == 7 * VARIANTS[name]["num_hidden_layers"] + 2  # embedding and head with them
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0].numpy()
    np.testing.assert_allclose(mine, expected, atol=2e-4 * np.abs(expected).max())
