"""Everything of the lab that needs a GPU, in one run: `python -m tests.bench.lab OUT [PART...]`. Two minutes (H200).

    ahead    kernels compiled ahead into an empty cache, then a model loaded: compilations and new entries must be 0
    census   decode, verify and prefill steps of Qwen3-0.6B and decode and verify of 4B, on noise
    probes   every probe with its times; probes=NAME,NAME only those
    tests    the GPU tests of explain, far pages and signatures

OUT gets probes.json, census-….json and .svg, for docs/design_choices.md. Parts that fail do not stop
the others.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

WORKERS = min(16, os.cpu_count() or 1)
STEPS: dict[str, list[tuple[str, int | None, int]]] = {
    "Qwen3-0.6B": [("decode", None, 512), ("decode", None, 1000), ("verify", 4, 512), ("prefill", 512, 512)],
    "Qwen3-4B": [("decode", None, 512), ("verify", 8, 512)],
}
TESTS = ("kernels/test_explain.py", "kernels/test_far_pages.py", "compile/test_compile.py")
START = time.time()


def say(*words: Any) -> None:
    print(f"[{time.time() - START:6.1f} s]", *words, flush=True)


def config_file(name: str) -> Path:
    from kernels.shapes import MODELS
    from tileinfer_core.kernel_census import config_dict

    path = Path(tempfile.gettempdir()) / f"{name}.json"
    path.write_text(json.dumps({**config_dict(MODELS[name]), "torch_dtype": "bfloat16"}))
    return path


def entries() -> int:
    from kernels import cache

    folder = cache.cache_dir()
    return 0 if folder is None else len(cache.entries(folder))


def load(name: str) -> Any:
    from tileinfer_core.bench import load_for_bench
    from tileinfer_core.engine import EngineOptions

    return load_for_bench(config_file(name), EngineOptions("cuda", context=4096), noise=True)


def ahead(_out: Path, _chosen: str) -> None:
    from kernels.shapes import MODELS
    from tileinfer_core import kernel_tools

    models = [(name, MODELS[name], "bfloat16") for name in STEPS]
    arch = kernel_tools.this_gpu() or "sm_90"
    results = list(kernel_tools.compile_kernels([arch], models, workers=WORKERS))
    say(f"{len(results)} kernels compiled ahead, errors: {[result.error for result in results if result.error]}")
    before = entries()
    loaded = load("Qwen3-0.6B")
    new = entries() - before
    say(f"then a model loaded in {loaded.load_s:.2f} s, {loaded.runner.compile_s} s of it compiling, {new} new entries")
    device = loaded.runner.device
    say(f"forms loaded: {sum(map(len, device.specialisations.values()))}, compiled by launches: {device.compiled}")
    loaded.runner.close()


def census(out: Path, _chosen: str) -> None:
    for name, steps in STEPS.items():
        loaded = load(name)
        for kind, tokens, at in steps:
            try:
                one_census(out / f"census-{name}-{kind}-{at}", loaded, name, (kind, tokens, at))
            except Exception:
                traceback.print_exc()
        loaded.runner.close()


def one_census(stem: Path, loaded: Any, name: str, step: tuple[str, int | None, int]) -> None:
    from tileinfer_core import kernel_census

    found = kernel_census.census_on_gpu(name, loaded, kernel_census.chosen_step(*step))
    stem.with_name(stem.name + ".json").write_text(json.dumps(found.as_dict()))
    stem.with_name(stem.name + ".svg").write_text(kernel_census.picture(found))
    total, parts = found.total_us or 0.0, found.sum_us or 0.0
    say(f"{stem.name}: {total:.1f} µs, sum {parts:.1f} ({100 * (parts / total - 1):+.1f} %), loop "
        f"{found.loop_us:.1f}, copy {(found.copy_bytes_per_s or 0) / 1e9:.0f} GB/s")  # fmt: skip
    for row in kernel_census.by_kind(found):
        times = " ".join(f"{key} {row[key]:8.2f}" for key in ("time_us", "alone_us", "gap_us", "bound_us"))
        print(f"  {row['launches']:3} {row['kernel']:32} {row['grid']!s:18} {times}", flush=True)


def probes(out: Path, chosen: str) -> None:
    from tileinfer_core import kernel_probe, kernel_tools

    found = []
    for probe in kernel_probe.find_probes(chosen.split(",") if chosen else ()):
        try:
            [result] = kernel_probe.run_probes([probe.name], kernel_tools.chosen_archs(()), workers=WORKERS)
        except Exception:
            traceback.print_exc()
            continue
        found.append(result.as_dict())
        (out / "probes.json").write_text(json.dumps(found))
        say(f"{probe.name}: {probe.question}")
        for row in result.as_dict()["variants"]:
            times = row["times_us"] or {}
            numbers = " ".join(f"{times.get(key, 0):9.3f}" for key in ("least", "median", "mean", "launch"))
            print(f"  {row['variant']:56} {numbers} {times.get('error') or row['error'] or ''}", flush=True)


def tests(_out: Path, _chosen: str) -> None:
    folder = Path(__file__).resolve().parents[1]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    subprocess.run([*command, *(str(folder / name) for name in TESTS)], timeout=200, check=False)


PARTS: dict[str, Callable[[Path, str], None]] = {"ahead": ahead, "census": census, "probes": probes, "tests": tests}


def main() -> None:
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    os.environ["CUDA_TILE_CACHE_DIR"] = tempfile.mkdtemp()
    for part in sys.argv[2:] or PARTS:
        say("==", part)
        name, _, chosen = part.partition("=")
        try:
            PARTS[name](out, chosen)
        except Exception:
            traceback.print_exc()


if __name__ == "__main__":
    main()
