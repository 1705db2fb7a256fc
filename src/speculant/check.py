"""`speculant check`: is this pair lossless on this machine? Measured, not assumed.

1. greedy:      speculative text equals plain decoding, token for token, over several prompts
2. forward:     one tree forward over the cache gives the logits of plain, uncached forwards
3. distribution: the draft's real proposals and the real acceptance rule, 50,000 times, against the
                target's own distribution (plain forwards): the first token, and the joint of the
                next two
4. loop:        the same two tests on requests that ran through the whole engine, batched
5. roll-back:   after rejections, the cache equals a fresh prefill of what was committed
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .decode import RULES, Decoder, Row
from .drafts import load_draft
from .drafts.base import Draft
from .engine import Engine, generate_many, prompt_ids
from .proposal import ROOT, Proposal
from .sampling import History, Random, SamplingParams, draw, to_probs
from .target.base import Target
from .text import TextStream
from .tree import forward_layout
from .verify import verify_chosen, verify_tree

PROMPTS = (
    "Write a haiku about whales.",
    "Repeat this list three times: red, green, blue, yellow.",
    "What is 17 * 23? Explain each step.",
    "Write a Python function that reverses a list.",
    "Translate to French: The weather is nice today.",
)
SIGNIFICANCE = 1e-3
TOP_K = 8
LENGTH = 3  # tokens a sample has: the first, and the next two
LOGIT_TOLERANCE = {torch.float32: 1e-2, torch.bfloat16: 2.0, torch.float16: 0.5}
"""Largest logit difference that rounding explains, by dtype; also the near-tie that may flip."""


@dataclass(frozen=True)
class Check:
    """One verdict with its numbers."""

    name: str
    passed: bool
    detail: str
    numbers: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """All verdicts on a pair."""

    target: str
    draft: str
    checks: list[Check]

    @property
    def passed(self) -> bool:
        """True when every check passed."""
        return all(check.passed for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        checks = [{"name": c.name, "passed": c.passed, **c.numbers} for c in self.checks]
        return {
            "target": self.target, "draft": self.draft, "passed": self.passed, "checks": checks
        }  # fmt: skip

    def render(self) -> str:
        """A table for people."""
        lines = [f"{self.target} with {self.draft}"]
        for c in self.checks:
            lines.append(f"  {'pass' if c.passed else 'FAIL'}  {c.name:<13} {c.detail}")
        verdict = (
            "lossless on this machine" if self.passed else "NOT lossless: do not use this pair"
        )
        return "\n".join([*lines, f"verdict: {verdict}"])


def run_checks(
    target: Target,
    draft: Draft,
    samples: int = 50_000,
    seed: int = 0,
    rule: str = "block",
    depth: int | None = None,
) -> Report:
    """Run every check. depth: tokens to draft a round in the greedy and loop checks."""
    if samples < 1000:
        raise ValueError(f"samples is {samples}: a chi-square needs at least 1000")
    prompt = prompt_ids(target, PROMPTS[0])
    contexts = Contexts(target, draft, prompt)
    checks = [
        check_greedy(target, draft, rule, depth),
        check_forward(target, contexts),
        *check_distribution(contexts, samples, seed, rule),
        *check_loop(target, draft, contexts, seed, rule, depth),
        check_rollback(target, draft, seed, rule, depth),
    ]
    return Report(target.info.name, draft.info.name, checks)


def check_greedy(target: Target, draft: Draft, rule: str, depth: int | None) -> Check:
    """Temperature 0: the same tokens as plain decoding, batched, over all prompts."""
    params = SamplingParams(max_tokens=48, temperature=0.0)
    options: dict[str, Any] = {"rule": rule, "num_draft_tokens": depth}
    plain = generate_many(target, load_draft("none", target), PROMPTS, params)
    ours = generate_many(target, draft, PROMPTS, params, **options)
    gaps = []
    for prompt, a, b in zip(PROMPTS, plain, ours, strict=True):
        if a.token_ids != b.token_ids:
            gaps.append(_gap(target, prompt_ids(target, prompt), a.token_ids, b.token_ids))
    allowed = LOGIT_TOLERANCE[target.info.dtype]
    same, tokens = len(PROMPTS) - len(gaps), sum(len(a.token_ids) for a in plain)
    detail = f"{same} of {len(PROMPTS)} prompts identical, {tokens} tokens"
    if gaps:
        detail += f"; largest logit gap at a first difference {max(gaps):.2g} (allowed {allowed:g})"
    numbers = {"identical": same, "prompts": len(PROMPTS), "tokens": tokens, "logit_gaps": gaps}
    return Check("greedy", max(gaps, default=0.0) <= allowed, detail, numbers)


def _gap(target: Target, prompt: list[int], plain: list[int], ours: list[int]) -> float:
    """How much less likely than the plain token ours was, in logits, at the first difference."""
    pairs = enumerate(zip(plain, ours, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), None)
    if at is None:  # one is longer than the other: no rounding explains that
        return math.inf
    logits = plain_logits(target, [prompt + plain[:at]], 1)[0, -1]
    return float(logits[plain[at]] - logits[ours[at]])


def plain_logits(target: Target, sequences: Sequence[list[int]], last: int) -> Tensor:
    """Logits [B, last, V] at the last positions of sequences of one length, without speculation."""
    tokens = torch.tensor(sequences)
    out = []
    for part in tokens.split(8):
        rows, length = part.shape
        cache = target.new_cache(rows, length)
        positions = torch.arange(length).expand(rows, -1)
        head = length - last
        if head:
            slots = cache.rows(range(rows), head)
            target.forward(part[:, :head], positions[:, :head], None, slots, need_logits=False)
            for row in range(rows):
                cache.advance(row, head)
        slots = cache.rows(range(rows), last)
        logits, _ = target.forward(part[:, head:], positions[:, head:], None, slots)
        assert logits is not None
        out.append(logits.cpu())
    return torch.cat(out)


class Contexts:
    """Every context of up to two tokens behind a prompt that sampling with top-k 8 can reach.

    For each: the target's own distribution from plain forwards (`truth`), the same from one tree
    forward over the cache (`seen`, what verification reads), and the draft's real proposal. Tokens
    are renumbered to the few that occur, so that 50,000 rounds fit one tensor.
    """

    def __init__(self, target: Target, draft: Draft, prompt: list[int]) -> None:
        self.target, self.draft, self.prompt = target, draft, prompt
        self.params = SamplingParams(temperature=1.0, top_k=TOP_K)
        self.paths: list[tuple[int, ...]] = [()]
        rows: dict[tuple[int, ...], Tensor] = {}
        rows[()] = self._probs(plain_logits(target, [prompt], 1)[0, -1])
        for level in range(LENGTH - 1):
            parents = [path for path in self.paths if len(path) == level]
            children = [(*p, t) for p in parents for t in _support(rows[p])]
            logits = plain_logits(target, [prompt + list(c) for c in children], 1)[:, -1]
            rows |= {child: self._probs(row) for child, row in zip(children, logits, strict=True)}
            self.paths += children
        self.index = {path: i for i, path in enumerate(self.paths)}
        self.truth_full = torch.stack([rows[path] for path in self.paths])  # shape: [C, V]
        self.seen_logits = self._tree_logits()
        self.proposals = {p: self._propose(p) for p in self.paths if len(p) < LENGTH - 1}
        self._renumber()

    def _probs(self, logits: Tensor) -> Tensor:
        return to_probs(logits.double(), self.params)

    def _tree_logits(self) -> Tensor:
        """Logits [C, V] of all contexts from one forward: the root and the tree of paths."""
        tokens = [path[-1] for path in self.paths[1:]]
        parents = [self.index[path[:-1]] - 1 for path in self.paths[1:]]
        proposal = Proposal.trees([(tokens, parents)])
        drafted, offsets, mask = forward_layout(proposal)
        cache = self.target.new_cache(1, len(self.prompt) + len(self.paths))
        head = torch.tensor([self.prompt[:-1]])
        if head.shape[1]:
            where = torch.arange(head.shape[1])[None]
            self.target.forward(head, where, None, cache.rows([0], head.shape[1]), (), False)
            cache.advance(0, head.shape[1])
        rows = torch.cat([torch.tensor([self.prompt[-1:]]), drafted], dim=1)
        positions = offsets + len(self.prompt) - 1
        logits, _ = self.target.forward(rows, positions, mask, cache.rows([0], rows.shape[1]))
        assert logits is not None
        return logits[0].cpu()

    def _propose(self, path: tuple[int, ...]) -> Proposal:
        """The draft's real proposal behind a context. A sampled chain is asked for one level."""
        tokens = [*self.prompt, *path]
        room = len(tokens) + self.draft.info.max_nodes + self.draft.info.max_window + 2
        cache = self.target.new_cache(1, room)
        self.draft.start(1, room)
        vocab = self.target.info.vocab_size
        row = Row(
            slot=0, tokens=tokens, params=self.params, random=Random(0),
            history=History(self.params, vocab, tokens),
            text=TextStream(self.target.tokenizer.decode, self.params, (), LENGTH),
        )  # fmt: skip
        self.draft.open(row)
        if len(tokens) > 1:
            Decoder(self.target, self.draft, cache).prefill(row, 0, len(tokens) - 1)
        row.budget = LENGTH - 1 - len(path)
        proposal = self.draft.propose([row])
        if proposal.draft_probs is None or row.budget == 1 or not proposal.width:
            return proposal
        first = (
            proposal.parents[0] == ROOT
        )  # the root's children alone: deeper ones are other contexts
        cut = (
            proposal.tokens[:, first],
            proposal.parents[:, first],
            proposal.draft_probs[:, first],
        )
        return Proposal(*cut)

    def _renumber(self) -> None:
        """Keep the columns that occur; the last one stands for every other token (probability 0)."""
        used = {int(t) for t in self.truth_full.sum(0).nonzero()}
        for proposal in self.proposals.values():
            if proposal.draft_probs is not None:
                used |= {int(t) for t in proposal.draft_probs.sum((0, 1)).nonzero()}
        self.ids = torch.tensor(sorted(used))
        self.column = {int(t): i for i, t in enumerate(self.ids)}
        self.truth = self._columns(self.truth_full)
        self.seen = self._columns(self._probs(self.seen_logits))

    def _columns(self, probs: Tensor) -> Tensor:
        kept = probs[..., self.ids].double()
        return torch.cat([kept, torch.zeros_like(kept[..., :1])], dim=-1)

    def proposal_at(self, path: tuple[int, ...], count: int, random: torch.Generator) -> Proposal:
        """`count` proposals of the draft behind a context, in renumbered tokens, drawn anew."""
        real = self.proposals.get(path)
        budget = LENGTH - 1 - len(path)
        if real is None or not real.width or budget < 1:
            return Proposal.chains([[]] * count)
        if real.draft_probs is None:
            n = int(real.num_nodes[0])
            other = len(self.ids)
            tokens = torch.tensor([self.column.get(int(t), other) for t in real.tokens[0, :n]])
            return Proposal(tokens.expand(count, n), real.parents[0, :n])
        tokens = torch.zeros(count, budget, dtype=torch.int64)
        probs = torch.zeros(count, budget, len(self.ids) + 1, dtype=torch.float64)
        now = [path] * count
        for step in range(budget):
            for where in set(now):
                rows = torch.tensor([i for i, p in enumerate(now) if p == where])
                here = self.proposals.get(where)
                if here is None or here.draft_probs is None:
                    # behind a token the target never emits: anything may be drafted there
                    dist = self.truth[:1]
                else:
                    dist = self._columns(here.draft_probs[0, :1])
                probs[rows, step] = dist
                uniforms = torch.rand(len(rows), dtype=torch.float64, generator=random)
                tokens[rows, step] = draw(dist.expand(len(rows), -1), uniforms)
            now = [self.after(p, int(t)) for p, t in zip(now, tokens[:, step], strict=True)]
        return Proposal(tokens, torch.arange(-1, budget - 1), probs)

    def after(self, path: tuple[int, ...], column: int) -> tuple[int, ...]:
        """The context one renumbered token further."""
        return (*path, int(self.ids[column]) if column < len(self.ids) else -1)

    def probs_at(self, path: tuple[int, ...]) -> Tensor:
        """What verification reads behind a context; the prompt's, where the target never goes."""
        return self.seen[self.index.get(path, 0)]

    def expected(self) -> tuple[Tensor, Tensor]:
        """The target's own first-token distribution [S], and the joint [S, S] of the next two."""
        width = self.truth.shape[1]
        joint = torch.zeros(width, width, dtype=torch.float64)
        for path in (p for p in self.paths if len(p) == 2):
            a, b = (self.column[t] for t in path)
            chance = self.truth[0, a] * self.truth[self.index[path[:1]], b]
            joint[b] += chance * self.truth[self.index[path]]
        return self.truth[0], joint


def _support(probs: Tensor) -> list[int]:
    return [int(t) for t in probs.nonzero().squeeze(1)]


def check_forward(target: Target, contexts: Contexts) -> Check:
    """The tree forward against plain forwards: largest difference in probability."""
    seen = contexts._probs(contexts.seen_logits)
    worst = float((seen - contexts.truth_full).abs().max())
    allowed = LOGIT_TOLERANCE[target.info.dtype] / 2
    detail = f"{len(contexts.paths)} contexts in one tree, largest difference {worst:.2g}"
    numbers = {"contexts": len(contexts.paths), "max_difference": worst, "allowed": allowed}
    return Check("tree forward", worst <= allowed, detail, numbers)


def check_distribution(contexts: Contexts, samples: int, seed: int, rule: str) -> list[Check]:
    """Real proposals and the real rule, `samples` times, until every sample has three tokens."""
    random = torch.Generator().manual_seed(seed)
    out = torch.full((samples, LENGTH), -1)
    paths: dict[tuple[int, ...], Tensor] = {(): torch.arange(samples)}
    while paths:
        behind: dict[tuple[int, ...], list[Tensor]] = {}
        for path, rows in paths.items():
            emitted = _one_round(
                contexts, path, len(rows), random, rule
            )  # shape: [N, LENGTH - len]
            for columns in emitted.unique(dim=0):
                chosen = rows[(emitted == columns).all(dim=1)]
                tokens = columns[columns >= 0]
                end = len(path) + len(tokens)
                out[chosen, len(path) : end] = tokens
                if end < LENGTH:
                    where = path
                    for token in tokens:
                        where = contexts.after(where, int(token))
                    behind.setdefault(where, []).append(chosen)
        paths = {path: torch.cat(rows) for path, rows in behind.items()}
    return _compare(contexts, out, "distribution")


def _one_round(
    contexts: Contexts, path: tuple[int, ...], count: int, random: torch.Generator, rule: str
) -> Tensor:
    """Tokens (renumbered, -1 past the end) that `count` rounds behind one context commit."""
    proposal = contexts.proposal_at(path, count, random)
    n, room = proposal.width, LENGTH - len(path)
    uniforms = torch.rand(count, n + 1, dtype=torch.float64, generator=random)
    node_paths: list[list[tuple[int, ...]]] = []
    for parents, tokens in zip(proposal.parents.tolist(), proposal.tokens.tolist(), strict=True):
        mine = [path]
        for parent, token in zip(parents, tokens, strict=True):
            mine.append(contexts.after(mine[parent + 1], token))
        node_paths.append(mine)
    where = torch.tensor([[contexts.index.get(p, 0) for p in mine] for mine in node_paths])
    target_probs = contexts.seen[where]  # shape: [N, 1 + n, S]
    if proposal.draft_probs is None:
        verdict = verify_chosen(proposal, draw(target_probs, uniforms))
    elif rule in RULES and n == int((proposal.parents[0] != ROOT).sum()) + 1:
        verdict = RULES[rule](proposal, target_probs, uniforms)
    else:
        verdict = verify_tree(proposal, target_probs, uniforms)
    path_nodes = verdict.path[:, :room]
    out = torch.full((count, room + 1), -1)
    taken = proposal.tokens.gather(1, path_nodes.clamp(min=0)) if n else path_nodes
    out[:, : taken.shape[1]] = torch.where(path_nodes >= 0, taken, -1)
    out.scatter_(1, verdict.num_accepted[:, None].clamp(max=room), verdict.next_token[:, None])
    return out[:, :room]


def check_loop(
    target: Target, draft: Draft, contexts: Contexts, seed: int, rule: str, depth: int | None
) -> list[Check]:
    """The whole engine, batched: 384 requests of three tokens against the same expectation."""
    params = [
        SamplingParams(
            max_tokens=LENGTH, temperature=1.0, top_k=TOP_K, seed=seed + i, ignore_eos=True
        )
        for i in range(384)
    ]
    options: dict[str, Any] = {"rule": rule, "num_draft_tokens": depth}
    done = generate_many(target, draft, [contexts.prompt] * len(params), params, **options)
    other = len(contexts.ids)
    rows = [[contexts.column.get(t, other) for t in out.token_ids] for out in done]
    return _compare(contexts, torch.tensor(rows), "loop")


def _compare(contexts: Contexts, samples: Tensor, name: str) -> list[Check]:
    """Chi-square of samples [N, 3] (renumbered) against the target's own distribution."""
    first, joint = contexts.expected()
    width = len(first)
    seen_first = torch.bincount(samples[:, 0], minlength=width).double()
    pair = samples[:, 1] * width + samples[:, 2]
    seen_joint = torch.bincount(pair, minlength=width * width).double()
    return [
        _chi_square(f"{name} 1st", seen_first, first),
        _chi_square(f"{name} 2nd+3rd", seen_joint, joint.reshape(-1)),
    ]


def _chi_square(name: str, observed: Tensor, probs: Tensor) -> Check:
    """Pearson's test; cells expecting fewer than 5 are pooled, a token of probability 0 fails."""
    total = float(observed.sum())
    expected = probs * total
    impossible = int(observed[probs <= 0].sum())
    small = expected < 5
    seen = torch.cat([observed[~small], observed[small].sum()[None]])
    want = torch.cat([expected[~small], expected[small].sum()[None]])
    seen, want = seen[want > 0], want[want > 0]
    statistic = float(((seen - want) ** 2 / want).sum())
    freedom = max(len(want) - 1, 1)
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    p_value = float(torch.special.gammaincc(half[0], half[1]))
    passed = p_value >= SIGNIFICANCE and not impossible
    detail = (
        f"chi-square {statistic:.1f}, {freedom} degrees of freedom, p = {p_value:.3g} "
        f"({total:.0f} samples; fails below {SIGNIFICANCE:g})"
    )
    if impossible:
        detail += f"; {impossible} tokens of probability 0"
    numbers = {
        "chi_square": statistic, "degrees_of_freedom": freedom, "p_value": p_value,
        "samples": int(total), "impossible": impossible,
    }  # fmt: skip
    return Check(name, passed, detail, numbers)


def check_rollback(target: Target, draft: Draft, seed: int, rule: str, depth: int | None) -> Check:
    """Sample three requests for 32 tokens; after every round, replay what each row holds."""
    engine = Engine(
        target, draft, max_rows=3, capacity=256, rule=rule, num_draft_tokens=depth
    )  # fmt: skip
    prompts = [prompt_ids(target, prompt)[-60:] for prompt in PROMPTS[:3]]
    for i, prompt in enumerate(prompts):
        engine.submit(prompt, SamplingParams(max_tokens=32, temperature=1.0, seed=seed + i))
    committed = {i: list(prompt) for i, prompt in enumerate(prompts)}
    worst, replays = 0.0, 0
    while engine.busy:
        for piece in engine.step():
            committed[piece.request] += piece.token_ids
        for number, slot in engine.slots():
            tokens = committed[number][:-1]
            if engine.cache.lengths[slot] != len(tokens):
                return Check("roll-back", False, f"row {slot} holds the wrong number of tokens")
            worst = max(worst, _replay(target, engine, slot, tokens))
            replays += 1
    scale = LOGIT_TOLERANCE[target.info.dtype]
    detail = f"{replays} replays, largest K/V difference {worst:.2g} of its scale"
    numbers = {"replays": replays, "max_difference": worst, "allowed": scale}
    return Check("roll-back", worst <= scale, detail, numbers)


def _replay(target: Target, engine: Engine, slot: int, tokens: list[int]) -> float:
    """Largest difference between a row of the cache and a fresh prefill, relative to the largest."""
    fresh = target.new_cache(1, len(tokens))
    rows = fresh.rows([0], len(tokens))
    target.forward(torch.tensor([tokens]), torch.arange(len(tokens))[None], None, rows, (), False)
    ours = engine.cache.data[:, :, slot, :, : len(tokens)].float()
    want = fresh.data[:, :, 0].float()
    return float((ours - want).abs().max() / want.abs().max())
