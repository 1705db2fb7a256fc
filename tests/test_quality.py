"""Perplexity and agreement against the formulas written out over whole distributions."""

from __future__ import annotations

import math

import pytest
import torch

from fake import FakeTarget
from speculant.bench.quality import quality


def test_a_target_equals_itself() -> None:
    target = FakeTarget(seed=1)
    same = quality(target, target, [([1, 2, 3, 4, 5], 2)])
    assert same.tokens == 3
    assert same.agreement == 1.0
    assert same.divergence == pytest.approx(0.0, abs=1e-6)
    assert same.perplexity == same.reference_perplexity


def test_against_the_formulas() -> None:
    a, b = FakeTarget(seed=1), FakeTarget(seed=2)
    texts = [([3, 1, 4, 1, 5], 2), ([2, 6], 1), ([7, 7, 7], 3)]  # the last has no answer
    spent_a = spent_b = divergence = 0.0
    agree = count = 0
    for ids, prompt in texts:
        for i in range(prompt, len(ids)):
            p, q = (logits(t, ids[:i]).double().softmax(-1) for t in (a, b))
            spent_a -= math.log(p[ids[i]])
            spent_b -= math.log(q[ids[i]])
            divergence += float((p * (p / q).log()).sum())
            agree += int(p.argmax() == q.argmax())
            count += 1
    found = quality(a, b, texts)
    assert found.tokens == count == 4
    assert found.agreement == agree / count
    assert found.perplexity == pytest.approx(math.exp(spent_b / count), rel=1e-4)
    assert found.reference_perplexity == pytest.approx(math.exp(spent_a / count), rel=1e-4)
    assert found.divergence == pytest.approx(divergence / count, rel=1e-3)


def logits(target: FakeTarget, ids: list[int]) -> torch.Tensor:
    """The target's logits behind some tokens, alone in a cache of their own."""
    rows = target.new_cache(1, 16).rows([0], len(ids))
    out, _ = target.forward(torch.tensor([ids]), torch.arange(len(ids))[None], None, rows)
    assert out is not None
    return out[0, -1]


def test_nothing_to_compare() -> None:
    target = FakeTarget(seed=1)
    with pytest.raises(ValueError, match="nothing to compare"):
        quality(target, target, [([1, 2], 2), ([1], 0)])
