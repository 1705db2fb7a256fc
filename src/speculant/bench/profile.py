"""Measure what the latency model needs of one target, its drafts and this machine: `profile.json`.

Times of drafting and of the loop come from the same runs that count acceptance: whole conversations,
so that a draft is paid for as it is used. The target's forward is timed over (batch, rows) between
them, behind a cache of the given length.
"""

from __future__ import annotations

import platform
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
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
from ..pace import WARM_UP, ForwardTimer
from ..target.base import Target
from ..target.load import target_fingerprint
from .acceptance import Answer, Evaluation, Setting, pooled
from .evaluate import evaluate
from .questions import Question

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 33, 64)
REPEATS = 9
"""Forwards of each shape at least; one a question when there are more."""


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
    def label(self) -> str:
        """The setting in words."""
        shape = f", {self.depth} deep, {self.nodes} nodes" if self.nodes else ""
        return f"{self.name}{shape}, temperature {self.done.setting.temperature:g}"

    @property
    def tokens_per_s(self) -> float:
        """Emitted tokens per second of decoding one request, prefill left out.

        Tokens a round are those of all answers; a round's time is the median over answers, so that
        a moment in which the machine was busy with something else does not count.
        """
        rounds = [_each(a, a.counters.decode_ms) for a in _timed(self.done.answers)]
        per_round = _middle(rounds)[0]
        tokens = pooled(self.done.answers).tokens_per_forward
        return 1e3 * tokens / per_round if per_round else 0.0


Progress = Callable[[str], None]


def measure(
    target: Target,
    plan: Plan,
    questions: Sequence[Question],
    progress: Progress = lambda text: None,
) -> tuple[Profile, list[Run]]:
    """The profile, and the runs at batch 1 that it was made from, plain decoding first.

    Everything at batch 1 is interleaved, a question at a time: forwards, plain decoding and every
    setting, so that a machine whose speed drifts is the same machine for all of them. Raises
    ValueError for a draft that does not fit, before anything is timed.
    """
    made = {name: list(settings(target, name, plan)) for name in plan.drafts}
    runs = [Run("none", 1, 0, _nothing(0.0, 1, plan, None))]
    drafts = [load_draft("none", target)]
    for name, variants in made.items():
        count = "num_draft_tokens" in draft_options(find_draft(name)[0])
        for draft, depth, nodes in variants:
            for temperature in plan.temperatures:
                empty = _nothing(temperature, 1, plan, depth if count else None)
                runs.append(Run(name, depth, nodes, empty, draft.info.max_window))
                drafts.append(draft)
    timer = ForwardTimer(target, ROWS, plan.context, plan.batches)
    timer.run(WARM_UP)
    passes = -(-REPEATS // len(questions))
    for at, question in enumerate(questions):
        for run, draft in zip(runs, drafts, strict=True):
            progress(f"question {at + 1}/{len(questions)}: {run.label}")
            part = evaluate(target, draft, [question], run.done.setting)
            run.done.answers.extend(part.answers)
            run.done.skipped.extend(part.skipped)
        progress(f"question {at + 1}/{len(questions)}: t(batch, rows)")
        timer.run(passes)
    profiles = []
    for name in made:
        mine = [(run, draft) for run, draft in zip(runs, drafts, strict=True) if run.name == name]
        batched = [
            _batched(target, run, draft, questions, batch, progress)
            for run, draft in mine
            for batch in plan.batches
            if batch > 1 and run.done.setting.temperature == plan.temperatures[0]
        ]
        profiles.append(_draft_profile(name, [run for run, _ in mine] + batched))
    profile = Profile(
        target=_target(target),
        machine=ProfiledMachine(
            platform.processor() or platform.machine(),
            target.info.device.type,
            torch.get_num_threads(),
        ),
        context_length=plan.context,
        forward_ms=tuple(ForwardTime(*shape, *ms) for shape, ms in timer.medians().items()),
        drafts=tuple(profiles),
        plain_overhead_ms=max(0.0, _middle(_overheads(runs[0].done.answers))[0]),
    )
    return profile, runs


def _nothing(temperature: float, batch: int, plan: Plan, depth: int | None) -> Evaluation:
    """An evaluation to be filled."""
    setting = Setting(temperature, None, depth, max_tokens=plan.max_tokens, batch=batch)
    return Evaluation(setting, [], [], 0.0)


def _batched(
    target: Target,
    run: Run,
    draft: Draft,
    questions: Sequence[Question],
    batch: int,
    progress: Progress,
) -> Run:
    """The same setting with several questions at once."""
    progress(f"{run.label}, x{batch}")
    done = evaluate(target, draft, questions, replace(run.done.setting, batch=batch))
    return replace(run, done=done)


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


def predictions(profile: Profile, runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Predicted beside measured tokens per second of every run at batch 1.

    The prediction is the latency model's: acceptance of the run, times of the profile.
    """
    from ..cost.latency import as_measured

    by_name = {draft.name: draft for draft in profile.drafts}
    out = []
    for run in runs:
        counters = pooled(run.done.answers)
        draft = by_name.get(run.name)
        times = Measured(profile, draft)
        predicted = 1e3 / times.plain_ms(1)
        if draft is not None and counters.num_drafts:
            entry = _accepted("all", run.done.answers, run.done.setting.temperature, run)
            predicted = 1e3 / as_measured(times, draft.family, entry, 1).token_ms
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
