"""Drafts that misbehave: their requests go on without them, and the answers are the target's."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Sequence
from copy import copy
from typing import Any

import openai
import pytest
import torch

from fake import HIDDEN, FakeTarget
from scripted import Scripted
from serving import (
    MODEL,
    TALK,
    VOCAB,
    Running,
    ask,
    plain,
    serving,
    state,
    tiny_target,
    usual_drafts,
)
from speculant.drafts import load_draft
from speculant.drafts.base import Draft, DraftRow
from speculant.drafts.eagle import EagleDraft
from speculant.engine import Engine, generate
from speculant.heads.eagle3 import Eagle3Config, Eagle3Head
from speculant.proposal import Proposal
from speculant.sampling import SamplingParams
from speculant.serve.guarded import Guarded
from speculant.serve.health import Health
from speculant.step import Drafted

METHODS = ("open", "resume", "prefill", "propose", "update", "close")


class Failing:
    """The draft inside, but that one method raises in its call `at` (from 0) and ever after."""

    def __init__(self, inner: Any, method: str, at: int, calls: list[int] | None = None) -> None:
        self.inner, self.method, self.at = inner, method, at
        self.calls = [] if calls is None else calls  # one for all copies

    def __copy__(self) -> Failing:
        return Failing(copy(self.inner), self.method, self.at, self.calls)

    def __getattr__(self, name: str) -> Any:
        real = getattr(self.inner, name)
        if name != self.method:
            return real

        def call(*args: Any) -> Any:
            self.calls.append(1)
            if len(self.calls) > self.at:
                raise RuntimeError("boom")
            return real(*args)

        return call


def eagle(target: FakeTarget) -> EagleDraft:
    torch.manual_seed(5)
    config = Eagle3Config(
        hidden_size=HIDDEN, intermediate_size=24, num_heads=4, kv_heads=2, head_dim=6,
        vocab_size=VOCAB, draft_vocab_size=VOCAB, taps=(0, 1),
    )  # fmt: skip
    head = Eagle3Head(config)
    head.set_vocabulary(torch.arange(VOCAB))
    return EagleDraft(head.eval(), target.embed, VOCAB, 4)


def drafts_of(target: FakeTarget) -> dict[str, Any]:
    return {**usual_drafts(target), "eagle3": eagle(target)}


def texts(out: Any) -> list[str]:
    return [choice.message.content for choice in out.choices]


def switched_off(running: Running, name: str, reason: str) -> bool:
    """It is off, it was counted once, and /speculation says why."""
    told = state(running, name)
    labels = f'draft="{name}",model_name="{MODEL}"'
    lines = running.service.metrics.render().decode().splitlines()
    counted = f'speculant:draft_switched_off_total{{{labels},reason="{reason}"}} 1.0'
    return (
        (told["enabled"], told["reason"]) == (False, reason)
        and counted in lines
        and f"speculant:draft_enabled{{{labels}}} 0.0" in lines
    )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("name", "at"), [("ngram", 0), ("vanilla", 2), ("eagle3", 0), ("eagle3", 2)]
)
def test_rows_go_on_without_a_draft_that_fails(
    name: str, method: str, at: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Three rows in one batch, then their next turns, then a new request: as plain decoding."""
    target = tiny_target()
    failing = Failing(drafts_of(target)[name], method, at)
    drafts: dict[str, Any] = {name: failing, **plain(target)}
    hot = {"temperature": 0.9, "seed": 3} if name == "ngram" else {"temperature": 0.0}
    asked: dict[str, Any] = {"n": 3, "max_tokens": 16, **hot}
    reuse = method != "close"  # else a draft keeps its slot's state
    with serving(target, drafts, max_rows=3, reuse=reuse) as running:
        talk = list(TALK)
        for turn in range(3):
            want = [
                generate(target, load_draft("none", target), talk, SamplingParams(
                    max_tokens=16, ignore_eos=True, temperature=hot["temperature"], seed=3 + i,
                )).text
                for i in range(3)
            ]  # fmt: skip
            out = ask(running, messages=talk, **asked)
            assert texts(out) == want, turn
            talk = [*talk, {"role": "assistant", "content": want[0]}, *TALK]
        assert len(failing.calls) == at + 1  # it was not asked again
        assert switched_off(running, name, "error")
        assert caplog.text.count(f"draft {name} is switched off: it failed") == 1
        assert out.metrics["speculative_decoding"]["draft"] == "none"
        assert out.metrics["speculative_decoding"]["num_draft_tokens"] == 0
        running.idle()


class Absurd(Scripted):
    """Proposes what no draft may."""

    def __init__(self, how: str) -> None:
        super().__init__(lambda tokens, budget: [VOCAB + 5], 1)
        self.how = how

    def propose(self, rows: Sequence[DraftRow]) -> Proposal:
        if self.how == "a token outside the vocabulary":
            return super().propose(rows)
        if self.how == "rows that nobody has":
            return Proposal.chains([[1]] * (len(rows) + 1))
        if self.how == "more than the cache holds":
            return Proposal.chains([[1] * 5000 for _ in rows])
        certain = torch.zeros(len(rows), 1, VOCAB)  # drawn from a distribution that lacks it
        certain[:, :, 3] = 1
        return Proposal(torch.full((len(rows), 1), 2), torch.tensor([-1]), certain)


@pytest.mark.parametrize(
    "how",
    [
        "a token outside the vocabulary",
        "rows that nobody has",
        "more than the cache holds",
        "a token that it cannot have drawn",
    ],
)
def test_a_proposal_that_cannot_be_run_is_a_failure_too(how: str) -> None:
    target = tiny_target()
    with serving(target, {"absurd": Absurd(how), **plain(target)}, max_rows=2) as running:
        params = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
        want = generate(target, load_draft("none", target), TALK, params).text
        assert texts(ask(running, n=2, max_tokens=16)) == [want, want]
        assert switched_off(running, "absurd", "error")
        assert texts(ask(running, max_tokens=16)) == [want]


def test_a_row_that_lost_a_round_fails_alone() -> None:
    """What a round committed and nobody was told of cannot be had again: 500, and the slot is free."""
    target = tiny_target()
    with serving(target, max_rows=2) as running:
        lane = running.worker.engine.lanes[0]
        teach = lane.decoder._teach

        def fail(*args: Any) -> None:
            raise RuntimeError("boom")

        lane.decoder._teach = fail
        with pytest.raises(openai.InternalServerError) as caught:
            ask(running)
        assert caught.value.status_code == 500
        assert "boom" not in str(caught.value)
        running.idle()
        lane.decoder._teach = teach
        assert ask(running).usage.completion_tokens == 20


def test_what_follows_a_failure_has_the_targets_distribution() -> None:
    """Three sampled tokens whose draft fails in its second round: the joint distribution, by
    enumeration, against 1500 draws; and the draft did draft in the first one."""
    target, small = FakeTarget(2, 4, sharpness=1.5), FakeTarget(3, 4, sharpness=1.5)
    prompt, runs = [1, 2, 3], 1500
    want = {
        path: math.prod(
            float(target.logits([*prompt, *path[:i]])[-1].softmax(0)[path[i]]) for i in range(3)
        )
        for path in itertools.product(range(4), repeat=3)
    }
    seen: Counter[tuple[int, ...]] = Counter()
    drafted = 0
    for batch in range(15):
        inner = load_draft("vanilla", target, model=small, num_draft_tokens=1)
        draft: Draft = Guarded(Failing(inner, "propose", 1))  # type: ignore[arg-type]
        engine = Engine(target, draft, max_rows=100, capacity=16)
        params = [
            SamplingParams(max_tokens=3, temperature=1, seed=100 * batch + i, ignore_eos=True)
            for i in range(100)
        ]
        for out in engine.complete([prompt] * 100, params):
            seen[tuple(out.token_ids)] += 1
            drafted += out.metrics.num_draft_tokens
    assert drafted == runs
    chi2 = sum((seen[path] - runs * p) ** 2 / (runs * p) for path, p in want.items())
    assert chi2 < 63 + 4 * math.sqrt(2 * 63)  # 64 cells; four standard deviations


def test_a_draft_of_which_nothing_is_accepted_is_switched_off(
    caplog: pytest.LogCaptureFixture,
) -> None:
    target = tiny_target()
    params = SamplingParams(max_tokens=600, temperature=0, ignore_eos=True)
    want = generate(target, load_draft("none", target), TALK, params)
    never = next(t for t in range(VOCAB) if t not in want.token_ids)
    drafts = {"wrong": Scripted(lambda tokens, budget: [never], 1), **plain(target)}
    with serving(target, drafts) as running:
        out = ask(running, max_tokens=600)
        assert out.choices[0].message.content == want.text
        assert "draft wrong is switched off" in caplog.text
        told = state(running, "wrong")
        assert (told["enabled"], told["reason"]) == (False, "acceptance")
        again = ask(running, max_tokens=20)
        assert again.metrics["speculative_decoding"]["draft"] == "none"
        text = running.service.metrics.render().decode()
        assert (
            'draft_switched_off_total{draft="wrong",model_name="tiny",reason="acceptance"} 1'
            in text
        )
        assert 'draft_enabled{draft="wrong",model_name="tiny"} 0.0' in text
        running.worker.health["wrong"].off_until = 0.0  # the pause is over
        assert ask(running).metrics["speculative_decoding"]["draft"] == "wrong"


def test_nan_in_a_draft_switches_it_off() -> None:
    target = tiny_target()
    small = tiny_target(7, tokenizer=target.tokenizer)
    small.head.fill_(math.nan)
    drafts = {"vanilla": load_draft("vanilla", target, model=small), **plain(target)}
    with serving(target, drafts) as running:
        params = SamplingParams(max_tokens=200, seed=3, ignore_eos=True)
        want = generate(target, load_draft("none", target), TALK, params)
        out = ask(running, max_tokens=200, seed=3, temperature=1)
        assert out.choices[0].message.content == want.text
        assert state(running, "vanilla")["reason"] == "nan"


def test_health_is_judged_by_rounds_alone() -> None:
    """By counts of whole rounds, never by a token that was drawn (law 3)."""
    health = Health("d", True, 10**6, time.monotonic)
    bad = Drafted([1], [-1], [], 1)
    assert [health.observe(bad, 5) for _ in range(512)][-2:] == [None, "acceptance"]
    health.switch_off("acceptance")
    assert not health.usable()
    assert health.pause_s == 600
    good = Health("d", True, 10**6, time.monotonic)
    assert all(good.observe(Drafted([1], [-1], [0], 1), 5) is None for _ in range(2000))
    silent = Health("d", True, 100, time.monotonic)
    none = Drafted([], [], [], 4)
    assert all(silent.observe(none, 200) is None for _ in range(500))  # beyond its context
    assert [silent.observe(none, 5) for _ in range(128)][-1] == "nan"
    assert all(silent.observe(Drafted([], [], [], 0), 5) is None for _ in range(500))
