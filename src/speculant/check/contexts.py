"""Every context that a short sample can reach, and what target and draft say behind it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..decode import Decoder, Row
from ..drafts import load_draft
from ..drafts.base import Draft
from ..engine import generate_many
from ..history import History
from ..proposal import ROOT, Proposal
from ..request import prompt_ids
from ..sampling import Random, SamplingParams, draw, to_probs
from ..target.base import Target
from ..text import TextStream
from ..tree import forward_layout

PROMPTS = (
    "Write a haiku about whales.",
    "Repeat this list three times: red, green, blue, yellow.",
    "What is 17 * 23? Explain each step.",
    "Write a Python function that reverses a list.",
    "Translate to French: The weather is nice today.",
)
TOP_K = 8
SURE = 0.9  # a target surer than this of its next token makes a weak test
LENGTH = 3  # tokens a sample has: the first, and the next two


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
        rows[()] = self.probs(plain_logits(target, [prompt], 1)[0, -1])
        for level in range(LENGTH - 1):
            parents = [path for path in self.paths if len(path) == level]
            children = [(*p, t) for p in parents for t in _support(rows[p])]
            logits = plain_logits(target, [prompt + list(c) for c in children], 1)[:, -1]
            rows |= {child: self.probs(row) for child, row in zip(children, logits, strict=True)}
            self.paths += children
        self.index = {path: i for i, path in enumerate(self.paths)}
        self.truth_full = torch.stack([rows[path] for path in self.paths])  # shape: [C, V]
        self.seen_logits = self._tree_logits()
        self.proposals = {
            p: propose_at(target, draft, [*prompt, *p], LENGTH - 1 - len(p), self.params)
            for p in self.paths
            if len(p) < LENGTH - 1
        }
        self._renumber()

    def probs(self, logits: Tensor) -> Tensor:
        """Logits [..., V] -> the probabilities that are sampled from."""
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

    def _renumber(self) -> None:
        """Keep the columns that occur; the last one stands for every other token (probability 0)."""
        used = {int(t) for t in self.truth_full.sum(0).nonzero()}
        for proposal in self.proposals.values():
            if proposal.draft_probs is not None:
                used |= {int(t) for t in proposal.draft_probs.sum((0, 1)).nonzero()}
        self.ids = torch.tensor(sorted(used))
        self.column = {int(t): i for i, t in enumerate(self.ids)}
        self.truth = self._columns(self.truth_full)
        self.seen = self._columns(self.probs(self.seen_logits))

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

    def expected(self) -> tuple[Tensor, Tensor]:
        """The target's own first-token distribution [S], and the joint [S, S] of the next two."""
        width = self.truth.shape[1]
        joint = torch.zeros(width, width, dtype=torch.float64)
        for path in (p for p in self.paths if len(p) == 2):
            a, b = (self.column[t] for t in path)
            chance = self.truth[0, a] * self.truth[self.index[path[:1]], b]
            joint[b] += chance * self.truth[self.index[path]]
        return self.truth[0], joint


def propose_at(
    target: Target, draft: Draft, tokens: list[int], budget: int, params: SamplingParams
) -> Proposal:
    """The draft's real proposal for a request of these tokens, its prompt prefilled by the target.

    Of a sampled proposal only the root's children are kept: what lies deeper depends on what was
    drawn, and is asked for again as a context of its own.
    """
    room = len(tokens) + draft.info.max_nodes + draft.info.max_window + 2
    cache = target.new_cache(1, room)
    draft.start(1, room)
    row = Row(
        slot=0,
        tokens=list(tokens),
        params=params,
        random=Random(0),
        history=History(params, target.info.vocab_size, tokens),
        budget=budget,
        text=TextStream(target.tokenizer.decode, params, (), LENGTH),
    )
    draft.open(row)
    if len(tokens) > 1:
        Decoder(target, draft, cache).prefill(row, 0, len(tokens) - 1)
    proposal = draft.propose([row])
    if proposal.draft_probs is None or not proposal.width:
        return proposal
    first = proposal.parents[0] == ROOT
    return Proposal(
        proposal.tokens[:, first], proposal.parents[:, first], proposal.draft_probs[:, first]
    )


def choose_prompt(target: Target, draft: Draft) -> tuple[list[int], bool]:
    """Tokens behind which the draft proposes something and the target is unsure; was one found?

    Tries the prompts with 0 to 24 tokens of their greedy answers: an n-gram draft is silent until
    something repeats, and a test of a silent draft would show nothing.
    """
    params = SamplingParams(temperature=1.0, top_k=TOP_K)
    greedy = SamplingParams(max_tokens=24, temperature=0.0)
    answers = generate_many(target, load_draft("none", target), PROMPTS, greedy)
    for taken in (0, 8, 16, 24):
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            tokens = prompt_ids(target, prompt) + answer.token_ids[:taken]
            if not propose_at(target, draft, tokens, LENGTH - 1, params).width:
                continue
            probs = to_probs(plain_logits(target, [tokens], 1)[0, -1], params)
            if float(probs.max()) < SURE:
                return tokens, True
    return prompt_ids(target, PROMPTS[0]), False


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


def _support(probs: Tensor) -> list[int]:
    return [int(t) for t in probs.nonzero().squeeze(1)]
