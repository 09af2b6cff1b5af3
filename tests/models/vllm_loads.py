"""Loads a model folder with vLLM's own code, on the CPU and without its kernels, and compares every weight with ours.

    python -m tests.models.vllm_loads FOLDER

vLLM builds the model by config.json, its loader fills it from the files, and every linear layer is then multiplied with
the identity. VLLM_BATCH_INVARIANT has it keep the weights as they are stored and dequantise them for each product, so
that no GPU kernel is needed; the scales are widened first, which makes scale · int8 exact. Written for vLLM 0.33.0.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

os.environ |= {"VLLM_BATCH_INVARIANT": "1", "VLLM_LOGGING_LEVEL": "ERROR", "CUDA_VISIBLE_DEVICES": ""}

import numpy as np
import torch
import vllm.platforms
from vllm.config import LoadConfig, ModelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import compressed_tensors_wNa16
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.platforms.cpu import CpuPlatform

from tileinfer_core.backends.numpy_weights import load_arrays
from tileinfer_core.config import ModelConfig as OurConfig
from tileinfer_core.models.define import define_from_files
from tileinfer_core.progress import silent
from tileinfer_core.weights import WeightFiles


def load_theirs(folder: Path) -> torch.nn.Module:
    vllm.platforms._current_platform = CpuPlatform()
    compressed_tensors_wNa16.matmul_batch_invariant = torch.matmul  # theirs is a Triton kernel
    path = str(folder)
    model = ModelConfig(
        model=path, tokenizer=path, skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True, max_model_len=64
    )
    config = VllmConfig(model_config=model, load_config=LoadConfig(load_format="safetensors"))
    with set_current_vllm_config(config), tempfile.TemporaryDirectory() as rendezvous:
        init_distributed_environment(
            1, 0, distributed_init_method=f"file://{rendezvous}/one", local_rank=0, backend="gloo"
        )
        initialize_model_parallel(1, 1)
        torch.set_default_dtype(torch.bfloat16)
        module = initialize_model(vllm_config=config)
        DefaultModelLoader(config.load_config).load_weights(module, model)
        process_weights_after_loading(module, model, torch.device("cpu"))
    return module


def weight_of(layer: torch.nn.Module) -> np.ndarray:
    """[out, in] in float32."""
    if not hasattr(layer, "weight_packed"):
        return layer.weight.float().numpy()
    layer.weight_scale.data = layer.weight_scale.data.float()
    identity = torch.eye(layer.input_size_per_partition, dtype=torch.float32)
    return layer.scheme.apply_weights(layer, identity, None).T.numpy()


def main(folder: Path) -> None:
    files = WeightFiles.open(folder)
    definition, _ = define_from_files(OurConfig.load(folder), files)
    ours = load_arrays(definition.parameters, files, silent)
    seen = set()
    for name, layer in load_theirs(folder).named_modules():
        if isinstance(layer, LinearBase | VocabParallelEmbedding):
            key = name.replace("self_attn.", "").replace("mlp.", "") + ".weight"
            expected = ours[key if key in ours else "model.embed_tokens.weight"]
            found = weight_of(layer)[: len(expected)]  # their vocabulary is padded
            assert np.array_equal(found, expected), name
            seen.add(key)
    assert seen >= {name for name, array in ours.items() if array.ndim == 2}
    print(f"{len(seen)} matrices are equal")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
