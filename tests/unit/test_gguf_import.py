"""A GGUF file becomes a model folder with the weights, settings and tokenizer it was made from."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, quants
from gguf.constants import GGML_QUANT_SIZES
from safetensors import safe_open

from tests.gguf_files import TEMPLATE, TinyModel
from tileinfer_core.config import ModelConfig
from tileinfer_core.dtypes import BFLOAT16
from tileinfer_core.errors import DamagedModelError, DiskError, UnsupportedModelError
from tileinfer_core.gguf_import import convert, tensors
from tileinfer_core.gguf_import.config import llama3_scaling
from tileinfer_core.gguf_import.container import GgufFile, GgufTensor
from tileinfer_core.manifest import Manifest
from tileinfer_core.models.define import define_from_files
from tileinfer_core.progress import silent
from tileinfer_core.weights import WeightFiles

if TYPE_CHECKING:
    from pathlib import Path

    from tileinfer_core.progress import ProgressEvent

Q = GGMLQuantizationType


def converted(model: TinyModel, tmp_path: Path) -> Path:
    convert(model.write(tmp_path / "tiny.gguf"), tmp_path / "out", silent)
    return tmp_path / "out"


def config_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "config.json").read_text()))


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_float32_weights_come_back_exactly(tmp_path: Path, arch: str, tied: bool) -> None:
    model = TinyModel(arch=arch, tied=tied, heads=6, kv_heads=3, head_dim=16)
    files = WeightFiles.open(converted(model, tmp_path))
    expected = model.weights()
    assert files.names == expected.keys()
    for name, values in expected.items():
        assert np.array_equal(files.read(name), values), name
    assert config_of(tmp_path / "out")["tie_word_embeddings"] is tied
    assert define_from_files(ModelConfig.load(tmp_path / "out"), files)[0].tied is tied


def test_rows_are_reordered_head_by_head_in_any_piece_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "PIECE_ELEMENTS", 1)  # one head or one row at a time
    model = TinyModel()
    files = WeightFiles.open(converted(model, tmp_path))
    for name, values in model.weights().items():
        assert np.array_equal(files.read(name), values), name


@pytest.mark.parametrize("qtype", [Q.F16, Q.BF16, Q.Q8_0, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1])
def test_stored_types(tmp_path: Path, qtype: GGMLQuantizationType) -> None:
    model = TinyModel(qtype=qtype)
    files = WeightFiles.open(converted(model, tmp_path))
    for name, values in model.weights().items():
        read = files.read(name)
        wanted = np.float32 if values.ndim == 1 else BFLOAT16 if qtype == Q.BF16 else np.float16
        assert read.dtype == wanted
        step = {Q.F16: 1e-3, Q.BF16: 4e-3, Q.Q8_0: 2e-2}.get(qtype, 0.2)
        assert np.abs(read.astype(np.float32) - values).max() <= step * np.abs(values).max()


def readable_types() -> list[GGMLQuantizationType]:
    """Every type that the installed gguf package can turn into numbers."""
    found = []
    for kind, (_, width) in GGML_QUANT_SIZES.items():
        try:
            quants.dequantize(np.zeros((1, width), np.uint8), kind)
        except NotImplementedError:
            continue
        found.append(kind)
    return found


@pytest.mark.parametrize("kind", readable_types(), ids=lambda kind: kind.name)
def test_every_readable_type_equals_the_gguf_package(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    block, width = GGML_QUANT_SIZES[kind]
    candidates = np.random.default_rng(3).integers(0, 256, (20_000, width), dtype=np.uint8)
    with np.errstate(all="ignore"):
        values = quants.dequantize(candidates, kind).astype(np.float32)
    good = candidates[(np.abs(values) < 60_000).all(axis=1)][:24]  # random bytes often make scales that are no numbers
    raw = np.ascontiguousarray(good.reshape(12, -1))  # [12 rows, 2 blocks each]
    (tmp_path / "data").write_bytes(b"\0" * 32 + raw.tobytes())
    tensor = GgufTensor("w", (12, 2 * block), kind, 32, raw.nbytes)
    file = GgufFile(tmp_path / "data", {}, {"w": tensor})
    target = tensors.Target("w", tensor, tensors._KEPT.get(kind, np.dtype("<f2")), None)
    assert tensors.write(file, [target], tmp_path / "model.safetensors", silent) == []
    read = WeightFiles.open(tmp_path).read("w")
    exact = quants.dequantize(raw, kind).reshape(12, 2 * block)
    assert np.array_equal(read, exact.astype(read.dtype))
    with safe_open(tmp_path / "model.safetensors", "numpy") as other:
        assert other.get_slice("w").get_shape() == [12, 2 * block]


def test_values_beyond_float16_are_kept_as_bfloat16_with_a_note(tmp_path: Path) -> None:
    rows = np.full((2, 32), 1e5, np.float32)
    rows[1] = 3.0
    raw = quants.quantize(rows, Q.Q8_0)
    raw[0, :2] = np.frombuffer(np.float16(1000).tobytes(), np.uint8)  # scale 1000 × 127 = 127,000
    (tmp_path / "data").write_bytes(raw.tobytes())
    tensor = GgufTensor("w", (2, 32), Q.Q8_0, 0, raw.nbytes)
    file = GgufFile(tmp_path / "data", {}, {"w": tensor})
    notes = tensors.write(
        file, [tensors.Target("w", tensor, np.dtype("<f2"), None)], tmp_path / "model.safetensors", silent
    )
    assert notes == ["w: stored as bfloat16, its values pass float16's 65,504"]
    read = WeightFiles.open(tmp_path).read("w")
    assert read.dtype == BFLOAT16
    assert read[0, 0] == BFLOAT16.type(127_000)
    assert abs(float(read[1, 0]) - 3.0) < 0.02


@pytest.mark.parametrize("scale", [np.inf, np.nan])
def test_values_that_are_no_numbers_are_damage(tmp_path: Path, scale: float) -> None:
    raw = quants.quantize(np.ones((1, 32), np.float32), Q.Q8_0)
    raw[0, :2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
    (tmp_path / "data").write_bytes(raw.tobytes())
    tensor = GgufTensor("w", (1, 32), Q.Q8_0, 0, raw.nbytes)
    target = tensors.Target("w", tensor, np.dtype("<f2"), None)
    with pytest.raises(DamagedModelError, match="not numbers"):
        tensors.write(GgufFile(tmp_path / "data", {}, {"w": tensor}), [target], tmp_path / "out", silent)


def test_the_folder_is_complete_and_says_so(tmp_path: Path) -> None:
    events: list[ProgressEvent] = []
    gguf = TinyModel().write(tmp_path / "tiny.gguf")
    convert(gguf, tmp_path / "out", events.append, name="tiny", source={"kind": "test"})
    manifest = Manifest.load(tmp_path / "out")
    assert manifest is not None
    assert manifest.name == "tiny"
    on_disk = {path.name for path in (tmp_path / "out").iterdir()} - {"tileinfer.json"}
    assert manifest.files.keys() == on_disk
    assert on_disk == {
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
        "model.safetensors",
    }  # fmt: skip
    assert (tmp_path / "out/chat_template.jinja").read_text() == TEMPLATE
    assert events[-1].done == events[-1].total
    assert [e.done for e in events] == sorted(e.done for e in events)
    assert {p.name for p in tmp_path.iterdir()} == {"tiny.gguf", "out"}


def test_config_and_end_tokens(tmp_path: Path) -> None:
    model = TinyModel(extra={"general.sampling.temp": 0.6, "general.sampling.top_k": 20})
    config = config_of(converted(model, tmp_path))
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (4, 2, 16)
    assert config["rms_norm_eps"] == 1e-5  # not 9.999999747378752e-06
    assert config["vocab_size"] == model.vocab
    generation = json.loads((tmp_path / "out/generation_config.json").read_text())
    assert generation["eos_token_id"] == [2, 0]  # the file's own, then <|endoftext|>
    assert (generation["temperature"], generation["top_k"]) == (0.6, 20)


def test_per_layer_lists_are_taken_when_equal(tmp_path: Path) -> None:
    model = TinyModel(extra={"llama.attention.head_count_kv": [2, 2]})
    assert config_of(converted(model, tmp_path))["num_key_value_heads"] == 2
    with pytest.raises(DamagedModelError, match="head_count_kv"):
        converted(TinyModel(extra={"llama.attention.head_count_kv": [2, 1]}), tmp_path)


def test_linear_rope_scaling(tmp_path: Path) -> None:
    model = TinyModel(extra={"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0})
    assert config_of(converted(model, tmp_path))["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}


def meta_factors(head_dim: int, theta: float, factor: float, low: float, high: float, original: int) -> Any:
    """Meta's own formulation, by wavelength."""
    factors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * np.pi * theta ** (i / head_dim)
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


@pytest.mark.parametrize(
    ("factor", "low", "high", "original"), [(8, 1, 4, 8192), (32, 1, 4, 8192), (4, 1, 6, 16384), (8, 2, 8, 8192)]
)
def test_llama3_rope_is_recovered_from_its_factors(factor: float, low: float, high: float, original: int) -> None:
    factors = meta_factors(128, 500_000.0, factor, low, high, original)
    scaling = llama3_scaling(factors.astype(np.float64), 500_000.0, "x")
    assert scaling is not None
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    again = meta_factors(128, 500_000.0, *(scaling[name] for name in names))
    assert np.allclose(again, factors, rtol=1e-4)
    if low == 1 and high == 4:
        assert scaling["original_max_position_embeddings"] == original


def test_llama3_rope_in_a_file(tmp_path: Path) -> None:
    factors = meta_factors(16, 10_000.0, 8, 1, 4, 8192)

    def add(writer: GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", factors)

    scaling = config_of(converted(TinyModel(edit=add), tmp_path))["rope_scaling"]
    assert scaling["rope_type"] == "llama3"
    assert scaling["factor"] == 8


def test_factors_that_are_not_llama3_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="rope_freqs"):
        llama3_scaling(np.linspace(1, 9, 64), 500_000.0, "x")


def test_a_sparse_table_equals_the_gguf_packages_reader(tmp_path: Path) -> None:
    path = TinyModel(qtype=Q.Q4_1).write(tmp_path / "a.gguf")
    ours, theirs = GgufFile.open(path), GGUFReader(path)
    assert {t.name: (t.tensor_type, tuple(map(int, t.shape))[::-1], int(t.data_offset)) for t in theirs.tensors} == {
        t.name: (t.type, t.shape, t.offset) for t in ours.tensors.values()
    }
    for key, value in ours.metadata.items():
        assert theirs.fields[key].contents() == value


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"arch": "gemma3"}, "architecture 'gemma3'"),
        ({"pre": "made-up"}, "pre-tokenizer 'made-up'"),
        ({"extra": {"llama.expert_count": 8}}, "llama.expert_count = 8"),
        ({"extra": {"llama.attention.sliding_window": 4096}}, "sliding_window"),
        ({"extra": {"llama.logit_scale": 0.5}}, "logit_scale"),
        ({"extra": {"llama.rope.dimension_count": 8}}, "rotary"),
        ({"extra": {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}}, "'yarn'"),
        ({"extra": {"split.count": 3}}, "llama-gguf-split|split into 3"),
    ],
)
def test_what_cannot_run_is_refused_by_name(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedModelError, match=says):
        converted(TinyModel(**change), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["tiny.gguf"]


def test_an_unknown_tensor_is_refused_by_name(tmp_path: Path) -> None:
    def add(writer: GGUFWriter) -> None:
        writer.add_tensor("blk.0.ffn_gate_inp.weight", np.zeros((4, 4), np.float32))

    with pytest.raises(UnsupportedModelError, match=r"blk\.0\.ffn_gate_inp\.weight"):
        converted(TinyModel(edit=add), tmp_path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"drop": ("blk.1.attn_v.weight",)}, r"1 tensors are missing: blk\.1\.attn_v\.weight"),
        ({"drop": ("token_embd.weight",)}, "no embedding matrix"),
        ({"drop": ("llama.block_count",)}, r"llama\.block_count is missing"),
        ({"extra": {"llama.block_count": 2_000_000_000}}, "block_count is 2000000000"),
        ({"extra": {"llama.block_count": 0}}, "block_count is 0"),
        ({"extra": {"llama.block_count": "two"}}, "expected a whole number"),
        ({"extra": {"llama.embedding_length": 128}}, "has shape"),
        ({"extra": {"llama.attention.head_count": 0}}, "0 attention heads"),
        ({"extra": {"llama.attention.head_count": 5}}, "can't share"),
        ({"padding": -4}, "embedding rows"),
        ({"merges": ["h e", "z q z"]}, "the merge 'z q z'"),
        ({"merges": ["h e", "h e"]}, "are both 'he'"),
        ({"extra": {"tokenizer.ggml.padding_token_id": 99_999}}, "padding_token_id is 99999"),
    ],
)
def test_what_contradicts_itself_is_damage(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    with pytest.raises(DamagedModelError, match=says):
        converted(TinyModel(**change), tmp_path)


def test_no_room_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tileinfer_core.gguf_import.free_bytes", lambda _path: 1000)
    with pytest.raises(DiskError, match="1,000 free"):
        converted(TinyModel(), tmp_path)


def test_an_interrupt_leaves_nothing_behind(tmp_path: Path) -> None:
    def interrupt(_event: ProgressEvent) -> None:
        raise KeyboardInterrupt

    gguf = TinyModel().write(tmp_path / "tiny.gguf")
    with pytest.raises(KeyboardInterrupt):
        convert(gguf, tmp_path / "out", interrupt)
    assert [p.name for p in tmp_path.iterdir()] == ["tiny.gguf"]


def test_a_new_conversion_replaces_the_old_one(tmp_path: Path) -> None:
    converted(TinyModel(), tmp_path)
    (tmp_path / "out/leftover").touch()
    converted(TinyModel(arch="qwen3"), tmp_path)
    assert config_of(tmp_path / "out")["model_type"] == "qwen3"
    assert not (tmp_path / "out/leftover").exists()
