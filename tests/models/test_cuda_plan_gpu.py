"""The same engine on a real GPU: against NumPy, across buckets, and twice, so that every graph is replayed."""

from __future__ import annotations

from contextlib import closing
from itertools import islice

import numpy as np
import pytest

from tests.checkpoints import int8_tensors, quantization_config, write_checkpoint
from tests.reference import tiny_models
from tests.reference.tiny_models import VARIANTS
from tileinfer_core.backends.base import LoadOptions
from tileinfer_core.backends.cuda.load import load_runner
from tileinfer_core.backends.cuda.probe import cuda_status
from tileinfer_core.backends.numpy_backend import NumpyRunner
from tileinfer_core.config import ModelConfig
from tileinfer_core.models.define import define_from_files
from tileinfer_core.progress import silent
from tileinfer_core.sampling import SamplingParams
from tileinfer_core.weights import WeightFiles

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(cuda_status().problem is not None, reason="no usable GPU")]
CONFIG = {**VARIANTS["qwen3-tied"], "head_dim": 64, "intermediate_size": 96, "max_position_embeddings": 4096}
ROWS = {"Linear": None, "model.embed_tokens": 32}
GROUPS = {**ROWS, "re:.*down_proj": 32}  # as `quantize` makes them
# of a logit, in float16, and where rounding to half precision decides how a key rounds in INT8; see
# test_cuda_plan_engine.py
TOLERANCE = {"half": 0.03, "int8 weights": 0.03, "int8 weights, groups in down": 0.03, "int8 weights and cache": 0.15}
TOLERANCE |= {"int8 weights, groups in down, no copies": 0.03, "int8 weights, no copies": 0.03}


@pytest.fixture(scope="module", params=list(TOLERANCE))
def runners(tmp_path_factory, request):
    from tileinfer_core.backends.cuda.gpu import GpuDevice

    config, kv = CONFIG, "int8" if "cache" in request.param else "bf16"
    arrays = {t: tiny_models._values(t, shape) for t, shape in tiny_models.shapes(CONFIG).items()}
    if request.param != "half":
        grouped = {name: array for name, array in arrays.items() if "down_proj" in name and "groups" in request.param}
        config = {**CONFIG, "quantization_config": quantization_config(GROUPS if grouped else ROWS)}
        arrays = int8_tensors(arrays, None, 32) | int8_tensors(grouped, 32, 32)
    files = WeightFiles.open(write_checkpoint(tmp_path_factory.mktemp("model"), config, arrays, dtype="F16"))
    model, _ = define_from_files(ModelConfig.load(files.folder), files)
    options = LoadOptions(4096, kv=kv, half_copies="no" not in request.param)
    cuda = load_runner(model, files, GpuDevice(), options, silent)
    yield cuda, NumpyRunner.load(model, files, silent, kv=kv), TOLERANCE[request.param]
    cuda.close()


@pytest.mark.parametrize("length", [1, 63, 64, 505, 1020, 2040])
def test_greedy_ids_and_logits_equal_numpys(runners, length):
    cuda, reference, tolerance = runners
    prompt = np.random.default_rng(length).integers(3, 160, length).tolist()
    for _ in range(2):
        cache = cuda.new_cache(4096)
        cuda.prefill(cache, prompt)
        with closing(cuda.decode(cache, SamplingParams(temperature=0), None, length)) as steps:
            ids = [sampled.id for sampled in islice(steps, 24)]
        whole = [*prompt, *ids[:-1]]
        rows = reference.logits(reference.new_cache(4096), whole)[length - 1 :]
        gaps = rows.max(axis=1) - rows[np.arange(24), ids]
        assert gaps.max() <= tolerance
        del cache  # its pages are needed
        own = cuda.logits(cuda.new_cache(4096), whole)[length - 1 :]
        np.testing.assert_allclose(own, rows, rtol=0, atol=tolerance)


def test_a_seed_repeats_its_ids(runners):
    cuda = runners[0]

    def run(seed):
        cache = cuda.new_cache(256)
        cuda.prefill(cache, [5, 6, 7])
        params = SamplingParams(temperature=1.5, top_k=0, top_p=0.98, repetition_penalty=1.1, seed=seed)
        with closing(cuda.decode(cache, params, None, 3)) as steps:
            return [sampled.id for sampled in islice(steps, 40)]

    assert run(1) == run(1) != run(2)
