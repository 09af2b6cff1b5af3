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
from tileinfer_core.quantization import Int8  # noqa: E402
from tileinfer_core.quantize import execute_quantize, plan_quantize  # noqa: E402
from tileinfer_core.quantize_recipe import Recipe  # noqa: E402
from tileinfer_core.store import ModelFolder  # noqa: E402
from tileinfer_core.weights import WeightFiles  # noqa: E402


@pytest.mark.parametrize("embedding", [None, "int8", "bf16"])
@pytest.mark.parametrize("size", [None, 0, 16])
@pytest.mark.parametrize("name", ["llama-tied", "llama-head-dim", "qwen3-tied", "qwen3-untied"])
def test_transformers_computes_the_same_logits(tmp_path, name, size, embedding):
    """In float32 on both sides: scale · int8 is exact there, and the rest differs by rounding."""
    source = write_variant(tmp_path / "source", name, dtype="BF16")
    plan = plan_quantize(ModelFolder("m", source, "local", None), tmp_path / "int8", "m", Recipe(size, embedding))
    execute_quantize(plan, None, silent)
    ids = prompt(name, 24)
    runner = load_runner(tmp_path / "int8")
    mine = runner.logits(runner.new_cache(32), ids)
    load = transformers.AutoModelForCausalLM.from_pretrained
    theirs, report = load(tmp_path / "int8", dtype=torch.float32, output_loading_info=True)
    assert not any(report.values())  # nothing missing, nothing left over
    quantised = {key for key, module in theirs.named_modules() if hasattr(module, "quantization_scheme")}
    assert len(quantised - {"model.embed_tokens", "lm_head"}) == 7 * VARIANTS[name]["num_hidden_layers"]
    tied = plan.model.tied
    assert ("model.embed_tokens" in quantised) == (embedding == "int8" or (tied and embedding is None))
    assert ("lm_head" in quantised) == (not tied or embedding != "bf16")
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0].numpy()
    np.testing.assert_allclose(mine, expected, atol=2e-4 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("scheme", "layout", "size"),
    [
        ("W8A8", "int-quantized", None),
        ("W8A16", "int-quantized", None),
        ("W8A16", None, None),
        ("W8A16", None, 16),
    ],
)
def test_a_model_that_compressed_tensors_wrote_is_read(tmp_path, scheme, layout, size):
    """As llm-compressor leaves it: linear layers in INT8, the head alone, activations per token or not at all.

    Without a layout of the test's own the package chooses, which is packed where weights alone are quantised.
    """
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
    group = preset_name_to_scheme(scheme, ["Linear"]).model_copy(update={"format": layout})
    group.weights.strategy, group.weights.group_size = "group" if size else "channel", size
    apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": group}, ignore=["lm_head"]))
    restored = {}
    for name, module in model.named_modules():
        if hasattr(module, "quantization_scheme"):
            weight = module.weight.data.float()
            groups = weight.reshape(len(weight), -1, size or weight.shape[1])
            module.weight_scale.data = (groups.abs().amax(2) / 127).to(torch.bfloat16)
            module.quantization_status = QuantizationStatus.FROZEN
            scale = module.weight_scale.data.float()[..., None]
            restored[name] = (torch.clamp(torch.round(groups / scale), -128, 127) * scale).reshape(weight.shape)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(tmp_path / "theirs")
    compressor.update_config(tmp_path / "theirs")
    stored = WeightFiles.open(tmp_path / "theirs").info("model.layers.1.mlp.down_proj.weight")
    assert stored.packed == (layout != "int-quantized")
    found = load_runner(tmp_path / "theirs")
    assert found._model.int8("down_proj", 0) == Int8(size)
    assert found._model.int8("lm_head") is None
    assert found._model.config.quantization.quantised_activations == (scheme == "W8A8")
    expected = restored["model.layers.1.mlp.down_proj"].numpy()
    step = 1.01 * np.abs(expected).max() / 127  # it divides in BF16: a number may fall one step away
    np.testing.assert_allclose(found._weights.layers[1].down, expected, rtol=0, atol=step)
    assert np.isfinite(found.logits(found.new_cache(32), [5, 6, 7])).all()
