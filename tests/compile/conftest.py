"""Compile tests use tileiras, which installs on Linux; elsewhere they are skipped. They keep a cache of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("cuda.tile")


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> object:
    """A fresh cache, unless TILEINFER_TEST_CACHE names one to keep between runs."""
    import os

    kept = os.environ.get("TILEINFER_TEST_CACHE")
    folder = Path(kept) if kept else tmp_path_factory.mktemp("cutile-cache")
    patch = pytest.MonkeyPatch()
    patch.setenv("CUDA_TILE_CACHE_DIR", str(folder))
    patch.delenv("CUDA_HOME", raising=False)
    yield folder
    patch.undo()
