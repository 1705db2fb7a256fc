"""How often an imported Medusa head's choices are the target's tokens: what its tree is built from.

The target answers questions greedily. At every position of an answer, and for every head, the head's
choices from the target's own state are held against the token that the answer has there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from ..export.given import Imported
    from ..heads.medusa import MedusaHead
    from ..target.base import Target

RANKS = 10
MAX_TOKENS = 128


def measure_ranks(source: str, imported: Imported, questions: Path | None) -> Imported:
    """The heads with their accuracies, over the answers to the questions, or to the built-in prompts.

    source: name of the target
    """
    from ..bench.questions import builtin_questions, read_questions
    from ..heads.medusa import MedusaHead
    from ..target.load import load_target
    from .taps import answered

    head = imported.head
    assert isinstance(head, MedusaHead)
    target = load_target(source)
    asked = builtin_questions() if questions is None else read_questions(questions)
    texts = answered(target, [question.turns[0] for question in asked], MAX_TOKENS)
    shares, positions = accuracies(target, head, texts)
    head.config = replace(head.config, accuracies=shares)
    firsts = ", ".join(f"{ranks[0]:.1%}" for ranks in shares)
    told = (
        f"first choices right in {firsts} (measured at {positions} positions of the target's text)"
    )
    return replace(imported, head=head, remarks=[*imported.remarks, told])


def accuracies(
    target: Target, head: MedusaHead, texts: Sequence[tuple[list[int], int]]
) -> tuple[tuple[tuple[float, ...], ...], int]:
    """Shares [heads][RANKS] of each rank, and the positions of the first head.

    texts: token ids, and how many of them are the prompt: every answer token is a label of head h where
           the state 2 + h before it is there
    """
    import torch

    from ..target.base import LAST

    heads = head.config.num_heads
    ranks = min(RANKS, head.config.vocab_size)
    hits, tried = torch.zeros(heads, ranks, dtype=torch.float64), [0] * heads
    head.bind(target.unembed)
    with torch.inference_mode():
        for ids, prompt in texts:
            states = last_states(target, ids, LAST)  # shape: [T, H]
            for h in range(heads):
                first = max(0, prompt - 2 - h)
                labels = torch.tensor(ids[first + 2 + h :])
                if len(labels) == 0:
                    continue
                logits = head.logits_of(states[first : first + len(labels)], h)
                top = logits.topk(ranks, dim=-1).indices  # shape: [m, ranks]
                hits[h] += (top == labels[:, None]).sum(dim=0)
                tried[h] += len(labels)
    shares = tuple(tuple((hits[h] / max(1, tried[h])).tolist()) for h in range(heads))
    return shares, tried[0]


def last_states(target: Target, ids: list[int], last: int) -> Tensor:
    """The target's states after its final norm at every token [T, H], by one forward."""
    import torch

    rows = target.new_cache(1, len(ids)).rows([0], len(ids))
    positions = torch.arange(len(ids))[None]
    _, hidden = target.forward(torch.tensor([ids]), positions, None, rows, (last,))
    assert hidden is not None
    return hidden[0].float()
