"""Training-time test: what training computes is what drafting computes, at every depth.

Independent truth: the drafting code's own cached passes over the same tokens, one chain at a time,
literal masks, losses written out with plain sums, and real drafting for the scores.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import test_eagle1
from fake import FakeTarget, make_row
from speculant.drafts.eagle import EagleDraft
from speculant.target.base import LAST
from speculant.train.data import Batch, Item
from speculant.train.eagle3 import Eagle3Objective
from speculant.train.features import OnlineFeatures, States
from speculant.train.losses import Teacher, lm_head_rows, step_loss, teacher, whole_vocabulary
from speculant.train.ttt import step_mask, step_values, step_weights, unroll
from test_eagle import VOCAB, make_head, states
from test_losses_other import make_batch

TOKENS = [5, 9, 3, 17, 2, 8, 30, 11, 4, 6]
COUNT = len(TOKENS) - 1  # pairs
STEPS = 4


@pytest.fixture(scope="module")
def target() -> FakeTarget:
    return FakeTarget(seed=1)


def heads(target: FakeTarget) -> list[Any]:
    """A head of either kind."""
    eagle1 = test_eagle1.make_head(4)
    eagle1.bind(target.unembed)
    return [make_head(4), eagle1]


def assert_same(mine: Tensor, other: Tensor) -> None:
    """Equal but for float32's rounding, which grows from step to step, of the largest numbers."""
    assert float((mine - other).abs().max()) <= 1e-4 * float(other.abs().max())


def drafted(target: FakeTarget, head: Any, base: int, steps: int) -> list[Tensor]:
    """The head's outputs [H] at depths 0 .. of drafting behind base, fed with the text's tokens."""
    draft = EagleDraft(head, target.embed, VOCAB, STEPS)
    draft.start(1, 64)
    row = make_row(TOKENS[: base + 2])
    draft.open(row)
    draft.prefill(row, 0, states(target, TOKENS, head.config.taps)[: base + 1])
    output = draft._slots[0].output
    assert output is not None
    out = [output]
    for k in range(1, steps):
        token = torch.tensor([[TOKENS[base + k + 1]]])
        where = torch.tensor([k - 1])
        out.append(draft.passes.run([0], token, out[-1][None, None], where, behind=k - 1)[0, 0])
    return out


@torch.no_grad()
@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("bases", [range(COUNT), [4, 5, 6, 7], [8], [1, 3, 0]])
def test_every_step_equals_drafting_at_that_depth(
    target: FakeTarget, kind: int, bases: Any
) -> None:
    """The parity that matters most: all bases, an answer's behind a prompt, one, and no order."""
    head = heads(target)[kind]
    features = head.fuse(states(target, TOKENS, head.config.taps)[None, :-1])
    embedded = target.embed(torch.tensor([TOKENS[1:]]))
    trained = unroll(head, embedded, features, torch.tensor([list(bases)]), STEPS)
    assert [tuple(out.shape) for out in trained] == [(1, len(bases), 16)] * STEPS
    seen = 0
    for a, base in enumerate(bases):
        for k, output in enumerate(drafted(target, head, base, min(STEPS, COUNT - base))):
            assert_same(trained[k][0, a], output)
            seen += 1
    assert seen == sum(min(STEPS, COUNT - base) for base in bases)


@torch.no_grad()
def test_rows_with_bases_of_their_own(target: FakeTarget) -> None:
    """Ragged rows: each gets what it gets alone, whatever stands behind its end."""
    for head in heads(target):
        features = head.fuse(states(target, TOKENS, head.config.taps)[None, :-1])
        embedded = target.embed(torch.tensor([TOKENS[1:]]))
        junk = torch.full_like(embedded, 3.0)
        short = (torch.cat([x[:, :5], junk[:, 5:]], dim=1) for x in (embedded, features))
        short_embedded, short_features = short
        together = unroll(
            head,
            torch.cat([embedded, short_embedded]),
            torch.cat([features, short_features]),
            torch.tensor([[3, 4, 5], [1, 2, 3]]),
            2,
        )
        long = unroll(head, embedded, features, torch.tensor([[3, 4, 5]]), 2)
        alone = unroll(head, embedded[:, :5], features[:, :5], torch.tensor([[1, 2, 3]]), 2)
        for k in range(2):
            assert_same(together[k][:1], long[k])
            assert_same(together[k][1:], alone[k])


@torch.no_grad()
def test_steps_differ_from_teacher_forcing(target: FakeTarget) -> None:
    """The parity test can fail: feeding features at every depth gives other outputs."""
    for head in heads(target):
        features = head.fuse(states(target, TOKENS, head.config.taps)[None, :-1])
        embedded = target.embed(torch.tensor([TOKENS[1:]]))
        two = unroll(head, embedded, features, torch.arange(COUNT - 1)[None], 2)[1]
        one = unroll(head, embedded, features, torch.arange(1, COUNT)[None], 1)[0]
        assert float((two - one).abs().max()) > 0.1 * float(one.abs().max())


def test_literal_masks() -> None:
    assert step_mask(torch.tensor([[1, 3]]), 4).int().tolist() == [[[1, 1, 0, 0], [1, 1, 1, 1]]]
    assert step_mask(torch.tensor([[0, 1, 2]]), 3).int().tolist() == [
        [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    ]
    assert step_mask(torch.tensor([[2], [0]]), 3).int().tolist() == [[[1, 1, 1]], [[1, 0, 0]]]


def test_attention_reads_the_drawing() -> None:
    """Bases 1 and 3 of 4, step 2: uniform scores, so the weights are shares of what is drawn."""
    seen = step_mask(torch.tensor([[1, 3]]), 4)
    names = torch.eye(8)  # every value names its key: 4 of step 0, 2 each of steps 1 and 2
    keys = [torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 2, 8), torch.zeros(1, 1, 2, 8)]
    values = [names[None, None, :4], names[None, None, 4:6], names[None, None, 6:]]
    mixed = step_values(step_weights(torch.zeros(1, 1, 2, 8), keys, seen), values)
    drawn = torch.tensor([[1, 1, 0, 0, 1, 0, 1, 0], [1, 1, 1, 1, 0, 1, 0, 1]])
    torch.testing.assert_close(mixed[0, 0], drawn / drawn.sum(1, keepdim=True))


def test_nothing_to_unroll(target: FakeTarget) -> None:
    head, x = make_head(4), torch.zeros(1, 4, 16)
    for steps, bases in ((0, [[1]]), (2, [[]])):
        with pytest.raises(ValueError, match="nothing to unroll"):
            unroll(head, x, x, torch.tensor(bases, dtype=torch.int64), steps)


def test_teacher_is_the_targets_distribution(target: FakeTarget) -> None:
    ids = torch.tensor([1, 4, 9, 20])
    last = torch.randn(6, 16, generator=torch.Generator().manual_seed(0))
    full = (last @ target.head).softmax(-1)
    log_mass, best = whole_vocabulary(last @ target.head)
    assert torch.equal(best, full.argmax(-1))
    wanted = teacher(last, lm_head_rows(target, ids), log_mass, torch.tensor([0, -1, 2, 3, 1, 0]))
    torch.testing.assert_close(wanted.probs, full[:, ids], atol=1e-6, rtol=1e-4)
    assert wanted.best.tolist() == [0, -1, 2, 3, 1, 0]
    rounded = teacher(100 * last, lm_head_rows(target, ids), log_mass, best)
    assert float(rounded.probs.max()) <= 1.0


P = [[0.5, 0.3, 0.1], [0.2, 0.2, 0.6]]
LOGITS = [[0.1, 0.7, -0.3], [2.0, 0.0, 1.0]]


def test_losses_written_out() -> None:
    wanted = Teacher(torch.tensor(P), torch.tensor([0, 2]))
    logits = torch.tensor(LOGITS)
    entropy, overlap = 0.0, 0.0
    for p, row in zip(P, LOGITS, strict=True):
        q = [math.exp(x) / sum(map(math.exp, row)) for x in row]
        entropy -= sum(a / sum(p) * math.log(b) for a, b in zip(p, q, strict=True))
        overlap += sum(map(min, p, q))
    want = {"cross_entropy": entropy, "overlap": 2 - overlap, "mixed": entropy + 2 - overlap}
    for kind, value in want.items():
        step = step_loss(logits, wanted, kind)
        assert float(step.loss) == pytest.approx(value, rel=1e-5), kind
        assert step.alpha == pytest.approx(overlap, rel=1e-5)
        assert (step.top1, step.count) == (0, 2)
    assert step_loss(logits, Teacher(wanted.probs, torch.tensor([1, -1]))).top1 == 1
    assert step_loss(logits[1:], Teacher(wanted.probs[1:], torch.tensor([0]))).count == 1
    low = step_loss(logits.bfloat16(), wanted, "mixed")
    assert low.loss.dtype == torch.float32
    with pytest.raises(ValueError, match="empty"):
        step_loss(logits[:0], Teacher(wanted.probs[:0], torch.zeros(0)))
    with pytest.raises(ValueError, match="unknown loss 'mse'"):
        step_loss(logits, wanted, "mse")


def test_mixed_has_the_gradient_of_both() -> None:
    gradients = {}
    for kind in ("cross_entropy", "overlap", "mixed"):
        logits = torch.tensor(LOGITS, requires_grad=True)
        step_loss(logits, Teacher(torch.tensor(P), torch.tensor([0, 2])), kind).loss.backward()
        assert logits.grad is not None
        gradients[kind] = logits.grad
    both = gradients["cross_entropy"] + gradients["overlap"]
    torch.testing.assert_close(gradients["mixed"], both)
    assert float(gradients["overlap"].abs().max()) > 1e-3


class Named:
    """States whose numbers say where they stand, and a head that copies what it is given."""

    def __init__(self, batch: Batch, vocab: int) -> None:
        width, most = batch.tokens.shape[1], batch.valid.shape[1]
        last = torch.arange(width - 1).expand(len(batch.tokens), -1)[..., None].float()
        zero = torch.zeros(len(batch.tokens), most)
        self.given = States(last, last, zero, zero.long())

    def states(self, batch: Batch) -> States:
        return self.given


def test_shift_at_the_boundary_of_an_answer(
    target: FakeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompt of 3, answer of 3: which base, teacher's position and token meet, at steps 0 and 1.

    token     0  1  2 | 3  4  5        answer token a is token 3 + a
    base a    1, 2, 3                  3 - 2 + a; step k at base a predicts token base + 2 + k
    teacher   after 2, 3, 4            of tokens 3, 4, 5: one before each
    """
    batch = make_batch([([7, 8, 9], [10, 11, 12])])
    objective = Eagle3Objective(make_head(4), target, Named(batch, VOCAB), 2, single=0.0)
    seen: dict[str, Any] = {"pairs": [], "teacher": []}

    def place(self: Any, some: Batch, given: States) -> Teacher:
        """A teacher whose row n holds the position its state comes from."""
        at = (some.bases + 1)[some.valid]
        seen["teacher"] = given.last[0, at, 0].tolist()
        return Teacher(at[:, None].expand(-1, 20).float(), at)

    def unrolled(
        head: Any, embedded: Tensor, hidden: Tensor, bases: Tensor, steps: int, watch: Any
    ) -> Any:
        """Step k's outputs name base * 10 + k."""
        assert torch.equal(embedded, target.embed(batch.tokens[:, 1:]))
        return [(bases * 10 + k)[..., None].float() for k in range(steps)]

    def paired(logits: Tensor, wanted: Teacher, kind: str) -> Any:
        seen["pairs"].append(list(zip(logits[:, 0].tolist(), wanted.best.tolist(), strict=True)))
        return step_loss(torch.zeros(len(logits), 20), wanted, kind)

    monkeypatch.setattr("speculant.train.teaching.Vocabulary.teacher", place)
    monkeypatch.setattr("speculant.train.eagle3.unroll", unrolled)
    monkeypatch.setattr("speculant.train.eagle3.step_loss", paired)
    monkeypatch.setattr(objective.head, "fuse", lambda taps: taps)
    monkeypatch.setattr(objective.head, "logits", lambda hidden: hidden)
    outcome = objective.loss(batch)
    assert seen["teacher"] == [2, 3, 4]
    # (base * 10 + step, position whose state is the teacher)
    assert seen["pairs"] == [[(10, 2), (20, 3), (30, 4)], [(11, 3), (21, 4)]]
    assert (outcome.count, [s.count for s in outcome.steps]) == (3, [3, 2])


def objective(target: FakeTarget, **options: Any) -> Eagle3Objective:
    """Over a random head with a scattered, reduced vocabulary."""
    head = make_head(4).train()
    return Eagle3Objective(head, target, OnlineFeatures(target, head.config.taps), **options)


@pytest.mark.parametrize("kind", ["cross_entropy", "overlap", "mixed"])
def test_loss_written_out(target: FakeTarget, kind: str) -> None:
    """Every base and step of two ragged rows, each from drafting and the uncached target."""
    mine, batch = objective(target, steps=3, kind=kind, decay=0.5), make_batch([_row(3, 7)])
    mine.head.eval()
    ids = mine.head.target_ids
    total, counts, top1 = 0.0, [0] * 3, [0] * 3
    with torch.no_grad():
        for a in range(7):
            for k, output in enumerate(drafted(target, mine.head, 1 + a, min(3, 7 - a))):
                q = mine.head.logits(output).softmax(-1)
                full = target.logits(TOKENS[: 3 + a + k])[-1].softmax(-1)
                p = full[ids]
                entropy = -float((p / p.sum() * q.log()).sum())
                missed = 1 - float(torch.minimum(p, q).sum())
                term = {"cross_entropy": entropy, "overlap": missed, "mixed": entropy + missed}
                total += 0.5**k * term[kind]
                counts[k] += 1
                top1[k] += int(ids[q.argmax()]) == int(full.argmax())
    outcome = mine.loss(batch)
    assert float(outcome.loss.detach()) == pytest.approx(total, rel=1e-4)
    assert [s.count for s in outcome.steps] == counts == [7, 6, 5]
    assert [s.top1 for s in outcome.steps] == top1


def _row(prompt: int, answer: int) -> tuple[list[int], list[int]]:
    return TOKENS[:prompt], TOKENS[prompt : prompt + answer]


def test_a_row_alone_gives_what_it_gives_in_a_batch(target: FakeTarget) -> None:
    mine, rows = objective(target, steps=3), [_row(3, 7), _row(2, 2), _row(6, 1)]
    whole, parts = mine.loss(make_batch(rows)), [mine.loss(make_batch([row])) for row in rows]
    assert whole.count == sum(p.count for p in parts) == 10
    torch.testing.assert_close(whole.loss, sum(p.loss for p in parts))
    assert [len(p.steps) for p in parts] == [3, 2, 1]  # an answer of one token has one step


def test_every_parameter_has_a_gradient(target: FakeTarget) -> None:
    for steps in (1, STEPS):
        mine = objective(target, steps=steps)
        mine.loss(make_batch([_row(3, 7), _row(2, 3)])).loss.backward()
        for name, p in mine.module.named_parameters():
            assert p.grad is not None, name
            assert float(p.grad.abs().sum()) > 0, name


def test_single_steps_come_first(target: FakeTarget) -> None:
    mine, batch = objective(target, steps=4, single=0.5), make_batch([_row(3, 7)])
    for share, steps in ((0.0, 1), (0.49, 1), (0.5, 4), (1.0, 4)):
        mine.begin(share, 0)
        assert len(mine.loss(batch).steps) == steps
    for wrong in ({"steps": 0}, {"single": 1.5}, {"kind": "mse"}):
        with pytest.raises(ValueError, match="out of range"):
            objective(target, **wrong)


def test_deeper_steps_are_run_as_often_as_they_weigh(target: FakeTarget) -> None:
    """Over many steps the mean loss is that of weights decay^k; any few steps have that mix nearly."""
    mine, batch = objective(target, steps=4, decay=0.7), make_batch([_row(3, 7)])
    mine.head.eval()
    with torch.no_grad():
        weighted = float(mine.loss(batch).loss)  # before a run begins: all steps, by their weights
        losses, depths = [], []
        for step in range(100, 300):
            mine.begin(1.0, step)
            depths.append(mine.active)
            losses.append(float(mine.loss(batch).loss))
    assert sum(losses) / len(losses) == pytest.approx(weighted, rel=0.01)
    for k in range(4):
        assert sum(d > k for d in depths) / 200 == pytest.approx(0.7**k, abs=0.01)
        assert all(
            abs(sum(d > k for d in depths[i : i + 20]) / 20 - 0.7**k) < 0.11 for i in range(180)
        )


def trained(target: FakeTarget, steps: int) -> tuple[Eagle3Objective, Batch, list[list[float]]]:
    """A head after a short run on the target's own greedy text, one row changed at its third."""
    mine = objective(target, steps=steps)
    rows = [(p, target.greedy(p, 9)) for p in ([5, 9, 3], [31, 7, 1, 4], [2, 2])]
    rows[1][1][2] = (rows[1][1][2] + 1) % VOCAB
    batch, seen = make_batch(rows), []
    optimizer = torch.optim.AdamW(mine.head.parameters(), lr=1e-2)
    for _ in range(40):
        outcome = mine.loss(batch)
        optimizer.zero_grad()
        (outcome.loss / outcome.count).backward()
        optimizer.step()
        seen.append([s.alpha / s.count for s in outcome.steps])
    return mine, batch, seen


def test_a_short_training_run_learns(target: FakeTarget) -> None:
    _, _, seen = trained(target, 3)
    assert all(after > before + 0.1 for before, after in zip(seen[0], seen[-1], strict=True))


def test_scores_are_what_drafting_gets(target: FakeTarget) -> None:
    """Every base of a score, drafted for real behind the tokens up to it."""
    depth = 3
    mine, batch, _ = trained(target, 2)
    mine.head.eval()
    draft = EagleDraft(mine.head, target.embed, VOCAB, depth)
    reached, accepted = torch.zeros(depth), torch.zeros(depth)
    for b, item in enumerate(batch.items):
        row = batch.tokens[b, : item.length].tolist()
        for a in range(item.prompt, item.length - depth + 1):
            if target.greedy(row[:a], depth) != row[a : a + depth]:
                continue
            draft.start(1, 64)
            one = make_row(row[:a])
            draft.open(one)
            draft.prefill(one, 0, states(target, row[: a - 1], mine.head.config.taps))
            chain = draft.propose([one]).tokens[0].tolist()
            for k in range(depth):
                reached[k] += chain[:k] == row[a : a + k]
                accepted[k] += chain[: k + 1] == row[a : a + k + 1]
    scored = mine.score(batch, depth)
    assert torch.equal(scored[0], reached)
    assert torch.equal(scored[1], accepted)
    assert 0 < float(accepted.sum()) < float(reached.sum())


def test_states_of_another_order_are_told_apart(target: FakeTarget) -> None:
    """The objective reads the taps its head names, not the first ones that come."""
    head = make_head(4)
    batch = make_batch([_row(3, 7)])
    right = OnlineFeatures(target, head.config.taps).states(batch)
    torch.testing.assert_close(right.taps[0], states(target, TOKENS[:-1], (0, 1)))
    torch.testing.assert_close(right.last[0], states(target, TOKENS[:-1], (LAST,)))
    swapped = OnlineFeatures(target, (1, 0)).states(batch)
    assert not torch.equal(right.taps, swapped.taps)


def test_items_of_a_batch_keep_their_place() -> None:
    batch = make_batch([_row(3, 7), _row(2, 2)])
    assert batch.items == (Item(Path("s"), 0, 0, 3, 7), Item(Path("s"), 1, 0, 2, 2))
    assert batch.bases.tolist() == [[1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 5, 6]]
    assert batch.valid.sum(1).tolist() == [7, 2]
    assert batch.supervised().int().tolist() == [[0] * 3 + [1] * 7, [0] * 2 + [1] * 2 + [0] * 6]
