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


@pytest.mark.parametrize("scheme", ["W8A8", "W8A16"])
def test_a_model_that_compressed_tensors_wrote_is_read(tmp_path, scheme):
    """As llm-compressor leaves it: linear layers in INT8, the head alone, activations per token or not at all."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationConfig,
        QuantizationStatus,
        apply_quantization_config,
        preset_name_to_scheme,
    )

    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**VARIANTS["llama-head-dim"], "tie_word_embeddings": False})
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    group = preset_name_to_scheme(scheme, ["Linear"]).model_copy(update={"format": "int-quantized"})
    group.weights.strategy, group.weights.group_size = "channel", None
    apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": group}, ignore=["lm_head"]))
    restored = {}
    for name, module in model.named_modules():
        if hasattr(module, "quantization_scheme"):
            weight = module.weight.data.float()
            module.weight_scale.data = (weight.abs().amax(1, keepdim=True) / 127).to(torch.bfloat16)
            module.quantization_status = QuantizationStatus.FROZEN
            scale = module.weight_scale.data.float()
            restored[name] = torch.clamp(torch.round(weight / scale), -128, 127) * scale
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(tmp_path / "theirs")
    compressor.update_config(tmp_path / "theirs")
    found = load_runner(tmp_path / "theirs")
    assert found._model.int8("down_proj", 0) is not None
    assert found._model.int8("lm_head") is None
    assert found._model.config.quantization.quantised_activations == (scheme == "W8A8")
    expected = restored["model.layers.1.mlp.down_proj"].numpy()
    step = 1.01 * np.abs(expected).max() / 127  # it divides in BF16: a number may fall one step away
    np.testing.assert_allclose(found._weights.layers[1].down, expected, rtol=0, atol=step)
    assert np.isfinite(found.logits(found.new_cache(32), [5, 6, 7])).all()
