"""`/model` when the new model can't be loaded: the old one is back, or the chat ends with the reason's code."""

from __future__ import annotations

import weakref
from itertools import count
from typing import TYPE_CHECKING

import pytest

from tests.interrupts import interrupted
from tests.scripted_model import write_scripted_model
from tileinfer_cli import opening
from tileinfer_cli.chat.swap import Models
from tileinfer_cli.commandline import Cli
from tileinfer_cli.options import ModelFlags
from tileinfer_core.engine import Engine, Request
from tileinfer_core.errors import ModelError, OutOfMemoryError
from tileinfer_core.sampling import SamplingParams
from tileinfer_core.session import Session
from tileinfer_core.settings import Settings

if TYPE_CHECKING:
    from pathlib import Path

REQUEST = Request(SamplingParams(temperature=0.0))


class Weights:
    """A model's memory, as long as something refers to it."""


@pytest.fixture
def models(recorded, tmp_path: Path) -> Models:
    settings = Settings.load({"HOME": str(tmp_path)}, tmp_path / "none.toml")
    return Models(Cli(recorded(tty=False)), ModelFlags(), settings, quiet=True)


@pytest.fixture
def session(models: Models, tmp_path: Path) -> Session:
    chat = Session(models.open(str(write_scripted_model(tmp_path / "old", ["old", " one"]))))
    list(chat.send("a", REQUEST))
    return chat


def failing_loads(monkeypatch: pytest.MonkeyPatch, *errors: BaseException) -> None:
    """The next loads fail with these; those after them do what they always do."""
    left, load = list(errors), Engine.load

    def fail_or_load(*args: object) -> Engine:
        if left:
            raise left.pop(0)
        return load(*args)

    monkeypatch.setattr(Engine, "load", fail_or_load)


@pytest.mark.parametrize("error", [OutOfMemoryError("too big"), KeyboardInterrupt()])
def test_a_load_that_fails_brings_the_old_model_back(
    error: BaseException, models: Models, session: Session, tmp_path: Path, monkeypatch
) -> None:
    other = write_scripted_model(tmp_path / "new", ["new"])
    failing_loads(monkeypatch, error)
    with pytest.raises(type(error)):
        models.replace(session, str(other))
    assert [event.text for event in list(session.send("b", REQUEST))[-1:]] == ["old one"]
    assert [message.content for message in session.messages] == ["a", "old one", "b", "old one"]


def test_the_old_model_has_the_memory_that_the_new_one_took(
    models: Models, session: Session, tmp_path: Path, monkeypatch
) -> None:
    """Copies and the context are what there is room for."""
    taken: list[weakref.ref[Weights]] = []
    load = Engine.load

    def interrupted(*args: object) -> Engine:
        if not taken:
            weights = Weights()
            taken.append(weakref.ref(weights))
            raise KeyboardInterrupt
        assert taken[0]() is None
        return load(*args)

    monkeypatch.setattr(Engine, "load", interrupted)
    with pytest.raises(KeyboardInterrupt):
        models.replace(session, str(write_scripted_model(tmp_path / "new", ["new"])))
    assert len(taken) == 1


def test_an_interrupt_at_any_instruction_leaves_a_model_that_answers(
    models: Models, session: Session, tmp_path: Path, monkeypatch
) -> None:
    other = write_scripted_model(tmp_path / "new", ["new"])
    engines = {name: models.open(str(tmp_path / name)) for name in ("old", "new")}
    closed: set[str] = set()

    def load(folder, *_args: object) -> Engine:
        closed.discard(folder.path.name)
        return engines[folder.path.name]

    monkeypatch.setattr(Engine, "load", load)
    monkeypatch.setattr(Engine, "close", lambda engine: closed.add(engine.folder.path.name))
    for steps in count():
        closed.clear()
        session.adopt(engines["old"])
        came = interrupted(lambda: models.replace(session, str(other)), steps, inside=("chat/swap.py",))
        assert session.engine.folder.path.name not in closed, f"after {steps} instructions"
        if not came:
            break
    assert session.engine is engines["new"]


@pytest.mark.parametrize(("second", "code"), [(OutOfMemoryError("gone too"), 8), (KeyboardInterrupt(), 130)])
def test_without_the_old_model_the_chat_ends(
    second: BaseException, code: int, models: Models, session: Session, tmp_path: Path, monkeypatch
) -> None:
    other = write_scripted_model(tmp_path / "new", ["new"])
    failing_loads(monkeypatch, OutOfMemoryError("too big"), second)
    with pytest.raises(SystemExit) as caught:
        models.replace(session, str(other))
    assert caught.value.code == code
    assert ("gone too" in models.cli.streams.stderr) is (code == 8)


def test_a_model_that_cannot_chat_is_refused_while_the_old_one_is_there(
    models: Models, session: Session, tmp_path: Path, monkeypatch
) -> None:
    other = write_scripted_model(tmp_path / "raw", ["x"], template=None)
    engine = session.engine
    monkeypatch.setattr(opening, "load_engine", None)
    with pytest.raises(ModelError, match="no chat template"):
        models.replace(session, str(other))
    assert session.engine is engine
