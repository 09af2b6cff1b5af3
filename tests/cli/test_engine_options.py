"""What the flags and settings ask of an engine: a flag wins over the config file, and both over the default."""

from __future__ import annotations

import os

import pytest

from tests.checkpoints import write_variant
from tileinfer_cli.commandline import Cli
from tileinfer_cli.commands import kernels_census, quantize
from tileinfer_cli.opening import engine_options
from tileinfer_cli.options import KvFormat, ModelFlags, QuantizeFlags
from tileinfer_core import bench
from tileinfer_core.backends import select
from tileinfer_core.engine import Engine, EngineOptions
from tileinfer_core.settings import Settings

CHOSEN = [(None, None, True), (None, False, False), (True, False, True), (False, None, False), (False, True, False)]


class StoppedError(Exception):
    pass


@pytest.fixture
def asked(monkeypatch):
    """What a GPU's loader is asked for; nothing is loaded."""
    found = {}

    def start(_model, _files, options):
        found["half_copies"] = options.half_copies
        raise StoppedError

    monkeypatch.setattr(select, "_start_cuda", start)
    choice = select.BackendChoice("cuda", "pretended")
    monkeypatch.setattr(bench, "choose_backend", lambda _asked: choice)
    monkeypatch.setattr("tileinfer_core.engine.choose_backend", lambda _asked: choice)
    return found


@pytest.mark.parametrize(("flag", "setting", "expected"), CHOSEN)
def test_half_copies(tmp_path, flag, setting, expected):
    path = tmp_path / "config.toml"
    path.write_text("" if setting is None else f"half_copies = {str(setting).lower()}\n")
    settings = Settings.load({"HOME": str(tmp_path)}, path)
    assert engine_options(ModelFlags(half_copies=flag), settings).half_copies is expected


@pytest.mark.parametrize("half_copies", [False, True])
def test_the_loader_is_told(tmp_path, asked, half_copies):
    folder = write_variant(tmp_path / "model", "qwen3-tied")
    with pytest.raises(StoppedError):
        Engine.load(folder, EngineOptions(half_copies=half_copies))
    assert asked.pop("half_copies") is half_copies
    with pytest.raises(StoppedError):
        bench.load_for_bench(folder, EngineOptions(half_copies=half_copies), noise=False)
    assert asked["half_copies"] is half_copies


@pytest.mark.parametrize("setting", [False, True])
def test_the_loss_of_quantising_is_measured_as_the_config_file_says(tmp_path, monkeypatch, recorded, setting):
    found = []

    def load(_folder, options, _on_progress):
        found.append(options.half_copies)
        raise StoppedError

    monkeypatch.setattr(Engine, "load", load)
    path = tmp_path / "config.toml"
    path.write_text(f"half_copies = {str(setting).lower()}\n")
    monkeypatch.setenv("TILEINFER_CONFIG", str(path))
    source = write_variant(tmp_path / "model", "qwen3-tied")
    with pytest.raises(StoppedError):
        quantize.run(Cli(recorded(tty=False)), str(source), tmp_path / "int8", how=QuantizeFlags(), quiet=True)
    assert found == [setting]


def test_a_census_without_a_gpu_is_told_too(tmp_path, monkeypatch, recorded):
    def census(_name, _config, _arch, _step, load, **_more):
        assert (load.kv, load.half_copies) == ("int8", False)
        raise StoppedError

    monkeypatch.setattr("tileinfer_core.kernel_census.census_without_gpu", census)
    monkeypatch.setenv("TILEINFER_CONFIG", os.devnull)
    where = ModelFlags(kv=KvFormat.int8, half_copies=False)
    with pytest.raises(StoppedError):
        kernels_census.run(
            Cli(recorded(tty=False)), where=where, random_weights="Qwen3-0.6B", arch=["sm_80"], as_json=True, quiet=True
        )
