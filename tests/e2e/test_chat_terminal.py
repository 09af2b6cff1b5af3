"""`chat` at a terminal: a pseudo-terminal, real keys, real signals."""

from __future__ import annotations

import re
import shutil
import signal
import sys
import termios
import time
from typing import TYPE_CHECKING

import pytest

from tests.e2e.conftest import COMMAND

pexpect = pytest.importorskip("pexpect")

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator
    from pathlib import Path

ANSWER = "Hello, world!"
PROMPT = "›"
PASTE, END = "\x1b[200~", "\x1b[201~"
TRACEBACK = "Traceback (most recent call last):\n" + "\n".join(f"\tframe {n}" for n in range(36)) + "\n\n/help\nEnd"


class Terminal:
    """A chat in a pseudo-terminal of 80 by 24."""

    def __init__(self, environment: dict[str, str], *args: str | os.PathLike[str]) -> None:
        self.child = pexpect.spawn(
            sys.executable,
            ["-m", "tileinfer_cli", *map(str, args)],
            env=environment,
            dimensions=(24, 80),
            encoding="utf-8",
            timeout=20,
        )

    def send(self, keys: str) -> None:
        self.child.send(keys)

    def wait(self, text: str) -> str:
        """Waits for a text; returns what came before it."""
        self.child.expect_exact(text)
        return str(self.child.before)

    def ready(self) -> None:
        """The line editor is up: the gauge has been drawn."""
        self.wait("left")

    def code(self) -> int | None:
        self.child.expect(pexpect.EOF)
        self.child.close()
        return self.child.exitstatus if self.child.signalstatus is None else -self.child.signalstatus


@pytest.fixture
def terminal(environment) -> Iterator:
    opened: list[Terminal] = []

    def start(*args: str | os.PathLike[str], **more: str) -> Terminal:
        opened.append(Terminal(environment | more, *args))
        return opened[-1]

    yield start
    for one in opened:
        one.child.close(force=True)


def test_a_conversation(terminal, hello: Path) -> None:
    chat = terminal("chat", "-m", hello)
    chat.wait("tokens of context")
    chat.ready()
    chat.send("hi\r")
    chat.wait(ANSWER)
    chat.wait("used")
    chat.send("\x04")
    assert chat.code() == 0


def test_the_gauge_counts(terminal, hello: Path) -> None:
    chat = terminal("chat", "-m", hello)
    chat.wait("0 tokens used, 4,096 left")
    chat.send("hi\r")
    chat.wait(ANSWER)
    used = re.search(r"(\d+) tokens used, ([\d,]+) left", chat.wait("left") + "left")
    assert used is not None
    assert int(used[1]) > 0
    assert int(used[1]) + int(used[2].replace(",", "")) == 4096


def test_a_pasted_traceback_is_one_message(terminal, hello: Path) -> None:
    chat = terminal("chat", "-m", hello)
    chat.ready()
    chat.send(f"{PASTE}{TRACEBACK}{END}")
    time.sleep(0.3)
    chat.send("\r")
    chat.wait(ANSWER)
    chat.ready()
    chat.send("/prompt\r")
    shown = chat.wait("End<|im_end|>")
    assert shown.count("<|im_start|>user") == 1
    assert "/help" in shown
    chat.send("/exit\r")
    assert chat.code() == 0


@pytest.mark.parametrize("text", ["def f():\n\n/help\n", "x" * 10_000], ids=["lines", "one long line"])
def test_what_is_pasted_into_an_answer_waits_as_one_message(text: str, terminal, endless: Path) -> None:
    text += "end of it"
    chat = terminal("chat", "-m", endless, "--max-tokens", "600")
    chat.wait("\x1b[?2004h")
    chat.ready()
    chat.send("hi\r")
    assert "\x1b[?2004l" not in chat.wait("tick tock")  # the terminal goes on to mark what is pasted
    chat.send(f"{PASTE}{text}{END}")
    chat.wait("stopped after 600 tokens")
    chat.wait("end of it")
    chat.send("\r")
    chat.wait("stopped after 600 tokens")
    chat.ready()
    chat.send("/prompt\r")
    chat.wait("<|im_start|>user\r\nhi<|im_end|>")
    _, _, second = chat.wait("end of it<|im_end|>").partition("<|im_start|>user\r\n")
    assert second + "end of it" == text.replace("\n", "\r\n")
    chat.ready()
    chat.send("/exit\r")
    assert chat.code() == 0


def test_the_terminal_is_as_it_was_after_a_chat(environment, hello: Path) -> None:
    line = " ".join([*COMMAND, "chat", "-m", str(hello)])
    child = pexpect.spawn("bash", ["-c", f"{line}; stty -a"], env=environment, dimensions=(24, 80), encoding="utf-8")
    child.expect_exact("left")
    child.send("\x04")
    child.expect(pexpect.EOF)
    _, _, after = child.before.rpartition("\x1b[?2004l")
    assert re.search(r"[^-]icanon", after)
    assert re.search(r"[^-]echo ", after)


def modes(child) -> int:
    return termios.tcgetattr(child.child_fd)[3]


def test_a_chat_that_was_stopped_goes_on(environment, endless: Path) -> None:
    """Ctrl-Z at the prompt and in an answer: a shell sets the terminal as it likes it, and fg brings the chat back."""
    line = " ".join([*COMMAND, "chat", "-m", str(endless)])
    child = pexpect.spawn(
        "bash", ["--norc", "-i"], env=environment | {"PS1": "$ "}, dimensions=(24, 80), encoding="utf-8"
    )
    child.sendline(line)
    child.expect_exact("left")
    child.send("half\x1a")
    child.expect_exact("Stopped")
    child.sendline("fg")
    child.expect_exact("half")
    child.send(" done\r")
    child.expect_exact("tick tock")
    child.send("\x1a")
    child.expect_exact("Stopped")
    child.sendline("fg")
    child.expect_exact("tick tock")
    assert not modes(child) & (termios.ECHO | termios.ICANON)
    child.send("\x03")
    child.expect_exact("interrupted")
    child.expect_exact("left")
    child.send("/prompt\r")
    child.expect_exact("half done<|im_end|>")
    child.expect_exact("left")
    child.send("/exit\r")
    child.expect_exact("$ ")
    child.close(force=True)


def test_ctrl_c_stops_an_answer_and_keeps_the_session(terminal, endless: Path) -> None:
    chat = terminal("chat", "-m", endless)
    chat.ready()
    chat.send("hi\r")
    chat.wait("tick tock")
    chat.send("\x03")  # the whole answer would take minutes
    chat.wait("interrupted")
    chat.ready()
    chat.send("/prompt\r")
    chat.wait("<|im_start|>assistant\r\n")
    chat.wait("tick tock")
    chat.ready()
    chat.send("again\r")
    chat.wait("tick tock")
    chat.send("\x03")
    chat.wait("interrupted")
    chat.ready()
    chat.send("/exit\r")
    assert chat.code() == 0


def test_continue_goes_on_after_ctrl_c(terminal, endless: Path) -> None:
    chat = terminal("chat", "-m", endless)
    chat.ready()
    chat.send("hi\r")
    chat.wait("tick tock")
    for keys in ("/continue\r", "/continue\r"):
        chat.send("\x03")
        chat.wait("interrupted")
        chat.ready()
        chat.send(keys)
        chat.wait("/continue")
        chat.wait("tock")
    chat.send("\x03")
    chat.wait("interrupted")
    chat.ready()
    chat.send("/prompt\r")
    chat.wait("<|im_start|>user\r\nhi<|im_end|>\r\n<|im_start|>assistant\r\n")
    assert "<|im_start|>" not in chat.wait("left")  # one question, one answer
    chat.send("/exit\r")
    assert chat.code() == 0


def test_edit_opens_the_last_message(terminal, hello: Path) -> None:
    chat = terminal("chat", "-m", hello)
    chat.ready()
    chat.send("first\r")
    chat.wait(ANSWER)
    chat.ready()
    chat.send("/edit\r")
    chat.wait("first")
    time.sleep(0.3)
    chat.send(" draft\r")
    chat.wait(ANSWER)
    chat.ready()
    chat.send("/edit\r")
    chat.wait("first draft")
    time.sleep(0.3)
    chat.send("\x03")
    chat.wait("stays as it is")
    chat.ready()
    chat.send("/prompt\r")
    shown = chat.wait("Hello, world!<|im_end|>")
    assert shown.count("<|im_start|>user") == 1
    assert "first draft<|im_end|>" in shown
    chat.send("/exit\r")
    assert chat.code() == 0


def test_another_model_answers_or_the_old_one_does(terminal, hello: Path, scripted, tmp_path: Path) -> None:
    damaged = shutil.copytree(hello, tmp_path / "damaged")
    (damaged / "model.safetensors").write_bytes(b"no weights")
    chat = terminal("chat", "-m", hello)
    chat.ready()
    chat.send("hi\r")
    chat.wait(ANSWER)
    for name, message in (("no-such-model", "no model named"), (damaged, "model.safetensors")):
        chat.ready()
        chat.send(f"/model {name}\r")
        chat.wait("error:")
        chat.wait(message)
    chat.ready()
    chat.send("again\r")
    chat.wait(ANSWER)
    chat.ready()
    chat.send(f"/model {scripted(['Bonjour', ' !'])}\r")
    chat.wait("model: ")
    chat.ready()
    chat.send("who?\r")
    chat.wait("Bonjour !")
    chat.ready()
    chat.send("/prompt\r")
    shown = chat.wait("Bonjour !<|im_end|>")
    roles = re.findall(r"<\|im_start\|>(\w+)", shown)
    assert roles == ["user", "assistant"] * 3
    chat.send("/exit\r")
    assert chat.code() == 0


def test_ctrl_c_at_the_prompt_clears_and_twice_leaves(terminal, hello: Path) -> None:
    chat = terminal("chat", "-m", hello)
    chat.ready()
    chat.send("wrong words")
    time.sleep(0.2)
    chat.send("\x03")
    chat.wait("Ctrl-C again to leave")
    chat.send("hi\r")
    chat.wait(ANSWER)
    chat.ready()
    chat.send("\x03")
    time.sleep(0.3)
    chat.send("\x03")
    assert chat.code() == 130


# Imported by Python at its start: loading a model stops for 30 s where it imports the backend.
SLOW_LOADING = """
import sys, time

class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "tileinfer_core.backends.numpy_backend":
            print("loading has begun", flush=True)
            time.sleep(30)

sys.meta_path.insert(0, Slow())
"""


def test_ctrl_c_while_loading_leaves(terminal, hello: Path, tmp_path: Path, environment) -> None:
    (tmp_path / "sitecustomize.py").write_text(SLOW_LOADING)
    chat = terminal("chat", "-m", hello, PYTHONPATH=f"{tmp_path}:{environment['PYTHONPATH']}")
    chat.wait("loading has begun")
    chat.child.kill(signal.SIGINT)
    assert chat.code() == 130
    assert "Traceback" not in chat.child.before


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_at_the_prompt_puts_the_terminal_in_order(terminal, hello: Path, number: int, code: int) -> None:
    chat = terminal("chat", "-m", hello)
    chat.ready()
    chat.child.kill(number)
    assert chat.code() == code
    assert "\x1b[?2004l" in chat.child.before  # bracketed paste is off again


def test_history_survives(terminal, hello: Path, home: Path) -> None:
    chat = terminal("chat", "-m", hello)
    chat.ready()
    chat.send("remember me\r")
    chat.wait(ANSWER)
    chat.ready()
    chat.send("\x04")
    assert chat.code() == 0
    assert "remember me" in (home / ".local/state/tileinfer/history").read_text()
    chat = terminal("chat", "-m", hello)
    chat.ready()
    chat.send("\x1b[A")
    chat.wait("remember me")


def test_a_state_folder_that_cannot_be_written_is_no_crash(terminal, hello: Path, home: Path) -> None:
    (home / ".local").write_text("a file where the folder should be")
    chat = terminal("chat", "-m", hello)
    chat.wait("the history can't be kept")
    chat.ready()
    chat.send("hi\r")
    chat.wait(ANSWER)
    chat.ready()
    chat.send("/exit\r")
    assert chat.code() == 0


def test_an_unknown_command_is_answered_and_the_chat_goes_on(terminal, hello: Path) -> None:
    chat = terminal("chat", "-m", hello)
    chat.ready()
    chat.send("/hlep\r")
    chat.wait("did you mean /help?")
    chat.ready()
    chat.send("/help\r")
    chat.wait("/system TEXT")
    chat.ready()
    chat.send("/exit\r")
    assert chat.code() == 0


def test_model_text_cannot_drive_the_terminal(terminal, scripted) -> None:
    model = scripted(["a\x1b]52;c;aGk=\x07", "b\x1b[2J", "c\x9b", "[bold]d"])
    run = terminal("generate", "hi", "-m", model, "--seed", "1")
    run.wait("a␛]52;c;aGk=␇b␛[2Jc\ufffd[bold]d")
    assert run.code() == 0


def test_no_colour_on_request(terminal, scripted) -> None:
    model = scripted(["<think>", "hmm", "</think>", "Answer"], thinking=True)
    plain = terminal("generate", "hi", "-m", model, "--quiet", NO_COLOR="1")
    plain.wait("Answer")
    assert plain.code() == 0
    coloured = terminal("generate", "hi", "-m", model, "--quiet")
    before = coloured.wait("Answer")
    assert "\x1b[2mhmm" in before


def test_a_plain_terminal_gets_a_plain_prompt(terminal, hello: Path) -> None:
    chat = terminal("chat", "-m", hello, TERM="dumb")
    chat.wait(PROMPT)
    chat.send("wrong\x03")
    chat.wait("Ctrl-C again to leave")
    chat.send("hi\n")
    chat.wait(ANSWER)
    chat.wait(PROMPT)
    chat.send("\x03")
    chat.wait("Ctrl-C again to leave")
    chat.send("\x03")
    assert chat.code() == 130


def test_a_long_answer_scrolls_and_nothing_is_drawn_twice(terminal, scripted) -> None:
    lines = [f"line {n}\n" for n in range(200)]
    chat = terminal("chat", "-m", scripted(lines))
    chat.ready()
    chat.send("hi\r")
    chat.wait("line 0\r\n")
    chat.child.setwinsize(10, 40)
    rest = chat.wait("line 199\r\n")
    assert rest == "".join(f"line {n}\r\n" for n in range(1, 199))
    chat.ready()
    chat.send("/exit\r")
    assert chat.code() == 0


def test_the_log_of_a_pipe_has_the_answers_alone(environment, hello: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    line = " ".join([*COMMAND, "chat", "-m", str(hello)])
    child = pexpect.spawn("bash", ["-c", f"{line} | tee {log}"], env=environment, dimensions=(24, 80), encoding="utf-8")
    for _ in range(2):
        child.expect_exact("left")
        child.send("hi\r")
        child.expect_exact(ANSWER)
    child.expect_exact("left")
    child.send("\x04")
    child.expect(pexpect.EOF)
    assert log.read_text() == f"{ANSWER}\n" * 2


def test_stderr_elsewhere_leaves_a_usable_editor(environment, hello: Path, tmp_path: Path) -> None:
    log = tmp_path / "err"
    line = " ".join([*COMMAND, "chat", "-m", str(hello)])
    child = pexpect.spawn("bash", ["-c", f"{line} 2>{log}"], env=environment, dimensions=(24, 80), encoding="utf-8")
    child.expect_exact("left")
    child.send("hi\r")
    child.expect_exact(ANSWER)
    child.expect_exact("left")
    child.send("\x04")
    child.expect(pexpect.EOF)
    assert "\x1b" not in log.read_text()
