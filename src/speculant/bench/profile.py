"""Measure what the latency model needs of one target, its drafts and this machine: `profile.json`.

Times of drafting and of the loop come from the same runs that count acceptance: whole conversations,
so that a draft is paid for as it is used. The target's forward is timed alone over (batch, rows),
behind a cache of the given length.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..cost.latency import Measured
from ..cost.profile import (
    Accepted,
    DraftProfile,
    ForwardTime,
    Profile,
    ProfiledMachine,
    ProfiledTarget,
    ProposeTime,
)
from ..drafts import draft_options, find_draft, load_draft
from ..drafts.base import Draft
from ..target.base import Target
from ..target.load import target_fingerprint
from .acceptance import Answer, Evaluation, Setting, pooled
from .evaluate import evaluate
from .questions import Question

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 33, 64)
WARM_UP, REPEATS = 2, 9


@dataclass(frozen=True)
class Plan:
    """What to measure.

    drafts:       names or heads' folders
    depths:       draft lengths of chains; trees: nodes of trees, where a draft grows some
    temperatures: of the answers whose acceptance is counted
    batches:      batch sizes; drafting at the ones above 1 is timed at the first temperature
    context:      cached tokens behind a timed forward
    """

    drafts: tuple[str, ...]
    depths: tuple[int, ...] = (2, 3, 5)
    trees: tuple[int, ...] = (16,)
    temperatures: tuple[float, ...] = (0.0, 1.0)
    batches: tuple[int, ...] = (1,)
    max_tokens: int = 96
    context: int = 256

    def __post_init__(self) -> None:
        for name, least in (("depths", 1), ("trees", 1), ("batches", 1), ("temperatures", 0)):
            values = getattr(self, name)
            if not values and name != "trees":
                raise ValueError(f"no {name} to measure")
            if any(value < least for value in values):
                raise ValueError(f"{name} {list(values)}: each must be at least {least}")
        if self.max_tokens < 2 or self.context < 0:
            raise ValueError("an answer needs at least 2 tokens, and a context no fewer than 0")
        if 1 not in self.batches:
            object.__setattr__(self, "batches", (1, *self.batches))


@dataclass(frozen=True)
class Run:
    """One draft setting over the questions at one batch size and temperature.

    nodes: of a proposal; a chain has as many as it is deep
    extra: rows beside root and nodes in the target's forward (lookahead's window)
    """

    name: str
    depth: int
    nodes: int
    done: Evaluation
    extra: int = 0

    @property
    def tokens_per_s(self) -> float:
        """Emitted tokens per second of decoding one request, prefill left out."""
        return pooled(self.done.answers).tokens_per_s


Progress = Callable[[str], None]


def measure(
    target: Target,
    plan: Plan,
    questions: Sequence[Question],
    progress: Progress = lambda text: None,
) -> tuple[Profile, list[Run]]:
    """The profile, and the runs at batch 1 that it was made from, plain decoding first.

    Raises ValueError for a draft that does not fit, before anything is timed.
    """
    made = {name: list(settings(target, name, plan)) for name in plan.drafts}
    progress("t(batch, rows)")
    forward = forward_table(target, plan.batches, plan.context)
    progress("plain")
    plain = _run(target, "none", load_draft("none", target), 1, 0, questions, 0.0, 1, plan)
    profiles, runs = [], [plain]
    for name, variants in made.items():
        mine: list[Run] = []
        for draft, depth, nodes in variants:
            for batch in plan.batches:
                for temperature in plan.temperatures if batch == 1 else plan.temperatures[:1]:
                    progress(f"{name}, {depth} deep, {nodes} nodes, {temperature:g}, x{batch}")
                    mine.append(
                        _run(target, name, draft, depth, nodes, questions, temperature, batch, plan)
                    )
        profiles.append(_draft_profile(name, mine))
        runs += [run for run in mine if run.done.setting.batch == 1]
    profile = Profile(
        target=_target(target),
        machine=ProfiledMachine(
            platform.processor() or platform.machine(),
            target.info.device.type,
            torch.get_num_threads(),
        ),
        context_length=plan.context,
        forward_ms=tuple(forward),
        drafts=tuple(profiles),
        plain_overhead_ms=max(0.0, _middle(_overheads(plain.done.answers))[0]),
    )
    return profile, runs


def settings(target: Target, name: str, plan: Plan) -> Iterable[tuple[Draft, int, int]]:
    """The draft in every form that the plan asks for: (draft, depth, nodes)."""
    kind = find_draft(name)[0]
    options = draft_options(kind)
    grows, always = "tree" in options, bool(options.get("tree"))
    if "num_draft_tokens" in options and not always:
        for depth in plan.depths:
            draft = load_draft(name, target, num_draft_tokens=depth)
            yield draft, depth, depth
    if grows:
        for nodes in plan.trees:
            draft = load_draft(name, target, tree=nodes)
            yield draft, min(draft.info.depth, nodes), nodes
    if not grows and "num_draft_tokens" not in options:
        draft = load_draft(name, target)
        # lookahead's candidates are paths of n-grams without their first token
        depth = int(str(options["ngram"])) - 1 if "ngram" in options else draft.info.depth
        yield draft, depth, draft.info.max_nodes


def forward_table(target: Target, batches: Sequence[int], context: int) -> list[ForwardTime]:
    """t(batch, rows): medians of forwards of `rows` tokens in each of `batch` rows of the cache."""
    most, widest = max(batches), max(ROWS)
    cache = target.new_cache(most, context + widest)
    for slot in range(most):
        cache.advance(slot, context)
    times: dict[tuple[int, int], list[float]] = {(b, r): [] for b in batches for r in ROWS}
    for _ in range(WARM_UP + REPEATS):
        for (batch, rows), seen in times.items():
            tokens = torch.full((batch, rows), 5)
            positions = context + torch.arange(rows).expand(batch, -1)
            where = cache.rows(range(batch), rows)
            began = time.perf_counter()
            target.forward(tokens, positions, None, where)
            if target.info.device.type == "cuda":  # not measured here: no CUDA machine
                torch.cuda.synchronize()
            seen.append(1e3 * (time.perf_counter() - began))
    out = []
    for (batch, rows), seen in times.items():
        median, spread = _middle(seen[WARM_UP:])
        out.append(ForwardTime(batch, rows, median, spread))
    return out


def predictions(profile: Profile, runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Predicted beside measured tokens per second of every run at batch 1.

    The prediction is the latency model's: acceptance of the run, times of the profile.
    """
    from ..cost.families import DraftPlan
    from ..cost.latency import estimate

    by_name = {draft.name: draft for draft in profile.drafts}
    out = []
    for run in runs:
        counters = pooled(run.done.answers)
        times = Measured(profile, by_name.get(run.name))
        predicted = 1e3 / times.plain_ms(1)
        if run.name in by_name and counters.num_drafts:
            rows = counters.num_draft_tokens / counters.num_drafts
            family, nodes = by_name[run.name].family, max(run.depth, round(rows))
            if run.nodes > run.depth:  # a tree stays one however few of its nodes were drafted
                nodes = max(run.depth + 1, nodes)
            work = DraftPlan(family, run.depth, nodes, run.depth)
            share = counters.num_drafts / counters.target_forwards
            found = estimate(times, work, counters.mean_acceptance_length, 1, share)
            predicted = 1e3 / found.token_ms
        out.append(
            {
                "draft": run.name,
                "num_draft_tokens": run.depth if run.nodes else 0,
                "nodes": run.nodes,
                "temperature": run.done.setting.temperature,
                "mean_acceptance_length": counters.mean_acceptance_length,
                "measured_tokens_per_s": run.tokens_per_s,
                "predicted_tokens_per_s": predicted,
                "error": predicted / run.tokens_per_s - 1 if run.tokens_per_s else None,
            }
        )
    return out


def _run(
    target: Target,
    name: str,
    draft: Draft,
    depth: int,
    nodes: int,
    questions: Sequence[Question],
    temperature: float,
    batch: int,
    plan: Plan,
) -> Run:
    count = depth if "num_draft_tokens" in draft_options(find_draft(name)[0]) else None
    setting = Setting(temperature, None, count, max_tokens=plan.max_tokens, batch=batch)
    done = evaluate(target, draft, questions, setting)
    return Run(name, depth, nodes, done, draft.info.max_window)


def _draft_profile(name: str, runs: Sequence[Run]) -> DraftProfile:
    """One draft's costs and acceptance, out of its runs."""
    propose, accepted = [], []
    first = runs[0].done.setting.temperature
    for run in runs:
        setting, answers = run.done.setting, run.done.answers
        if setting.temperature == first:
            median, spread = _middle([_each(a, a.counters.draft_ms) for a in _timed(answers)])
            propose.append(ProposeTime(setting.batch, run.depth, run.nodes, median, spread))
        if setting.batch == 1:
            tasks = {"all": answers, **run.done.per_task}
            accepted += [
                _accepted(task, mine, setting.temperature, run) for task, mine in tasks.items()
            ]
    overheads = [v for run in runs if run.done.setting.batch == 1
                 for v in _overheads(run.done.answers)]  # fmt: skip
    kind = find_draft(name)[0]
    overhead = max(0.0, _middle(overheads)[0])
    parts = (tuple(propose), tuple(accepted), overhead)
    return DraftProfile(name, kind, *parts, window_rows=runs[0].extra)


def _accepted(task: str, answers: Sequence[Answer], temperature: float, run: Run) -> Accepted:
    counters = pooled(answers)
    rounds = max(1, counters.num_drafts)
    return Accepted(
        task,
        temperature,
        run.depth,
        run.nodes,
        tuple(counters.acceptance_per_position[: run.depth]),
        counters.mean_acceptance_length,
        counters.num_drafts / max(1, counters.target_forwards),
        counters.num_draft_tokens / rounds,
        counters.target_forwards,
    )


def _target(target: Target) -> ProfiledTarget:
    info = target.info
    print_of = target_fingerprint(info.folder, target.tokenizer) if info.folder else {}
    params = parameters(target)
    dtype = str(info.dtype).removeprefix("torch.")
    return ProfiledTarget(info.name, dtype, params, weight_bytes(target, params), print_of)


def parameters(target: Target) -> int:
    """Parameters of a target, a tied embedding counted once."""
    from ..target.hf import HFTarget
    from ..target.llama import LlamaTarget

    if isinstance(target, HFTarget):
        return sum(p.numel() for p in target.model.parameters())
    if not isinstance(target, LlamaTarget):
        raise ValueError(f"{target.info.name}: a target whose parameters are not known")
    count = target.embedding.numel * (1 if target.config.tied else 2) + target.norm.numel()
    for layer in target.layers:
        for part in vars(layer).values():
            if isinstance(part, torch.Tensor):
                count += part.numel()
            elif part is not None:
                count += part.in_features * part.out_features
    return count


def weight_bytes(target: Target, params: int) -> int:
    """Bytes that one forward reads of the weights."""
    from ..target.llama import LlamaTarget

    if not isinstance(target, LlamaTarget):
        return params * target.info.dtype.itemsize
    parts = [p for layer in target.layers for p in vars(layer).values() if hasattr(p, "nbytes")]
    return sum(int(p.nbytes) for p in (*parts, target.head, target.norm))


def _timed(answers: Sequence[Answer]) -> list[Answer]:
    return [a for a in answers if a.counters.target_forwards]


def _each(answer: Answer, spent_ms: float) -> float:
    return spent_ms / answer.counters.target_forwards


def _overheads(answers: Sequence[Answer]) -> list[float]:
    """Milliseconds a round beside drafting and the target's forward, an answer each."""
    out = []
    for answer in _timed(answers):
        c = answer.counters
        out.append(_each(answer, c.decode_ms - c.draft_ms - c.forward_ms))
    return out


def _middle(values: Sequence[float]) -> tuple[float, float]:
    """Median, and largest less smallest; zeros of nothing."""
    return (statistics.median(values), max(values) - min(values)) if values else (0.0, 0.0)
