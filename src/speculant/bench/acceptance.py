"""What an evaluation counted, and the figures made of it.

Every rate comes from `metrics.Counters`, whose raw counts are summed over answers first: a ratio
of sums, never a mean of ratios.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..metrics import Counters
from ..sampling import SamplingParams
from ..train.prompts import looping
from .questions import Question

RATES = (
    "mean_acceptance_length",
    "draft_acceptance_rate",
    "acceptance_per_position",
    "conditional_acceptance_per_position",
    "tokens_per_forward",
)
RAW = (
    "num_drafts",
    "num_draft_tokens",
    "num_accepted_tokens",
    "num_accepted_tokens_per_pos",
    "num_drafted_per_pos",
    "num_emitted_tokens",
    "target_forwards",
    "accepted_length_histogram",
)
LITTLE = 1.2  # mean acceptance length under which a draft does next to nothing
SELDOM = 0.5  # share of rounds with a draft under which mean acceptance length misleads
LOOPS = 0.05  # share of answers that may be repetition loops without a warning


@dataclass(frozen=True)
class Setting:
    """How one pass over the questions decodes.

    temperature:      of the target, 0 is greedy
    tree:             nodes of the draft's tree; 0: a chain; None: the draft knows no such choice
    num_draft_tokens: depth to draft a round; None: the draft's own
    max_tokens:       of an answer; at least 2, since an answer of one token is never drafted
    batch:            questions answered at once
    rule:             acceptance rule of sampled chains
    seed:             of all answers together; each has its own generator, made from this, its
                      question's id and the turn, so that neither batch nor limit changes it
    """

    temperature: float = 0.0
    tree: int | None = None
    num_draft_tokens: int | None = None
    max_tokens: int = 128
    batch: int = 8
    rule: str = "block"
    seed: int = 0

    def __post_init__(self) -> None:
        least = (("batch", 1), ("max_tokens", 2), ("num_draft_tokens", 1), ("tree", 0), ("seed", 0))
        for name, smallest in least:
            value = getattr(self, name)
            if value is not None and value < smallest:
                flag = "--" + name.replace("_", "-")
                raise ValueError(f"{flag} is {value}: it must be at least {smallest}")
        SamplingParams(max_tokens=self.max_tokens, temperature=self.temperature)

    @property
    def label(self) -> str:
        """What sets this pass apart, in words."""
        shape = {None: "", 0: "chain, "}.get(self.tree, f"tree of {self.tree} nodes, ")
        return f"{shape}temperature {self.temperature:g}"

    def params(self, question: Question, turn: int) -> SamplingParams:
        """How one answer is sampled."""
        mine = random.Random(f"{self.seed}/{question.question_id}/{turn}").getrandbits(48)
        return SamplingParams(self.max_tokens, self.temperature, seed=mine)


@dataclass(frozen=True)
class Answer:
    """The target's answer to one turn of a question, with what decoding it counted."""

    question: Question
    turn: int
    text: str
    counters: Counters

    @property
    def loops(self) -> bool:
        """True for a repetition loop, which any draft guesses right."""
        return looping(self.text)


@dataclass(frozen=True)
class Skipped:
    """A turn that was not asked: the conversation up to it, `tokens` long, fills the context."""

    question: Question
    turn: int
    tokens: int


@dataclass(frozen=True)
class Evaluation:
    """One pass over the questions. settings: everything a reader needs to repeat it."""

    setting: Setting
    answers: list[Answer]
    skipped: list[Skipped]
    seconds: float
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def per_task(self) -> dict[str, list[Answer]]:
        """Answers by category, in the order in which the questions name them."""
        tasks: dict[str, list[Answer]] = {}
        for answer in sorted(self.answers, key=lambda a: a.turn):
            tasks.setdefault(answer.question.category, []).append(answer)
        return tasks

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the figures overall, then per task, the settings, and what to beware of."""
        overall = figures(self.answers)
        skipped = [
            {"question_id": s.question.question_id, "turn": s.turn + 1, "tokens": s.tokens}
            for s in self.skipped
        ]
        return {
            **overall,
            "per_task": {task: figures(answers) for task, answers in self.per_task.items()},
            "settings": {**self.settings, **vars(self.setting)},
            "skipped": skipped,
            "warnings": warnings(self),
            "seconds": round(self.seconds, 2),
            "tokens_per_s": overall["num_tokens"] / self.seconds if self.seconds else 0.0,
        }


def pooled(answers: Iterable[Answer]) -> Counters:
    """The answers' raw counts, summed."""
    total = Counters()
    for answer in answers:
        total.merge(answer.counters)
    return total


def figures(answers: Sequence[Answer]) -> dict[str, Any]:
    """All figures of some answers: the rates of their pooled counters, and those counters.

    loops counts the answers that are repetition loops; mean_acceptance_length_without_loops pools
    the others alone (None when there is no other).
    """
    counters = pooled(answers)
    straight = [answer for answer in answers if not answer.loops]
    without = pooled(straight).mean_acceptance_length if straight else None
    return {
        **{name: getattr(counters, name) for name in RATES},
        "num_questions": len({a.question.question_id for a in answers}),
        "num_answers": len(answers),
        "num_tokens": counters.num_emitted_tokens,
        "loops": len(answers) - len(straight),
        "mean_acceptance_length_without_loops": without,
        "counters": {name: getattr(counters, name) for name in RAW},
    }


def warnings(done: Evaluation) -> list[str]:
    """What a reader of the figures must know first, a line each."""
    out = []
    counters, length = pooled(done.answers), pooled(done.answers).mean_acceptance_length
    if done.skipped:
        questions = {s.question.question_id for s in done.skipped}
        names = ", ".join(str(name) for name in sorted(questions, key=str)[:5])
        out.append(
            f"{len(done.skipped)} turns of {len(questions)} questions were skipped, since they "
            f"do not fit into the target's context: {names}{', ...' if len(questions) > 5 else ''}"
        )
    if not counters.num_drafts:
        out.append("the draft proposed nothing in any round: there is no acceptance to measure")
    elif length < LITTLE:
        out.append(
            f"mean acceptance length {length:.2f}: this draft accepts almost nothing. Is it "
            "trained for this target (the same weights, tokenizer and tap ids)? If it is, on "
            "enough of the target's own answers? (ngram: does the text repeat itself?)"
        )
    share = counters.num_drafts / max(1, counters.target_forwards)
    if 0 < share < SELDOM:
        out.append(
            f"only {share:.0%} of the rounds drafted anything, and mean acceptance length counts "
            f"those alone: over all rounds it is {counters.tokens_per_forward:.2f} tokens a forward"
        )
    loops = sum(answer.loops for answer in done.answers)
    if loops > LOOPS * len(done.answers):
        without = figures(done.answers)["mean_acceptance_length_without_loops"]
        rest = "there is no other" if without is None else f"without them it is {without:.2f}"
        out.append(
            f"{loops} of {len(done.answers)} answers are repetition loops, which any draft "
            f"guesses: mean acceptance length is {length:.2f} with them, {rest}"
        )
    return out
