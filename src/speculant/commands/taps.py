"""Which layers an imported EAGLE-3 head was trained on: measured, where its file leaves two.

The target answers the built-in prompts greedily. Then both readings of the layer ids see the same
texts: at every position, does the head name the token that the target finds likeliest after it?
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from ..export.given import Imported
    from ..heads.eagle3 import Eagle3Head
    from ..target.base import Target

MAX_TOKENS = 48


def choose_taps(source: str, imported: Imported) -> tuple[Imported, dict[str, float]]:
    """The head with the taps under which it agrees with the target more, and both agreements.

    source: name of the target
    """
    from ..heads.eagle3 import Eagle3Head
    from ..target.load import load_target

    head, other = imported.head, imported.ambiguous
    assert isinstance(head, Eagle3Head)
    assert other is not None
    target = load_target(source)
    choices = [head.config.taps, other]
    if other[0] < 0 or other[-1] >= target.info.num_layers:
        choices.pop()
    likely, agree = measure(target, head, choices, written_texts(target))
    best = choices[likely.index(max(likely))]
    remarks = [line for line in imported.remarks if not line.startswith("taps ")]
    head.config = replace(head.config, taps=best)
    chosen = f"taps {', '.join(map(str, best))} (measured)"
    named = {",".join(map(str, t)): share for t, share in zip(choices, agree, strict=True)}
    return replace(imported, head=head, remarks=[*remarks, chosen], ambiguous=None), named


def written_texts(target: Target) -> list[list[int]]:
    """Token ids of the built-in prompts with the target's greedy answers."""
    from ..bench.prompts import PROMPTS

    return [ids for ids, _ in answered(target, list(PROMPTS.values()), MAX_TOKENS)]


def answered(target: Target, texts: Sequence[str], max_tokens: int) -> list[tuple[list[int], int]]:
    """Token ids of prompts with the target's greedy answers, and how many of them are the prompt.

    Prompts that leave no room for an answer are left out.
    """
    from ..drafts import load_draft
    from ..engine import generate_many
    from ..request import prompt_ids
    from ..sampling import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    room = target.info.context_length - max_tokens
    prompts = [ids for ids in (prompt_ids(target, text) for text in texts) if len(ids) < room]
    answers = generate_many(target, load_draft("none", target), prompts, params)
    return [
        (ids + answer.token_ids, len(ids)) for ids, answer in zip(prompts, answers, strict=True)
    ]


def measure(
    target: Target, head: Eagle3Head, choices: Sequence[tuple[int, ...]], texts: Sequence[list[int]]
) -> tuple[list[float], list[float]]:
    """For each choice of taps, over all positions of the texts whose next token the head can draft:
    its mean log-likelihood of the target's likeliest token, and how often that is its first choice.

    The log-likelihood decides: of the two it is the one that few positions settle.
    """
    import torch

    sums = torch.zeros(len(choices), 2, dtype=torch.float64)
    count = 0
    with torch.inference_mode():
        for text in texts:
            states, labels = forward(
                target, text, sorted({tap for taps in choices for tap in taps})
            )
            draft_ids = torch.searchsorted(head.target_ids, labels).clamp(
                max=len(head.target_ids) - 1
            )
            known = head.target_ids[draft_ids] == labels
            count += int(known.sum())
            for i, taps in enumerate(choices):
                logits = first_logits(target, head, text, torch.cat([states[t] for t in taps], -1))
                scores = logits.log_softmax(-1)[known]
                wanted = draft_ids[known]
                sums[i, 0] += scores.gather(1, wanted[:, None]).sum()
                sums[i, 1] += (scores.argmax(-1) == wanted).sum()
    means = sums / max(1, count)
    return means[:, 0].tolist(), means[:, 1].tolist()


def forward(
    target: Target, text: list[int], taps: Sequence[int]
) -> tuple[dict[int, Tensor], Tensor]:
    """States [T - 2, H] that enter each tapped layer at positions 0 .. T-3, and the target's likeliest
    token two positions behind each, [T - 2]."""
    import torch

    cache = target.new_cache(1, len(text))
    tokens, positions = torch.tensor([text]), torch.arange(len(text))[None]
    rows = cache.rows([0], len(text))
    logits, hidden = target.forward(tokens, positions, None, rows, taps)
    assert logits is not None
    assert hidden is not None
    parts = hidden[0, :-2].float().split(target.info.hidden_size, dim=-1)
    return dict(zip(taps, parts, strict=True)), logits[0, 1:-1].argmax(-1)


def first_logits(target: Target, head: Eagle3Head, text: list[int], taps: Tensor) -> Tensor:
    """The head's logits [T - 2, Vd] for the token two behind each position, fed the target's states."""
    import torch

    from ..heads.layers import causal

    embedded = (head.own_embedding or target.embed)(torch.tensor([text[1:-1]])).float()
    positions = torch.arange(len(text) - 2)[None]
    return head.logits(head(embedded, head.fuse(taps)[None], positions, causal))[0]
