"""`speculant check` passes a lossless pair and catches broken ones, each by the check that should."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from fake import FakeTarget
from scripted import Sampled
from speculant import check as module
from speculant.cache import KVCache
from speculant.check import Report, run_checks
from speculant.drafts import load_draft
from speculant.drafts.base import DraftRow
from speculant.proposal import Proposal, Verdict
from speculant.sampling import draw
from speculant.verify import verify_chain


@pytest.fixture
def target() -> FakeTarget:
    return FakeTarget(seed=1, sharpness=2.5)


def failed(report: Report) -> set[str]:
    return {c.name for c in report.checks if not c.passed}


def vanilla(target: FakeTarget) -> Any:
    model = FakeTarget(seed=5, sharpness=2.5)
    return load_draft("vanilla", target, model=model, num_draft_tokens=3)


@pytest.mark.parametrize("name", ["none", "ngram", "lookahead", "vanilla"])
@pytest.mark.parametrize("rule", ["token", "block"])
def test_lossless_pairs_pass(target: FakeTarget, name: str, rule: str) -> None:
    draft = vanilla(target) if name == "vanilla" else load_draft(name, target)
    report = run_checks(target, draft, samples=20_000, rule=rule)
    assert report.passed, report.render()
    assert not report.silent
    numbers = {c.name: c.numbers for c in report.checks}
    assert numbers["distribution 1st"]["samples"] == 20_000
    assert numbers["roll-back"]["replays"] > 20
    assert "verdict: lossless" in report.render()
    assert report.as_dict()["passed"]


def test_a_lying_draft_fails(target: FakeTarget) -> None:
    class Liar(Sampled):
        def propose(self, rows: Sequence[DraftRow]) -> Proposal:
            honest = super().propose(rows)
            assert honest.draft_probs is not None
            flat = torch.full_like(honest.draft_probs, 1 / 32)
            return Proposal(honest.tokens, honest.parents, flat, honest.lengths)

    def peaked(tokens: Sequence[int]) -> torch.Tensor:
        return target.logits(tokens)[-1].mul(3).softmax(-1)

    report = run_checks(target, Liar(peaked, 2), samples=20_000)
    assert "loop 1st" in failed(report)


def test_a_biased_rule_fails(target: FakeTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recovering from the target instead of the residual: close to right, and caught."""

    def biased(proposal: Proposal, target_probs: torch.Tensor, u: torch.Tensor) -> Verdict:
        verdict = verify_chain(proposal, target_probs, u)
        rows = torch.arange(len(u))
        wrong = draw(target_probs[rows, verdict.num_accepted], u[:, -1])
        return Verdict(verdict.num_accepted, verdict.path, wrong, verdict.is_bonus)

    monkeypatch.setitem(module.RULES, "token", biased)
    report = run_checks(target, vanilla(target), samples=20_000, rule="token")
    assert {"distribution 1st", "distribution 2nd+3rd"} <= failed(report)
    assert "NOT lossless" in report.render()


def test_a_broken_roll_back_fails(target: FakeTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeping the first entries instead of the accepted ones."""
    real = KVCache.keep

    def careless(self: KVCache, slot: int, offsets: Sequence[int]) -> None:
        real(self, slot, range(len(offsets)))

    monkeypatch.setattr(KVCache, "keep", careless)
    report = run_checks(target, load_draft("lookahead", target), samples=1000)
    assert "roll-back" in failed(report)


def test_a_broken_mask_fails(target: FakeTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tree forward in which every node sees every earlier node."""
    real = FakeTarget.forward

    def sloppy(
        self: FakeTarget, tokens: Any, positions: Any, mask: Any, *rest: Any, **more: Any
    ) -> Any:
        return real(self, tokens, positions, None, *rest, **more)

    monkeypatch.setattr(FakeTarget, "forward", sloppy)
    report = run_checks(target, load_draft("lookahead", target), samples=1000)
    assert "tree forward" in failed(report)


def test_too_few_samples_are_refused(target: FakeTarget) -> None:
    with pytest.raises(ValueError, match="at least 1000"):
        run_checks(target, load_draft("none", target), samples=10)


def test_coarse_dtypes_do_not_excuse_a_broken_roll_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 tolerances are wider, and still far from what a wrong gather does."""
    target = FakeTarget(seed=1, sharpness=2.5, dtype=torch.bfloat16)
    draft = load_draft("lookahead", target)
    report = run_checks(target, draft, samples=1000)
    assert {"roll-back", "tree forward"}.isdisjoint(failed(report)), report.render()
    real = KVCache.keep
    monkeypatch.setattr(KVCache, "keep", lambda self, slot, o: real(self, slot, range(len(o))))
    assert "roll-back" in failed(run_checks(target, draft, samples=1000))
