"""The compiler's time limit and the kernel cache: from flags, environment and config file to cuda-tile."""

from __future__ import annotations

import pytest

from tileinfer_core.compiler_settings import configure_compiler
from tileinfer_core.errors import UsageError
from tileinfer_core.settings import Setting, Settings


def configured(settings, environ=None):
    environ = {} if environ is None else environ
    names = ("compiler_timeout", "kernel_cache", "kernel_cache_size")
    configure_compiler(environ, {name: getattr(settings, name) for name in names})
    return environ


def test_the_environment_wins_over_the_config_file(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text('compiler_timeout = 20\nkernel_cache = "/fast"\nkernel_cache_size = 2097152\n')
    settings = Settings.load({"TILEINFER_COMPILER_TIMEOUT": "7.5", "HOME": str(tmp_path)}, path)
    assert configured(settings) == {
        "CUDA_TILE_COMPILER_TIMEOUT_SEC": "7.5",
        "CUDA_TILE_CACHE_DIR": "/fast",
        "CUDA_TILE_CACHE_SIZE": "2097152",
    }


def test_what_is_not_set_leaves_cuda_tiles_own_variables(tmp_path):
    settings = Settings.load({"HOME": str(tmp_path)}, tmp_path / "absent.toml")
    assert configured(settings, {"CUDA_TILE_CACHE_DIR": "/mine"}) == {"CUDA_TILE_CACHE_DIR": "/mine"}


def test_the_cache_can_be_switched_off():
    environ = {}
    configure_compiler(environ, {"kernel_cache": Setting("off", "--kernel-cache")})
    assert environ == {"CUDA_TILE_CACHE_DIR": "off"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("compiler_timeout", 0),
        ("compiler_timeout", "soon"),
        ("compiler_timeout", float("nan")),
        ("compiler_timeout", "inf"),
        ("kernel_cache_size", 100),
        ("kernel_cache_size", "2G"),
    ],
)
def test_a_value_out_of_range_names_its_origin(name, value):
    with pytest.raises(UsageError, match=f"--flag: {name} must be at least"):
        configure_compiler({}, {name: Setting(value, "--flag")})
