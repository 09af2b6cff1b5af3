"""Times the samplers over 151,936 logits: the whole chain in a graph, and each of its kernels alone.

    python3 tests/bench/sampling.py [--scan]

Needs CuPy, cuda-tile and tileiras. Logits are normal with a deviation of 3: a flat distribution, the hard case. The
last lines draw from a sharper one, where the nucleus fits the sorted ids.
"""

from __future__ import annotations

import argparse
from typing import Any

import cupy as cp

from kernels.argmax import ArgmaxConfig, SampleOutputs, argmax
from kernels.configs import config
from kernels.sampling import SampleConfig, SampleWorkspace, sample, sample_workspace_shapes
from kernels.specs import RecordingLauncher
from tests.bench.timing import ARCH, LAUNCHER, Report, compile_ahead, microseconds

say = Report("sampling")
VOCAB = 151_936
# name, temperature, top-k, top-p
SETTINGS = [
    ("greedy", 0.0, 0, 1.0),
    ("top-k 20, top-p 0.95", 1.0, 20, 0.95),
    ("top-k 128", 1.0, 128, 1.0),
    ("top-p 0.95", 1.0, 0, 0.95),
    ("temperature alone", 1.0, 0, 1.0),
]
SCAN = [
    {"chunk": chunk, "sub": sub, "own": own, "tail": tail}
    for chunk, sub, own, tail in [
        (512, 64, 4, 8192),
        (512, 64, 8, 2048),
        (512, 32, 8, 4096),
        (1024, 64, 8, 2048),
    ]
]


def outputs() -> SampleOutputs:
    one, ring = cp.zeros(1, dtype=cp.int32), cp.zeros(64, dtype=cp.int32)
    return SampleOutputs(one, cp.zeros(1, dtype=cp.int32), ring, cp.zeros(64, dtype=cp.float32))


def greedy(logits: Any) -> None:
    for chunk in (512, 1024, 2048):
        chunks = -(-VOCAB // chunk)
        arrays = (cp.zeros(chunks, dtype=cp.float32), cp.zeros(chunks, dtype=cp.int32), cp.zeros(8, dtype=cp.int32))
        out, tiles = outputs(), ArgmaxConfig(chunk)
        us = microseconds(
            lambda _, a=arrays, o=out, t=tiles: argmax(LAUNCHER, logits, *a, o, vocab=VOCAB, config=t), calls=20
        )
        right = int(out.sampled[0]) == int(cp.argmax(logits))
        say(f"argmax, chunks of {chunk}: {us:.2f} us, {'right' if right else 'WRONG'}")


def draws(logits: Any, name: str, temperature: float, top_k: int, top_p: float, tiles: dict[str, Any]) -> None:
    cfg = SampleConfig(**tiles)
    settings = cp.asarray([temperature, top_p, 0, 1, 0, 0, 0, 0], dtype=cp.float32)
    state = cp.asarray([top_k, 1, 0, 0, 0, 0, 0, 0], dtype=cp.int32)
    shapes = sample_workspace_shapes(VOCAB, cfg)
    workspace = SampleWorkspace(**{key: cp.zeros(shape, dtype) for key, (shape, dtype) in shapes.items()})
    arrays = (logits, cp.zeros(VOCAB, dtype=cp.int32), settings, state, workspace, outputs())
    compile_ahead([lambda launcher: sample(launcher, *arrays, config=cfg)])
    us = microseconds(lambda _: sample(LAUNCHER, *arrays, config=cfg), calls=20)
    recorder = RecordingLauncher(ARCH, pdl=LAUNCHER.pdl)
    sample(recorder, *arrays, config=cfg)
    parts = [microseconds(lambda _, r=r: LAUNCHER(r.kernel, r.grid, r.args), calls=20) for r in recorder.records]
    say(f"{name}: {us:.2f} us; kernels alone {', '.join(f'{part:.2f}' for part in parts)}; {tiles}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--scan", action="store_true", help="other sizes of the stages")
    scan = parser.parse_args().scan
    cp.random.seed(1)
    flat = cp.random.standard_normal((1, VOCAB), dtype=cp.float32) * 3
    greedy(flat)
    for tiles in [config("sample", ARCH, vocab=VOCAB), *(SCAN if scan else [])]:
        for case in SETTINGS:
            draws(flat, *case, tiles)
    sharp = flat.copy()
    sharp[0, :40] += cp.arange(40, dtype=cp.float32) * 0.5
    for case in SETTINGS[3:]:
        draws(sharp, f"sharp, {case[0]}", *case[1:], config("sample", ARCH, vocab=VOCAB))


if __name__ == "__main__":
    main()
