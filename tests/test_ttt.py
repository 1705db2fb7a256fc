"""Training-time test: what training computes is what drafting computes, at every depth.

Independent truth: the drafting code's own cached passes over the same tokens, one chain at a time,
literal masks, and losses written out with plain sums.
"""

from __future__ import annotations

import math

import pytest
import torch

from fake import FakeTarget, make_row
from speculant.drafts.eagle import Eagle3Draft
from speculant.train.losses import step_loss, teacher, unrolled_loss
from speculant.train.ttt import step_mask, unroll
from test_eagle import DRAFT_VOCAB, VOCAB, make_head, states

TOKENS = [5, 9, 3, 17, 2, 8, 30, 11, 4, 6]
STEPS = 4


@pytest.fixture(scope="module")
def target() -> FakeTarget:
    return FakeTarget(seed=1)


@torch.no_grad()
def test_every_step_equals_drafting_at_that_depth(target: FakeTarget) -> None:
    """The parity that matters most: bases 0 .. T-1, depths 0 .. 3, through the drafting cache."""
    head = make_head(4)
    taps = states(target, TOKENS, head.config.taps)  # shape: [L, taps * H]
    count = len(TOKENS) - 1
    embedded = target.embed(torch.tensor([TOKENS[1:]]))
    trained = unroll(head, embedded, head.fuse(taps[None, :-1]), STEPS)
    assert [o.shape[1] for o in trained] == [count - k for k in range(STEPS)]
    draft = Eagle3Draft(head, target.embed, VOCAB, STEPS)
    for base in range(count):
        draft.start(1, 64)
        row = make_row(TOKENS[: base + 2], slot=0)
        draft.open(row)
        draft.prefill(row, 0, taps[: base + 1])  # pairs 0 .. base, from the target's features
        output = draft._slots[0].output
        assert output is not None
        for k in range(min(STEPS, count - base)):
            if k:
                output = draft._run([0], [TOKENS[base + k + 1 : base + k + 2]], output[None, None])[
                    0, 0
                ]
                draft.cache.advance(0, 1)
            torch.testing.assert_close(trained[k][0, base], output, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_steps_differ_from_teacher_forcing(target: FakeTarget) -> None:
    """The parity test can fail: feeding features at every depth gives other outputs."""
    head = make_head(4)
    features = head.fuse(states(target, TOKENS, head.config.taps)[None, :-1])
    embedded = target.embed(torch.tensor([TOKENS[1:]]))
    two, one = unroll(head, embedded, features, 2)[1], unroll(head, embedded, features, 1)[0]
    assert float((two[0] - one[0, 1:]).abs().max()) > 1e-2


def test_literal_masks() -> None:
    assert step_mask(4, 4).int().tolist() == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [1, 1, 1, 0],
        [1, 1, 1, 1],
    ]
    assert step_mask(2, 4).int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0]]  # T = 4, step 2


def test_every_parameter_has_a_gradient(target: FakeTarget) -> None:
    head = make_head(4).train()
    features = head.fuse(states(target, TOKENS, head.config.taps)[None, :-1])
    outputs = unroll(head, target.embed(torch.tensor([TOKENS[1:]])), features, STEPS)
    sum(head.logits(o).logsumexp(-1).sum() for o in outputs).backward()  # type: ignore[union-attr]
    for name, p in head.named_parameters():
        assert p.grad is not None, name
        assert float(p.grad.abs().sum()) > 0, name


def test_padding_behind_a_row_changes_nothing(target: FakeTarget) -> None:
    head = make_head(4)
    features = head.fuse(states(target, TOKENS, head.config.taps)[None, :-1])
    embedded = target.embed(torch.tensor([TOKENS[1:]]))
    alone = unroll(head, embedded[:, :5], features[:, :5], 3)
    padded = unroll(head, embedded, features, 3)
    for a, b in zip(alone, padded, strict=True):
        torch.testing.assert_close(a, b[:, : a.shape[1]])


def test_teacher_is_the_targets_distribution(target: FakeTarget) -> None:
    ids = torch.tensor([1, 4, 9, 20])
    hidden = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(0))
    lm_head = target.head.T
    probs, best = teacher(hidden, lm_head, ids)
    full = (hidden @ lm_head.T).softmax(-1)
    torch.testing.assert_close(probs, full[..., ids])
    for b in range(2):
        for t in range(3):
            top = int(full[b, t].argmax())
            want = ids.tolist().index(top) if top in ids.tolist() else -1
            assert int(best[b, t]) == want


def test_losses_written_out() -> None:
    p = torch.tensor([[[0.5, 0.3, 0.1], [0.2, 0.2, 0.6]]])
    logits = torch.tensor([[[0.1, 0.7, -0.3], [2.0, 0.0, 1.0]]])
    q = logits.softmax(-1)[0]
    mask = torch.tensor([[True, True]])
    best = torch.tensor([[0, 2]])
    step = step_loss(logits, p, best, mask, "cross_entropy")
    want = 0.0
    for i in range(2):
        total = float(p[0, i].sum())
        want -= sum(float(p[0, i, v]) / total * math.log(float(q[i, v])) for v in range(3)) / 2
    assert float(step.loss) == pytest.approx(want, rel=1e-5)
    overlap = sum(min(float(p[0, i, v]), float(q[i, v])) for i in range(2) for v in range(3)) / 2
    assert step.alpha == pytest.approx(overlap, rel=1e-5)
    assert step.top1 == 0.0
    other = step_loss(logits, p, best, mask, "overlap")
    assert float(other.loss) == pytest.approx(1 - overlap, rel=1e-5)
    half = step_loss(logits, p, best, torch.tensor([[False, True]]), "overlap")
    assert half.count == 1
    assert half.alpha != step.alpha
    with pytest.raises(ValueError, match="empty"):
        step_loss(logits, p, best, torch.zeros(1, 2, dtype=torch.bool), "overlap")
    with pytest.raises(ValueError, match="unknown loss"):
        step_loss(logits, p, best, mask, "mse")


def test_shifts_at_the_boundary_of_an_answer() -> None:
    """Tokens 3 and 4 of five are the answer: which bases are supervised at steps 0 and 1.

    Step 0 at base t predicts token t + 2: bases 1, 2. Step 1 predicts t + 3: bases 0, 1.
    """
    length = 5
    supervised = torch.tensor([[False, False, False, True, True]])
    # teacher after token t puts all its mass on draft id t; the head is right where it says t+1+k
    probs = torch.eye(DRAFT_VOCAB)[:length][None]
    best = torch.arange(length)[None]
    logits = []
    for k in range(2):
        mine = torch.zeros(1, length - 1 - k, DRAFT_VOCAB)
        for t in range(length - 1 - k):
            mine[0, t, t + 1 + k] = 50.0
        logits.append(mine)
    total, steps = unrolled_loss(logits, probs, best, supervised)
    assert [s.count for s in steps] == [2, 2]
    assert [s.top1 for s in steps] == [1.0, 1.0]
    assert [s.alpha for s in steps] == pytest.approx([1.0, 1.0])
    assert float(total) == pytest.approx(0.0, abs=1e-5)
    only = torch.tensor([[False, False, False, True, False]])
    _, steps = unrolled_loss(logits, probs, best, only)
    assert [s.count for s in steps] == [1, 1]


def test_a_short_training_run_learns(target: FakeTarget) -> None:
    """Forty steps on the target's own greedy text: overlap rises at every depth."""
    head = make_head(4).train()
    text = target.greedy([5, 9, 3], 60)
    tokens = [5, 9, 3, *text]
    taps = states(target, tokens, head.config.taps)[None]
    rows = target.new_cache(1, 80).rows([0], len(tokens))
    where = torch.arange(len(tokens))[None]
    _, last = target.forward(torch.tensor([tokens]), where, None, rows, (-1,))
    assert last is not None
    probs, best = teacher(last, target.head.T, head.target_ids)
    supervised = torch.tensor([[i >= 3 for i in range(len(tokens))]])
    embedded = target.embed(torch.tensor([tokens[1:]]))
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2)
    seen = []
    for _ in range(40):
        outputs = unroll(head, embedded, head.fuse(taps[:, :-1]), 3)
        loss, steps = unrolled_loss([head.logits(o) for o in outputs], probs, best, supervised)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append([s.alpha for s in steps])
    assert all(after > before + 0.1 for before, after in zip(seen[0], seen[-1], strict=True))
