"""The demo model's greedy answer on a GPU against the NumPy backend's logits, token for token over 256 steps.

The converted model's folder is named by TILEINFER_TEST_DEMO (`tileinfer show demo` prints it). At every step the GPU's
choice must be NumPy's best token, or one within what half precision resolves (TOLERANCE, of logits that spread over
some 30); how many steps were such near-ties is printed.
"""

from __future__ import annotations

import os
from contextlib import closing
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from tileinfer_core.backends.base import LoadOptions
from tileinfer_core.backends.cuda.load import load_runner
from tileinfer_core.backends.cuda.probe import cuda_status
from tileinfer_core.backends.numpy_backend import NumpyRunner
from tileinfer_core.config import ModelConfig
from tileinfer_core.models.define import define_from_files
from tileinfer_core.progress import silent
from tileinfer_core.sampling import SamplingParams
from tileinfer_core.tokenizer import Tokenizer
from tileinfer_core.weights import WeightFiles

FOLDER = os.environ.get("TILEINFER_TEST_DEMO", "")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(cuda_status().problem is not None, reason="no usable GPU"),
    pytest.mark.skipif(not FOLDER, reason="TILEINFER_TEST_DEMO does not name the demo model's folder"),
]
STEPS = 256
TOLERANCE = 0.5
PROMPTS = [
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nWrite a story about a lighthouse.<|im_end|>\n<|im_start|>assistant\n",
    "def fibonacci(n):\n",
]


@pytest.fixture(scope="module")
def runners():
    from tileinfer_core.backends.cuda.gpu import GpuDevice

    files = WeightFiles.open(Path(FOLDER))
    model, _ = define_from_files(ModelConfig.load(files.folder), files)
    cuda = load_runner(model, files, GpuDevice(), LoadOptions(2048), silent)
    yield cuda, NumpyRunner.load(model, files, silent)
    cuda.close()


@pytest.mark.parametrize("prompt", PROMPTS)
def test_256_greedy_steps(runners, prompt: str, capsys: pytest.CaptureFixture[str]) -> None:
    cuda, reference = runners
    prompt_ids = Tokenizer.load(Path(FOLDER), ModelConfig.load(Path(FOLDER)).vocab_size).encode(prompt, special=True)
    cache = cuda.new_cache(1024)
    cuda.prefill(cache, prompt_ids)
    with closing(cuda.decode(cache, SamplingParams(temperature=0), None, len(prompt_ids))) as steps:
        ids = [sampled.id for sampled in islice(steps, STEPS)]
    whole = [*prompt_ids, *ids[:-1]]
    rows = reference.logits(reference.new_cache(1024), whole)[len(prompt_ids) - 1 :]
    gaps = rows.max(axis=1) - rows[np.arange(STEPS), ids]
    with capsys.disabled():
        print(f"\n{int((gaps > 0).sum())} of {STEPS} steps differ, by at most {gaps.max():.4f} of a logit")
    assert gaps.max() <= TOLERANCE
    assert (gaps > 0).sum() <= STEPS // 20
