"""quantize: the oracle's numbers in every tensor, bounded memory, whole folders or none, refusals by name."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.checkpoints import load_runner, write_checkpoint, write_safetensors, write_variant
from tests.int8_oracle import dequantise, quantise
from tests.reference.tiny_models import VARIANTS, prompt, shapes, tensors
from tests.scripted_model import write_scripted_model
from tileinfer_core import quantize as module
from tileinfer_core import tensor_pieces
from tileinfer_core.config import ModelConfig
from tileinfer_core.errors import DamagedModelError, DiskError, ModelError, UnsupportedModelError, UsageError
from tileinfer_core.manifest import Manifest
from tileinfer_core.models.define import define_from_files
from tileinfer_core.progress import silent
from tileinfer_core.quantization import Int8
from tileinfer_core.quantize import execute_quantize, plan_quantize
from tileinfer_core.quantize_recipe import Recipe
from tileinfer_core.receipt import RECEIPT_NAME, QualityOptions, bundled_text, read_receipt
from tileinfer_core.store import ModelFolder, Store
from tileinfer_core.verify import verify_folder
from tileinfer_core.weight_index import INDEX_NAME
from tileinfer_core.weights import WeightFiles, read_header

TIED, UNTIED, BIASED = "llama-tied", "qwen3-untied", "llama-biases"
EMBED, HEAD = "model.embed_tokens", "lm_head"
ROOT = Path(__file__).resolve().parents[2]


def folder_of(path):
    return ModelFolder(str(path), path, "local", None)


def make(source, target, recipe=None, **options):
    plan = plan_quantize(folder_of(source), target, target.name, recipe or Recipe(), **options)
    return execute_quantize(plan, None, silent)


# What is written


@pytest.mark.parametrize(
    ("name", "dtype", "size"),
    [
        *((TIED, dtype, size) for dtype in ("BF16", "F16", "F32") for size in (None, 0, 16)),
        *((name, "BF16", None) for name in (UNTIED, BIASED, "qwen2-tied", "mistral", "apertus-tied", "apertus1p5")),
    ],
)
def test_every_tensor_is_the_oracles(tmp_path, name, size, dtype):
    source = write_variant(tmp_path / "source", name, dtype=dtype)
    make(source, tmp_path / "int8", Recipe(size))
    model, _ = define_from_files(ModelConfig.load(tmp_path / "int8"), files := WeightFiles.open(tmp_path / "int8"))
    before = WeightFiles.open(source)
    for parameter in (parameter for parameter in model.parameters if not parameter.is_scale):
        for part in (part for part in parameter.parts if part.name in files.names):
            stored = files.read(part.name)
            if parameter.int8 is None:
                assert len(part.shape) < 2 or (part.name.endswith("embed_tokens.weight") and not model.tied)
                assert stored.dtype == before.read(part.name).dtype
                np.testing.assert_array_equal(stored, before.read(part.name))
                continue
            q, scales = quantise(before.read(part.name).astype(np.float32), parameter.int8.group_size)
            np.testing.assert_array_equal(stored, q)
            np.testing.assert_array_equal(files.read(part.name + "_scale").astype(np.float32), scales)


def test_the_default_recipe_has_fine_groups_where_rows_lose_most(tmp_path):
    make(write_variant(tmp_path / "source", UNTIED), tmp_path / "int8")
    model, _ = define_from_files(ModelConfig.load(tmp_path / "int8"), WeightFiles.open(tmp_path / "int8"))
    assert model.int8("qkv_proj", 0) == model.int8("o_proj", 2) == model.int8("gate_up_proj", 1) == Int8()
    assert (model.int8("embedding"), model.int8("lm_head")) == (None, Int8(64))
    assert model.int8("down_proj", 2) == Int8(16)  # of 112 columns


@pytest.mark.parametrize(
    ("name", "embedding", "recipe", "layouts"),
    [
        (TIED, None, "groups of 64 in embedding, head and down_proj", {EMBED: "i", HEAD: "i"}),
        (TIED, "int8", "groups of 64 in embedding, head and down_proj", {EMBED: "i", HEAD: "i"}),
        (TIED, "bf16", "groups of 64 in down_proj; embedding and head unchanged", {}),
        (UNTIED, None, "groups of 64 in head and down_proj; embedding unchanged", {HEAD: "p"}),
        (UNTIED, "bf16", "groups of 64 in head and down_proj; embedding unchanged", {HEAD: "p"}),
        (UNTIED, "int8", "groups of 64 in embedding, head and down_proj", {EMBED: "i", HEAD: "p"}),
    ],
)
def test_what_is_packed_and_what_stays(tmp_path, name, embedding, recipe, layouts):
    """Linear layers are packed. An embedding never is; it stays as it was unless it is the head too."""
    source = write_variant(tmp_path / "source", name, dtype="BF16")
    receipt = make(source, tmp_path / "int8", Recipe(None, embedding))
    assert receipt.recipe == f"a scale a row; {recipe}"
    section = json.loads((tmp_path / "int8/config.json").read_text())["quantization_config"]
    names = {"p": "pack-quantized", "i": "int-quantized"}
    layers = [("Linear", "p"), ("re:.*down_proj$", "p")]
    groups = section["config_groups"].values()
    found = {target: group["format"] for group in groups for target in group["targets"]}
    assert found == {target: names[layout] for target, layout in [*layers, *layouts.items()]}
    assert section["format"] == ("mixed-precision" if "i" in layouts.values() else "pack-quantized")
    assert section["ignore"] == ([HEAD] if (name, embedding) == (TIED, "bf16") else [])
    stored = read_header(tmp_path / "int8/model.safetensors")
    dtypes = {key: stored[key].dtype for key in stored if "norm" not in key}
    linear = [key for key in dtypes if key.endswith("weight_packed")]
    assert len(linear) == 7 * 3 + (name == UNTIED)
    assert {dtypes[key] for key in linear} == {"int32"}
    for key in linear:
        rows, words = stored[key].shape
        assert WeightFiles.open(tmp_path / "int8").info(key.removesuffix("_packed")).shape == (rows, 4 * words)
        assert dtypes[key.removesuffix("packed") + "shape"] == "int64"
    assert dtypes["model.embed_tokens.weight"] == ("int8" if EMBED in layouts else "bfloat16")


def test_columns_that_fill_no_words_are_not_packed(tmp_path):
    """down_proj of 110 columns: int8 as it is, and the same numbers when it is read."""
    config = {**VARIANTS[UNTIED], "intermediate_size": 110}
    arrays = {n: np.random.default_rng(3).standard_normal(shape, np.float32) for n, shape in shapes(config).items()}
    make(write_checkpoint(tmp_path / "source", config, arrays), tmp_path / "int8", Recipe(0))
    files = WeightFiles.open(tmp_path / "int8")
    for kind, packed in (("down_proj", False), ("up_proj", True)):
        name = f"model.layers.1.mlp.{kind}.weight"
        assert files.info(name).packed == packed
        np.testing.assert_array_equal(files.read(name), quantise(arrays[name])[0])
    runner = load_runner(tmp_path / "int8")
    assert np.isfinite(runner.logits(runner.new_cache(8), [1, 2, 3])).all()


@pytest.mark.parametrize("name", ["qwen2-tied", "mistral", "apertus-tied", "apertus1p5"])
def test_every_architecture_runs_close_to_its_original(tmp_path, name):
    source = write_variant(tmp_path / "source", name, dtype="BF16")
    make(source, tmp_path / "int8", Recipe(16))
    exact, int8 = load_runner(source), load_runner(tmp_path / "int8")
    ids = prompt(name, 20)
    expected = exact.logits(exact.new_cache(32), ids)
    found = int8.logits(int8.new_cache(32), ids)
    assert 0 < np.linalg.norm(found - expected) < 0.05 * np.linalg.norm(expected)


def test_logits_are_those_of_the_restored_weights(tmp_path):
    source = write_variant(tmp_path / "source", TIED)
    make(source, tmp_path / "int8", Recipe(16))
    arrays = {
        name: dequantise(*quantise(array, 16)) if array.ndim == 2 else array for name, array in tensors(TIED).items()
    }
    plain = load_runner(write_checkpoint(tmp_path / "plain", VARIANTS[TIED], arrays))
    mine = load_runner(tmp_path / "int8")
    ids = prompt(TIED, 20)
    np.testing.assert_array_equal(mine.logits(mine.new_cache(32), ids), plain.logits(plain.new_cache(32), ids))


def test_a_tied_head_has_its_scales_by_both_names(tmp_path):
    """Transformers ties the weights alone, and wants scales for each module."""
    make(write_variant(tmp_path / "source", TIED), tmp_path / "int8")
    files = WeightFiles.open(tmp_path / "int8")
    assert "lm_head.weight" not in files.names
    np.testing.assert_array_equal(files.read("lm_head.weight_scale"), files.read("model.embed_tokens.weight_scale"))


def test_shards_and_their_index(tmp_path, monkeypatch):
    source = write_variant(tmp_path / "source", UNTIED, dtype="BF16")
    make(source, tmp_path / "one")
    monkeypatch.setattr(module, "SHARD_BYTES", 20_000)
    make(source, tmp_path / "many")
    index = json.loads((tmp_path / "many" / INDEX_NAME).read_text())
    shards = sorted(set(index["weight_map"].values()))
    assert len(shards) > 3
    assert shards[0] == f"model-00001-of-{len(shards):05}.safetensors"
    one, many = WeightFiles.open(tmp_path / "one"), WeightFiles.open(tmp_path / "many")
    assert one.names == many.names
    assert {name: path.name for path in many.folder.glob("*.safetensors") for name in read_header(path)} == index[
        "weight_map"
    ]
    for name in one.names:
        np.testing.assert_array_equal(one.read(name), many.read(name))


def test_small_pieces_give_the_same_file(tmp_path, monkeypatch):
    source = write_variant(tmp_path / "source", UNTIED, dtype="BF16")
    make(source, tmp_path / "whole")
    monkeypatch.setattr(tensor_pieces, "PIECE", 100)
    make(source, tmp_path / "pieces")
    assert (tmp_path / "whole/model.safetensors").read_bytes() == (tmp_path / "pieces/model.safetensors").read_bytes()


def test_text_files_are_copied_and_the_config_says_what_is_int8(tmp_path):
    source = write_scripted_model(tmp_path / "source", ["Hi"])
    (source / "generation_config.json").write_text('{"temperature": 0.5}')
    make(source, tmp_path / "int8", kv="int8")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "int8" / name).read_bytes() == (source / name).read_bytes()
    config = json.loads((tmp_path / "int8/config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert ModelConfig.load(tmp_path / "int8").kv == "int8"
    assert ModelConfig.load(source).kv is None


def test_progress_counts_every_byte(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_pieces, "PIECE", 500)
    source = write_variant(tmp_path / "source", UNTIED, dtype="BF16")
    events = []
    plan = plan_quantize(folder_of(source), tmp_path / "int8", "int8", Recipe())
    execute_quantize(plan, None, events.append)
    done = [event.done for event in events]
    assert done == sorted(done)
    assert done[0] == 0
    assert done[-1] == events[-1].total == plan.bytes_before == WeightFiles.open(source).total_bytes


# The receipt


def test_the_receipt_counts_and_measures(tmp_path):
    source = write_scripted_model(tmp_path / "source", ["Hi"])
    plan = plan_quantize(folder_of(source), tmp_path / "int8", "int8", Recipe())
    receipt = execute_quantize(plan, QualityOptions("cpu", 200), silent)
    assert read_receipt(tmp_path / "int8") == json.loads(json.dumps(receipt.as_dict()))
    assert receipt.bytes_before == WeightFiles.open(source).total_bytes
    assert receipt.bytes_after == sum(t.bytes for t in read_header(tmp_path / "int8/model.safetensors").values())
    quality = receipt.quality
    assert quality.tokens == 200
    assert quality.backend == "cpu"
    assert abs(quality.change) < 0.02
    assert 0 <= quality.mean_kl < 0.01
    assert quality.agreement > 0.9
    worst = [error.relative_error for error in receipt.worst]
    assert worst == sorted(worst, reverse=True)


def test_a_loss_beyond_any_number_is_said_and_costs_no_work(tmp_path):
    source = write_scripted_model(tmp_path / "source", ["Hi"])
    arrays = {name: WeightFiles.open(source).read(name) for name in WeightFiles.open(source).names}
    write_safetensors(source / "model.safetensors", arrays | {"lm_head.weight": arrays["lm_head.weight"] * 1e5})
    plan = plan_quantize(folder_of(source), tmp_path / "int8", "int8", Recipe())
    receipt = execute_quantize(plan, QualityOptions("cpu", 50), silent)
    assert receipt.quality is None
    assert "beyond any number" in receipt.not_measured
    assert read_receipt(tmp_path / "int8")["not_measured"] == receipt.not_measured


def test_weights_whose_squares_are_beyond_float32_have_an_error_too(tmp_path):
    arrays = tensors(UNTIED)
    name = "model.layers.0.mlp.up_proj.weight"
    source = write_checkpoint(tmp_path / "source", VARIANTS[UNTIED], arrays | {name: arrays[name] * np.float32(1e30)})
    found = {error.name: error.relative_error for error in make(source, tmp_path / "int8", Recipe(0)).worst}
    assert name in found
    assert all(0 < error < 0.02 for error in found.values())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("recipe", None), ("calibrated", 1), ("bytes_before", 1.5), ("bytes_per_weight", float("nan")),
        ("bytes_after", 10**400), ("worst", {}), ("worst", [3]), ("worst", [{"name": "x"}]), ("quality", {}),
        ("quality", 7), ("not_measured", None),
    ],
)  # fmt: skip
def test_a_receipt_that_lacks_something_counts_as_none(tmp_path, key, value):
    make(write_variant(tmp_path / "source", UNTIED), tmp_path / "int8")
    table = read_receipt(tmp_path / "int8")
    path = tmp_path / "int8" / RECEIPT_NAME
    path.write_text(json.dumps(table | {key: value}))
    assert read_receipt(tmp_path / "int8") is None
    path.write_text(json.dumps({k: v for k, v in table.items() if k != key}))
    assert read_receipt(tmp_path / "int8") is None
    path.write_text(json.dumps(table | {"later": 1}))
    assert read_receipt(tmp_path / "int8") == table | {"later": 1}


def test_relative_errors_are_what_they_say(tmp_path):
    source = write_variant(tmp_path / "source", UNTIED)
    receipt = make(source, tmp_path / "int8", Recipe(0))
    for error in receipt.worst:
        weight = tensors(UNTIED)[error.name]
        difference = weight - dequantise(*quantise(weight))
        expected = np.sqrt((difference.astype(np.float64) ** 2).sum() / (weight.astype(np.float64) ** 2).sum())
        assert error.relative_error == pytest.approx(expected, rel=1e-4)
        assert error.format == "one scale a row"


def test_a_loss_that_can_not_be_measured_is_said(tmp_path, monkeypatch):
    """No tokenizer in the folder: the weights are made all the same."""
    source = write_variant(tmp_path / "source", TIED)
    plan = plan_quantize(folder_of(source), tmp_path / "int8", "int8", Recipe())
    receipt = execute_quantize(plan, QualityOptions("cpu", 100), silent)
    assert receipt.quality is None
    assert "tokenizer" in receipt.not_measured


def test_the_bundled_text_is_there_and_long_enough():
    text = bundled_text()
    assert 150_000 < len(text.encode()) < 300_000
    assert text.count("\n\n") > 300


# Calibration


def test_calibration_lowers_the_loss(tmp_path):
    """On a random model with the byte tokenizer: logits closer to the original's than plain rounding leaves them."""
    source = write_scripted_model(tmp_path / "source", ["a"])
    vocab = json.loads((source / "config.json").read_text())["vocab_size"]
    config = {**VARIANTS["llama-head-dim"], "vocab_size": vocab}
    rng = np.random.default_rng(0)
    arrays = {
        name: np.ones(shape, np.float32) if len(shape) == 1 else rng.standard_normal(shape, np.float32) * 0.2
        for name, shape in shapes(config).items()
    }
    (source / "config.json").write_text(json.dumps(config))
    write_safetensors(source / "model.safetensors", arrays)
    text = bundled_text()
    make(source, tmp_path / "plain", Recipe(0))
    receipt = make(source, tmp_path / "calibrated", Recipe(0), calibration=text[:6000])
    assert receipt.calibrated
    runners = [load_runner(path) for path in (source, tmp_path / "plain", tmp_path / "calibrated")]
    ids = [3 + ord(letter) % (vocab - 3) for letter in text[8000:8200]]
    exact, plain, calibrated = (runner.logits(runner.new_cache(256), ids) for runner in runners)
    assert np.linalg.norm(calibrated - exact) < 0.9 * np.linalg.norm(plain - exact)


def test_a_calibration_text_that_is_too_short(tmp_path):
    source = write_scripted_model(tmp_path / "source", ["a"])
    with pytest.raises(UsageError, match="the calibration text has 5 tokens"):
        make(source, tmp_path / "int8", calibration="short")
    assert not (tmp_path / "int8").exists()


# Refusals


def test_a_quantised_model_is_refused(tmp_path):
    make(write_variant(tmp_path / "source", TIED), tmp_path / "int8")
    with pytest.raises(UnsupportedModelError, match="is quantised already"):
        make(tmp_path / "int8", tmp_path / "again")


def test_unknown_tensors_are_named(tmp_path):
    arrays = {**tensors(TIED), "model.layers.0.self_attn.sinks": np.ones(4, np.float32)}
    write_checkpoint(tmp_path / "source", VARIANTS[TIED], arrays)
    with pytest.raises(ModelError, match=r"1 unexpected: model\.layers\.0\.self_attn\.sinks"):
        make(tmp_path / "source", tmp_path / "int8")


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
def test_weights_that_are_not_finite_are_named(tmp_path, name, bad, dtype):
    arrays = tensors(TIED)
    arrays[name].reshape(-1)[-3] = bad
    write_checkpoint(tmp_path / "source", VARIANTS[TIED], arrays, dtype)
    with pytest.raises(DamagedModelError, match=f"the tensor {name} has values that are not finite"):
        make(tmp_path / "source", tmp_path / "int8")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_a_group_size_that_does_not_divide_names_one_that_does(tmp_path):
    source = write_variant(tmp_path / "source", TIED)
    with pytest.raises(UsageError, match="--group-size 128 does not divide the 64 columns of") as caught:
        make(source, tmp_path / "int8", Recipe(128))
    assert caught.value.hint == "--group-size 16 does"


def test_the_size_that_is_named_divides_every_matrix(tmp_path):
    """The first matrix has 64 columns, but down_proj 112."""
    with pytest.raises(UsageError, match="--group-size 64 does not divide the 112 columns of") as caught:
        make(write_variant(tmp_path / "source", TIED), tmp_path / "int8", Recipe(64))
    assert caught.value.hint == "--group-size 16 does"


@pytest.mark.parametrize("size", [-1, 1, 8, 48, 1 << 13])
def test_group_sizes_that_can_not_be(size):
    with pytest.raises(UsageError, match="--group-size must be 0 or a power of two"):
        Recipe(size)


def test_too_little_room_is_said_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "free_bytes", lambda _path: 1000)
    source = write_variant(tmp_path / "source", TIED)
    with pytest.raises(DiskError, match=r"needs [\d,]+ bytes in .*, free are 1,000"):
        make(source, tmp_path / "int8")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


# Whole or not there


def test_an_interrupt_leaves_nothing(tmp_path):
    source = write_variant(tmp_path / "source", TIED)

    def stop(event):
        if event.done > event.total // 2:
            raise KeyboardInterrupt

    plan = plan_quantize(folder_of(source), tmp_path / "int8", "int8", Recipe())
    with pytest.raises(KeyboardInterrupt):
        execute_quantize(plan, None, stop)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_what_a_killed_run_left_is_swept_away(tmp_path):
    source = write_variant(tmp_path / "source", TIED)
    (tmp_path / "int8.partial").mkdir()
    (tmp_path / "int8.partial/rubbish").write_text("x")
    make(source, tmp_path / "int8")
    assert not (tmp_path / "int8.partial").exists()
    assert not (tmp_path / "int8/rubbish").exists()


def test_a_second_run_finds_the_first(tmp_path):
    store = Store(tmp_path / "root")
    source = write_variant(tmp_path / "root/org--tiny", TIED)
    records = {"model.safetensors": module.record_of(source / "model.safetensors")}
    Manifest("org/tiny", {"kind": "hub"}, "abc", records).write(source)
    folder = store.resolve("org/tiny")
    name, target = store.int8_target(folder)
    assert (name, target) == ("org/tiny-int8", tmp_path / "root/org--tiny-int8")
    execute_quantize(plan_quantize(folder, target, name, Recipe()), None, silent)
    assert plan_quantize(folder, target, name, Recipe()).complete
    assert not plan_quantize(folder, target, name, Recipe(), force=True).complete
    with pytest.raises(UsageError, match="exists, made by: a scale a row; groups"):
        plan_quantize(folder, target, name, Recipe(16))
    assert store.resolve("org/tiny-int8").path == target
    [_, row] = store.list()
    assert (row.name, row.quantization, row.complete) == (name, "int8", True)
    assert [finding.status for finding in store.verify(name)] == ["ok"]


def test_verify_finds_a_changed_byte(tmp_path):
    make(write_variant(tmp_path / "source", TIED), tmp_path / "int8")
    path = tmp_path / "int8/model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    [finding] = verify_folder(folder_of(tmp_path / "int8"), silent)
    assert (finding.name, finding.status) == ("model.safetensors", "problem")
    assert finding.cure == f"tileinfer quantize {tmp_path / 'source'} --force"


@pytest.mark.parametrize("force", [False, True])
def test_a_folder_that_is_not_ours_is_never_replaced(tmp_path, force):
    source = write_variant(tmp_path / "source", TIED)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("years of work")
    with pytest.raises(UsageError, match="is not a model that `quantize` has made"):
        make(source, tmp_path / "mine", force=force)
    with pytest.raises(UsageError, match="is not a model that `quantize` has made"):
        make(source, source, force=force)


def test_an_empty_folder_is_taken(tmp_path):
    source = write_variant(tmp_path / "source", TIED)
    (tmp_path / "int8").mkdir()
    make(source, tmp_path / "int8")
    assert WeightFiles.open(tmp_path / "int8").names
    (tmp_path / "nothing").mkdir()
    (tmp_path / "link").symlink_to("nothing")
    with pytest.raises(UsageError, match="is not a model that `quantize` has made"):
        make(source, tmp_path / "link")


def test_how_a_folder_in_the_way_was_made_is_said(tmp_path):
    source = write_variant(tmp_path / "source", TIED)
    make(source, tmp_path / "int8", Recipe(16), kv="int8")
    with pytest.raises(UsageError, match=r"made by: groups of 16, int8 keys and values, of .*source"):
        make(source, tmp_path / "int8", Recipe(16))


def test_names_of_int8_models(tmp_path):
    store = Store(tmp_path)
    assert store.canonical("demo-int8") == "demo-int8"
    assert store.canonical("qwen3:4b-int8") == store.canonical("QWEN3:4B-INT8") == "Qwen/Qwen3-4B-int8"
    assert store.not_found("qwen3:4b-int8").hint == "make it: tileinfer quantize qwen3:4b"
    assert store.int8_target(folder_of(tmp_path / "a.gguf"))[1] == tmp_path / "a-int8"
    assert store.int8_target(folder_of(tmp_path / "b"))[1] == tmp_path / "b-int8"


# Memory

_MEASURE = """
import re, sys
from pathlib import Path
from tileinfer_core.quantize import execute_quantize, plan_quantize
from tileinfer_core.quantize_recipe import Recipe
from tileinfer_core.progress import silent
from tileinfer_core.store import ModelFolder
source, target = map(Path, sys.argv[1:])
plan = plan_quantize(ModelFolder("m", source, "local", None), target, "m", Recipe())
def memory(field):
    return 1024 * int(re.search(field + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
before = memory("VmRSS")
execute_quantize(plan, None, silent)
print(memory("VmHWM") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_stays_below_two_tensors(tmp_path):
    """The embedding takes 75 MB as BF16; the process may grow by no more than two such, and grows by less than one."""
    config = {**VARIANTS[TIED], "vocab_size": 146_000, "hidden_size": 256, "num_attention_heads": 8}
    rng = np.random.default_rng(0)
    arrays = {n: rng.standard_normal(shape, np.float32) for n, shape in shapes(config).items()}
    write_checkpoint(tmp_path / "source", config, arrays, "BF16")
    largest = arrays["model.embed_tokens.weight"].size * 2
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, tmp_path / "source", tmp_path / "int8"],
        capture_output=True, text=True, check=True, cwd=ROOT,
    )  # fmt: skip
    grown = int(done.stdout)
    print(f"grown by {grown / 1e6:.1f} MB, the largest tensor has {largest / 1e6:.1f} MB")
    assert 0 < grown < largest
    shutil.rmtree(tmp_path / "source")
