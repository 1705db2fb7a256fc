"""What a serving stack's version can do, from `data/stacks.json`."""

from __future__ import annotations

import re
from typing import Any

from .facts import data


def stack_facts(name: str) -> dict[str, Any]:
    """All facts of a stack."""
    facts: dict[str, Any] = data("stacks")["stacks"][name]
    return facts


def stack_names() -> list[str]:
    """Stacks that are known."""
    return list(data("stacks")["stacks"])


def version_key(version: str) -> tuple[int, ...]:
    """Numbers of a version for comparison; "v0.11.0rc1" and "0.11" both start 0, 11."""
    numbers = re.match(r"v?(\d+(?:\.\d+)*)", version.strip())
    if numbers is None:
        raise ValueError(f"stack.version {version!r} is no version such as 0.11.0")
    parts = [int(part) for part in numbers[1].split(".")]
    return tuple(parts + [0] * (4 - len(parts)))


def has_family(stack: str, version: str | None, family: str) -> bool:
    """Whether a version of a stack has a draft family; no version means the last one checked."""
    entry = stack_facts(stack)["families"].get(family)
    if entry is None:
        return False
    mine = version_key(version or stack_facts(stack)["last_checked"])
    until = entry.get("until")
    return version_key(entry["since"]) <= mine and (until is None or mine < version_key(until))


def why_missing(stack: str, version: str | None, family: str) -> str:
    """Why `has_family` says no, with the source."""
    entry = stack_facts(stack)["families"].get(family)
    if entry is None:
        return f"{stack} has no {family}"
    range_ = f"from {entry['since']}" + (f" to before {entry['until']}" if "until" in entry else "")
    return f"{stack} {version} has no {family} (it is there {range_}; {entry['source']})"


def tree_capable(stack: str, family: str) -> bool:
    """Whether a stack verifies trees of a family."""
    facts = stack_facts(stack)
    entry = facts["families"].get(family, {})
    return bool(facts["trees"]) and not entry.get("chain_only", False) and family in TREE_FAMILIES


TREE_FAMILIES = ("medusa", "eagle2", "eagle3")
"""Families that draft trees; EAGLE-2 is EAGLE-1's head with a tree."""


def dynamic_length(stack: str, version: str | None) -> bool:
    """Whether the draft length can follow the batch size by configuration."""
    since = stack_facts(stack)["dynamic_length_since"]
    if since is None:
        return False
    mine = version or stack_facts(stack)["last_checked"]
    return version_key(mine) >= version_key(since)
