"""Imports point downward only: every module's imports against the design's allow-list."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "speculant"
ANY = {"*"}

ALLOWED: dict[str, set[str]] = {
    "proposal": set(),
    "prices": set(),
    "pictures": set(),
    "sampling": set(),
    "cache": set(),
    "native": set(),
    "attention": {"cache", "native"},
    "metrics": set(),
    "cost": set(),
    "heads": {"native"},
    "text": {"sampling"},
    "history": {"sampling"},
    "step": {"proposal"},
    "slots": set(),
    "constraint": {"history", "sampling"},
    "tree": {"proposal", "sampling"},
    "verify": {"proposal", "sampling"},
    "target": {"cache", "attention", "native"},
    "track": set(),
    "control": {"prices", "track"},
    "adaptive": {"control", "cost", "prices", "track"},
    "drafts": {
        "heads", "tree", "history", "sampling", "proposal", "prices", "cache", "attention", "target",
    },
    "decode": {
        "target", "drafts.base", "verify", "tree", "cache", "sampling", "proposal", "control",
        "metrics", "text", "step", "native",
    },
    "request": {"target", "sampling", "metrics", "step"},
    "admission": {
        "request", "history", "constraint", "slots", "target", "drafts.base", "cache", "sampling",
        "control", "track", "metrics", "text", "decode",
    },
    "engine": {
        "request", "constraint", "admission",
        "target", "drafts.base", "verify", "tree", "cache", "sampling", "proposal", "control",
        "metrics", "text", "decode",
    },
    "pace": {
        "engine", "adaptive", "control", "drafts.base", "target", "sampling", "metrics", "request",
        "cache",
    },
    "train": {"heads", "target", "cache", "sampling"},
    "simulate": {"pictures", "cost", "metrics"},
    "tune": {"cost", "metrics"},
    "export": {"heads"},
    "check": ANY,
    "chat": ANY,
    "demo": ANY,
    "bench": ANY,
    "serve": ANY,
    "options": ANY,
    "commands": ANY,
    "pipeline": ANY,
    "cli": ANY,
    "__init__": ANY,
}  # fmt: skip
USES_TRANSFORMERS = {"target", "heads", "train", "bench"}
ENTRY_POINTS = {
    "cli",
    "options",
    "commands",
    "pipeline",
    "__init__",
    "check",
    "chat",
    "demo",
    "serve",
}


def modules() -> list[Path]:
    return sorted(p for p in PACKAGE.rglob("*.py"))


def layer(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path, root: Path = PACKAGE.parent) -> set[str]:
    """Dotted names a module imports, those of the package without its name, at any depth."""
    home = path.relative_to(root).parts[:-1]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = list(home[: len(home) - node.level + 1]) if node.level else []
            name = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            found |= {name} if node.module else {f"{name}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_downward(path: Path) -> None:
    mine = layer(path)
    assert mine in ALLOWED, f"{mine} has no place in the layer table"
    for name in imports(path):
        if not name.startswith("speculant."):
            continue
        inner = name.removeprefix("speculant.")
        top = inner.split(".")[0]
        ok = ALLOWED[mine] == ANY or top == mine or top in ALLOWED[mine] or inner in ALLOWED[mine]
        assert ok, f"{mine} imports {inner}"
        assert mine in ENTRY_POINTS or top not in ENTRY_POINTS, f"{mine} imports {inner}"


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_libraries_stay_where_they_belong(path: Path) -> None:
    names = {name.split(".")[0] for name in imports(path)}
    assert "transformers" not in names or layer(path) in USES_TRANSFORMERS
    assert not names & {"fastapi", "uvicorn"} or layer(path) == "serve"
    if layer(path) in ("cli", "options", "commands", "__init__"):
        top_level = ast.parse(path.read_text()).body
        eager = {a.name for n in top_level if isinstance(n, ast.Import) for a in n.names}
        assert "torch" not in eager


def test_only_vanilla_reaches_a_target_from_the_drafts() -> None:
    for path in (PACKAGE / "drafts").glob("*.py"):
        reached = {n for n in imports(path) if n.startswith("speculant.target")}
        allowed = path.stem in ("vanilla", "__init__") or reached <= {"speculant.target.base"}
        assert allowed, f"{path.name} imports {reached}"


def test_the_check_sees_a_violation(tmp_path: Path) -> None:
    """The reader finds relative imports inside functions too."""
    bad = PACKAGE / "target" / "base.py"
    text = bad.read_text() + "\n\ndef f() -> None:\n    from ..drafts import load_draft\n"
    home = tmp_path / "speculant" / "target"
    home.mkdir(parents=True)
    (home / "base.py").write_text(text)
    assert "speculant.drafts" in imports(home / "base.py", tmp_path)
    assert "speculant.drafts" not in imports(bad)
