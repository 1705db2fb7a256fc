"""How much of a draft the target accepts, over whole conversations.

Questions run through the engine a turn at a time, so that a second turn follows the target's own
answer to the first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..drafts.base import Draft
from ..engine import Engine
from ..metrics import Counters
from ..request import Completion
from ..target.base import Target
from .acceptance import Answer, Evaluation, Setting, Skipped
from .questions import Question

Progress = Callable[[int, int], None]
"""Told after every round: answers done and tokens emitted so far in this evaluation."""


def evaluate(
    target: Target,
    draft: Draft,
    questions: Sequence[Question],
    setting: Setting,
    settings: Mapping[str, Any] | None = None,
    progress: Progress = lambda answers, tokens: None,
) -> Evaluation:
    """Hold every conversation with the target, drafted by `draft`, and count.

    A turn whose prompt fills the context is skipped with the turns behind it, and reported.
    settings: further entries for the report's settings. Raises FloatingPointError when the
    target's logits broke.
    """
    began = time.perf_counter()
    answers: list[Answer] = []
    skipped: list[Skipped] = []
    said: list[list[str]] = [[] for _ in questions]  # turns and answers, alternating
    live = list(range(len(questions)))
    for turn in range(max((len(q.turns) for q in questions), default=0)):
        live = [i for i in live if turn < len(questions[i].turns)]
        prompts = {}
        for i in live:
            said[i].append(questions[i].turns[turn])
            prompts[i] = conversation_ids(target, said[i])
        context = target.info.context_length
        left_out = [i for i in live if len(prompts[i]) >= context]
        for i in left_out:
            behind = range(turn, len(questions[i].turns))
            skipped += [Skipped(questions[i], t, len(prompts[i])) for t in behind]
        live = [i for i in live if i not in left_out]
        done = len(answers), sum(a.counters.num_emitted_tokens for a in answers)
        asked = [(questions[i], prompts[i]) for i in live]
        told = _answers(target, draft, asked, turn, setting, progress, done)
        for i, completion in zip(live, told, strict=True):
            said[i].append(completion.text)
            answers.append(Answer(questions[i], turn, completion.text, completion.metrics))
    seconds = time.perf_counter() - began
    return Evaluation(setting, answers, skipped, seconds, dict(settings or {}))


def conversation_ids(target: Target, said: Sequence[str]) -> list[int]:
    """Token ids of a conversation: the user's and the target's words, alternating.

    Without a chat template it is the plain text, its parts a blank line apart.
    """
    if not target.tokenizer.has_chat_template:
        return target.tokenizer.encode("\n\n".join(said))
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(said)]
    return target.tokenizer.chat(messages)


def _answers(
    target: Target,
    draft: Draft,
    asked: Sequence[tuple[Question, list[int]]],
    turn: int,
    setting: Setting,
    progress: Progress,
    before: tuple[int, int],
) -> list[Completion]:
    """Answer one turn of many questions (with their prompts), batched; in the order given.

    before: answers and tokens that earlier turns had, for `progress`.
    """
    if not asked:
        return []
    most = draft.info.depth
    longest = max(len(ids) for _, ids in asked) + setting.max_tokens
    engine = Engine(
        target,
        draft,
        max_rows=min(setting.batch, len(asked)),
        capacity=min(longest, target.info.context_length),
        num_draft_tokens=min(setting.num_draft_tokens or most, most),
        rule=setting.rule,
    )
    out: dict[int, Completion] = {}
    questions: dict[int, Question] = {}
    for question, ids in asked:
        counters = Counters()
        number = engine.submit(ids, setting.params(question, turn), counters)
        out[number] = Completion(prompt_tokens=len(ids), metrics=counters)
        questions[number] = question
    ended, tokens = before
    while engine.busy:
        for piece in engine.step():
            if piece.error:
                name = questions[piece.request].question_id
                raise FloatingPointError(f"question {name}, turn {turn + 1}: {piece.error}")
            out[piece.request].add(piece)
            tokens += len(piece.token_ids)
            ended += piece.finish_reason is not None
        progress(ended, tokens)
    return list(out.values())
