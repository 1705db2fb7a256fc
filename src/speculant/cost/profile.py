"""`profile.json`: what was measured of one target on one machine, and of drafts with it.

Written by `speculant profile`, read by the tuner, where it overrides the roofline. Every time is
in milliseconds, medians with the spread (largest - smallest) beside them.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from .formulas import position_rates

PROFILE_VERSION = 1
T = TypeVar("T")


@dataclass(frozen=True)
class ForwardTime:
    """One target forward of `rows` tokens in each of `batch` rows of the cache."""

    batch: int
    rows: int
    median_ms: float
    spread_ms: float = 0.0

    def __post_init__(self) -> None:
        _whole("forward_ms.batch", self.batch, 1)
        _whole("forward_ms.rows", self.rows, 1)
        _number("forward_ms.median_ms", self.median_ms, above=0.0)
        _number("forward_ms.spread_ms", self.spread_ms)


@dataclass(frozen=True)
class ProposeTime:
    """Drafting one proposal of `num_draft_tokens` deep with `nodes` nodes, for the whole batch.

    nodes == num_draft_tokens is a chain.
    """

    batch: int
    num_draft_tokens: int
    nodes: int
    median_ms: float
    spread_ms: float = 0.0

    def __post_init__(self) -> None:
        _whole("propose_ms.batch", self.batch, 1)
        _whole("propose_ms.num_draft_tokens", self.num_draft_tokens, 0)
        _whole("propose_ms.nodes", self.nodes, self.num_draft_tokens)
        _number("propose_ms.median_ms", self.median_ms)
        _number("propose_ms.spread_ms", self.spread_ms)


@dataclass(frozen=True)
class Accepted:
    """Acceptance of one draft setting on one task at one temperature.

    task:                    "all" over every task
    acceptance_per_position: unconditional: position accepted / rounds that drafted
    mean_acceptance_length:  committed tokens per round that drafted, bonus or recovered included
    drafted_share:           rounds that drafted / all rounds (an n-gram draft often finds nothing)
    mean_draft_tokens:       drafted nodes per round that drafted
    rounds:                  rounds measured
    """

    task: str
    temperature: float
    num_draft_tokens: int
    nodes: int
    acceptance_per_position: tuple[float, ...]
    mean_acceptance_length: float
    drafted_share: float = 1.0
    mean_draft_tokens: float | None = None
    rounds: int = 0

    def __post_init__(self) -> None:
        _number("acceptance.temperature", self.temperature)
        _whole("acceptance.num_draft_tokens", self.num_draft_tokens, 1)
        _whole("acceptance.nodes", self.nodes, self.num_draft_tokens)
        object.__setattr__(self, "acceptance_per_position", tuple(self.acceptance_per_position))
        position_rates(self.acceptance_per_position, len(self.acceptance_per_position))
        _number("acceptance.mean_acceptance_length", self.mean_acceptance_length)
        if not 1.0 <= self.mean_acceptance_length <= self.num_draft_tokens + 1:
            raise ValueError(
                f"profile: mean_acceptance_length is {self.mean_acceptance_length:g} with "
                f"{self.num_draft_tokens} drafted tokens: it lies in 1..{self.num_draft_tokens + 1}"
            )
        if not 0.0 <= self.drafted_share <= 1.0:
            raise ValueError(f"profile: drafted_share is {self.drafted_share}: it lies in 0..1")
        if self.mean_draft_tokens is not None:
            _number("acceptance.mean_draft_tokens", self.mean_draft_tokens)
        _whole("acceptance.rounds", self.rounds, 0)


@dataclass(frozen=True)
class DraftProfile:
    """One draft: its costs and its acceptance.

    name:        as given to --draft;  family: as `speculant tune` names it (eagle3, ngram, ...)
    overhead_ms: of a round, beside drafting and the target's forward: the acceptance rule,
                 roll-back, the loop's own work
    step_ms:     one draft step, per depth from 1, batch 1; empty where a draft has no steps
    window_rows: rows beside root and drafted tokens in every forward (lookahead's window)
    """

    name: str
    family: str
    propose_ms: tuple[ProposeTime, ...]
    acceptance: tuple[Accepted, ...]
    overhead_ms: float = 0.0
    step_ms: tuple[float, ...] = ()
    params: int | None = None
    window_rows: int = 0

    def __post_init__(self) -> None:
        _number(f"drafts.{self.name}.overhead_ms", self.overhead_ms)
        _whole(f"drafts.{self.name}.window_rows", self.window_rows, 0)
        object.__setattr__(self, "step_ms", tuple(self.step_ms))
        for value in self.step_ms:
            _number(f"drafts.{self.name}.step_ms", value)
        if not self.propose_ms:
            raise ValueError(f"profile: draft {self.name!r} has no propose_ms")


@dataclass(frozen=True)
class ProfiledTarget:
    """The target that was measured. params: parameters; weight_bytes: their bytes in memory."""

    name: str
    dtype: str
    params: int
    weight_bytes: int
    fingerprint: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _whole("target.params", self.params, 1)
        _whole("target.weight_bytes", self.weight_bytes, 1)


@dataclass(frozen=True)
class ProfiledMachine:
    """Where it was measured."""

    name: str
    device: str = "cpu"
    threads: int | None = None


@dataclass(frozen=True)
class Profile:
    """The whole file.

    context_length:    cached tokens behind each measured forward
    plain_overhead_ms: of a plain round beside the forward (sampling, the loop's own work)
    """

    target: ProfiledTarget
    machine: ProfiledMachine
    context_length: int
    forward_ms: tuple[ForwardTime, ...]
    drafts: tuple[DraftProfile, ...]
    plain_overhead_ms: float = 0.0
    version: int = PROFILE_VERSION

    def __post_init__(self) -> None:
        _whole("context_length", self.context_length, 0)
        _number("plain_overhead_ms", self.plain_overhead_ms)
        if not any((t.batch, t.rows) == (1, 1) for t in self.forward_ms):
            raise ValueError("profile: forward_ms has no entry of batch 1, rows 1 (a plain step)")

    def as_dict(self) -> dict[str, Any]:
        """For JSON; `from_dict` reads it back."""
        return asdict(self)


def from_dict(data: Any) -> Profile:
    """A profile from parsed JSON. Raises ValueError naming the first wrong or missing key."""
    version = data.get("version") if isinstance(data, dict) else None
    if version != PROFILE_VERSION:
        raise ValueError(
            f"profile: version is {version!r}: this reads version {PROFILE_VERSION}; "
            "make it with `speculant profile`"
        )
    inner: dict[str, Any] = dict(data)
    inner["target"] = _build(ProfiledTarget, inner.get("target"), "target")
    inner["machine"] = _build(ProfiledMachine, inner.get("machine"), "machine")
    inner["forward_ms"] = _each(ForwardTime, inner.get("forward_ms"), "forward_ms")
    drafts = []
    for i, entry in enumerate(_list(inner.get("drafts"), "drafts")):
        where = f"drafts[{i}]"
        if not isinstance(entry, dict):
            raise ValueError(f"profile: {where} is not an object")
        made = dict(entry)
        made["propose_ms"] = _each(ProposeTime, entry.get("propose_ms"), f"{where}.propose_ms")
        made["acceptance"] = _each(Accepted, entry.get("acceptance"), f"{where}.acceptance")
        drafts.append(_build(DraftProfile, made, where))
    inner["drafts"] = tuple(drafts)
    return _build(Profile, inner, "the file")


def read_profile(path: Path) -> Profile:
    """Read `profile.json`. Raises OSError for a missing file, ValueError for a wrong one."""
    try:
        return from_dict(json.loads(path.read_text(encoding="utf-8")))
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: line {error.lineno}: not JSON: {error.msg}") from None


def write_profile(profile: Profile, path: Path) -> None:
    """Write `profile.json`, to a temporary name first."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(json.dumps(profile.as_dict(), indent=1) + "\n", encoding="utf-8")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _build(kind: type[T], data: Any, where: str) -> T:
    """A dataclass from a dict; ValueError for unknown and missing keys and for wrong types."""
    if not isinstance(data, dict):
        raise ValueError(f"profile: {where} is missing or not an object")
    known = {f.name for f in fields(kind)}  # type: ignore[arg-type]
    unknown = sorted(set(data) - known)
    if unknown:
        raise ValueError(f"profile: {where} has unknown keys: {', '.join(unknown)}")
    try:
        return kind(**data)
    except TypeError as error:
        raise ValueError(f"profile: {where}: {error}") from None


def _each(kind: type[T], data: Any, where: str) -> tuple[T, ...]:
    return tuple(_build(kind, item, f"{where}[{i}]") for i, item in enumerate(_list(data, where)))


def _list(data: Any, where: str) -> Sequence[Any]:
    if not isinstance(data, (list, tuple)):
        raise ValueError(f"profile: {where} is missing or not a list")
    return data


def _number(name: str, value: Any, above: float | None = None) -> None:
    real = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not real or not math.isfinite(value) or value < 0 or (above is not None and value <= above):
        raise ValueError(f"profile: {name} is {value!r}: it must be a number of at least 0")


def _whole(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"profile: {name} is {value!r}: it must be a whole number from {least}")
