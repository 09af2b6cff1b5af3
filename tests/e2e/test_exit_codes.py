"""Every way to end, with its code: pipes, full disks, signals, models that are missing or broken."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest


def shell(script: str, environment: dict[str, str], timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """A line of bash in which `tileinfer` is the program under test."""
    prelude = f'set -o pipefail; tileinfer() {{ "{sys.executable}" -m tileinfer_cli "$@"; }}\n'
    return subprocess.run(
        ["bash", "-c", prelude + script], capture_output=True, text=True, env=environment, timeout=timeout, check=False
    )


def test_a_reader_that_leaves_ends_the_generation_with_141(environment, endless: Path) -> None:
    started = time.monotonic()
    done = shell(
        f'tileinfer generate hi -m "{endless}" -q </dev/null | head -1; echo "${{PIPESTATUS[0]}}"', environment
    )
    assert done.stdout == "tick tock\n141\n"
    assert done.stderr == ""
    assert time.monotonic() - started < 15


def test_a_reader_that_left_while_nothing_is_written(environment, scripted) -> None:
    """Hidden thinking writes nothing; the reader's leaving is noticed all the same."""
    model = scripted(["<think>", "a", "b"], forever=True, thinking=True, context=200_000)
    done = shell(
        f'tileinfer generate hi -m "{model}" -q --hide-thinking </dev/null | true; echo "${{PIPESTATUS[0]}}"',
        environment,
    )
    assert done.stdout == "141\n"


@pytest.mark.parametrize("command", ["--help", "list --json", "tokens hi --json"])
def test_other_outputs_end_with_141_too(command: str, environment, hello: Path) -> None:
    line = f"(sleep 0.5; tileinfer {command} </dev/null) | true; echo ${{PIPESTATUS[0]}}"
    done = shell(line, environment | {"TILEINFER_MODEL": str(hello)})
    assert done.stdout == "141\n"
    assert done.stderr == ""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")  # noqa: PTH110
@pytest.mark.parametrize("command", ["generate hi", "generate hi --json", "tokens hi", "show {model}"])
def test_a_full_disk_is_code_6(command: str, environment, hello: Path) -> None:
    line = f"tileinfer {command.format(model=hello)} -q </dev/null >/dev/full"
    line = line.replace(" -q", "") if not command.startswith("generate") else line
    done = shell(line, environment | {"TILEINFER_MODEL": str(hello)})
    assert done.returncode == 6
    assert done.stderr == "error: could not write to stdout: No space left on device\n"


def test_a_closed_stdout_is_an_error_before_the_model_is_looked_for(environment) -> None:
    done = shell("tileinfer generate hi -m no-such-model </dev/null >&-", environment)
    assert done.returncode == 1
    assert "stdout is closed" in done.stderr


@pytest.mark.parametrize("redirect", ["2>&-", "2>/dev/full"])
def test_a_stderr_that_takes_nothing_changes_nothing(redirect: str, environment, hello: Path) -> None:
    done = shell(f'tileinfer generate hi -m "{hello}" --stats </dev/null {redirect}', environment)
    assert (done.returncode, done.stdout) == (0, "Hello, world!\n")
    assert shell(f"tileinfer generate hi -m no-such-model </dev/null {redirect}", environment).returncode == 4


def test_what_is_opened_takes_no_closed_stream_s_place(environment, tmp_path: Path) -> None:
    """Else a library's or a compiler's message for stderr would go into a model's weights."""
    program = (
        "import os, sys, tileinfer_cli.app as app\n"
        "def run(argv, **_):\n"
        "    handle = os.open(argv[0], os.O_WRONLY | os.O_CREAT)\n"
        "    os.write(2, b'a message')\n"
        "    return os.write(handle, b'%d' % handle) - 1\n"
        "app.run = run\n"
        "app.main()\n"
    )
    command = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", program, str(tmp_path / "file")]
    assert subprocess.run(command, env=environment, check=False).returncode == 0
    assert int((tmp_path / "file").read_text()) > 2


def test_a_closed_stdin_is_no_prompt(environment, hello: Path) -> None:
    assert shell(f'tileinfer generate hi -m "{hello}" <&-', environment).returncode == 0
    done = shell(f'tileinfer generate -m "{hello}" <&-', environment)
    assert done.returncode == 2
    assert "no prompt" in done.stderr


# Signals


# A signal before Python itself has started, and signals are heeded, is not ours to handle: the delay counts from here.
ANNOUNCED = (
    "import os; from tileinfer_cli import app; dispatch = app._dispatch; "
    "app._dispatch = lambda *given: (os.write(2, b'up'), dispatch(*given))[1]; app.main()"
)


# A thread that is in the middle of long work, as one of a product's may be.
WITH_A_BUSY_THREAD = (
    "import time, concurrent.futures as c; c.ThreadPoolExecutor(1).submit(time.sleep, 30); " + ANNOUNCED
)


def interrupted_after(
    delay: float, args: list[str], environment: dict[str, str], number: int, program: str = ANNOUNCED
) -> tuple[int, float, str, str]:
    """Exit code, seconds from the signal to the end, stdout, stderr.

    On a machine that is busy with other work the seconds are those of a processor that it has had itself.
    """
    before = processor_seconds()
    process = subprocess.Popen(
        [sys.executable, "-c", program, *args],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    )
    assert process.stderr is not None
    assert process.stderr.read(2) == b"up"
    time.sleep(delay)
    used = processor_seconds_of(process.pid)
    process.send_signal(number)
    started = time.monotonic()
    out, err = process.communicate(timeout=20)
    seconds = time.monotonic() - started
    if 1 <= seconds < 10 and used is not None:  # a thread that is waited for would take 30
        seconds = processor_seconds() - before - used
    return process.returncode, seconds, out.decode(), err.decode()


def processor_seconds() -> float:
    """Of all children that have ended."""
    times = os.times()
    return times.children_user + times.children_system


def processor_seconds_of(pid: int) -> float | None:
    """Of a process that runs, where Linux says so."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("delay", [0.02, 0.1, 0.2, 0.4, 0.8, 1.5])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_start_loading_and_decoding(
    delay: float, number: int, code: int, environment, endless: Path
) -> None:
    args = ["generate", "hi", "-m", str(endless), "--quiet"]
    found, seconds, out, err = interrupted_after(delay, args, environment, number)
    assert (found, err) == (code, "")
    assert seconds < 1
    assert out in ("", "\n") or out.startswith("tick")
    assert out == "" or out.endswith("\n")


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="a terminal's end is no signal here")
def test_a_terminal_that_goes_ends_the_work_in_good_order_unless_it_is_ignored(environment, endless: Path) -> None:
    args = ["generate", "hi", "-m", str(endless), "--quiet"]
    heeding = f"import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL); {ANNOUNCED}"  # whatever started the tests
    code, seconds, out, err = interrupted_after(0.6, args, environment, signal.SIGHUP, heeding)
    assert (code, err) == (129, "")
    assert seconds < 1
    assert out == "" or out.endswith("\n")
    args += ["--max-tokens", "3000"]
    ignoring = f"import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN); {ANNOUNCED}"
    code, _, out, _ = interrupted_after(0.3, args, environment, signal.SIGHUP, ignoring)  # as nohup does
    assert code == 0
    assert out.count("tick") == 1000


# The signal comes while a finaliser runs, in which Python drops its exception: as in the garbage collector's callbacks.
IN_A_FINALISER = """
import os
from tileinfer_cli.answer import AnswerView

class Late:
    def __del__(self):
        os.kill(os.getpid(), {number})

def taking(view, event, take=AnswerView._take, seen=[]):
    seen.append(event)
    if len(seen) == 50:
        Late()
    take(view, event)

AnswerView._take = taking
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_that_python_drops_ends_an_answer_all_the_same(
    number: int, code: int, environment, endless: Path
) -> None:
    program = IN_A_FINALISER.format(number=int(number)) + ANNOUNCED
    done = subprocess.run(
        [sys.executable, "-c", program, "generate", "hi", "-m", str(endless), "--quiet"],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, env=environment, timeout=30, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (code, "up")
    assert done.stdout.endswith("\n")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_waits_for_no_thread(number: int, code: int, environment, endless: Path) -> None:
    args = ["generate", "hi", "-m", str(endless), "--quiet"]
    found, seconds, out, err = interrupted_after(1.5, args, environment, number, WITH_A_BUSY_THREAD)
    assert (found, err) == (code, "")
    assert seconds < 10  # of the thread's 30
    assert out.endswith("\n")  # what was said is there to its last line


def test_a_signal_ends_a_long_prefill(environment, endless: Path, tmp_path: Path) -> None:
    file = tmp_path / "long.txt"
    file.write_text("word " * 30_000)
    args = ["generate", "-f", str(file), "-m", str(endless), "--quiet"]
    found, seconds, out, err = interrupted_after(2.5, args, environment, signal.SIGINT)
    assert (found, out, err) == (130, "", "")
    assert seconds < 1


# Models


def broken_copy(model: Path, folder: Path) -> Path:
    return shutil.copytree(model, folder / "broken")


def test_a_model_that_is_not_there_is_code_4_within_a_second(tileinfer) -> None:
    for name in ("demo", "no-such-model", "Some/Thing", "./nowhere", "/nowhere/x.gguf"):
        result = tileinfer("generate", "hi", "-m", name)
        assert (result.code, result.out) == (4, ""), name
        assert "Traceback" not in result.err
        assert len(result.err.splitlines()) <= 2
        assert result.seconds < 5  # 0.2 s on an idle machine; a connection that is tried takes longer
    assert "tileinfer pull demo" in tileinfer("generate", "hi", "-m", "demo").err


def test_strange_names_are_printed_as_they_are(tileinfer) -> None:
    result = tileinfer("generate", "hi", "-m", "a[q8]:smile:[/login]")
    assert result.code == 4
    assert "a[q8]:smile:[/login]" in result.err


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("model.safetensors", lambda data: data[:-4096]),
        ("model.safetensors", lambda data: data + b"x"),
        ("model.safetensors", lambda data: (2**40).to_bytes(8, "little") + data[8:]),
        ("model.safetensors", lambda data: b""),
        ("config.json", lambda data: data[:-20]),
        ("config.json", lambda data: b"[]"),
        ("config.json", lambda data: data.replace(b'"llama"', b'"mamba"')),
        ("config.json", lambda data: data.replace(b'"silu"', b'"relu6"')),
        ("tokenizer.json", lambda data: data[:-20]),
        ("tokenizer.json", lambda data: data.replace(b'"ByteLevel"', b'"Hexagonal"')),
        ("chat_template.jinja", lambda data: b"{% for m in messages %}"),
        ("chat_template.jinja", lambda data: b"{{ raise_exception('no') }}"),
        ("generation_config.json", lambda data: b'{"temperature": "hot"}'),
    ],
)
def test_a_damaged_model_is_one_line_and_code_7(file: str, change, hello: Path, tmp_path: Path, tileinfer) -> None:
    model = broken_copy(hello, tmp_path)
    (model / file).write_bytes(change((model / file).read_bytes()))
    result = tileinfer("generate", "hi", "-m", model)
    assert (result.code, result.out) == (7, ""), result.err
    assert "Traceback" not in result.err
    assert len(result.err.splitlines()) <= 2
    assert file in result.err or "mamba" in result.err or "relu6" in result.err


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(file: str, hello: Path, tmp_path: Path, tileinfer) -> None:
    model = broken_copy(hello, tmp_path)
    (model / file).unlink()
    result = tileinfer("generate", "hi", "-m", model)
    assert result.code in (4, 7)
    assert "Traceback" not in result.err


def test_without_a_template_chat_is_refused_and_raw_works(scripted, tileinfer) -> None:
    model = scripted(["plain"], template=None)
    result = tileinfer("generate", "hi", "-m", model)
    assert result.code == 7
    assert "template" in result.err
    assert "--raw" in result.err
    assert tileinfer("generate", "hi", "-m", model, "--raw").out == "plain\n"


def test_a_backend_that_is_not_there_is_code_8(tileinfer, hello: Path) -> None:
    result = tileinfer("generate", "hi", "-m", hello, "--backend", "cuda")
    assert (result.code, result.out) == (8, "")
    assert "--backend" in result.err


def test_debug_shows_the_traceback_and_keeps_the_code(tileinfer) -> None:
    for args in (["--debug", "generate"], ["generate", "--debug"]):
        result = tileinfer(*args, "hi", "-m", "no-such-model")
        assert result.code == 4
        assert "Traceback" in result.err
        assert "ModelNotFoundError" in result.err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("colour = 1", "colour"),
        ("context = 'big'", "context"),
        ("[sampling]\ntemperature = 'hot'", "temperature"),
        ("model = ", "TOML"),
    ],
)
def test_a_config_file_that_is_wrong_is_a_usage_error(text: str, message: str, home: Path, tileinfer) -> None:
    config = home / "config.toml"
    config.write_text(text)
    result = tileinfer("generate", "hi", TILEINFER_CONFIG=str(config))
    assert result.code == 2
    assert message in result.err
    assert str(config) in result.err


def test_settings_of_the_config_file_reach_the_run(home: Path, hello: Path, tileinfer) -> None:
    config = home / "config.toml"
    config.write_text("max_tokens = 2\n[sampling]\ntemperature = 0.0\ntop_k = 7\n")
    result = tileinfer("generate", "hi", "-m", hello, "--json", TILEINFER_CONFIG=str(config))
    document = json.loads(result.out)
    assert document["text"] == "Hello,"
    assert document["sampling"]["top_k"] == {"value": 7, "origin": "config file"}
    assert "config file" in result.err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["generate", "hi", "-m", "qwen3:0.6b"],
            "no model named qwen3:0.6b on this disk\n  fetch it: tileinfer pull qwen3:0.6b\n",
        ),
        (
            ["show", "Qwen/Qwen3-4B"],
            "no model named Qwen/Qwen3-4B on this disk\n  fetch it: tileinfer pull Qwen/Qwen3-4B\n",
        ),
        (["generate", "hi", "-m", "qwen3:0.7b"], "did you mean qwen3:1.7b or qwen3:0.6b"),
        (["pull", "no such"], "neither an alias nor ORGANISATION/NAME\n  aliases: "),
        (["pull", "qwen3:0.7b"], "neither an alias nor ORGANISATION/NAME\n  did you mean qwen3:1.7b or qwen3:0.6b"),
    ],
)
def test_a_name_is_answered_as_it_was_typed(args: list[str], message: str, tileinfer) -> None:
    result = tileinfer(*args)
    assert (result.code, result.out) == (4, "")
    assert message in result.err


def test_a_second_ctrl_c_is_no_traceback(environment, endless: Path) -> None:
    """It may come while the first one is reported, while the interpreter cleans up, or after the end."""
    for pause in (0.0, 0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08):
        process = subprocess.Popen(
            [sys.executable, "-c", ANNOUNCED, "generate", "hi", "-m", str(endless), "--quiet"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
        )
        assert process.stdout is not None
        assert process.stdout.read(1)  # it decodes
        process.send_signal(signal.SIGINT)
        time.sleep(pause)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
        assert err.decode().removeprefix("up") == "", pause
        assert process.returncode in (130, -signal.SIGINT)  # a shell calls both 130


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_file_is_refused_not_read(make, hello: Path, tmp_path: Path, home: Path, tileinfer) -> None:
    make(tmp_path / "odd")
    result = tileinfer("list", TILEINFER_CONFIG=str(tmp_path / "odd"), timeout=20)
    assert (result.code, result.err.count("not a regular file")) == (2, 1)
    shutil.copytree(hello, tmp_path / "model")
    (tmp_path / "model" / "config.json").unlink()
    make(tmp_path / "model" / "config.json")
    assert tileinfer("generate", "hi", "-m", tmp_path / "model", timeout=20).code == 7
    result = tileinfer("chat", "-m", hello, stdin=f"/load {tmp_path / 'odd'}\n".encode(), timeout=20)
    assert (result.code, result.err.count("not a regular file")) == (2, 1)
