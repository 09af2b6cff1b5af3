"""Settings from the environment and the config file: each with its origin, nothing ignored in silence."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tileinfer_core.compiler_settings import default_folder
from tileinfer_core.errors import UsageError
from tileinfer_core.files import expanded
from tileinfer_core.hub_cache import cache_folder
from tileinfer_core.settings import Setting, Settings, default_config_path

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "config.toml"


def test_nothing_set(config: Path, tmp_path: Path) -> None:
    settings = Settings.load({"HOME": str(tmp_path)}, config)
    assert settings.model == Setting("demo", "default")
    assert settings.backend == Setting("auto", "default")
    assert settings.context == Setting(None, "default")
    assert settings.models_dir == Setting(tmp_path / ".local/share/tileinfer", "default")
    assert settings.history_path == tmp_path / ".local/state/tileinfer/history"
    assert settings.sampling == {}


def test_environment_wins_over_the_file(config: Path) -> None:
    config.write_text('model = "a/b"\nbackend = "cuda"\nmodels_dir = "~/x"\n')
    environ = {"HOME": "/h", "TILEINFER_MODEL": "qwen3:4b", "TILEINFER_BACKEND": "cpu"}
    settings = Settings.load(environ, config)
    assert settings.model == Setting("qwen3:4b", "TILEINFER_MODEL")
    assert settings.backend == Setting("cpu", "TILEINFER_BACKEND")
    assert settings.models_dir == Setting(Path("/h/x"), "config file")
    assert Settings.load({**environ, "TILEINFER_HOME": "/m"}, config).models_dir == Setting(
        Path("/m"), "TILEINFER_HOME"
    )


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ('modle = "x"', "did you mean model?"),
        ("temperature = 1", "did you mean temperature, in the table [sampling]?"),
        ("[sampling]\ntemprature = 1", "did you mean temperature?"),
        ("[alias]\na = 'b'", "did you mean aliases?"),
        ("xyzzy = 1", "known settings: model, backend"),
    ],
)
def test_an_unknown_key_names_what_is_near(text: str, hint: str, config: Path) -> None:
    config.write_text(text)
    with pytest.raises(UsageError) as caught:
        Settings.load({"HOME": "/h"}, config)
    assert caught.value.hint is not None
    assert caught.value.hint.startswith(hint)


def test_a_config_file_that_is_asked_for_must_be_there(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path), "TILEINFER_CONFIG": str(tmp_path / "gone.toml")}
    with pytest.raises(UsageError, match=r"TILEINFER_CONFIG: there is no file .*gone\.toml"):
        Settings.load(environ)
    for rest in ({}, {"TILEINFER_CONFIG": os.devnull}):
        assert Settings.load({"HOME": str(tmp_path), **rest}).model.origin == "default"


def test_sampling_and_aliases(config: Path) -> None:
    config.write_text('max_tokens = 9\n[sampling]\ntemperature = 1\ntop_k = 40\n[aliases]\n"mine" = "org/model"\n')
    settings = Settings.load({"HOME": "/h"}, config)
    assert settings.sampling == {"temperature": Setting(1, "config file"), "top_k": Setting(40, "config file")}
    assert settings.aliases == {"mine": "org/model"}
    assert settings.max_tokens == Setting(9, "config file")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("modell = 'x'", "unknown setting 'modell'"),
        ("[sampling]\ntemprature = 1", "unknown setting 'sampling.temprature'"),
        ("context = '8k'", "context must be a whole number, found '8k'"),
        ("context = true", "context must be a whole number, found true"),
        ("half_copies = 'no'", "half_copies must be true or false, found 'no'"),
        ("context = 0", "context must be at least 1, found 0"),
        ("[sampling]\ntop_k = 1.5", "sampling.top_k must be a whole number, found 1.5"),
        ("[sampling]\ntop_p = '1'", "sampling.top_p must be a number, found '1'"),
        ("sampling = 3", "sampling must be a table, found 3"),
        ("[aliases]\nx = 3", "aliases.x must be a string, found 3"),
        ("backend = 'rocm'", "backend must be one of auto, cuda, cpu, found 'rocm'"),
        ("model = ", "not valid TOML"),
        ("model = '\udcff'", "not valid TOML"),
    ],
)
def test_what_is_wrong_is_named(config: Path, text: str, says: str) -> None:
    config.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(UsageError, match=says):
        Settings.load({"HOME": "/h"}, config)


def test_a_config_path_that_is_a_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="can't be read"):
        Settings.load({"HOME": "/h"}, tmp_path)


def test_where_the_config_file_lies() -> None:
    assert default_config_path({"HOME": "/h"}) == Path("/h/.config/tileinfer/config.toml")
    assert default_config_path({"HOME": "/h", "XDG_CONFIG_HOME": "/c"}) == Path("/c/tileinfer/config.toml")
    assert default_config_path({"HOME": "/h", "XDG_CONFIG_HOME": "relative"}).is_relative_to("/h")
    assert default_config_path({"HOME": "/h", "TILEINFER_CONFIG": "/f.toml"}) == Path("/f.toml")


def test_a_home_that_is_no_folder_has_no_config_file() -> None:
    assert Settings.load({"HOME": "/dev/null"}).model.origin == "default"


@pytest.mark.parametrize("ask", [Settings.load, default_config_path, cache_folder, default_folder])
def test_a_user_without_a_home_is_told(
    ask: Callable[[dict[str, str]], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container's user whom the list of users does not have."""

    def none() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", none)
    for environ in ({}, {"HOME": ""}):
        with pytest.raises(UsageError, match="HOME is not set") as caught:
            ask(environ)
        assert caught.value.hint == "set HOME to a folder"


def test_a_home_of_nobody() -> None:
    for variable, ask in {"TILEINFER_CONFIG": default_config_path, "HF_HOME": cache_folder}.items():
        with pytest.raises(UsageError, match="~no-such-user/x: there is no such home folder"):
            ask({"HOME": "/h", variable: "~no-such-user/x"})
    with pytest.raises(UsageError):
        expanded("~no-such-user")
