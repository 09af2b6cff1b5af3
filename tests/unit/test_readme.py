"""The README's two commands, and the CI script that runs one of them word for word."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text("utf-8")


def marked(name: str) -> list[str]:
    """The lines of the code block that follows <!-- name -->."""
    found = re.search(rf"^<!-- {name} -->\n```sh\n(.*?)```", README, re.MULTILINE | re.DOTALL)
    assert found is not None, name
    return found[1].splitlines()


def test_the_first_screen_has_one_command_each_to_try_and_to_test() -> None:
    first_screen = "\n".join(README.splitlines()[:24])
    for name, must in (("try", "tileinfer generate"), ("test", "pytest")):
        (line,) = marked(name)
        assert must in line
        assert line in first_screen


def test_ci_runs_the_readme_s_test_command() -> None:
    script = (ROOT / ".ci" / "run").read_text("utf-8")
    program = re.search(r"awk '(.*?)' README.md", script)
    assert program is not None
    found = subprocess.run(["awk", program[1], "README.md"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.splitlines() == marked("test")


def test_the_changelog_has_an_unreleased_section() -> None:
    assert "## [Unreleased]" in (ROOT / "CHANGELOG.md").read_text("utf-8")


def test_files_that_the_readme_links_to_exist() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
