"""The census of a step without a GPU: its kernels, what they move, and the picture."""

from __future__ import annotations

import dataclasses
import json
import math
from types import SimpleNamespace
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from kernels.lab.census import StepShape, label, moved_bytes, operations
from kernels.shapes import MODELS
from tests.checkpoints import quantization_config, write_checkpoint, write_quantised
from tests.reference import tiny_models
from tileinfer_core import kernel_census
from tileinfer_core.backends.base import LoadOptions
from tileinfer_core.backends.cuda import load
from tileinfer_core.backends.cuda.census_steps import Step, record_step, shape_runner
from tileinfer_core.backends.cuda.interpreted import InterpretedDevice
from tileinfer_core.backends.cuda.verify_step import verify_step
from tileinfer_core.config import ModelConfig
from tileinfer_core.engine import EngineOptions
from tileinfer_core.errors import BackendUnavailableError, ModelNotFoundError, UsageError
from tileinfer_core.kernel_census import Census, by_kind, chosen_step, config_of, picture
from tileinfer_core.kernel_timeline import layers
from tileinfer_core.kernel_tools import shape_of
from tileinfer_core.models.define import define_from_files, define_model
from tileinfer_core.progress import silent
from tileinfer_core.settings import Settings
from tileinfer_core.store import Store
from tileinfer_core.weights import WeightFiles


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    return Store.from_settings(Settings.load({"HOME": str(home)}, home / "absent.toml"))


def launches(name, kind, tokens, context, store):
    _, config = config_of(name, store)
    model = define_model(config, tied=config.tie_word_embeddings)
    return record_step(shape_runner(model, "sm_90", LoadOptions(2048)), model, Step(kind, tokens, context)), model


def test_a_decode_step_moves_its_weights_and_the_context(store):
    found, model = launches("Qwen3-0.6B", "decode", 1, 512, store)
    shape = StepShape(1, 512)
    assert len(found) == 2 + 6 * 28 + 4
    matrices = sum(math.prod(p.shape) for p in model.parameters if len(p.shape) == 2)  # the tied table is the head
    products = [launch for launch in found if launch.name.startswith("linear")]
    assert sum(launch.args[0].nbytes for launch in products) == 2 * matrices
    attention = [launch for launch in found if launch.name == "attention_page_kernel"]
    kept = 2 * 512 * 8 * 128 * 2
    assert all(kept < moved_bytes(launch, shape) < kept * 1.1 for launch in attention)
    whole = sum(moved_bytes(launch, shape) for launch in found)
    least = 2 * matrices + 28 * kept
    assert least < whole < 1.02 * least
    assert sum(operations(launch, shape) for launch in products) == 2 * matrices


def test_rows_of_the_configuration_are_named(store):
    found, _ = launches("Qwen3-4B", "decode", 1, 512, store)
    texts = {kernel_census.rows_text(launch) for launch in found if launch.name == "attention_page_kernel"}
    assert texts == {"sm_90 attention_decode[0]: form page, splits 8 (3.42 µs)"}
    assert len({label(launch) for launch in found}) == 12


def test_a_prefill_counts_causal_pairs(store):
    found, _ = launches("Qwen3-0.6B", "prefill", 512, 1024, store)
    attention = next(launch for launch in found if launch.name == "attention_prefill_kernel")
    pairs = sum(512 + i + 1 for i in range(512))
    assert operations(attention, StepShape(512, 1024)) == 4 * pairs * 16 * 128


def test_recording_notes_rows_only_for_the_census(store):
    _, config = config_of("Qwen3-0.6B", store)
    model = define_model(config, tied=True)
    runner = shape_runner(model, "sm_90", LoadOptions(2048))
    assert all(launch.rows == () for launch in runner.plans.decode(512))
    assert any(launch.rows for launch in record_step(runner, model, Step("decode", 1, 512)))
    assert all(launch.rows == () for launch in runner.plans.decode(512))


class NoWarmup:
    unkept = None

    def __init__(self, *_): ...
    def start(self): ...
    def finish(self, _on_progress):
        return 0.0


WITH_INT8 = {
    "half": None,
    "rows, down and head in groups": {"re:.*down_proj": 32, "re:.*embed_tokens": 32, "Linear": None},
    "attention in INT8 alone": {"re:.*self_attn.*": None},
    "feed-forward in groups": {"re:.*mlp.*": 64},
}


def verifying_model(folder, variant, formats):
    """A tiny model whose rows the groups divide."""
    changes = {"num_hidden_layers": 2, "head_dim": 64, "intermediate_size": 192}
    if formats is None:
        config = {**tiny_models.VARIANTS[variant], **changes}
        arrays = {t: tiny_models._values(t, shape) for t, shape in tiny_models.shapes(config).items()}
        write_checkpoint(folder, config, arrays, dtype="BF16")
    else:
        write_quantised(folder, variant, quantization_config(formats), **changes)
    files = WeightFiles.open(folder)
    return define_from_files(ModelConfig.load(folder), files)[0], files


STEPS = [("qwen3-tied", name, 5) for name in WITH_INT8]
STEPS += [("apertus-biases", "half", 4), ("apertus-biases", "rows, down and head in groups", 2)]


@pytest.mark.parametrize(("variant", "formats", "tokens"), STEPS)
def test_the_verify_step_is_a_step(variant, formats, tokens, tmp_path, monkeypatch):
    """Interpreted, its logits are those of a prefill of the same tokens, whatever the products' formats."""
    model, files = verifying_model(tmp_path / "model", variant, WITH_INT8[formats])
    monkeypatch.setattr(load, "KernelWarmup", NoWarmup)
    device = InterpretedDevice()
    runner = load.load_runner(model, files, device, LoadOptions(256, 64), silent)
    prompt, checked = [5, 9, 2, 11, 7], [3, 8, 1, 6, 4][:tokens]
    whole = runner.new_cache(64)
    wanted = runner.logits(whole, prompt + checked)[len(prompt) :]
    cache = runner.new_cache(64)
    runner.prefill(cache, prompt)
    cache.reserve(tokens)
    runner.show_pages(cache.block_table)
    device.copy_in(runner.buffers["token_ids"][:tokens], np.asarray(checked, np.int32))
    device.copy_in(runner.buffers["start"], np.asarray([len(prompt)], np.int32))
    step, logits = verify_step(runner, model, tokens)
    device.run(step)
    found = device.download(logits)
    assert found.shape == wanted.shape == (tokens, model.config.vocab_size)
    assert np.abs(found - wanted).max() < 0.02 * np.abs(wanted).max()


@pytest.fixture(scope="module")
def census(store, tmp_path_factory):
    """Of two layers, compiled."""
    patch = pytest.MonkeyPatch()
    patch.setenv("CUDA_TILE_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
    config = dataclasses.replace(config_of("Qwen3-0.6B", store)[1], num_hidden_layers=2)
    step = chosen_step("decode", None, 512)
    yield kernel_census.census_without_gpu("two layers", config, "sm_90", step, LoadOptions())
    patch.undo()


def test_a_census_without_a_gpu(census: Census):
    assert len(census.kernels) == 18
    assert census.gpu is census.total_us is None
    assert all(row.registers > 0 and row.spills == 0 and row.time_us is None for row in census.kernels)
    kinds = by_kind(census)
    assert sum(kind["launches"] for kind in kinds) == 18
    assert [kind["launches"] for kind in kinds][:3] == [1, 2, 2]
    json.dumps(census.as_dict())


@pytest.mark.parametrize(("kv", "half_copies"), [(None, True), ("int8", False)])
def test_a_census_is_of_the_engine_asked_for(monkeypatch, kv, half_copies):
    """Without a GPU too: by copies or by digits, with keys and values in either form."""
    made = []
    monkeypatch.setattr(kernel_census, "_resources", lambda launches, *_: made.extend(launches))
    monkeypatch.setattr(kernel_census, "_rows", lambda *_: ())
    shape = dataclasses.replace(MODELS["Qwen3-0.6B"], layers=2)
    section = quantization_config({"Linear": None})
    config = ModelConfig.from_dict({**kernel_census.config_dict(shape), "quantization_config": section})
    step = chosen_step("prefill", 1024, 1024)
    wanted = EngineOptions(kv=kv, half_copies=half_copies).for_loading(config)
    kernel_census.census_without_gpu("two layers", config, "sm_90", step, wanted)
    names = {launch.name for launch in made}
    assert any("digits" in name for name in names) is not half_copies
    assert any("widen" in name for name in names) is (kv == "int8")


def timed(census: Census, added: float = 2.0) -> Census:
    rows = tuple(
        dataclasses.replace(row, time_us=added, alone_us=3.0, gap_us=added - 3.0, bound_us=1.0, gb_s=1.0, share=0.5)
        for row in census.kernels
    )
    return dataclasses.replace(census, kernels=rows, gpu="a <GPU>", total_us=36.5, sum_us=36.0, loop_us=40.0)


SVG = "{http://www.w3.org/2000/svg}"
WIDTH = 1200 - 150 - 20


def test_the_picture_shows_every_launch(census: Census):
    for each in (census, timed(census), timed(census, added=-0.1)):
        root = ET.fromstring(picture(each))
        tips = [node.text for node in root.iter(f"{SVG}title")]
        assert {int(tip.split()[0]) for tip in tips} == set(range(18))
        texts = [node.text for node in root.iter(f"{SVG}text")]
        assert {" ".join(text.split()[:2]) for text in texts if text.startswith("layer")} == {"layer 0", "layer 1"}
    text = picture(timed(census))
    assert "a &lt;GPU&gt;, 18 launches, 36 µs, sum 36 µs" in text
    assert "linear_kernel, grid 256x1x1, 8.40 MB: 2 launches of 2.00 µs, bound 1.00 µs; 11.1 % of the step" in text


def test_a_row_of_the_picture_is_as_wide_as_its_layer(census: Census):
    """Two launches before and after of 2 µs, six a layer; half of each is its bound."""
    root = ET.fromstring(picture(timed(census)))
    rows: dict[str, list[tuple[float, float]]] = {}
    for group in root.iter(f"{SVG}g"):
        whole, solid = group.findall(f"{SVG}rect")
        rows.setdefault(whole.get("y"), []).append((float(whole.get("width")), float(solid.get("width"))))
    found = list(rows.values())
    assert [len(blocks) for blocks in found] == [1, 6, 6, 5]
    for blocks in found:
        assert [width for width, _ in blocks] == pytest.approx([WIDTH / 6] * len(blocks), abs=0.02)
        assert [solid for _, solid in blocks] == pytest.approx([WIDTH / 12] * len(blocks), abs=0.02)


@pytest.mark.parametrize(
    ("kinds", "found"),
    [
        ("eabcabcabchs", [(1, 4), (4, 7), (7, 10)]),
        ("enanbnanbnanbf", [(1, 5), (5, 9), (9, 13)]),  # a norm twice a layer, and after the last
        ("aaaa", [(0, 1), (1, 2), (2, 3), (3, 4)]),
        ("abc", []),
        ("", []),
    ],
)
def test_layers_are_found_by_what_repeats(kinds: str, found: list[tuple[int, int]]):
    assert layers(kinds) == found


def test_a_long_launch_goes_on_in_the_next_row(census: Census):
    """The head takes longer than a layer."""
    rows = list(timed(census).kernels)
    rows[13] = dataclasses.replace(rows[13], time_us=30.0, bound_us=20.0)
    root = ET.fromstring(picture(dataclasses.replace(timed(census), kernels=tuple(rows))))
    pieces = [group for group in root.iter(f"{SVG}g") if group.find(f"{SVG}title").text.startswith("13 ")]
    whole = [float(piece.find(f"{SVG}rect").get("width")) for piece in pieces]
    solid = [float(piece.findall(f"{SVG}rect")[1].get("width")) for piece in pieces]
    assert whole == pytest.approx([WIDTH, WIDTH, WIDTH / 2], abs=0.02)
    assert solid == pytest.approx([WIDTH, WIDTH * 2 / 3, 0], abs=0.02)


def test_means_of_a_kind(census: Census):
    kinds = by_kind(timed(census))
    assert all(kind["time_us"] == 2.0 and kind["gap_us"] == -1.0 for kind in kinds)
    assert kinds[0]["share"] == 0.5
    hidden = by_kind(timed(census, added=-0.3))
    assert all(kind["share"] is None and kind["gb_s"] is None for kind in hidden)


@pytest.mark.parametrize("name", MODELS)
def test_a_shape_s_name_stands_for_its_shape(name: str, store):
    assert shape_of(config_of(name, store)[1]) == MODELS[name]


@pytest.mark.parametrize(
    ("kind", "tokens", "context", "says"),
    [
        ("encode", None, 512, "--step must be one of decode, verify, prefill"),
        ("verify", 9, 512, "a verify step takes 1 to 8 tokens, found 9"),
        ("decode", 2, 512, "a decode step takes 1 to 1 tokens, found 2"),
        ("verify", 4, 2, "a context of 2 can't hold the step's 4 tokens"),
    ],
)
def test_steps_that_there_are_not(kind, tokens, context, says):
    with pytest.raises(UsageError, match=says):
        chosen_step(kind, tokens, context)


def test_models_by_name(store, tmp_path):
    for name in ("qwen3-4b", "qwen3:4b", "Qwen/Qwen3-4B"):
        assert config_of(name, store)[1].hidden_size == MODELS["Qwen3-4B"].hidden
    with pytest.raises(ModelNotFoundError, match="nor a shape of that name"):
        config_of("org/absent", store)


def test_times_against_bounds(census: Census):
    """The bound is bytes at the copy speed or operations at the matrix rate, whichever takes longer."""
    rows = census.kernels[:2]
    times = SimpleNamespace(added=(4.0, 0.01), alone=(3.0, 2.0))
    first, second = kernel_census._timed(rows, times, copy=1e12, rate=None)
    assert first.bound_us == pytest.approx(rows[0].bytes / 1e6)
    assert (first.time_us, first.gap_us) == (4.0, 1.0)
    assert first.share == pytest.approx(first.bound_us / 4.0)
    assert first.gb_s == pytest.approx(rows[0].bytes / 4.0 / 1e3)
    assert (second.share, second.gb_s, second.gap_us) == (None, None, pytest.approx(-1.99))
    slow, _ = kernel_census._timed((rows[1], rows[0]), times, copy=1e12, rate=1e9)
    assert slow.bound_us == pytest.approx(rows[1].operations / 1e3)


def test_noise_of_a_shape_by_its_name(tmp_path):
    from tileinfer_core.bench import load_for_bench

    config = ModelConfig.from_dict({**tiny_models.VARIANTS["qwen3-tied"]}, "tiny")
    loaded = load_for_bench(tmp_path / "no file", EngineOptions("cpu"), noise=True, shape=config)
    assert loaded.model.config is config
    runner = SimpleNamespace(runner=loaded.runner, backend=loaded.backend, model=loaded.model)
    with pytest.raises(BackendUnavailableError, match="a census times GPU kernels, and this is cpu: asked for"):
        kernel_census.census_on_gpu("tiny", runner, chosen_step("decode", None, 64))
