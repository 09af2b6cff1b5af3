"""Kernels before the first token: compiled once, in parallel with progress, kept on disk, launched once."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from kernels import compile as compile_module
from kernels.compile import CompileError
from kernels.cubin_store import CubinStore
from kernels.specs import ArraySpec, RecordingLauncher
from tests.checkpoints import quantization_config, write_checkpoint
from tests.reference import tiny_models
from tileinfer_core.backends.base import LoadOptions
from tileinfer_core.backends.cuda import load, warmup
from tileinfer_core.backends.cuda.census_steps import ShapeDevice
from tileinfer_core.backends.cuda.interpreted import InterpretedDevice
from tileinfer_core.backends.cuda.warmup import KernelWarmup
from tileinfer_core.config import ModelConfig
from tileinfer_core.errors import BackendError
from tileinfer_core.models.define import define_from_files, define_model
from tileinfer_core.progress import silent
from tileinfer_core.weights import WeightFiles

CONFIG = {**tiny_models.VARIANTS["qwen3-tied"], "num_hidden_layers": 2, "head_dim": 64}


class NoWarmup:
    unkept = None

    def __init__(self, *_args): ...
    def start(self): ...
    def finish(self, _on_progress):
        return 0.0


class ZeroedDevice(InterpretedDevice):
    """The launches are for loading kernels, not for their results: they read what nothing has written."""

    def empty(self, shape, dtype):
        return self.zeros(shape, dtype)


@pytest.fixture
def runner(tmp_path, monkeypatch):
    arrays = {t: tiny_models._values(t, shape) for t, shape in tiny_models.shapes(CONFIG).items()}
    files = WeightFiles.open(write_checkpoint(tmp_path / "model", CONFIG, arrays, dtype="BF16"))
    model, _ = define_from_files(ModelConfig.load(files.folder), files)
    monkeypatch.setattr(load, "KernelWarmup", NoWarmup)
    return load.load_runner(model, files, ZeroedDevice(), LoadOptions(1024, 128), silent)


@pytest.fixture
def warm(runner, monkeypatch, tmp_path):
    """A warm-up whose compiler is `compile_all(records, …)`; the cache is empty."""

    def make(compile_all):
        monkeypatch.setattr(warmup, "compile_all", compile_all)
        monkeypatch.setattr("kernels.cache.cache_dir", lambda: tmp_path / "cache")
        made = KernelWarmup(
            runner.plans, runner.bucket_ends, runner.device, runner.buffers["length"], runner.prefill_chunk
        )
        made.start()
        return made

    return make


def compiler(log, *, fails=None):
    def compile_all(records, arch, *, workers, timeout, on_progress, cancelled):
        log.extend(record.name for record in records)
        for done, record in enumerate(records, 1):
            result = SimpleNamespace(cached=False, unkept=None)
            if record.name == fails:
                result = CompileError(record.name, arch, "ran out of registers", "use another one")
            on_progress(done, len(records), result)
            yield result

    return compile_all


def test_every_kernel_of_every_step_is_compiled_once_and_launched(warm, runner):
    names, events = [], []
    seconds = warm(compiler(names)).finish(events.append)
    assert seconds > 0
    steps = [*runner.plans.prefill(64), *runner.plans.head(), *runner.plans.sample()]
    steps += [record for end in runner.bucket_ends for record in runner.plans.decode(end)]
    assert {record.name for record in steps} == set(names)
    assert [event.done for event in events] == sorted(event.done for event in events)
    assert events[-1].done == events[-1].total == len(names)
    assert events[-1].unit == "kernels"


BY_LAYER = {"re:.*layers.1.*(q|k|v|gate|up)_proj": None, "re:.*(o|down)_proj": None}
IN_GROUPS = {"re:.*(q|k|v)_proj": 64, "Linear": None}  # widened at a layer's start, behind the layer before


@pytest.mark.parametrize("half_copies", [False, True], ids=["stored", "copies"])
@pytest.mark.parametrize("chunk", [192, 704])
@pytest.mark.parametrize("targets", [{"Linear": None}, BY_LAYER, IN_GROUPS], ids=["alike", "by layer", "in groups"])
def test_no_length_and_no_layer_is_left_to_compile_in_an_answer(targets, chunk, half_copies):
    """A context may end within a range of lengths, and formats may differ by the layer."""
    big = {"hidden_size": 2560, "intermediate_size": 9728, "num_attention_heads": 32, "num_key_value_heads": 8}
    config = {**CONFIG, **big, "head_dim": 128, "quantization_config": quantization_config(targets)}
    model, device = define_model(ModelConfig.from_dict(config), tied=True), ShapeDevice("sm_90")
    made, _ = load.empty_runner(model, device, LoadOptions(chunk, half_copies=half_copies), "bfloat16")
    known = {
        record.identity()
        for record in KernelWarmup(made.plans, made.bucket_ends, device, made.buffers["length"], chunk).records()
    }
    late = {
        record.name
        for step in (*map(made.plans.prefill, range(64, chunk + 1, 64)), made.plans.copies(), made.plans.decode(chunk))
        for record in step
        if record.identity() not in known
    }
    assert not late


def test_the_scratch_page_is_all_that_the_launches_write(warm, runner):
    warm(compiler([])).finish(silent)
    assert any(array[: 64 * 2].any() for array in runner.pool.k)
    assert not any(array[64 * 2 :].any() for array in runner.pool.k)
    runner.forget_warmup()
    assert not any(array.any() for array in (*runner.pool.k, *runner.pool.v))


def test_a_kernel_that_does_not_compile_is_named_with_the_way_out(warm):
    with pytest.raises(BackendError, match=r"kernel rms_norm_kernel for sm_90: ran out of registers") as caught:
        warm(compiler([], fails="rms_norm_kernel")).finish(silent)
    assert caught.value.hint == "use another one"
    assert caught.value.exit_code == 8


def test_nothing_is_compiled_when_everything_is_kept(warm, monkeypatch):
    monkeypatch.setattr(CubinStore, "holds", lambda _self, _records: True)
    names, events = [], []
    assert warm(compiler(names)).finish(events.append) == 0
    assert not names
    assert not events


@pytest.mark.parametrize(
    ("refused", "says"),
    [
        ("No space left on device", ": No space left on device"),
        (None, ": the limit of 2,147,483,648 bytes is too small"),
    ],
)
def test_kernels_that_are_not_kept_are_told_of(warm, tmp_path, refused, says):
    """The next start compiles them again, for half a minute."""
    names = []
    compiled = compiler(names)

    def unkept(*args, **kwargs):
        for result in compiled(*args, **kwargs):
            result.unkept = refused
            yield result

    found = warm(unkept)
    found.finish(silent)
    assert names
    assert found.unkept == f"compiled kernels are not kept in {tmp_path / 'cache'}, so every start compiles{says}"


def test_waiting_for_launches_takes_no_processor_time(warm, monkeypatch):
    """With everything kept there is nothing to count, and the thread that launches needs the interpreter."""
    monkeypatch.setattr(CubinStore, "holds", lambda _self, _records: True)
    monkeypatch.setattr(KernelWarmup, "_prime", lambda _self, _records: time.sleep(0.5))
    started = warm(compiler([]))
    before = time.thread_time()
    started.finish(silent)
    assert time.thread_time() - before < 0.1


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_cancelling_ends_the_compilers_and_nothing_else(tmp_path):
    shutil.copy(shutil.which("sleep"), tmp_path / "tileiras")
    compiler_, other = subprocess.Popen([tmp_path / "tileiras", "30"]), subprocess.Popen(["sleep", "30"])
    try:
        deadline = time.monotonic() + 5
        while compiler_.poll() is None and time.monotonic() < deadline:
            warmup.stop_compilers()
            time.sleep(0.01)
        assert compiler_.returncode == -signal.SIGTERM
        assert other.poll() is None
    finally:
        for process in (compiler_, other):
            process.kill()
            process.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_cancelling_leaves_no_compiler_and_no_thread_that_an_exit_would_wait_for(warm, tmp_path, monkeypatch):
    shutil.copy(shutil.which("sleep"), tmp_path / "tileiras")
    started = []

    def slow(_job, _timeout):
        started.append(subprocess.Popen([tmp_path / "tileiras", "30"]))
        assert started[-1].wait() == 0  # a compiler that is ended fails

    monkeypatch.setattr("kernels.compile._tileiras", slow)
    monkeypatch.setattr("kernels.compile.cache_dir", lambda: None)
    warmup_ = warm(compile_module.compile_all)
    while not started:
        time.sleep(0.01)
    begun = time.monotonic()
    warmup_.cancel()
    assert time.monotonic() - begun < 5  # Tile IR that is being made is finished, 0.1 s each on an idle machine
    assert all(process.poll() is not None for process in started)
    assert len(started) < 10
    assert not [thread for thread in threading.enumerate() if "ThreadPool" in thread.name]


class Kernel:
    """As much of a cuda-tile kernel as the store touches."""

    compiled = 0

    def __init__(self, hints=0):
        self._pyfunc = test_nothing_is_compiled_when_everything_is_kept
        self._compiler_options = SimpleNamespace(occupancy=hints)

    def _compile(self, signature, _context):
        Kernel.compiled += 1
        return b"\x7fELF\n" + signature.symbol.encode(), signature.symbol, None, ()


class Signature:
    def __init__(self, symbol):
        self.symbol = symbol

    def with_mangled_symbol(self, _name):
        return self


def test_a_kept_cubin_is_loaded_and_others_are_told_apart(tmp_path):
    store = CubinStore(tmp_path, "sm_90")
    Kernel.compiled = 0
    for count, (hints, symbol) in enumerate([(0, "a"), (0, "b"), (1, "a")], 1):
        for _ in range(2):
            kernel = Kernel(hints)
            store.install(kernel)
            cubin, name, host, providers = kernel._compile(Signature(symbol), None)
            assert (cubin, name, host, providers) == (b"\x7fELF\n" + symbol.encode(), symbol, None, ())
        assert Kernel.compiled == count
    assert CubinStore(tmp_path, "sm_80").path(Kernel(), "a") != store.path(Kernel(), "a")
    assert store.seen == {Kernel()._pyfunc.__name__: ["a", "a", "b", "b", "a", "a"]}  # a kernel object each


def test_a_folder_that_can_not_be_written_costs_only_time(tmp_path):
    (tmp_path / "file").write_text("")
    store = CubinStore(tmp_path / "file" / "below", "sm_90")
    kernel = Kernel()
    store.install(kernel)
    assert kernel._compile(Signature("a"), None)[1] == "a"


def test_records_of_real_kernels_are_found_by_their_signature(tmp_path):
    from kernels.norm import rms_norm

    launcher = RecordingLauncher("sm_90", pdl=True)
    for width in (1024, 2048):
        rows = ArraySpec((64, width), "float32")
        rms_norm(launcher, rows, ArraySpec((1, width), "float32"), ArraySpec((64, width), "bfloat16"), eps=1e-6)
    store = CubinStore(tmp_path, "sm_90")
    first, second = launcher.records
    path = store.path(first.kernel, first.signature().symbol)
    assert path != store.path(second.kernel, second.signature().symbol)
    assert not store.holds([first])
    path.write_bytes(b"x\n")
    assert store.holds([first])
    assert not store.holds(launcher.records)
    assert np.all([record.kernel is first.kernel for record in launcher.records])


def test_a_decode_step_that_compiles_is_told(runner, monkeypatch):
    """Everything was compiled before; a launch that compiles all the same names its kernel, once."""
    from tileinfer_core.backends.base import Warns
    from tileinfer_core.sampling import SamplingParams

    late = {"decode": ["linear_kernel_Kt2_x", "linear_kernel_Kt2_y", "sample_draw_kernel_Kt1_z"]}
    record = runner.device.record

    def compiling(step, carveout=None):
        if any(launch.name.startswith("embedding_decode") for launch in step):
            runner.device.compiled.extend(late.pop("decode", []))
        return record(step, carveout)

    monkeypatch.setattr(runner.device, "record", compiling)
    assert isinstance(runner, Warns)
    cache = runner.new_cache(64)
    runner.prefill(cache, [1, 2, 3])
    steps = runner.decode(cache, SamplingParams(temperature=0), None, 3)
    next(steps)
    [warning] = runner.take_warnings()
    assert warning.startswith("a decode step waited while linear_kernel, sample_draw_kernel compiled (3 new)")
    next(steps)
    assert runner.take_warnings() == ()
    steps.close()


def test_a_store_without_a_folder_keeps_nothing_and_tells_of_each_compilation():
    told = []
    store = CubinStore(None, "sm_90", told.append)
    kernel = Kernel()
    store.install(kernel)
    for _ in range(2):
        assert kernel._compile(Signature("a"), None)[1] == "a"
    assert told == ["a", "a"]
    assert not store.holds([SimpleNamespace(kernel=kernel, signature=lambda: Signature("a"))])
