"""`rm` says what is gone."""

from __future__ import annotations

import pytest

from tileinfer_cli.commandline import Cli
from tileinfer_cli.commands import rm
from tileinfer_core.store import Store


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("demo", "removed demo: 2.0 kB freed\n"),
        ("./My.GGUF", "removed the converted copy of ./My.GGUF: 2.0 kB freed\n"),
    ],
)
def test_of_a_gguf_file_the_copy_alone_is_removed(
    model: str, said: str, recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Store, "remove", lambda _self, _reference: 2000)
    streams = recorded()
    rm.run(Cli(streams), model)
    assert (streams.stderr, streams.stdout) == (said, "")
