"""`speculant bench`: everything of one target on one machine, measured in one run."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..drafts import load_draft
from ..engine import generate_many
from ..sampling import SamplingParams
from ..target.base import Target
from ..target.load import load_target, resolve
from ..train.prompts import looping
from .acceptance import Skipped
from .asked import Asked, ask, groups
from .contenders import PLAIN, Contender, Peer, is_adaptive, ours
from .grid import Plan, Tally, run_grid
from .host import BUSY, describe, fit_together, peak_memory, versions
from .quality import Quality, quality
from .questions import Question, spread
from .roofline import CONTEXT, Forward, Forwards, Roofline
from .speeds import Adapted, Speed, adapted, speeds
from .visitors import enter_peers, wanted_peers

QUALITY_BATCH = 8
Progress = Callable[[str], None]


@dataclass
class Report:
    """All measurements of one run. notes: what a reader must know, a line each.

    forward, memory_mb, quality: by the name of the weights
    """

    settings: dict[str, Any]
    machine: dict[str, Any] = field(default_factory=describe)
    versions: dict[str, str] = field(default_factory=versions)
    questions: dict[str, Any] = field(default_factory=dict)
    speeds: list[Speed] = field(default_factory=list)
    adapted: list[Adapted] = field(default_factory=list)
    forward: dict[str, Forward] = field(default_factory=dict)
    roofline: Roofline | None = None
    memory_mb: dict[str, dict[str, float]] = field(default_factory=dict)
    quality: dict[str, Quality] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Prompts:
    """first: the turns that are answered; skipped: those that are too long; groups: `first` by batch
    size, filled up from other questions."""

    first: list[Asked]
    skipped: list[Skipped]
    groups: dict[int, list[list[Asked]]]


def measure(
    target_name: str,
    plan: Plan,
    questions: Sequence[Question],
    source: str,
    command: str = "",
    progress: Progress = lambda text: None,
) -> Report:
    """Run the plan on questions out of `source`.

    Targets of several weights are held in memory together, so that they alternate; where they do not
    fit, they are measured one after the other, and a note says so. Raises LoadError and ValueError
    for what cannot be loaded or does not go together.
    """
    report = Report(settings(target_name, plan, command))
    load = report.machine["load"]
    if load is not None and load > BUSY:
        report.notes.append(
            f"the machine was busy when this began (load {load:.1f}): speeds are lower than on an "
            "idle one, and ratios less sure"
        )
    folder, _ = resolve(target_name)
    together = fit_together(folder, plan.weights)
    if not together:
        report.notes.append(
            "the weights do not fit into memory together: they were measured one after the other, "
            "so compare tokens/s between them with care"
        )
    prompts: Prompts | None = None
    tallies: list[Tally] = []
    for weights in [plan.weights] if together else [(w,) for w in plan.weights]:
        progress("loading")
        targets = {label(w): load_target(target_name, weights=w) for w in weights}
        first = next(iter(targets.values()))
        peers = [] if tallies else _peers(str(folder), first, plan, report.notes)
        if prompts is None:
            prompts = choose(first, plan, questions, report.notes)
            report.questions = asked_of(source, prompts)
        found = _session(targets, plan, prompts, peers, report, progress)
        if not tallies:
            count_loops(report, first, found)
        tallies += found
        del targets, first  # before the next ones load
    assert prompts is not None
    report.speeds = speeds(tallies)
    report.adapted = adapted(report.speeds)
    beside_speed(report, target_name, plan, prompts.first, progress)
    return report


def label(weights: str) -> str:
    """What weights are called: "" is the dtype that the CPU computes in."""
    return weights or "float32"


def settings(target_name: str, plan: Plan, command: str) -> dict[str, Any]:
    """Everything a reader needs to repeat it."""
    adaptive = any(is_adaptive(spec) for spec in plan.drafts)
    return {
        "command": command,
        "target": target_name,
        **asdict(plan),
        "weights": [label(w) for w in plan.weights],
        "threads": torch.get_num_threads(),
        "context_of_t(k)": CONTEXT,
        "tokens_per_s": "tokens appended to the prompts / time of decoding, prefill left out; of a "
        "peer, whose prefill gives the first token, those behind it",
        "seeds": "of question and turn: the same for every contender and run",
        "adaptive": "costs measured once, at batch 1, before the runs" if adaptive else "",
    }


def choose(target: Target, plan: Plan, questions: Sequence[Question], notes: list[str]) -> Prompts:
    """The turns to answer. Raises ValueError where none fits into the context."""
    chosen = spread(questions, plan.limit or len({q.category for q in questions}))
    first, skipped = ask(target, chosen, plan.max_tokens)
    if not first:
        raise ValueError("no question leaves room for its answer in the target's context")
    used = {q.question_id for q in chosen}
    rest = [
        Question(q.question_id, q.category, q.turns[:1])
        for q in questions
        if q.question_id not in used
    ]
    missing = max(-len(first) % group_size(batch) for batch in plan.batches)
    more: list[Asked] = []
    if rest and missing:
        more, _ = ask(target, spread(rest, missing), plan.max_tokens)
    if missing > len(more):
        notes.append("the last group of a batch size repeats questions: there are no others")
    if skipped:
        notes.append(f"{len(skipped)} turns do not fit into the context: left out")
    mine = {b: groups(first, more, group_size(b)) for b in sorted(plan.batches)}
    return Prompts(first, skipped, mine)


def group_size(batch: int) -> int:
    """Prompts of a group: one, or four times what runs at once, so that a batch stays full for most of
    the time; 64 at most, unless more run at once."""
    return batch if batch == 1 else max(batch, min(4 * batch, 64))


def asked_of(source: str, prompts: Prompts) -> dict[str, Any]:
    """What was asked, for the report."""
    lengths = [len(a.ids) for a in prompts.first]
    tasks = [a.question.category for a in prompts.first]
    return {
        "source": source,
        "questions": len({a.question.question_id for a in prompts.first}),
        "prompts": len(prompts.first),
        "tasks": {task: tasks.count(task) for task in dict.fromkeys(tasks)},
        "prompt_tokens": {
            "least": min(lengths),
            "median": statistics.median(lengths),
            "most": max(lengths),
        },
        "skipped": [
            {"question_id": s.question.question_id, "turn": s.turn + 1, "tokens": s.tokens}
            for s in prompts.skipped
        ],
    }


def count_loops(report: Report, target: Target, tallies: Sequence[Tally]) -> None:
    """Note how many of the plain answers go in circles: any draft guesses those."""
    plain = next(t for t in tallies if t.entry.name == PLAIN)
    loops = [ids for ids in plain.texts.values() if looping(target.tokenizer.decode(list(ids)))]
    report.questions["repetition_loops"] = len(loops)
    if loops:
        report.notes.append(
            f"{len(loops)} of {len(plain.texts)} plain answers are repetition loops, which any "
            "draft guesses"
        )


def _peers(folder: str, target: Target, plan: Plan, notes: list[str]) -> list[Peer]:
    """The peers to measure. Raises ValueError for the name of one that there is none of."""
    found = wanted_peers(folder, target, plan.drafts, plan.peers)
    if found and not (1 in plan.batches and 0.0 in plan.temperatures):
        notes.append("peers are measured at batch 1 and temperature 0: not here")
        return []
    return found


def _session(
    targets: Mapping[str, Target],
    plan: Plan,
    prompts: Prompts,
    peers: Sequence[Peer],
    report: Report,
    progress: Progress,
) -> list[Tally]:
    """Measure the targets that are in memory, and the peers beside them."""
    entered: list[Contender] = []
    for weights, target in targets.items():
        for spec in (PLAIN, *plan.drafts):
            progress(f"preparing {spec}, {weights}")
            axes = (plan.temperatures, plan.batches, plan.max_tokens)
            entered += ours(target, weights, spec, *axes)
    with ExitStack() as stack:
        running, versions, notes = enter_peers(peers, plan.max_tokens, stack, progress)
        entered += running
        report.versions |= {name: version for name, version in versions.items() if version}
        report.notes += notes
        progress("t(k)")
        forwards = Forwards(dict(targets))
        tallies = run_grid(entered, prompts.groups, plan.runs, forwards.keep_up, progress)
    report.forward |= forwards.figures()
    report.roofline = report.roofline or forwards.roofline()
    report.notes += [f"{t.entry.name} was given up: {t.failed}" for t in tallies if t.failed]
    return tallies


def beside_speed(
    report: Report, name: str, plan: Plan, asked: Sequence[Asked], progress: Progress
) -> None:
    """Memory, and what rounding the weights changes: two targets in memory at most."""
    rounded = [w for w in plan.weights if w not in ("", "float32")]
    reference = load_target(name) if rounded else None
    texts = _texts(reference, asked, plan.max_tokens) if reference is not None else []
    for weights in plan.weights:
        target = load_target(name, weights=weights)
        if reference is not None and weights in rounded:
            progress(f"quality of {weights}")
            report.quality[weights] = quality(reference, target, texts)
        if Path("/proc/self/status").is_file():
            progress(f"memory, {label(weights)}")
            try:
                peak = peak_memory(name, target, plan.max_tokens, weights)
                report.memory_mb[label(weights)] = peak
            except OSError as error:
                report.notes.append(f"peak memory, {label(weights)}: {error}")


def _texts(target: Target, asked: Sequence[Asked], max_tokens: int) -> list[tuple[list[int], int]]:
    """Greedy answers behind their prompts, and how long those are."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    prompts = [list(a.ids) for a in asked]
    done = generate_many(target, load_draft("none", target), prompts, params, QUALITY_BATCH)
    return [(p + d.token_ids, len(p)) for p, d in zip(prompts, done, strict=True)]
