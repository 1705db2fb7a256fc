"""Losses of EAGLE-1, Medusa and the vanilla draft: written-out sums, and shifts at the boundary.

Independent truth: plain Python sums, oracles that are right only when the shift is, the target's
logits by an uncached forward, and drafting itself for the scores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import test_eagle1
import test_medusa
from fake import HIDDEN, FakeTarget, FakeTokenizer, make_row
from speculant.drafts.eagle import EagleDraft
from speculant.heads.eagle1 import Eagle1Config, Eagle1Head
from speculant.heads.layers import causal
from speculant.heads.medusa import MedusaConfig, MedusaHead
from speculant.heads.vanilla import VanillaConfig, VanillaHead
from speculant.target.base import LAST
from speculant.target.llama import LlamaTarget
from speculant.train.data import Batch, Item
from speculant.train.eagle1 import (
    Eagle1Objective,
    add_noise,
    eagle1_loss,
    feature_pairs,
    start_from_layer,
)
from speculant.train.features import OnlineFeatures, States
from speculant.train.losses import Teacher
from speculant.train.medusa import MedusaObjective, accuracies, head_pairs, medusa_loss
from speculant.train.teaching import Vocabulary, accepted_chains, answer_tokens, at_bases
from speculant.train.vanilla import VanillaObjective, predictions
from test_eagle import VOCAB, states
from test_llama import saved

ROWS = [([5, 9, 3], [17, 2, 8, 30]), ([31, 7, 1, 4, 4, 20], [9, 12])]


def make_batch(rows: Sequence[tuple[list[int], list[int]]] = ROWS) -> Batch:
    """Prompts and answers as a rectangle."""
    width = max(len(p) + len(a) for p, a in rows)
    tokens = torch.tensor([[*p, *a, *[0] * (width - len(p) - len(a))] for p, a in rows])
    items = tuple(Item(Path("s"), i, 0, len(p), len(a)) for i, (p, a) in enumerate(rows))
    lengths = torch.tensor([[len(p), len(a)] for p, a in rows])
    return Batch(tokens, lengths[:, 0], lengths[:, 1], items)


def vanilla_head(seed: int = 0) -> VanillaHead:
    torch.manual_seed(seed)
    return VanillaHead(VanillaConfig(HIDDEN, 24, 4, 2, 6, 2, VOCAB))


@pytest.fixture(scope="module")
def target() -> FakeTarget:
    return FakeTarget(seed=1)


def greedy_batch(target: FakeTarget) -> Batch:
    """Answers that are the target's own likeliest tokens, the second one changed at its third."""
    rows = [(p, target.greedy(p, 7)) for p in ([5, 9, 3], [31, 7, 1, 4], [2, 2])]
    rows[1][1][2] = (rows[1][1][2] + 1) % VOCAB
    return make_batch(rows)


def test_numbering() -> None:
    batch = make_batch()
    assert answer_tokens(batch)[batch.valid].tolist() == [17, 2, 8, 30, 9, 12]
    where = at_bases(batch.tokens, batch.bases, batch.valid)
    assert where.tolist() == [9, 3, 17, 2, 4, 20]  # two tokens before each


def test_the_teacher_is_the_uncached_target(target: FakeTarget) -> None:
    batch, ids = make_batch(), torch.tensor([9, 1, 4, 20, 30])
    vocabulary = Vocabulary.of(target, ids)
    assert vocabulary.ids.tolist() == [1, 4, 9, 20, 30]
    wanted = vocabulary.teacher(batch, OnlineFeatures(target, ()).states(batch))
    n = 0
    for prompt, answer in ROWS:
        for a in range(len(answer)):
            probs = target.logits([*prompt, *answer[:a]])[-1].softmax(-1)
            torch.testing.assert_close(wanted.probs[n], probs[vocabulary.ids], atol=1e-5, rtol=1e-4)
            best = int(probs.argmax())
            place = vocabulary.ids.tolist().index(best) if best in ids.tolist() else -1
            assert int(wanted.best[n]) == place
            n += 1
    assert n == len(wanted.probs)


def test_eagle1_loss_written_out() -> None:
    predicted = torch.tensor([[0.5, -2.0], [1.0, 0.0]])
    features = torch.tensor([[0.0, 1.0], [1.0, 0.25]])
    p = torch.tensor([[0.5, 0.3, 0.1], [0.2, 0.2, 0.6]])
    logits = torch.tensor([[0.1, 0.7, -0.3], [2.0, 0.0, 1.0]])
    step = eagle1_loss(predicted, features, logits, Teacher(p, torch.tensor([0, 0])))
    # SmoothL1: x^2 / 2 below 1, |x| - 1/2 above; mean over H, sum over positions
    regression = (0.5**2 / 2 + (3.0 - 0.5)) / 2 + (0.0 + 0.25**2 / 2) / 2
    entropy = 0.0
    for i in range(2):
        total = sum(math.exp(float(x)) for x in logits[i])
        for v in range(3):
            entropy -= float(p[i, v] / p[i].sum()) * math.log(math.exp(float(logits[i, v])) / total)
    assert float(step.loss) == pytest.approx(regression + 0.1 * entropy, rel=1e-5)
    assert (step.count, step.top1) == (2, 1)
    low = eagle1_loss(
        predicted.bfloat16(), features.bfloat16(), logits, Teacher(p, torch.tensor([0, 0]))
    )
    assert low.loss.dtype == torch.float32
    with pytest.raises(ValueError, match="empty"):
        eagle1_loss(predicted[:0], features[:0], logits[:0], Teacher(p[:0], torch.zeros(0)))


def test_eagle1_shift_at_the_boundary(target: FakeTarget) -> None:
    """A head that says exactly the next feature has no regression, and the target's distribution."""
    batch = make_batch()
    states = OnlineFeatures(target, ()).states(batch)
    valid, number = batch.valid, torch.arange(batch.tokens.shape[1] - 1)
    # an output that names its own base: base t says t + 1, as feature t + 1 does
    outputs = (batch.bases + 1)[..., None].float()
    features = number.expand(2, -1)[..., None].float()
    predicted, wanted = feature_pairs(outputs, features, batch.bases, valid)
    assert predicted.flatten().tolist() == [2, 3, 4, 5, 5, 6]  # prompt-1 .. prompt+answer-2
    assert torch.equal(predicted, wanted)
    rows = torch.arange(2)[:, None]
    oracle = states.last[rows, (batch.bases + 1).clamp(max=states.last.shape[1] - 1)]
    predicted, wanted = feature_pairs(oracle, states.last, batch.bases, valid)
    vocabulary = Vocabulary.of(target, torch.arange(VOCAB))
    teacher = vocabulary.teacher(batch, states)
    step = eagle1_loss(predicted, wanted, vocabulary.logits(predicted), teacher, 0.0)
    assert float(step.loss) == 0
    assert step.alpha == pytest.approx(step.count, rel=1e-4)
    assert step.top1 == step.count == 6


def test_noise_is_the_papers() -> None:
    features = torch.zeros(40, 50)
    noisy = add_noise(features, torch.Generator().manual_seed(0))
    assert float(noisy.min()) >= -0.1
    assert float(noisy.max()) <= 0.1
    assert float(noisy.mean().abs()) < 5e-3
    assert float(noisy.std()) == pytest.approx(0.2 / math.sqrt(12), rel=0.05)  # of a uniform
    assert torch.equal(noisy, add_noise(features, torch.Generator().manual_seed(0)))
    assert not torch.equal(noisy, add_noise(features, torch.Generator().manual_seed(1)))
    assert float(add_noise(features, torch.Generator(), 0.0).abs().max()) == 0


def test_medusa_pairs_are_the_drawing() -> None:
    valid = torch.tensor([[True, True, True, True], [True, True, False, False]])
    for head, want in enumerate(
        (
            [(0, 0), (1, 1), (2, 2), (3, 3), (4, 4), (5, 5)],
            [(0, 1), (1, 2), (2, 3), (4, 5)],
            [(0, 2), (1, 3)],
            [(0, 3)],
            [],
            [],
        )
    ):
        bases, tokens = head_pairs(valid, head)
        assert list(zip(bases.tolist(), tokens.tolist(), strict=True)) == want


def test_medusa_shift_at_the_boundary(target: FakeTarget) -> None:
    """Heads that know the token t + 2 + h have no loss; one position off they have."""
    batch = make_batch()
    valid, vocabulary = batch.valid, _identity()
    labels = answer_tokens(batch)[valid]
    probs = torch.eye(VOCAB)[labels]
    for shift, right in ((0, True), (1, False)):
        hidden = torch.zeros(int(valid.sum()), 3, VOCAB)
        n = 0
        for b, (prompt, answer) in enumerate(ROWS):
            row = [*prompt, *answer, *[0] * 8]
            for a in range(len(answer)):
                for h in range(3):
                    token = row[int(batch.bases[b, a]) + 2 + h + shift]
                    hidden[n, h, token] = 50.0
                n += 1
        for kind in ("tokens", "cross_entropy", "overlap"):
            wanted = Teacher(probs, labels)
            total, steps = medusa_loss(hidden, valid, vocabulary, wanted, labels, kind)
            assert [s.count for s in steps] == [6, 4, 2]
            assert ([s.top1 for s in steps] == [6, 4, 2]) is right
            assert (float(total) < 1e-4) is right


def test_medusa_loss_written_out() -> None:
    valid, vocabulary = torch.tensor([[True, True]]), _identity()
    torch.manual_seed(0)
    hidden = torch.randn(2, 2, VOCAB)
    logp = hidden.log_softmax(-1)
    labels = torch.tensor([4, 7])
    probs = torch.rand(2, VOCAB).softmax(-1) * 0.9
    wanted = Teacher(probs, probs.argmax(-1))
    total, steps = medusa_loss(hidden, valid, vocabulary, wanted, labels, "tokens", 0.8)
    first = -float(logp[0, 0, 4] + logp[1, 0, 7])
    second = -float(logp[0, 1, 7])
    assert [float(s.loss) for s in steps] == pytest.approx([first, second])
    assert float(total) == pytest.approx(first + 0.8 * second)
    total, steps = medusa_loss(hidden, valid, vocabulary, wanted, labels, decay=0.5)
    soft = [-float((probs[b] / 0.9 * logp[a, h]).sum()) for a, h, b in ((0, 0, 0), (1, 0, 1))]
    later = -float((probs[1] / 0.9 * logp[0, 1]).sum())
    assert float(total) == pytest.approx(sum(soft) + 0.5 * later, rel=1e-5)
    outside = torch.tensor([-1, 7])  # no draft id: no loss
    _, steps = medusa_loss(hidden, valid, vocabulary, wanted, outside, "tokens")
    assert float(steps[0].loss) == pytest.approx(-float(logp[1, 0, 7]))
    with pytest.raises(ValueError, match="unknown loss 'mse'"):
        medusa_loss(hidden, valid, vocabulary, wanted, labels, "mse")
    # an answer of one token: only the first head learns, and the batch is no reason to stop
    short = Teacher(probs[:1], wanted.best[:1])
    total, steps = medusa_loss(hidden[:1], valid[:, :1], vocabulary, short, labels[:1])
    assert [s.count for s in steps] == [1]
    assert float(total) == pytest.approx(soft[0], rel=1e-5)


def _identity() -> Vocabulary:
    """A vocabulary whose LM head is the identity, so that hidden states are logits."""
    ids = torch.arange(VOCAB)
    return Vocabulary(ids, torch.eye(VOCAB), ids)


def test_vanilla_shift_at_the_boundary(target: FakeTarget) -> None:
    """The target's own state at t has the teacher at t; and only tokens up to t are read."""
    batch, head = make_batch(), vanilla_head()
    embedded = target.embed(batch.tokens[:, :-1])
    states = predictions(head, embedded, batch.bases, batch.valid)
    n = 0
    for prompt, answer in ROWS:
        for a in range(len(answer)):
            text = torch.tensor([[*prompt, *answer[:a]]])
            alone = head(target.embed(text), torch.arange(text.shape[1])[None], causal)[0, -1]
            torch.testing.assert_close(states[n], alone, atol=1e-5, rtol=1e-4)
            n += 1
    vocabulary = Vocabulary.of(target, torch.arange(VOCAB))
    last = OnlineFeatures(target, ()).states(batch)
    oracle = at_bases(last.last, batch.bases + 1, batch.valid)
    own = vocabulary.logits(oracle).softmax(-1)
    torch.testing.assert_close(own, vocabulary.teacher(batch, last).probs, atol=1e-5, rtol=1e-4)


def objective(name: str, target: FakeTarget, **options: Any) -> Any:
    """An objective of a kind over a random head."""
    features = OnlineFeatures(target, ())
    if name == "eagle1":
        return Eagle1Objective(test_eagle1.make_head(4), target, features, **options)
    if name == "medusa":
        return MedusaObjective(test_medusa.make_head(4, 0.1), target, features, **options)
    return VanillaObjective(vanilla_head(4), target, features, **options)


@pytest.mark.parametrize("kind", ["eagle1", "medusa", "vanilla"])
@pytest.mark.parametrize("ids", [None, torch.arange(0, VOCAB, 2)])
def test_every_parameter_has_a_gradient(kind: str, ids: Tensor | None, target: FakeTarget) -> None:
    mine = objective(kind, target, ids=ids)
    outcome = mine.loss(make_batch())
    assert outcome.count == 6
    assert bool(outcome.loss.isfinite())
    outcome.loss.backward()
    for name, p in mine.module.named_parameters():
        assert p.grad is not None, name
        assert float(p.grad.abs().sum()) > 0, name


def test_zero_medusa_heads_have_gradients_too(target: FakeTarget) -> None:
    """They start at zero; every one of them must leave it."""
    mine = objective("medusa", target, kind="tokens")
    with torch.no_grad():
        for p in mine.module.parameters():
            p.zero_()
    mine.loss(make_batch()).loss.backward()
    assert all(float(p.grad.abs().sum()) > 0 for p in mine.module.parameters())


@pytest.mark.parametrize("kind", ["eagle1", "medusa", "vanilla"])
def test_a_row_alone_gives_what_it_gives_in_a_batch(kind: str, target: FakeTarget) -> None:
    """Padding teaches nothing, and the sums add up."""
    options = {"noise": 0.0} if kind == "eagle1" else {}
    mine = objective(kind, target, **options)
    rows = [ROWS[0], ([1, 2, 3, 4, 5], [6, 7, 8])]
    whole = mine.loss(make_batch(rows))
    parts = [mine.loss(make_batch([row])) for row in rows]
    assert whole.count == sum(p.count for p in parts)
    torch.testing.assert_close(whole.loss, sum(p.loss for p in parts))


def test_the_fast_decoder_trains_heads(tmp_path: Path) -> None:
    """It computes in inference mode, whose tensors take no gradient: nothing of it may get in."""
    saved(tmp_path, "llama")
    target: Any = LlamaTarget.from_folder(tmp_path, FakeTokenizer(), "small")
    sizes: Any = {"intermediate_size": 40, "num_heads": 4, "kv_heads": 2, "head_dim": 6}
    features, ids = OnlineFeatures(target, ()), torch.arange(50)
    eagle1 = Eagle1Head(Eagle1Config(hidden_size=48, vocab_size=97, **sizes))
    vanilla = VanillaHead(VanillaConfig(hidden_size=48, vocab_size=97, num_layers=1, **sizes))
    for mine in (
        Eagle1Objective(eagle1, target, features, ids),
        MedusaObjective(MedusaHead(MedusaConfig(48, 97)), target, features, ids),
        VanillaObjective(vanilla, target, features, ids),
    ):
        mine.loss(make_batch()).loss.backward()
        assert all(float(p.grad.abs().sum()) > 0 for p in mine.module.parameters())
        reached, _ = mine.score(make_batch(), 1)
        assert reached.shape == (1,)


@pytest.mark.parametrize("fits", [True, False])
def test_eagle1_may_start_from_a_layer(tmp_path: Path, fits: bool) -> None:
    saved(tmp_path, "llama")
    target = LlamaTarget.from_folder(tmp_path, FakeTokenizer(), "small")
    target.info = replace(target.info, folder=tmp_path)
    wide = 80 if fits else 72
    head = Eagle1Head(Eagle1Config(48, wide, 6, 2, 8, 97))
    before = {name: t.clone() for name, t in head.state_dict().items()}
    assert start_from_layer(head, target, 2) is fits
    tensors = load_file(tmp_path / "model.safetensors")
    for name, t in head.layers.state_dict().items():
        want = tensors[f"model.layers.2.{name.removeprefix('0.')}"] if fits else None
        if want is not None and name.endswith(("o_proj.weight", "down_proj.weight")):
            want = torch.zeros_like(want)
        assert torch.equal(t, before[f"layers.{name}"] if want is None else want), name
    if fits:
        passed = head.fc.weight[:, 48:] - torch.eye(48)
        assert float(passed.detach().abs().max()) < 0.1
        features, embedded = torch.randn(1, 5, 48), torch.zeros(1, 5, 48)
        out = head(embedded, features, torch.arange(5)[None], lambda q, k, v: q)
        torch.testing.assert_close(out, features, atol=0.5, rtol=0.2)  # the state stays as it is


def test_noise_comes_with_the_batch(target: FakeTarget) -> None:
    mine = objective("eagle1", target)
    one, two = mine.loss(make_batch()), mine.loss(make_batch())
    assert torch.equal(one.loss, two.loss)  # a resumed run sees the same
    other = objective("eagle1", target, seed=1).loss(make_batch())
    assert not torch.equal(one.loss, other.loss)


@pytest.mark.parametrize("kind", ["eagle1", "medusa", "vanilla"])
def test_a_short_training_run_learns(kind: str, target: FakeTarget) -> None:
    mine, batch = objective(kind, target), greedy_batch(target)
    optimizer = torch.optim.AdamW(mine.module.parameters(), lr=1e-2)
    alphas = []
    for _ in range(60):
        outcome = mine.loss(batch)
        optimizer.zero_grad()
        (outcome.loss / outcome.count).backward()
        optimizer.step()
        alphas.append([s.alpha / s.count for s in outcome.steps])
    assert all(b > a + 0.1 for a, b in zip(alphas[0], alphas[-1], strict=True)), alphas
    reached, accepted = mine.score(batch, 2)
    assert reached.tolist() == [_own_runs(target, batch, 2), int(accepted[0])]
    assert int(accepted[0]) > 0


def _own_runs(target: FakeTarget, batch: Batch, depth: int) -> int:
    """Answer positions from which `depth` tokens are the target's own likeliest ones."""
    count = 0
    for b, item in enumerate(batch.items):
        row = batch.tokens[b, : item.length].tolist()
        for a in range(item.prompt, item.length - depth + 1):
            count += target.greedy(row[:a], depth) == row[a : a + depth]
    return count


def test_scores_are_what_drafting_gets(target: FakeTarget) -> None:
    """Every base of `accepted_chains`, drafted for real behind the tokens up to it."""
    batch, depth = greedy_batch(target), 3
    mine = objective("eagle1", target)
    optimizer = torch.optim.AdamW(mine.module.parameters(), lr=1e-2)
    for _ in range(40):  # good enough that some chains are accepted and some are not
        loss = mine.loss(batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    draft = EagleDraft(mine.head, target.embed, VOCAB, depth, name="eagle1")
    heads = objective("medusa", target)
    reached, want = torch.zeros(depth), torch.zeros(depth)
    medusa = torch.zeros(depth)
    for b, item in enumerate(batch.items):
        row = batch.tokens[b, : item.length].tolist()
        for a in range(item.prompt, item.length - depth + 1):
            if target.greedy(row[:a], depth) != row[a : a + depth]:
                continue
            draft.start(1, 64)
            one = make_row(row[:a])
            draft.open(one)
            hidden = states(target, row[: a - 1], (LAST,))
            draft.prefill(one, 0, hidden)
            chain = draft.propose([one]).tokens[0].tolist()
            best = [
                int(x.argmax()) for x in test_medusa.head_logits(target, heads.head, hidden[-1])
            ]
            for k in range(depth):
                reached[k] += chain[:k] == row[a : a + k]
                want[k] += chain[: k + 1] == row[a : a + k + 1]
                medusa[k] += best[: k + 1] == row[a : a + k + 1]
    scored = mine.score(batch, depth)
    assert torch.equal(scored[0], reached)
    assert torch.equal(scored[1], want)
    assert torch.equal(heads.score(batch, depth)[1], medusa)
    assert 0 < float(want.sum()) < float(reached.sum())


def test_scores_of_answers_that_are_too_short(target: FakeTarget) -> None:
    for kind in ("eagle1", "medusa", "vanilla"):
        reached, accepted = objective(kind, target).score(make_batch(), 9)
        assert float(reached.sum() + accepted.sum()) == 0
    batch = make_batch()
    empty = States(torch.zeros(0), torch.zeros(0), torch.zeros(0), answer_tokens(batch))
    right = [answer_tokens(batch)[:, k:] for k in range(2)]
    reached, accepted = accepted_chains(batch, empty, right)
    assert reached.tolist() == accepted.tolist() == [4.0, 4.0]  # three chains of two, and one


def test_rank_hits_written_out(target: FakeTarget) -> None:
    batch, mine = make_batch(), objective("medusa", target)
    hits, tried = mine.rank_hits(batch, 4)
    want, count = torch.zeros(3, 4), torch.zeros(3)
    for prompt, answer in ROWS:
        row = [*prompt, *answer]
        last = states(target, row, (LAST,))
        for base in range(len(prompt) - 2, len(row)):
            logits = test_medusa.head_logits(target, mine.head, last[base])
            for h in range(3):
                if base + 2 + h < len(row):
                    order = logits[h].sort(descending=True).indices[:4].tolist()
                    count[h] += 1
                    for r, token in enumerate(order):
                        want[h, r] += token == row[base + 2 + h]
    assert torch.equal(tried, count)
    assert torch.equal(hits, want)
    shares = accuracies(hits, tried)
    assert MedusaConfig(HIDDEN, VOCAB, 3, accuracies=shares).accuracies == shares
    assert shares[1][0] == pytest.approx(float(want[1, 0]) / float(count[1]))
    assert accuracies(torch.zeros(1, 2), torch.zeros(1)) == ((0.0, 0.0),)
