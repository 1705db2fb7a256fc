"""Write every command's --help into its page under docs/, between the markers."""

from __future__ import annotations

import re
import sys
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
COMMANDS = (
    "generate",
    "chat",
    "check",
    "demo",
    "bench",
    "eval",
    "train",
    "data",
    "export",
    "import",
    "check-export",
    "profile",
    "tune",
    "serve",
)
GROUPS = ("simulate",)  # one page for all the commands of a group
BLOCK = re.compile(r"(<!-- help: ([\w -]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def help_text(command: str) -> str:
    """What `speculant COMMAND --help` prints, 100 columns wide, without colour."""
    from typer.testing import CliRunner

    from speculant.cli import app

    env = {"COLUMNS": "100", "TERMINAL_WIDTH": "100", "NO_COLOR": "1"}
    options = {"prog_name": "speculant", "terminal_width": 100, "env": env}
    out = CliRunner().invoke(app, [*command.split(), "--help"], **options)
    return "\n".join(line.rstrip() for line in out.output.strip().splitlines())


def updated(text: str) -> str:
    """A page with its help blocks made anew."""
    return BLOCK.sub(lambda m: f"{m[1]}\n```\n{help_text(m[2])}\n```\n\n{m[3]}", text)


def main() -> int:
    """Rewrite the pages; 1 when one changed, so that a test or a hook can tell."""
    changed = 0
    for command in (*COMMANDS, *GROUPS):
        page = DOCS / f"{command}.md"
        before = page.read_text()
        after = updated(before)
        if after != before:
            page.write_text(after)
            changed = 1
    return changed


if __name__ == "__main__":
    sys.exit(main())
