"""The README's commands and code are run; the help texts in docs are those the commands print."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("update_docs", ROOT / "scripts/update_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_help_in_docs_is_current() -> None:
    docs = script()
    for command in (*docs.COMMANDS, *docs.GROUPS):
        page = (ROOT / "docs" / f"{command}.md").read_text()
        assert docs.updated(page) == page, "run scripts/update_docs.py"
        assert f"Usage: speculant {command}" in page


def test_every_command_has_a_page() -> None:
    from speculant.cli import app

    names = {str(c.name or (c.callback and c.callback.__name__)) for c in app.registered_commands}
    assert names == set(script().COMMANDS)


def test_commands_in_the_readme_parse() -> None:
    """Every `speculant ...` line names a command and options that its help lists."""
    lines = re.findall(r"^    (?:\.venv/bin/)?speculant (.+)$", README, re.MULTILINE)
    assert len(lines) >= 3
    for line in lines:
        words = shlex.split(line, comments=True)
        group = words[0] in script().GROUPS
        text = script().help_text(" ".join(words[: 1 + group]))
        assert "Usage" in text
        for word in words[1:]:
            if word.startswith("--"):
                assert word in text, line


def test_links_in_the_readme_exist() -> None:
    for link in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / link).exists(), link


@pytest.mark.real
def test_python_in_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})
    assert len(capsys.readouterr().out) > 50
