"""From process start to the first token, against the time that reading the weights takes. A benchmark, not a test.

    python tests/bench/first_token.py MODEL_FOLDER [--cold]

--cold drops the model's files from the page cache before each start, so that they come from the disk.
Each round starts a new interpreter that runs `tileinfer generate` and waits for the first byte of the answer, then one
that does nothing but read: its time runs from the checked headers to the last float32 array that the engine computes
with, by the code that the program uses, and does not count the start of Python and the imports before it. Both find
their bytecode compiled, as pip leaves it. The last line is JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

ROUNDS = 9
PROMPT = "What is the capital of France?"
READ = """
import sys, time
from pathlib import Path
from tileinfer_core.backends.numpy_weights import load_arrays
from tileinfer_core.config import ModelConfig
from tileinfer_core.models.define import define_from_files
from tileinfer_core.progress import silent
from tileinfer_core.weights import WeightFiles
folder = Path(sys.argv[1])
files = WeightFiles.open(folder)
model, _ = define_from_files(ModelConfig.load(folder), files)
start = time.perf_counter()
load_arrays(model.parameters, files, silent)
print(time.perf_counter() - start)
"""


def drop_from_cache(folder: str) -> None:
    for path in Path(folder).iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def environment(home: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "HOME": home}


def first_byte(folder: str, home: str) -> tuple[float, int]:
    """Seconds from the start to the first byte on stdout, and the process's largest resident size in bytes."""
    command = [sys.executable, "-m", "tileinfer_cli", "generate", PROMPT, "-m", folder, "--temperature", "0"]
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment(home)) as process:
        assert process.stdout is not None
        assert process.stdout.read(1), "no answer"
        seconds = time.perf_counter() - start
        process.stdout.read()
        _, _, usage = os.wait4(process.pid, 0)
        process.returncode = 0
    return seconds, usage.ru_maxrss * 1024


def read_seconds(folder: str, home: str) -> float:
    command = [sys.executable, "-c", READ, folder]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment(home))
    return float(done.stdout)


def main() -> None:
    folder, cold = sys.argv[1], "--cold" in sys.argv[2:]
    prepare = drop_from_cache if cold else lambda _folder: None
    with tempfile.TemporaryDirectory() as home:
        first_byte(folder, home)
        rounds = []
        for _ in range(ROUNDS):
            prepare(folder)
            seconds, peak = first_byte(folder, home)
            prepare(folder)
            read = read_seconds(folder, home)
            rounds.append((seconds, read, seconds / read, peak))
    first, read, ratio, peaks = (sorted(column) for column in zip(*rounds, strict=True))
    print(
        f"{os.cpu_count()} CPUs, OPENBLAS_CORETYPE {os.environ.get('OPENBLAS_CORETYPE')}, load {os.getloadavg()[0]:.1f}"
    )
    print(f"first token after {spread(first)} s, reading the weights {spread(read)} s, ratio {spread(ratio)}")
    print(f"ratio of the medians {median(first) / median(read):.2f}; peak memory {median(peaks) / 1e6:.0f} MB")
    print(json.dumps({"first_token_s": first, "read_s": read, "ratio": ratio, "peak_bytes": peaks}))


def spread(values: list[float]) -> str:
    return f"{median(values):.3f} ({values[0]:.3f} to {values[-1]:.3f})"


if __name__ == "__main__":
    main()
