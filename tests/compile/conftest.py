"""Compile tests use tileiras, which installs on Linux; elsewhere they are skipped. They keep a cache of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("cuda.tile")


@pytest.fixture(autouse=True, scope="session")
def _own_cache(compile_cache: Path) -> object:
    patch = pytest.MonkeyPatch()
    patch.setenv("CUDA_TILE_CACHE_DIR", str(compile_cache))
    patch.delenv("CUDA_HOME", raising=False)
    yield compile_cache
    patch.undo()
