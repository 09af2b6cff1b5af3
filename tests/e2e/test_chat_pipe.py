"""`chat` without a terminal: pipes and files."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def test_end_of_input_leaves_with_0(tileinfer, hello: Path) -> None:
    result = tileinfer("chat", "-m", hello, stdin=b"")
    assert (result.code, result.out, result.err) == (0, "", "")


def test_one_line_is_one_answer(tileinfer, hello: Path) -> None:
    result = tileinfer("chat", "-m", hello, stdin=b"hi\n")
    assert (result.code, result.out, result.err) == (0, "Hello, world!\n", "")
    assert tileinfer("chat", "-m", hello, stdin=b"no newline").out == "Hello, world!\n"


def test_lines_blocks_and_commands(tileinfer, hello: Path) -> None:
    stdin = 'hi\n\n"""\nTraceback:\n\t/help\n\n  x = 1\n"""\n//slash\n/prompt\n/exit\nnot sent\n'
    result = tileinfer("chat", "-m", hello, stdin=stdin.encode())
    assert (result.code, result.out) == (0, "Hello, world!\n" * 3)
    assert "<|im_start|>user\nTraceback:\n\t/help\n\n  x = 1<|im_end|>" in result.err
    assert "<|im_start|>user\n/slash<|im_end|>" in result.err
    assert "not sent" not in result.err


def test_a_text_that_looks_like_a_control_token_stays_text(tileinfer, hello: Path) -> None:
    result = tileinfer("chat", "-m", hello, "--stats", stdin=b"x<|im_end|>\nx\n")
    assert result.out == "Hello, world!\n" * 2


def test_the_prefix_is_reused_and_stats_say_so(tileinfer, hello: Path) -> None:
    result = tileinfer("chat", "-m", hello, stdin=b"hi\nhi again\n/stats\n")
    assert "reused)" in result.err


def test_an_error_ends_the_run_with_its_code(tileinfer, scripted, hello: Path) -> None:
    small = scripted(["ok"], context=64)
    result = tileinfer("chat", "-m", small, stdin=b"hi\n" + b"word " * 100 + b"\nhi\n")
    assert (result.code, result.out) == (3, "ok\n")
    assert "64" in result.err
    result = tileinfer("chat", "-m", hello, stdin=b"/hlep\nhi\n")
    assert (result.code, result.out) == (2, "")
    assert "did you mean /help?" in result.err
    assert tileinfer("chat", "-m", hello, stdin=b"\xff\xfe\n").code == 2
    assert tileinfer("chat", "-m", hello, "--temperature", "-1", stdin=b"").code == 2


def test_params_show_origins(tileinfer, hello: Path) -> None:
    result = tileinfer("chat", "-m", hello, "--top-k", "3", stdin=b"/set min_p 0.1\n/params\n")
    rows = {tuple(line.split()) for line in result.err.splitlines()}
    assert ("top_k", "3", "--top-k") in rows
    assert ("temperature", "0.6", "generation_config.json") in rows
    assert ("min_p", "0.1", "/set") in rows


def test_save_and_load_go_on_with_the_conversation(tileinfer, hello: Path, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    assert tileinfer("chat", "-m", hello, stdin=f"first\n/save {file}\n".encode()).code == 0
    assert json.loads(file.read_text())
    result = tileinfer("chat", "-m", hello, stdin=f"/load {file}\nsecond\n/prompt\n".encode())
    assert result.code == 0
    assert result.err.index("first") < result.err.index("Hello, world!") < result.err.index("second")


def test_a_file_that_is_no_conversation_is_refused(tileinfer, hello: Path, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    for content in ("", "[", '{"messages": 3}', '[{"role": "king", "content": "x"}]'):
        file.write_text(content)
        result = tileinfer("chat", "-m", hello, stdin=f"/load {file}\n".encode())
        assert result.code in (1, 2), content
        assert "Traceback" not in result.err
        assert str(file) in result.err
    assert tileinfer("chat", "-m", hello, stdin=b"/load /nowhere/x\n").code in (1, 2, 6)
    assert tileinfer("chat", "-m", hello, stdin=b"/save /nowhere/x\n").code == 6
