"""`doctor MODEL`: a healthy folder, each single damage with its finding and its cure, and files full of anything."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from tests.checkpoints import write_checkpoint
from tests.reference import tiny_models
from tests.reference.tiny_models import VARIANTS
from tests.text_fixtures import with_template
from tileinfer_core.model_doctor import diagnose_model
from tileinfer_core.progress import silent
from tileinfer_core.quantize import execute_quantize, plan_quantize
from tileinfer_core.quantize_recipe import Recipe
from tileinfer_core.store import ModelFolder

CONFIG = {**VARIANTS["llama-tied"], "vocab_size": 512, "num_hidden_layers": 2, "eos_token_id": 2}
GENERATION = {"eos_token_id": [2], "temperature": 0.7}
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
QUERY = "model.layers.1.self_attn.q_proj.weight"


def arrays(config=CONFIG):
    shapes = tiny_models.shapes(config).items()
    return {name: tiny_models._values(name, shape) for name, shape in shapes}


def write(folder, config=CONFIG, weights=None, tokenizer="smollm", template="chatml", dtype="BF16"):
    with_template(folder, tokenizer, template)
    write_checkpoint(folder, config, arrays(config) if weights is None else weights, dtype)
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    return folder


def worst(findings):
    return max((("ok", "info", "warning", "problem").index(f.status) for f in findings), default=0)


def the(findings, name, status):
    """The findings of one kind, as one text."""
    return " / ".join(f"{f.detail} [{f.cure}]" for f in findings if (f.name, f.status) == (name, status))


def test_a_healthy_model(tmp_path):
    findings = diagnose_model(write(tmp_path))
    assert [f for f in findings if f.status in ("warning", "problem")] == []
    looked_at = {f.name for f in findings}
    wanted = ["config", "generation", "weight files", "weights", "types", "positions", "tokenizer", "end of sequence"]
    assert looked_at == {*wanted, "chat template", "values", "memory"}
    assert "9 of 9 usual dialogues" in the(findings, "chat template", "ok")
    assert "2 <|im_end|> (from generation_config.json, config.json, the tokenizer)" in the(
        findings, "end of sequence", "ok"
    )
    assert "480 tokens for 512 rows, 32 rows more than tokens" in the(findings, "tokenizer", "ok")
    assert len([f for f in findings if f.name == "memory"]) == 3


def test_an_apertus_model_with_thoughts(tmp_path):
    config = {**VARIANTS["apertus-tied"], "vocab_size": 512, "eos_token_id": 492}
    findings = diagnose_model(write(tmp_path, config, tokenizer="apertus", template="deliberation"))
    assert "thoughts stand in <|inner_prefix|>; --think and --no-think reach it" in the(findings, "chat template", "ok")


def test_a_quantised_model(tmp_path):
    folder = write(tmp_path / "whole", {**CONFIG, "hidden_size": 64, "intermediate_size": 128})
    plan = plan_quantize(ModelFolder("whole", folder, "local", None), tmp_path / "int8", "int8", Recipe())
    execute_quantize(plan, None, silent)
    findings = diagnose_model(tmp_path / "int8")
    assert worst(findings) == 1
    assert "int8" in the(findings, "types", "ok")
    assert [f.detail.split(":")[0] for f in findings if f.name == "memory"] == ["GPU, INT8 weights", "CPU, float32"]
    whole = the(diagnose_model(folder), "weights", "ok")
    assert the(findings, "weights", "ok").split(" numbers")[0] == whole.split(" numbers")[0]


def change(**fields):
    return {**CONFIG, **fields}


@pytest.mark.parametrize(
    ("config", "name", "status", "says"),
    [
        (change(model_type="mamba"), "config", "problem", "'mamba' is not supported [supported model types: apertus"),
        (change(final_logit_softcapping=30.0), "config", "problem", "final_logit_softcapping 30.0"),
        (change(partial_rotary_factor=0.5), "config", "problem", "partial rotary embedding"),
        (change(hidden_size=0), "config", "problem", "hidden_size must be"),
        (change(head_dim=32), "weights", "problem", "head_dim is 32 by config.json"),
        (change(num_hidden_layers=3), "weights", "problem", "missing"),
        (change(intermediate_size=100), "weights", "problem", "of another shape"),
        (change(tie_word_embeddings=False), "weights", "problem", "1 missing: lm_head.weight"),
        (change(vocab_size=400), "tokenizer", "problem", "80 tokens have ids beyond the 400 rows"),
        (change(eos_token_id=[2, 70]), "end of sequence", "warning", "config.json names 70 'c', an ordinary token"),
        (change(eos_token_id=500), "end of sequence", "warning", "config.json names 500, which is no token"),
        (change(sliding_window=64), "positions", "info", "beyond 64 tokens"),
        (
            change(rope_scaling={"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}),
            "positions",
            "warning",
            "scaled by 8, but from 256 tokens (original_max_position_embeddings) to 256",
        ),
    ],
)
def test_a_config_that_does_not_fit(tmp_path, config, name, status, says):
    folder = write(tmp_path)
    (folder / "config.json").write_text(json.dumps(config))
    findings = diagnose_model(folder)
    assert says in the(findings, name, status)
    assert all(f.cure for f in findings if f.status == "warning")


def test_a_stored_head_that_differs_from_the_embedding(tmp_path):
    weights = arrays()
    findings = diagnose_model(
        write(tmp_path, weights={**weights, "lm_head.weight": -weights["model.embed_tokens.weight"]})
    )
    assert "the stored one is used" in the(findings, "weights", "warning")


def test_values_that_no_model_has(tmp_path):
    weights = arrays()
    weights[QUERY] = weights[QUERY].copy()
    weights[QUERY][3, 5] = np.nan
    weights[QUERY][4, 0] = -np.inf
    weights["model.layers.0.mlp.up_proj.weight"] = np.zeros_like(weights["model.layers.0.mlp.up_proj.weight"])
    for dtype in ("BF16", "F16", "F32"):
        folder = write(tmp_path / dtype, weights=weights, dtype=dtype)
        findings = diagnose_model(folder, pull="tileinfer pull org/model")
        found = the(findings, "values", "problem")
        assert found == f"{QUERY} has 2 that are NaN or infinite, the first at [3, 5] [tileinfer pull org/model]"
        assert "1 matrices hold only zeros: model.layers.0.mlp.up_proj.weight" in the(findings, "values", "warning")
        assert worst(diagnose_model(folder, values=False)) < 3


@pytest.mark.parametrize(
    ("template", "name", "status", "says"),
    [
        ("{{ raise_exception('no') }}", "chat template", "problem", "with one question: "),
        ("{% for m in messages %}{{ m.content", "chat template", "problem", "the chat template fails"),
        (
            "{% for m in messages %}<|turn|>{{ m.content }}<|im_end|>{% endfor %}",
            "chat template",
            "warning",
            "it writes <|turn|>, which is no token of this tokenizer [take template and tokenizer",
        ),
        (
            "{% for m in messages %}{{ m.content }}{% endfor %}",
            "chat template",
            "warning",
            "it ignores add_generation_prompt",
        ),
        (
            "{% for m in messages %}<|im_start|>{{ m.content }}<|endoftext|>{% endfor %}",
            "end of sequence",
            "warning",
            "it ends an answer with <|endoftext|> (id 0), at which generation does not stop [add 0 to eos_token_id",
        ),
        (
            NO_SYSTEM + "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}",
            "chat template",
            "info",
            "with a system prompt: ",
        ),
    ],
)
def test_templates_that_do_not_serve(tmp_path, template, name, status, says):
    assert says in the(diagnose_model(write(tmp_path, template=template)), name, status)


def test_what_is_absent(tmp_path):
    whole = write(tmp_path / "whole", change(eos_token_id=None))
    for file, name, status, says in (
        ("chat_template.jinja", "chat template", "warning", "none: the model can continue a text, but not chat [put"),
        ("tokenizer.json", "tokenizer", "problem", "tokenizer.json"),
        ("model.safetensors", "weight files", "problem", "no weights"),
        ("config.json", "config", "problem", "missing"),
        ("generation_config.json", "generation", "info", "no generation_config.json"),
    ):
        folder = shutil.copytree(whole, tmp_path / file)
        (folder / file).unlink()
        assert says in the(diagnose_model(folder), name, status), file
    (folder / "tokenizer_config.json").unlink()
    assert "no end-of-sequence id" in the(diagnose_model(folder), "end of sequence", "warning")


@pytest.mark.parametrize("pull", [None, "tileinfer pull org/model"])
def test_weight_files_that_are_cut_or_not_all_there(tmp_path, pull):
    folder = write(tmp_path)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-7])
    assert "bytes expected" in the(diagnose_model(folder, pull=pull), "weight files", "problem")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "other.safetensors"}}))
    assert "no other.safetensors" in the(diagnose_model(folder, pull=pull), "weight files", "problem")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe\x00", b'{"a": [' * 5000, b"x" * 3000, None])
def test_no_file_can_make_it_fail(tmp_path, content):
    """None: a folder in the file's place."""
    whole = write(tmp_path / "whole")
    (whole / "special_tokens_map.json").write_text("{}")
    for file in sorted(path.name for path in whole.iterdir()):
        folder = shutil.copytree(whole, tmp_path / "copy")
        (folder / file).unlink()
        if content is None:
            (folder / file).mkdir()
        else:
            (folder / file).write_bytes(content)
        findings = diagnose_model(folder)
        assert worst(findings) >= 1, file
        assert all("\n" not in f.detail and f.detail for f in findings)
        shutil.rmtree(folder)


def test_a_folder_with_nothing_in_it(tmp_path):
    assert worst(diagnose_model(tmp_path)) == 3
    assert worst(diagnose_model(tmp_path / "not there")) == 3


@pytest.mark.parametrize("key", ["top_k", "max_new_tokens", "bos_token_id"])
def test_whole_numbers_of_any_length_are_a_finding(tmp_path, key):
    write(tmp_path)
    for value in (2**64, 10**400):
        (tmp_path / "generation_config.json").write_text(json.dumps({key: value}))
        assert f"{key} must be a whole number" in the(diagnose_model(tmp_path), "generation", "problem")
