"""The compiler's time limit and the kernel cache: from flags, environment and config file to cuda-tile."""

from __future__ import annotations

from pathlib import Path

import pytest

from tileinfer_core.compiler_settings import NAMES, compiler_settings, compiler_timeout, configure_compiler
from tileinfer_core.errors import UsageError
from tileinfer_core.settings import Setting, Settings

UNSET = dict.fromkeys(NAMES, Setting(None, "default"))


def configured(settings, environ=None):
    environ = {} if environ is None else environ
    configure_compiler(environ, {name: getattr(settings, name) for name in NAMES})
    return environ


def test_the_environment_wins_over_the_config_file(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text('compiler_timeout_seconds = 20\ncache_dir = "/fast"\ncache_size_bytes = 2097152\n')
    settings = Settings.load({"TILEINFER_COMPILER_TIMEOUT_SECONDS": "7.5", "HOME": str(tmp_path)}, path)
    assert configured(settings) == {
        "CUDA_TILE_COMPILER_TIMEOUT_SEC": "7.5",
        "CUDA_TILE_CACHE_DIR": "/fast",
        "CUDA_TILE_CACHE_SIZE": "2097152",
    }


def test_each_value_has_its_origin(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text("disk_cache = true\ncache_size_bytes = 2097152\n")
    settings = Settings.load({"TILEINFER_CACHE_DIR": "/fast", "HOME": str(tmp_path)}, path)
    chosen = {name: getattr(settings, name) for name in NAMES}
    found = compiler_settings({"CUDA_TILE_COMPILER_TIMEOUT_SEC": "9", "CUDA_TILE_CACHE_DIR": "/theirs"}, chosen)
    assert dict(found.items()) == {
        "compiler_timeout_seconds": Setting(9.0, "CUDA_TILE_COMPILER_TIMEOUT_SEC"),
        "disk_cache": Setting(True, "config file"),
        "cache_dir": Setting(Path("/fast"), "TILEINFER_CACHE_DIR"),
        "cache_size_bytes": Setting(2097152, "config file"),
    }


def test_what_is_not_set_leaves_cuda_tiles_own_variables(tmp_path):
    settings = Settings.load({"HOME": str(tmp_path)}, tmp_path / "absent.toml")
    found = configured(settings, {"CUDA_TILE_CACHE_DIR": "/mine"})
    assert found == {
        "CUDA_TILE_CACHE_DIR": "/mine",
        "CUDA_TILE_COMPILER_TIMEOUT_SEC": "300.0",
        "CUDA_TILE_CACHE_SIZE": str(1 << 31),
    }


def test_the_folder_is_cuda_tiles_own(tmp_path, monkeypatch):
    env = pytest.importorskip("cutile_cache._env")
    monkeypatch.delenv("CUDA_TILE_CACHE_DIR", raising=False)
    for variable in ("/somewhere", None):
        monkeypatch.setenv("XDG_CACHE_HOME", variable) if variable else monkeypatch.delenv("XDG_CACHE_HOME")
        import os

        assert str(compiler_settings(os.environ, UNSET).cache_dir.value) == env.get_cache_dir_from_env()


@pytest.mark.parametrize(
    ("switch", "folder", "own", "kept"),
    [
        (False, None, None, False),
        ("off", "/fast", "/mine", False),
        (None, None, "off", False),
        (None, None, "0", False),
        (None, "/fast", "off", True),  # a folder named for TileInfer says that there is to be a cache
        (True, None, "none", True),
        (None, None, None, True),
    ],
)
def test_the_cache_can_be_switched_off(switch, folder, own, kept):
    chosen = UNSET | {"disk_cache": Setting(switch, "--x"), "cache_dir": Setting(folder, "--x")}
    environ = {"HOME": "/h"} | ({} if own is None else {"CUDA_TILE_CACHE_DIR": own})
    assert configure_compiler(environ, chosen).disk_cache.value is kept
    assert environ["CUDA_TILE_CACHE_DIR"] == ((folder or "/h/.cache/cutile-python") if kept else "off")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("compiler_timeout_seconds", 0),
        ("compiler_timeout_seconds", "soon"),
        ("compiler_timeout_seconds", float("nan")),
        ("compiler_timeout_seconds", "inf"),
        ("cache_size_bytes", 100),
        ("cache_size_bytes", "2G"),
    ],
)
def test_a_value_out_of_range_names_its_origin(name, value):
    with pytest.raises(UsageError, match=rf"--flag: {name} must be a (whole )?number of (bytes|seconds), at least"):
        configure_compiler({}, UNSET | {name: Setting(value, "--flag")})


def test_a_switch_that_is_none():
    with pytest.raises(UsageError, match="TILEINFER_DISK_CACHE: disk_cache must be one of 1, true"):
        configure_compiler({}, UNSET | {"disk_cache": Setting("maybe", "TILEINFER_DISK_CACHE")})


def test_the_limit_is_read_where_cuda_tile_reads_it(monkeypatch):
    monkeypatch.setenv("CUDA_TILE_COMPILER_TIMEOUT_SEC", "12.5")
    assert compiler_timeout() == 12.5
    monkeypatch.delenv("CUDA_TILE_COMPILER_TIMEOUT_SEC")
    assert compiler_timeout() == 300
