"""The whole engine in INT8 beside BF16, on noise: `tileinfer bench --random-weights` for each recipe. Needs a GPU.

python3 -m tests.bench.int8_engine Qwen3-0.6B Qwen3-4B Qwen3-8B          # 512 positions, prefill of 512 and 4,096
python3 -m tests.bench.int8_engine --at 32000 --kv int8 Qwen3-4B         # long context, INT8 keys and values too
python3 -m tests.bench.int8_engine --recipes bf16,rows Qwen3-4B
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from kernels.shapes import MODELS, ModelShape
from tileinfer_core.kernel_census import config_dict
from tileinfer_core.quantize_recipe import Recipe, quantization_config

RECIPES: dict[str, int | None] = {"default": None, "rows": 0, "groups-of-128": 128}
_PRODUCTS = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "o_proj": "o", "gate_proj": "up", "up_proj": "up"}


def config(name: str, recipe: str) -> dict[str, Any]:
    """config.json of a model of that shape; `recipe` "bf16" or one of RECIPES."""
    shape = MODELS[name]
    found = {**config_dict(shape), "torch_dtype": "bfloat16"}
    if recipe == "bf16":
        return found
    modules = _modules(shape)
    chosen = Recipe(RECIPES[recipe]).for_model(tied=True, columns=shape.hidden)
    stored = {module: chosen.of(module, columns) for module, columns in modules.items()}
    return {**found, "quantization_config": quantization_config(stored)}


def _modules(shape: ModelShape) -> dict[str, int]:
    """Columns of each module that has weights."""
    found = {"model.embed_tokens": shape.hidden, "model.layers.0.mlp.down_proj": shape.ffn}
    for module, product in _PRODUCTS.items():
        part = "self_attn" if product in ("qkv", "o") else "mlp"
        found[f"model.layers.0.{part}.{module}"] = shape.products[product][1]
    return found


def bench(path: Path, kv: str, at: list[str], prefill: list[str], repeat: str) -> dict[str, Any]:
    command = [
        sys.executable,
        "-m",
        "tileinfer_cli",
        "bench",
        "--random-weights",
        str(path),
        "--kv",
        kv,
        "--json",
        "-q",
    ]
    command += [word for n in at for word in ("--decode-at", n)] + [word for n in prefill for word in ("--prefill", n)]
    done = subprocess.run([*command, "--repeat", repeat], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-500:])
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", choices=list(MODELS))
    parser.add_argument("--recipes", default="bf16,default")
    parser.add_argument("--kv", default="bf16", help="bf16, int8, or both with a comma")
    parser.add_argument("--at", action="append", default=None)
    parser.add_argument("--prefill", action="append", default=None)
    parser.add_argument("--repeat", default="5")
    args = parser.parse_args()
    for name in args.models:
        for recipe in args.recipes.split(","):
            for kv in args.kv.split(","):
                path = Path(tempfile.gettempdir()) / f"{name}-{recipe}.json"
                path.write_text(json.dumps(config(name, recipe)))
                found = bench(path, kv, args.at or ["512"], args.prefill or ["512", "4096"], args.repeat)
                print(f"{name} {recipe}, keys and values {kv}: {json.dumps(found)}", flush=True)


if __name__ == "__main__":
    main()
