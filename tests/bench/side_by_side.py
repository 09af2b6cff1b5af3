"""TileInfer, Transformers and cuBLAS on the same weights, in one run, as one table.

Needs a GPU, PyTorch and Transformers.
    python tests/bench/side_by_side.py FOLDER [CONTEXT] [TOKENS]

FOLDER is a model in Hugging Face's layout. Three rows:

    TileInfer       decoding through the runner, sampling included
    Transformers    BF16, static cache, the step compiled by torch.compile (reduce-overhead), greedy
    cuBLAS          only the weight products of a step, one after the other in a CUDA graph: what a decoder built on
                    library products could reach at best, without attention, norms and sampling

Every row is the median of RUNS runs after a warm-up; the copy speed of the memory is measured between them.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from tileinfer_core.bench import BenchOptions, load_for_bench, run_bench
from tileinfer_core.engine import EngineOptions
from tileinfer_core.sampling import SamplingParams

RUNS = 5


def tileinfer(folder: Path, context: int, tokens: int) -> tuple[float, dict[str, Any]]:
    """Tokens per second, and the whole report."""
    loaded = load_for_bench(folder, EngineOptions("cuda", context=context + tokens + 64), noise=False)
    options = BenchOptions(
        prefill=(context,),
        contexts=(context,),
        tokens=tokens,
        repetitions=RUNS,
        sampling=SamplingParams(temperature=0.7, top_k=20, top_p=0.95, seed=1),
    )
    report = run_bench(loaded.runner, loaded.model, options).as_dict()
    loaded.runner.close()
    return report["decode"][0]["tok_s"]["median"], report


def transformers(folder: Path, context: int, tokens: int) -> float:
    """Tokens per second of a compiled greedy step over a static cache."""
    from transformers import AutoModelForCausalLM, StaticCache

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).cuda().eval()
    cache = StaticCache(config=model.config, max_cache_len=context + tokens + 16)
    step = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True)
    ids = torch.randint(3, model.config.vocab_size, (1, context), device="cuda")
    speeds = []
    with torch.inference_mode():
        for _ in range(RUNS + 2):
            cache.reset()  # the cache counts its tokens itself
            model(ids, past_key_values=cache, use_cache=True)
            last = ids[:, -1:].clone()
            torch.cuda.synchronize()
            start = time.perf_counter()
            for position in range(context, context + tokens):
                where = torch.full((1,), position, device="cuda", dtype=torch.long)
                torch.compiler.cudagraph_mark_step_begin()
                out = step(last, past_key_values=cache, cache_position=where, position_ids=where[None], use_cache=True)
                last = out.logits[:, -1:].argmax(-1).clone()
            torch.cuda.synchronize()
            speeds.append(tokens / (time.perf_counter() - start))
    del model, cache
    torch.cuda.empty_cache()
    return statistics.median(speeds[2:])


def cublas(folder: Path) -> tuple[float, int]:
    """Steps per second of the products alone, and the bytes of their weights."""
    from transformers import AutoConfig

    c = AutoConfig.from_pretrained(folder)
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    wide, kv = c.num_attention_heads * head_dim, c.num_key_value_heads * head_dim
    shapes = [
        (wide + 2 * kv, c.hidden_size),
        (c.hidden_size, wide),
        (2 * c.intermediate_size, c.hidden_size),
        (c.hidden_size, c.intermediate_size),
    ] * c.num_hidden_layers
    shapes.append((c.vocab_size, c.hidden_size))
    weights = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02 for shape in shapes]
    inputs = {k: torch.randn(1, k, device="cuda", dtype=torch.bfloat16) for _, k in shapes}

    def step() -> None:
        for weight in weights:
            torch.nn.functional.linear(inputs[weight.shape[1]], weight)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    seconds = statistics.median(_timed(graph.replay) for _ in range(RUNS + 3))
    return 1 / seconds, sum(weight.nbytes for weight in weights)


def _timed(action: Any) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    action()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    folder = Path(sys.argv[1])
    context, tokens = (int(sys.argv[i]) if len(sys.argv) > i else n for i, n in ((2, 512), (3, 128)))
    ours, report = tileinfer(folder, context, tokens)
    theirs = transformers(folder, context, tokens)
    products, moved = cublas(folder)
    copy = report["ceilings"]["copy"]
    print(f"{folder.name}, {report['device']}, BF16, {context} tokens of context, {time.strftime('%Y-%m-%d')}")
    print(f"copy {copy / 1e9:,.0f} GB/s, weights of a step {moved / 1e9:.2f} GB\n")
    print("| | tok/s | share of the copy speed |\n| --- | ---: | ---: |")
    rows = (
        ("TileInfer, sampling included", ours),
        ("Transformers, static cache, compiled, greedy", theirs),
        ("cuBLAS, the products alone in a CUDA graph", products),
    )
    for name, speed in rows:
        print(f"| {name} | {speed:,.0f} | {moved * speed / copy * 100:.0f} % |")


if __name__ == "__main__":
    main()
