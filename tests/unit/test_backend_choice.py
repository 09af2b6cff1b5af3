"""Which backend runs, and why."""

from __future__ import annotations

import pytest

from tileinfer_core.backends.select import choose_backend
from tileinfer_core.errors import BackendUnavailableError, UsageError


def test_auto_takes_the_cpu_and_says_why():
    choice = choose_backend("auto")
    assert choice.name == "cpu"
    assert "CUDA backend is not part of this version" in choice.reason


def test_cpu_is_what_it_says():
    assert choose_backend("cpu").name == "cpu"


def test_cuda_is_never_replaced_in_silence():
    with pytest.raises(BackendUnavailableError, match="CUDA backend is not part of this version") as caught:
        choose_backend("cuda")
    assert caught.value.exit_code == 8
    assert "--backend cpu" in caught.value.hint


@pytest.mark.parametrize("name", ["gpu", "", "CPU", "cuda:0"])
def test_another_name_is_a_usage_error(name):
    with pytest.raises(UsageError, match="auto, cuda, cpu"):
        choose_backend(name)
