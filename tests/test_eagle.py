"""EAGLE-3: the head on disk, and its drafting against an uncached computation of the same chain.

Independent truth: `plain_chain` runs the head over the whole list of pairs at every depth, with
attention written out and no cache; exactness of the text is that of the loop (`FakeTarget.greedy`).
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fake import HIDDEN, FakeTarget
from speculant.control import Fixed
from speculant.drafts import load_draft
from speculant.drafts.eagle import EagleDraft
from speculant.engine import Engine, generate, generate_many
from speculant.heads.eagle3 import Eagle3Config, Eagle3Head, default_taps
from speculant.heads.weights import HeadError, check_target, load_head, save_head
from speculant.sampling import SamplingParams
from speculant.track import Track

VOCAB, DRAFT_VOCAB = 32, 20


def make_head(seed: int = 0, **change: Any) -> Eagle3Head:
    """A random head with a scattered draft vocabulary."""
    sizes: dict[str, Any] = {
        "hidden_size": HIDDEN, "intermediate_size": 24, "num_heads": 4, "kv_heads": 2,
        "head_dim": 6, "vocab_size": VOCAB, "draft_vocab_size": DRAFT_VOCAB, "taps": (0, 1),
    }  # fmt: skip
    torch.manual_seed(seed)
    head = Eagle3Head(Eagle3Config(**sizes | change)).eval()
    with torch.no_grad():
        for name, p in head.named_parameters():
            p.copy_(1 + 0.3 * torch.randn_like(p) if "norm" in name else torch.randn_like(p) * 0.5)
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed))[:DRAFT_VOCAB]
    head.set_vocabulary(ids)
    return head


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention [1, H, T, D] over all earlier positions, K/V heads repeated."""
    groups, count = q.shape[1] // k.shape[1], q.shape[2]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])
    mask = torch.ones(count, count, dtype=torch.bool).tril()
    return scores.masked_fill(~mask, -math.inf).softmax(-1) @ v


def states(target: FakeTarget, tokens: list[int], taps: tuple[int, ...]) -> Tensor:
    """Tapped states [T, len(taps) * H] of a sequence, by one fresh forward."""
    count = len(tokens)
    rows = target.new_cache(1, count).rows([0], count)
    _, hidden = target.forward(torch.tensor([tokens]), torch.arange(count)[None], None, rows, taps)
    assert hidden is not None
    return hidden[0]


@torch.no_grad()
def plain_chain(target: FakeTarget, head: Eagle3Head, tokens: list[int], depth: int) -> list[int]:
    """The greedy chain behind `tokens`, the whole list of pairs run anew at every depth."""
    hidden = head.fuse(states(target, tokens[:-1], head.config.taps))  # features of 0 .. L-2
    drafted: list[int] = []
    for _ in range(depth):
        embedded = target.embed(torch.tensor([tokens[1:] + drafted]))
        positions = torch.arange(embedded.shape[1])[None]
        out = head(embedded, hidden[None], positions, causal)[0]
        draft_id = int(head.logits(out[-1]).argmax())
        drafted.append(int(head.target_ids[draft_id]))
        hidden = torch.cat([hidden, out[-1:]])
    return drafted


@pytest.fixture(scope="module")
def target() -> FakeTarget:
    return FakeTarget(seed=1)


PROMPTS = [[5, 9, 3], [7], [1, 2, 3, 4, 5, 6, 1, 2, 3], [31, 30, 29, 31, 30]]
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


class Spy(EagleDraft):
    """Checks every greedy proposal against `plain_chain`."""

    seen = 0

    def propose(self, rows: Any) -> Any:
        proposal = super().propose(rows)
        for b, row in enumerate(rows):
            count = int(proposal.num_nodes[b])
            want = (
                plain_chain(TARGET, self.passes.head, row.tokens, count)
                if len(row.tokens) > 1
                else []
            )
            assert proposal.tokens[b, :count].tolist() == want
            assert count == min(row.budget, self.info.max_nodes) or len(row.tokens) == 1
            Spy.seen += count
        return proposal


TARGET = FakeTarget(seed=1)


def test_drafting_equals_the_uncached_chain() -> None:
    """After any ragged history of acceptance: roll-back and refreshed features are right."""
    draft = Spy(make_head(), TARGET.embed, VOCAB, 4)
    done = generate_many(TARGET, draft, PROMPTS, GREEDY, max_rows=3)
    assert [o.token_ids for o in done] == [TARGET.greedy(p, 24) for p in PROMPTS]
    assert Spy.seen > 100
    assert all(o.metrics.num_draft_tokens > 0 for o in done)


class Pauses(Fixed):
    """Drafts three deep, but for long stretches nothing: 3 rounds, then none in 23."""

    def budget(self, remaining: int, track: Track | None = None) -> int:
        rounds = 0 if track is None else track.quiet
        if track is not None:
            track.quiet += 1  # nothing else is learned
        return super().budget(remaining) if rounds % 26 < 3 else 0


def test_what_gathers_while_nothing_is_drafted_is_run_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A few pairs at a time, some before they are asked for: the drafts are the uncached chain's."""
    monkeypatch.setattr("speculant.drafts.eagle.CHUNK", 4)
    monkeypatch.setattr("speculant.drafts.eagle.MOST_PENDING", 14)
    params = SamplingParams(max_tokens=90, temperature=0.0, ignore_eos=True)
    draft, before = Spy(make_head(), TARGET.embed, VOCAB, 3), Spy.seen
    done = generate_many(TARGET, draft, PROMPTS[:3], params, max_rows=2, control=Pauses(3))
    assert [o.token_ids for o in done] == [TARGET.greedy(p, 90) for p in PROMPTS[:3]]
    assert Spy.seen - before > 60


def test_the_chain_is_rolled_back_after_acceptance(target: FakeTarget) -> None:
    """A head biased towards what the target says is accepted at times, and stays right."""
    accepted = 0
    for seed in range(12):
        draft = load_draft("eagle3", target, head=make_head(seed), num_draft_tokens=3)
        out = generate(target, draft, PROMPTS[2], GREEDY)
        assert out.token_ids == target.greedy(PROMPTS[2], 24)
        accepted += out.metrics.num_accepted_tokens
    assert accepted > 5


@pytest.mark.parametrize("rule", ["token", "block"])
def test_sampled_rows_equal_alone(target: FakeTarget, rule: str) -> None:
    draft = load_draft("eagle3", target, head=make_head(3))
    params = [
        SamplingParams(max_tokens=6 + 5 * i, temperature=0.8 * (i % 3), seed=i, ignore_eos=True)
        for i in range(4)
    ]
    together = generate_many(target, draft, PROMPTS, params, max_rows=2, rule=rule)
    for prompt, mine, out in zip(PROMPTS, params, together, strict=True):
        assert out.token_ids == generate(target, draft, prompt, mine, rule=rule).token_ids


def test_draft_probs_are_what_was_drawn_from(target: FakeTarget) -> None:
    """Only tokens of the draft vocabulary have probability, and they sum to one."""
    head = make_head(2)
    engine = Engine(target, EagleDraft(head, target.embed, VOCAB, 3), max_rows=2, capacity=64)
    engine.submit(PROMPTS[0], SamplingParams(max_tokens=20, temperature=0.9, seed=1))
    engine.step()
    row = engine._running[0].running
    row.budget = 3
    proposal = engine.draft.propose([row])
    assert proposal.draft_probs is not None
    torch.testing.assert_close(proposal.draft_probs.sum(-1), torch.ones(1, 3))
    outside = ~head.t2d
    assert float(proposal.draft_probs[..., outside].sum()) == 0
    picked = proposal.draft_probs.gather(2, proposal.tokens[:, :, None])
    assert bool((picked > 0).all())


def test_a_head_with_nan_costs_speed_only(target: FakeTarget) -> None:
    head = make_head()
    with torch.no_grad():
        head.midlayer.mlp.down_proj.weight[0, 0] = math.nan
    draft = EagleDraft(head, target.embed, VOCAB, 3)
    out = generate(target, draft, PROMPTS[0], GREEDY)
    assert out.token_ids == target.greedy(PROMPTS[0], 24)
    assert out.metrics.num_draft_tokens == 0


def test_a_context_shorter_than_the_targets(target: FakeTarget) -> None:
    draft = EagleDraft(make_head(context_length=12), target.embed, VOCAB, 3)
    for prompt in (PROMPTS[0], list(range(1, 20))):
        out = generate(target, draft, prompt, GREEDY)
        assert out.token_ids == target.greedy(prompt, 24)


def test_save_and_load_are_exact(tmp_path: Path, target: FakeTarget) -> None:
    head = make_head(target={"architecture": "x"}, training={"tokens": 5})
    save_head(head, tmp_path / "head", torch.float32)
    again = load_head(tmp_path / "head")
    assert again.config == head.config
    assert all(torch.equal(v, again.state_dict()[k]) for k, v in head.state_dict().items())
    save_head(head, tmp_path / "head")  # bfloat16, over the old one
    assert [p.name for p in tmp_path.iterdir()] == ["head"]
    small = load_file(tmp_path / "head" / "model.safetensors")
    assert small["fc.weight"].dtype == torch.bfloat16
    draft = load_draft(str(tmp_path / "head"), target, num_draft_tokens=2)
    assert draft.info.name == "eagle3"


VLLM = {
    "fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d",
    *(f"midlayer.{n}.weight" for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm")),
    *(f"midlayer.self_attn.{n}_proj.weight" for n in "qkvo"),
    *(f"midlayer.mlp.{n}_proj.weight" for n in ("gate", "up", "down")),
}  # fmt: skip


def test_names_and_shapes_are_vllms() -> None:
    head = make_head()
    tensors = head.state_dict()
    assert set(tensors) == VLLM
    assert tensors["fc.weight"].shape == (HIDDEN, 2 * HIDDEN)
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (24, 2 * HIDDEN)
    assert tensors["d2t"].dtype == torch.int64
    assert tensors["t2d"].dtype == torch.bool
    ids = torch.arange(DRAFT_VOCAB) + tensors["d2t"]
    assert torch.equal(ids, tensors["t2d"].nonzero().squeeze(1))
    assert default_taps(30) == (2, 15, 27)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("fc.weight"), "fc.weight is missing"),
        (lambda t: t.pop("d2t"), "d2t is missing"),
        (lambda t: t.update({"fc.bias": torch.zeros(2)}), "unexpected tensor fc.bias"),
        (lambda t: t.update({"norm.weight": torch.ones(3)}), "norm.weight is"),
        (lambda t: t["lm_head.weight"].fill_(math.nan), "NaN"),
        (lambda t: t["d2t"].fill_(99), "d2t maps outside"),
        (lambda t: t["t2d"].fill_(True), "name different tokens"),
    ],
)
def test_broken_heads_are_refused(tmp_path: Path, change: Any, words: str) -> None:
    save_head(make_head(), tmp_path / "head")
    file = tmp_path / "head" / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    with pytest.raises(HeadError, match=words):
        load_head(tmp_path / "head")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": "other"}, "not a head of this package"),
        ({"taps": [1, 0]}, "ascending"),
        ({"draft_vocab_size": 99}, "draft_vocab_size"),
        ({"what": 1}, "no head's config"),
    ],
)
def test_broken_configs_are_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    save_head(make_head(), tmp_path / "head")
    path = tmp_path / "head" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(HeadError, match=words):
        load_head(tmp_path / "head")


def test_another_targets_head_is_refused(target: FakeTarget) -> None:
    mine = {"architecture": "x", "weights_sha256": "aa"}
    head = make_head(target=mine)
    check_target(head, mine, "it")
    with pytest.raises(HeadError, match="another target than it: weights_sha256 differs"):
        check_target(head, mine | {"weights_sha256": "bb"}, "it")
    wide = FakeTarget(seed=1, vocab_size=40)
    with pytest.raises(ValueError, match="vocabulary 32"):
        load_draft("eagle3", wide, head=head)
    with pytest.raises(ValueError, match="taps layer 5"):
        load_draft("eagle3", target, head=make_head(taps=(0, 5)))
    with pytest.raises(ValueError, match="train one: speculant train eagle3"):
        load_draft("eagle3", target)  # no bundled head, or one that is not for this target
