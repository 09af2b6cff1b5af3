"""Logits of real shapes on a GPU against Transformers, with the same random weights, and the speed of each shape.

    python tests/models/logits_on_gpu.py [--out FILE] [--speed NAME …] [NAME …]     needs torch with CUDA, transformers

For each model: weights are drawn on the device in BF16, in Transformers' model; TileInfer's arrays are filled from them
without the host. At each length, the logits after the last positions (up to 64) by

    reference      Transformers' layers in float32, TF32 off, one layer's weights at a time, attention in rows
    transformers   Transformers in BF16 as it comes (sdpa)
    tileinfer      the engine: prefill in chunks, then the last rows

and the rms of either's deviation from the reference, which for TileInfer must not be the larger one. Then 64 greedy
tokens of the decode step, each against the reference's best, and decode and prefill speed as `tileinfer bench` measures
them; for the names after --speed that alone. The reference works in a thread while the kernels compile.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import sys
import threading
import time
import traceback
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import cupy
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.models.real_shapes import REAL
from tileinfer_core.backends.base import LoadOptions
from tileinfer_core.backends.cuda import load
from tileinfer_core.backends.cuda.gpu import GpuDevice
from tileinfer_core.backends.cuda.loader import is_interleaved
from tileinfer_core.bench import BenchOptions, run_bench
from tileinfer_core.config import ModelConfig
from tileinfer_core.dtypes import BFLOAT16
from tileinfer_core.models.define import define_model
from tileinfer_core.progress import silent
from tileinfer_core.sampling import SamplingParams

NAMES = (
    "Qwen3-0.6B", "Llama-3.2-1B", "Apertus-8B", "Qwen3-8B", "Llama-3.1-8B", "Qwen3-4B", "Qwen3-14B", "Qwen2.5-7B",
)  # fmt: skip
LENGTHS = (1, 17, 512, 4096, 16384)
LAST = 64
CONTEXT = LENGTHS[-1] + 128
PROMPT, GREEDY = 500, 64
ATTENTION_ROWS = 512
DEVICE = "cuda"
START = time.perf_counter()


def say(*words: object) -> None:
    print(f"[{time.perf_counter() - START:6.1f}]", *words, flush=True)


# Transformers' side


def attention_in_rows(module: Any, query: Any, key: Any, value: Any, _mask: Any, scaling: float, **_: Any) -> Any:
    """Causal attention in float32; scores for ATTENTION_ROWS queries at a time: 16,384 x 16,384 would not fit."""
    groups, length = query.shape[1] // key.shape[1], query.shape[2]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    out = torch.empty_like(query)
    for first in range(0, length, ATTENTION_ROWS):
        last = min(first + ATTENTION_ROWS, length)
        scores = torch.matmul(query[:, :, first:last], key[:, :, :last].transpose(2, 3)) * scaling
        hidden = torch.ones(last - first, last, dtype=torch.bool, device=query.device).triu(first + 1)
        scores = scores.masked_fill_(hidden, -torch.inf).softmax(-1)
        out[:, :, first:last] = torch.matmul(scores, value[:, :, :last])
    return out.transpose(1, 2).contiguous(), None


def make_model(config: dict[str, Any]) -> Any:
    """Transformers' model in BF16 with weights from one seed, without a float32 copy at any time."""
    hf = AutoConfig.for_model(**config)
    hf.dtype = torch.bfloat16
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf, attn_implementation="sdpa").to(torch.bfloat16)
    model = model.to_empty(device=DEVICE).eval()
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config).to(DEVICE)  # a CPU's frequencies
    generator = torch.Generator(DEVICE).manual_seed(1)
    for name, parameter in model.named_parameters():
        if "alpha" in name:
            parameter.data.uniform_(-1, 1, generator=generator)
        elif "norm" in name:
            parameter.data.normal_(1, 0.1, generator=generator)
        else:  # wider queries and keys than trained ones start with: attention that looks at some positions, not at all
            wide = 0.05 if name.endswith(("embed_tokens.weight", "bias")) else 0.03 if "q_proj" in name else 0.02
            parameter.data.normal_(0, wide, generator=generator)
    for name, buffer in model.named_buffers():
        if name.endswith(("beta", "eps")):
            buffer.fill_(0.5 if name.endswith("beta") else -1e-6)
    return model


@torch.no_grad()
def reference(model: Any, ids: list[int], positions: list[int]) -> Any:
    """Logits at the positions, float32 throughout: [positions, V]."""
    x = model.model.embed_tokens(torch.tensor([ids], device=DEVICE)).float()
    place = torch.arange(len(ids), device=DEVICE)[None]
    rotation = model.model.rotary_emb(x, place)
    layer = copy.deepcopy(model.model.layers[0]).float()
    layer.self_attn.config._attn_implementation = "in_rows"
    for source in model.model.layers:
        for mine, its in zip(layer.state_dict().values(), source.state_dict().values(), strict=True):
            mine.copy_(its)
        x = layer(x, attention_mask=None, position_ids=place, position_embeddings=rotation)
        x = x[0] if isinstance(x, tuple) else x
    x = copy.deepcopy(model.model.norm).float()(x[:, positions])
    return torch.matmul(x[0], model.lm_head.weight.float().T).cpu().numpy()


@torch.no_grad()
def in_bfloat16(model: Any, ids: list[int]) -> Any:
    """Logits after the last positions, as Transformers computes them in BF16."""
    out = model(torch.tensor([ids], device=DEVICE), use_cache=False, logits_to_keep=min(LAST, len(ids)))
    return out.logits[0].float().cpu().numpy()


# TileInfer's side


def as_cupy(tensor: Any) -> Any:
    kind = BFLOAT16 if tensor.dtype == torch.bfloat16 else np.dtype(np.float32)
    memory = cupy.cuda.UnownedMemory(tensor.data_ptr(), tensor.numel() * tensor.element_size(), tensor)
    return cupy.ndarray(tuple(tensor.shape), dtype=kind, memptr=cupy.cuda.MemoryPointer(memory, 0))


def fill_from(hf: Any) -> Any:
    """In place of loader.random_weights: the arrays of `hf`, joined as a load from files joins them."""
    state = hf.state_dict()

    def fill(model: Any, arrays: Any, device: Any) -> None:
        kept = []
        for parameter in model.parameters:
            array, start = arrays[parameter.name], 0
            parts = [state[part.name] for part in parameter.parts]
            if parameter.form == "xielu":
                alpha_p, alpha_n, beta, epsilon = (part.reshape(-1)[:1].float() for part in parts)
                soft = torch.nn.functional.softplus
                parts = [torch.cat([soft(alpha_p), beta + soft(alpha_n), beta, epsilon])]
            for index, part in enumerate(parts):
                source = part.detach().float() if str(array.dtype) == "float32" else part.detach()
                kept.append(source)
                target = array[start : start + len(part)]
                if is_interleaved(parameter):
                    target = array[index :: len(parts)]
                start += len(part)
                torch.cuda.synchronize()
                device.copy(target, as_cupy(source))
        device.synchronize()

    return fill


def last_logits(runner: Any, ids: list[int]) -> Any:
    cache = runner.new_cache(len(ids) + 1)
    keep = min(LAST, len(ids))
    if keep < len(ids):
        runner.prefill(cache, ids[:-keep])
    return runner.logits(cache, ids[-keep:])


def greedy(runner: Any, ids: list[int]) -> list[int]:
    cache = runner.new_cache(len(ids) + GREEDY + 2)
    runner.prefill(cache, ids)
    with closing(runner.decode(cache, SamplingParams(temperature=0), None, len(ids))) as steps:
        return [sampled.id for sampled in islice(steps, GREEDY)]


# Both


def rms(a: Any, b: Any) -> float:
    return float(np.sqrt(np.mean((a.astype(np.float64) - b) ** 2)))


def define(name: str) -> Any:
    return define_model(ModelConfig.from_dict(REAL[name]), tied=REAL[name]["tie_word_embeddings"])


def compare(name: str, results: dict[str, Any]) -> None:
    config = REAL[name]
    hf = make_model(config)
    ids = np.random.default_rng(0).integers(3, config["vocab_size"], LENGTHS[-1]).tolist()
    positions = sorted({p for n in LENGTHS for p in range(max(n - LAST, 0), n)})
    theirs: dict[str, Any] = {}

    def work() -> None:
        try:
            theirs["half"] = {n: in_bfloat16(hf, ids[:n]) for n in LENGTHS}
            whole = reference(hf, ids, positions)
            theirs["exact"] = {n: whole[[positions.index(p) for p in range(max(n - LAST, 0), n)]] for n in LENGTHS}
        except Exception as error:
            theirs["error"] = error

    thread = threading.Thread(target=work)
    thread.start()
    load.random_weights = fill_from(hf)
    model = define(name)
    runner = load.load_runner(model, None, GpuDevice(), LoadOptions(CONTEXT), silent)
    say(name, f"loaded, kernels compiled for {runner.compile_s:.1f} s")
    thread.join()
    torch.cuda.empty_cache()
    if "error" in theirs:
        raise theirs["error"]
    say(name, "reference done, spread of its logits", f"{theirs['exact'][LENGTHS[-1]].std():.3f}")
    try:
        measure(name, hf, runner, model, ids, theirs, results)
    finally:
        runner.close()


def measure(
    name: str, hf: Any, runner: Any, model: Any, ids: list[int], theirs: dict[str, Any], results: dict[str, Any]
) -> None:
    for length in LENGTHS:
        exact, ours = theirs["exact"][length], last_logits(runner, ids[:length])
        row = {
            "spread": float(exact.std()),
            "transformers": rms(theirs["half"][length], exact),
            "ours": rms(ours, exact),
        }
        row |= {
            "largest": float(np.abs(ours - exact).max()),
            "same_best": float((ours.argmax(1) == exact.argmax(1)).mean()),
        }
        results[f"{name} {length}"] = row
        verdict = "ok" if row["ours"] <= row["transformers"] else "LARGER"
        say(name, f"{length:6,d}", " ".join(f"{key} {value:.5f}" for key, value in row.items()), verdict)
    out = greedy(runner, ids[:PROMPT])
    rows = reference(hf, [*ids[:PROMPT], *out[:-1]], list(range(PROMPT - 1, PROMPT - 1 + GREEDY)))
    gaps = rows.max(1) - rows[np.arange(GREEDY), out]
    results[f"{name} greedy"] = {"differ": int((gaps > 0).sum()), "largest_gap": float(gaps.max())}
    say(name, "greedy: not the reference's best", int((gaps > 0).sum()), "of", GREEDY, f"largest gap {gaps.max():.4f}")
    torch.cuda.empty_cache()
    speed(name, runner, model, results)


def only_speed(name: str, results: dict[str, Any]) -> None:
    model = define(name)
    runner = load.load_runner(model, None, GpuDevice(), LoadOptions(2048), silent)
    try:
        speed(name, runner, model, results)
    finally:
        runner.close()


def speed(name: str, runner: Any, model: Any, results: dict[str, Any]) -> None:
    report = run_bench(
        runner, model, BenchOptions(prefill=(512,), contexts=(512,), tokens=128, repetitions=3)
    ).as_dict()
    results[f"{name} bench"] = report
    decode, prefill = report["decode"][0], report["prefill"][0]
    say(name, f"decode {decode['tok_s']['median']:.1f} tok/s, {decode['share_of_copy']:.1%} of the copy speed;",
        f"prefill of 512 {prefill['tok_s']['median']:,.0f} tok/s")  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=NAMES, metavar="NAME", help=f"of {', '.join(REAL)}")
    parser.add_argument("--speed", nargs="*", default=(), metavar="NAME", help="measure these, compare nothing")
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    ALL_ATTENTION_FUNCTIONS.register("in_rows", attention_in_rows)
    results: dict[str, Any] = {}
    failed = 0
    drawn = load.random_weights
    work = [(name, only_speed) for name in options.speed] + [(name, compare) for name in options.names]
    for name, function in work:
        load.random_weights = drawn
        try:
            function(name, results)
        except Exception:
            failed += 1
            say(name, "FAILED")
            traceback.print_exc()
        gc.collect()
        torch.cuda.empty_cache()
        if options.out:
            options.out.write_text(json.dumps(results, indent=1) + "\n")
    larger = [key for key, row in results.items() if row.get("ours", 0) > row.get("transformers", 1)]
    say("done;", f"{failed} failed;", f"larger deviations than Transformers': {larger or 'none'}")
    return int(bool(failed or larger))


if __name__ == "__main__":
    sys.exit(main())
