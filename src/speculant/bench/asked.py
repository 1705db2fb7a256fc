"""The prompts of a benchmark: every turn of its questions, the same token ids for every contender."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import TypeVar

from ..drafts import load_draft
from ..engine import generate
from ..sampling import SamplingParams
from ..target.base import Target
from .acceptance import Setting, Skipped
from .evaluate import conversation_ids
from .questions import Question

T = TypeVar("T")


@dataclass(frozen=True)
class Asked:
    """One turn of a question. ids: the conversation up to where the answer begins."""

    question: Question
    turn: int
    ids: tuple[int, ...]

    @property
    def key(self) -> tuple[int | str, int]:
        """What tells this prompt from the others."""
        return self.question.question_id, self.turn

    def params(self, max_tokens: int, temperature: float) -> SamplingParams:
        """How it is answered. The seed depends on question and turn alone."""
        return Setting(temperature, max_tokens=max_tokens).params(self.question, self.turn)


def ask(
    target: Target, questions: Sequence[Question], max_tokens: int
) -> tuple[list[Asked], list[Skipped]]:
    """Every turn, and the turns that leave no room for `max_tokens` tokens in the context.

    A second turn follows the target's greedy answer to the first, of `max_tokens` tokens, so that
    everything that is compared reads the same conversation.
    """
    none = load_draft("none", target)
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    asked: list[Asked] = []
    skipped: list[Skipped] = []
    for question in questions:
        said: list[str] = []
        for turn, text in enumerate(question.turns):
            said.append(text)
            ids = conversation_ids(target, said)
            if len(ids) + max_tokens > target.info.context_length:
                behind = range(turn, len(question.turns))
                skipped += [Skipped(question, t, len(ids)) for t in behind]
                break
            asked.append(Asked(question, turn, tuple(ids)))
            if turn + 1 < len(question.turns):
                said.append(generate(target, none, ids, params).text)
    return asked, skipped


def groups(asked: Sequence[T], more: Sequence[T], batch: int) -> list[list[T]]:
    """All of `asked` in groups of exactly `batch`; the last one is filled up from `more`, and where
    that does not suffice from the start."""
    missing = -len(asked) % batch
    filled = [*asked, *islice(cycle([*more, *asked]), missing)]
    return [filled[i : i + batch] for i in range(0, len(filled), batch)]
