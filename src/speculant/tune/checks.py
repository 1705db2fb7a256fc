"""What the tuner refuses, downgrades or warns of, each with its reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..cost import Machine, ModelShape, Profile
from .hardware import MEMORY_SHARE, devices_needed
from .stacks import stack_facts, version_key
from .workload import Head, Workload

SMALL, MEDIUM = 3e9, 7e9  # parameters: below SMALL off without a profile, below MEDIUM a warning
HOT = 0.8  # temperatures from here on are hot
HOT_CREATIVE = 0.1  # share of hot creative work from which nothing is recommended unmeasured


@dataclass(frozen=True)
class Finding:
    """level: refuse (not done as asked), downgrade (done otherwise), warn, or note."""

    level: str
    code: str
    text: str

    def as_dict(self) -> dict[str, str]:
        """For JSON."""
        return {"level": self.level, "code": self.code, "text": self.text}


def head_problem(head: Head, workload: Workload) -> Finding | None:
    """Why a head cannot serve this target, or None."""
    target = workload.target
    pairs = (
        ("tokenizer", head.tokenizer, target.tokenizer),
        ("base", head.base, target.model),
        ("base revision", head.base_revision, target.revision),
    )
    for what, mine, theirs in pairs:
        if mine is not None and theirs is not None and mine.lower() != theirs.lower():
            text = (
                f"{head.model} ({head.family}) is for {what} {mine}, the target has {theirs}: its "
                "drafts would be refused nearly always. Train one for this target, or serve the "
                "one it was trained for"
            )
            return Finding("refuse", f"head_{what.replace(' ', '_')}", text)
    if head.family == "vanilla" and head.params_b is None:
        return Finding(
            "refuse", "head_size", f"{head.model} (vanilla) has no params_b: its cost is not known"
        )
    return None


def general_findings(
    workload: Workload, target: ModelShape, machine: Machine | None, profile: Profile | None
) -> Iterator[Finding]:
    """Findings about the workload as a whole, in a fixed order."""
    yield from _rule(workload)
    if not workload.target.kv_rollback:
        yield Finding(
            "refuse", "no_rollback",
            "the target's state cannot go back after a rejection (kv_rollback: false): "
            "speculation would continue from refused tokens. Off",
        )  # fmt: skip
    yield from _size(target, profile)
    if profile is not None and not _same_size(profile, target):
        yield Finding(
            "warn", "profile_of_another",
            f"the profile is of {profile.target.name} with {profile.target.params / 1e9:.3g} "
            f"billion parameters; the target has {target.total_params / 1e9:.3g} billion",
        )  # fmt: skip
    if hot_creative(workload) and not workload.measured:
        yield Finding(
            "refuse", "calibrate",
            "creative work at high temperature without any measured acceptance: published figures "
            "do not cover it. Measure first (see the calibration run)",
        )  # fmt: skip
    elif not workload.measured:
        yield Finding(
            "warn", "no_telemetry",
            "no acceptance was measured on this target: published figures stand in for it",
        )  # fmt: skip
    if machine is not None and profile is None:
        needed = devices_needed(target, machine)
        if needed > machine.count:
            yield Finding(
                "warn", "memory",
                f"{target.total_params * target.weight_bytes / 1e9:.0f} GB of weights do not fit "
                f"into {MEMORY_SHARE:.0%} of {machine.count}x {machine.name}: {needed} are needed",
            )  # fmt: skip
    yield from _version(workload)


def _rule(workload: Workload) -> Iterator[Finding]:
    if workload.acceptance_rule != "exact":
        lossy = stack_facts(workload.stack.name)["lossy"]
        yield Finding(
            "refuse", "lossy",
            f"acceptance_rule {workload.acceptance_rule} changes the target's distribution: "
            f"refused, everything here is for the exact rule ({workload.stack.name}: {lossy})",
        )  # fmt: skip


def _size(target: ModelShape, profile: Profile | None) -> Iterator[Finding]:
    size = f"{target.total_params / 1e9:.3g} billion parameters"
    if target.total_params < SMALL and profile is None:
        yield Finding(
            "refuse", "small_target",
            f"a target of {size} (under 3 billion) and no measured profile: a plain step is so "
            "short that drafting usually costs more than it saves. Off, until speculant profile "
            "says otherwise",
        )  # fmt: skip
    elif target.total_params < SMALL:
        yield Finding(
            "note", "small_target_measured",
            f"a target of {size} would be off by rule (under 3 billion); the measured profile "
            "overrules it",
        )  # fmt: skip
    elif target.total_params < MEDIUM and profile is None:
        yield Finding(
            "warn", "medium_target",
            f"a target of {size} (3 to 7 billion): fixed costs weigh much, so measure before you "
            "rely on these figures",
        )  # fmt: skip


def _version(workload: Workload) -> Iterator[Finding]:
    name, version = workload.stack.name, workload.stack.version
    last = stack_facts(name)["last_checked"]
    if version is None:
        yield Finding("note", "no_version", f"no version of {name} given: {last} assumed")
    elif version_key(version) > version_key(last):
        yield Finding(
            "note", "newer_version",
            f"{name} {version} is newer than {last}, the last one checked: look its options up",
        )  # fmt: skip
    most = stack_facts(name)["max_ragged"]
    if most is not None and workload.traffic.usual_batch > most:
        yield Finding(
            "refuse", "ragged",
            f"{stack_facts(name)['ragged']}; the workload's batch is "
            f"{workload.traffic.usual_batch}. Off at that batch",
        )  # fmt: skip


def hot_creative(workload: Workload) -> bool:
    """Whether hot creative work is a real part of the mix."""
    hot = sum(share for t, share in workload.temperatures.items() if t >= HOT)
    return hot * workload.tasks.get("creative", 0.0) >= HOT_CREATIVE


def _same_size(profile: Profile, target: ModelShape) -> bool:
    return abs(profile.target.params / target.total_params - 1) < 0.1
