"""The draft families that a workload could use, each with its times and its acceptance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..cost import (
    FAMILIES,
    Estimate,
    Machine,
    Measured,
    ModelShape,
    Roofline,
    Times,
    as_measured,
    best_of,
    best_tree,
    dense_shape,
    draft_shape,
    estimate,
    plan,
)
from ..cost.families import MEDUSA_HEADS
from ..cost.profile import Accepted
from .checks import Finding, head_problem
from .evidence import DEPTH, Evidence, Measurements, evidence_for
from .facts import engine_for, rank_decay
from .hardware import (
    DTYPE_BYTES,
    find_machines,
    find_model,
    known_machines,
    moe_shape,
    shape_from_config,
)
from .stacks import has_family, stack_facts, tree_capable, why_missing
from .workload import Head, Workload

ORDER = ("eagle3", "eagle2", "eagle1", "medusa", "vanilla", "ngram", "lookahead")
TRAINABLE = {"none": (), "small": ("medusa", "eagle1", "eagle2"),
             "full": ("eagle3", "eagle2", "eagle1", "medusa")}  # fmt: skip
"""Training budget -> heads it pays for. EAGLE-3 wants about eight times EAGLE-1's dialogues."""
HEAD_OF = {"eagle2": "eagle1"}  # EAGLE-2 reuses EAGLE-1's head
SIZES = (8, 16, 24, 32, 48, 60)  # tree sizes that are tried
DEPTHS = (2, 3, 4, 5, 6, 7, 8)
TREE_GAIN = 1.02  # a tree has to be this much faster than the best chain


@dataclass(frozen=True)
class Candidate:
    """One family, ready to be priced.

    head:  the draft that exists, None where none is needed or it has to be trained
    train: whether it has to be trained first
    trees: whether the stack verifies its trees;  chains: whether it drafts chains here
    limit: longest chain
    fixed: settings that were measured as a whole (trees, look-ups), with their acceptance
    fill:  drafted tokens / chain length (a look-up often finds fewer than it may)
    """

    family: str
    times: Times
    evidence: Evidence
    head: Head | None
    train: bool
    trees: bool
    chains: bool
    limit: int
    fixed: tuple[Accepted, ...] = ()
    fill: float = 1.0

    def chain(self, batch: int) -> list[Estimate]:
        """Every chain length from 0 (plain), in order."""
        share = self.evidence.drafted_share
        out = [estimate(self.times, plan("off"), 1.0, batch)]
        for n in range(1, self.limit + 1 if self.chains else 1):
            tokens = 1.0 + sum(self.evidence.rates[:n])
            work = plan(self.family, n)
            rows = max(1, round(n * self.fill))
            priced = work if rows == n else replace(work, depth=rows, nodes=rows)
            made = estimate(self.times, priced, tokens, batch, share)
            out.append(made if rows == n else replace(made, work=work))
        if self.family == "lookahead":  # its window and n-grams are one fixed shape
            work = plan("lookahead")
            tokens = 1.0 + sum(self.evidence.rates[: work.depth])
            out.append(estimate(self.times, work, tokens, batch, share))
        return out

    def tree(self, batch: int, most_nodes: int) -> Estimate | None:
        """The fastest tree of at most so many nodes, or None where there is none."""
        found = [e for e in self.measured(batch) if e.work.tree and e.work.nodes <= most_nodes]
        if self.trees and not isinstance(self.times, Measured):
            usual = FAMILIES[self.family]
            depths = (MEDUSA_HEADS,) if self.family == "medusa" else DEPTHS
            for depth in depths:
                for nodes in SIZES:
                    if nodes <= depth or nodes > most_nodes:
                        continue
                    branch = max(4, usual.branch)
                    shape = best_tree(self.evidence.rates, nodes, depth, branch, rank_decay())
                    work = plan(self.family, depth, nodes)
                    found.append(estimate(self.times, work, shape.expected_tokens, batch))
        return best_of(found) if found else None

    def measured(self, batch: int) -> list[Estimate]:
        """The settings of the profile, each with its own measured acceptance and cost."""
        return [as_measured(self.times, self.family, entry, batch) for entry in self.fixed]

    def best(self, batch: int, most_nodes: int) -> Estimate:
        """The fastest setting at a batch size; plain (0 nodes) when nothing pays."""
        chain = best_of(self.chain(batch))
        tree = self.tree(batch, most_nodes)
        if tree is not None and tree.speedup > chain.speedup * TREE_GAIN:
            return tree
        return chain


def target_shape(workload: Workload, measured: Measurements) -> tuple[ModelShape, str]:
    """The target's sizes, and where they come from. Raises ValueError when they are not known."""
    t = workload.target
    width = DTYPE_BYTES[t.dtype]
    if t.params_b and t.active_params_b:
        total, active = t.params_b * 1e9, t.active_params_b * 1e9
        mix = (t.experts or 128, t.experts_per_token or 8)
        if mix[1] > mix[0]:
            raise ValueError("target.experts_per_token is more than target.experts")
        return moe_shape(t.model or "target", total, active, width, *mix), "the sizes given"
    if t.config:
        shape = shape_from_config(Path(workload.folder, t.config))
        return shape.with_bytes(width), f"{t.config}"
    shape_, exact = find_model(t.model or "target", t.params_b * 1e9 if t.params_b else None)
    if shape_ is None and measured.profile is not None:
        return dense_shape(t.model or "target", measured.profile.target.params), "the profile"
    if shape_ is None:
        raise ValueError(f"the sizes of {t.model} are not known: give target.params_b")
    kept = shape_.weight_bytes < width and t.dtype == "bfloat16"  # a checkpoint that ships smaller
    shape_ = shape_ if kept else shape_.with_bytes(width)
    return shape_, "the table of known models" if exact else "a usual shape of its size"


def target_machine(workload: Workload, measured: Measurements) -> Machine | None:
    """The machine; None when times come from the profile. Raises ValueError for unknown names."""
    h = workload.hardware
    if h.name.lower() == "measured":
        if measured.profile is None:
            raise ValueError("hardware measured needs telemetry.profile (speculant profile)")
        return None
    found = find_machines(h.name)
    if h.bandwidth_gb_s and h.tflops:
        return Machine(h.name, h.bandwidth_gb_s, h.tflops, h.memory_gb or 80.0, h.count)
    if not found:
        names = ", ".join(known_machines())
        raise ValueError(
            f"hardware {h.name!r} is not in the table ({names}, measured): give bandwidth_gb_s "
            "and tflops"
        )
    return replace(found[0], count=max(h.count, found[0].count))


def gather_candidates(
    workload: Workload, target: ModelShape, machine: Machine | None, measured: Measurements
) -> tuple[list[Candidate], list[Finding]]:
    """Families in a fixed order, and what was refused or downgraded on the way."""
    found: list[Candidate] = []
    findings: list[Finding] = []
    heads: dict[str, Head] = {}
    for head in workload.heads:
        problem = head_problem(head, workload)
        if problem is not None:
            findings.append(problem)
        else:
            heads.setdefault(head.family, head)
    wanted = {head.family for head in workload.heads} | set(measured.points)
    for family in ORDER:
        stack, version = workload.stack.name, workload.stack.version
        if not has_family(stack, version, family):
            if family in wanted:
                why = why_missing(stack, version or "", family)
                text = f"{why}: downgraded to the best of what it has"
                findings.append(Finding("downgrade", f"no_{family}", text))
            continue
        made = _candidate(family, workload, target, machine, measured, heads)
        if made is not None:
            found.append(made)
    return found, findings


def _candidate(
    family: str,
    workload: Workload,
    target: ModelShape,
    machine: Machine | None,
    measured: Measurements,
    heads: dict[str, Head],
) -> Candidate | None:
    """A family with times and acceptance, or None where the workload cannot have it."""
    head = heads.get(family) or heads.get(HEAD_OF.get(family, ""))
    profiled = measured.draft(family)
    free = FAMILIES[family].free
    train = not free and head is None and profiled is None
    if train and family not in TRAINABLE[workload.training_budget]:
        return None
    evidence = evidence_for(family, workload, measured)
    if evidence is None:
        return None
    stack = workload.stack.name
    times: Times
    if measured.profile is not None:
        if profiled is None:
            return None  # measured and computed times do not mix
        times = Measured(measured.profile, profiled)
        chains = [a for a in profiled.acceptance if a.nodes == a.num_draft_tokens]
        limit = max((a.num_draft_tokens for a in chains), default=0)
        fixed = _of_the_mix(profiled.acceptance, workload)
        parts = (evidence, head, False, False, bool(chains), limit, fixed, _fill(chains))
        return Candidate(family, times, *parts)
    assert machine is not None
    params = head.params_b * 1e9 if head is not None and head.params_b else None
    shape = draft_shape(family, target, params)
    times = Roofline(target, machine, engine_for(stack), shape, workload.traffic.context)
    trees = tree_capable(stack, family)
    entry = stack_facts(stack)["families"][family]
    chains_here = family not in ("eagle2", "lookahead") and (
        family != "medusa" or entry.get("chain_only", False)
    )
    limit = MEDUSA_HEADS if family == "medusa" else DEPTH
    return Candidate(family, times, evidence, head, train, trees, chains_here, limit)


def _fill(chains: Sequence[Accepted]) -> float:
    """Drafted tokens of a measured chain / its length, 1 where it was not counted."""
    counted = [a.mean_draft_tokens / a.num_draft_tokens for a in chains if a.mean_draft_tokens]
    return min(1.0, sum(counted) / len(counted)) if counted else 1.0


def _of_the_mix(entries: Sequence[Accepted], workload: Workload) -> tuple[Accepted, ...]:
    """Measured settings at the temperature that most of the workload has, over all tasks."""
    usual = max(workload.temperatures, key=lambda t: (workload.temperatures[t], -t))
    heats = sorted({e.temperature for e in entries}, key=lambda t: (abs(t - usual), t))
    near = [e for e in entries if e.temperature == heats[0]] if heats else []
    return tuple([e for e in near if e.task == "all"] or near)
