"""The loop: propose, forward, verify, roll back.

One round for a batch of rows. Every draft, every temperature and plain decoding (a draft that
proposes nothing) go through it. Before and after a round, for every row (design, law 7):

    cache:   tokens[:-1]           the prefix without the root
    root:    tokens[-1]            row 0 of the next forward
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .cache import KVCache
from .drafts.base import Draft, DraftRow, Feedback
from .metrics import Counters
from .native.layers import likeliest
from .proposal import Proposal, Verdict
from .sampling import broken_rows, draw, to_probs_rows
from .step import Drafted, Step, token_logprobs
from .target.base import Target
from .text import TextStream
from .tree import chain_rows, forward_layout, node_paths
from .verify import verify_block, verify_chain, verify_chosen, verify_tree

RULES = {"token": verify_chain, "block": verify_block}
"""Acceptance rules for sampled chains; sampled trees and chosen nodes have one rule each."""


@dataclass
class Row(DraftRow):
    """One running request, as the loop sees it."""

    text: TextStream = field(kw_only=True)
    counters: Counters = field(default_factory=Counters, kw_only=True)


class Decoder:
    """Runs rounds of a target and a draft over the rows of one cache."""

    def __init__(self, target: Target, draft: Draft, cache: KVCache, rule: str = "block") -> None:
        if rule not in RULES:
            raise ValueError(f"unknown acceptance rule {rule!r}: choose one of {', '.join(RULES)}")
        self.target, self.draft, self.cache, self.rule = target, draft, cache, rule

    def prefill(self, row: Row, start: int, end: int) -> None:
        """Cache prompt tokens [start, end) of a row, which holds exactly [0, start)."""
        began = time.perf_counter()
        tokens = torch.tensor([row.tokens[start:end]])
        positions = torch.arange(start, end)[None]
        rows = self.cache.rows([row.slot], end - start)
        taps = () if row.asleep else self.draft.info.taps
        _, hidden = self.target.forward(tokens, positions, None, rows, taps, need_logits=False)
        self.cache.advance(row.slot, end - start)
        if not row.asleep:
            self.draft.prefill(row, start, None if hidden is None else hidden[0])
        row.counters.prefill_ms += _ms_since(began)

    def round(self, rows: Sequence[Row]) -> list[Step]:
        """Commit at least one token for every row."""
        began = time.perf_counter()
        proposal = self._checked(self._propose(rows), rows)
        drafted = time.perf_counter()
        logits, hidden, offsets, best, errors = self._forward(rows, proposal)
        forwarded = time.perf_counter()
        nodes = 1 + proposal.width
        verdict = self._verify(rows, proposal, logits[:, :nodes], offsets[:, :nodes], best)
        steps = self._commit(rows, proposal, verdict, logits, offsets[:, :nodes].tolist(), errors)
        verified = time.perf_counter()
        self._teach(rows, proposal, steps, verdict, logits, hidden)
        ended = time.perf_counter()
        for row in rows:
            row.counters.draft_ms += 1e3 * (drafted - began + ended - verified)
            row.counters.forward_ms += 1e3 * (forwarded - drafted)
            row.counters.verify_ms += 1e3 * (verified - drafted)
            row.counters.decode_ms += 1e3 * (ended - began)
        return steps

    def _propose(self, rows: Sequence[Row]) -> Proposal:
        """The draft's proposal for the rows that are awake, nothing for the others."""
        awake = _awake(rows)
        if len(awake) == len(rows):
            return self.draft.propose(rows)
        if not awake:
            return Proposal.chains([[] for _ in rows])
        return self.draft.propose([rows[b] for b in awake]).spread(awake, len(rows))

    def _checked(self, proposal: Proposal, rows: Sequence[Row]) -> Proposal:
        """A proposal that is safe to run: ids in the vocabulary, finite probabilities.

        A row drafts only up to its first node whose probabilities hold NaN (design, law 6). The
        sampled nodes before it stay: dropping them for what came behind would bias the output.
        """
        if len(proposal.tokens) != len(rows):
            raise ValueError(
                f"{self.draft.info.name} proposed {len(proposal.tokens)} rows of {len(rows)}"
            )
        proposal = proposal.to(self.target.info.device)
        if not proposal.width:
            return proposal
        tokens, probs = proposal.tokens, proposal.draft_probs
        vocab = self.target.info.vocab_size
        lowest, highest = tokens.aminmax()
        if lowest < 0 or highest >= vocab:  # what is padding may be anything
            tokens = tokens.masked_fill(~proposal.real, 0)
            if bool(((tokens < 0) | (tokens >= vocab)).any()):
                raise ValueError(f"{self.draft.info.name} proposed a token outside 0..{vocab - 1}")
        elif probs is None:
            return proposal
        lengths = proposal.num_nodes
        if probs is not None:
            sane = probs.sum(dim=-1).isfinite()
            lengths = sane.to(torch.int64).cumprod(dim=1).sum(dim=1).minimum(lengths)
        return Proposal(tokens, proposal.parents, probs, lengths, proposal.window)

    def _forward(
        self, rows: Sequence[Row], proposal: Proposal
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, dict[int, str]]:
        """The target over root, nodes and window.

        Logits [B, T, V], taps, offsets [B, T], argmaxes at root and nodes [B, 1 + n], and errors:
        batch row -> what is wrong with its logits. Such a row's logits are zeroed.
        """
        drafted, offsets, mask = forward_layout(proposal)
        device = drafted.device
        roots = torch.tensor([[row.tokens[-1]] for row in rows], device=device)  # shape: [B, 1]
        tokens = torch.cat([roots, drafted], dim=1)  # shape: [B, T]
        last = torch.tensor([[len(row.tokens) - 1] for row in rows], device=device)
        positions = (last + offsets).clamp(max=self.target.info.context_length - 1)
        # a window lies behind the nodes' padding, which is then in the middle
        counts = None if proposal.window else [1 + n for n in proposal.num_nodes.tolist()]
        cache = self.cache.rows([row.slot for row in rows], tokens.shape[1], counts=counts)
        taps = self.draft.info.taps if _awake(rows) else ()
        logits, hidden = self.target.forward(tokens, positions, mask, cache, taps)
        assert logits is not None
        nodes = 1 + proposal.width
        best, fine = likeliest(logits[:, :nodes])
        errors = broken_rows(fine, positions[:, :nodes], proposal.real)
        for b in errors:
            logits[b], best[b] = 0, 0
        return logits, hidden, offsets, best, errors

    def _verify(
        self,
        rows: Sequence[Row],
        proposal: Proposal,
        logits: Tensor,
        offsets: Tensor,
        best: Tensor,
    ) -> Verdict:
        """Apply the acceptance rule; logits [B, 1 + n, V], offsets (depths) and argmaxes [B, 1 + n]."""
        adjusted = self._adjusted(rows, proposal, logits)
        if adjusted is not logits:
            logits, best = adjusted, likeliest(adjusted)[0]
        if proposal.draft_probs is None:
            return verify_chosen(proposal, _own_tokens(rows, logits, offsets, best))
        uniforms = torch.zeros(len(rows), proposal.width + 1, dtype=torch.float64)
        for b, (row, count) in enumerate(zip(rows, proposal.num_nodes.tolist(), strict=True)):
            numbers = row.random.take(count + 1)
            uniforms[b, :count] = torch.tensor(numbers[:-1], dtype=torch.float64)
            uniforms[b, -1] = numbers[-1]
        return self._judge(proposal, _probabilities(rows, logits), uniforms.to(logits.device))

    def _judge(self, proposal: Proposal, probs: Tensor, uniforms: Tensor) -> Verdict:
        """Chains by this decoder's rule, trees by theirs: which, each row's own proposal decides."""
        chains = chain_rows(proposal)
        if bool(chains.all()):
            return RULES[self.rule](proposal, probs, uniforms)
        out = verify_tree(proposal, probs, uniforms)
        if bool(chains.any()):
            index = chains.nonzero().squeeze(1)
            some = RULES[self.rule](proposal.select(index), probs[index], uniforms[index])
            out.num_accepted[index], out.path[index] = some.num_accepted, some.path
            out.next_token[index], out.is_bonus[index] = some.next_token, some.is_bonus
        return out

    def _adjusted(self, rows: Sequence[Row], proposal: Proposal, logits: Tensor) -> Tensor:
        """Penalties, bias and min_tokens at every position, with its drafted path as history."""
        if not any(row.history.active for row in rows):
            return logits
        out = []
        trees = zip(proposal.parents.tolist(), proposal.tokens.tolist(), strict=True)
        for row, (parents, tokens), mine in zip(rows, trees, logits, strict=True):
            paths = node_paths(parents, tokens) if row.history.active else []
            out.append(row.history.adjust(mine, paths))
        return torch.stack(out)

    def _commit(
        self,
        rows: Sequence[Row],
        proposal: Proposal,
        verdict: Verdict,
        logits: Tensor,
        depths: list[list[int]],
        errors: dict[int, str],
    ) -> list[Step]:
        """Cut at EOS, stops and limits; roll the cache back to what was committed; count."""
        ids, paths = proposal.tokens.tolist(), verdict.path.tolist()
        counts, lengths = verdict.num_accepted.tolist(), proposal.num_nodes.tolist()
        lasts, bonus = verdict.next_token.tolist(), verdict.is_bonus.tolist()
        above = proposal.parents.tolist()
        steps = []
        for b, row in enumerate(rows):
            if b in errors:
                steps.append(Step([], [], None, errors[b]))
                continue
            path = paths[b][: counts[b]]
            ending = "plain" if lengths[b] == 0 else "bonus" if bonus[b] else "recovered"
            tokens = [ids[b][node] for node in path] + [lasts[b]]
            origins = ["accepted"] * len(path) + [ending]
            kept = row.text.push(tokens)
            tokens, origins = tokens[:kept], origins[:kept]
            sources = [0, *(node + 1 for node in path)][:kept]  # forward row each came from
            self.cache.keep(row.slot, sources)
            row.tokens += tokens
            row.history.commit(tokens)
            if proposal.draft_probs is None and not row.params.greedy:
                row.random.take(kept)
            depth = max(depths[b][: lengths[b] + 1])
            row.counters.add_round(lengths[b], depth, min(len(path), kept), kept)
            logprobs = None
            if row.params.logprobs is not None:
                logprobs = token_logprobs(logits[b, sources], tokens, row.params.logprobs)
            drafted = Drafted(ids[b][: lengths[b]], above[b][: lengths[b]], path[:kept], row.budget)
            steps.append(Step(tokens, origins, logprobs, drafted=drafted))
        return steps

    def _teach(
        self,
        rows: Sequence[Row],
        proposal: Proposal,
        steps: Sequence[Step],
        verdict: Verdict,
        logits: Tensor,
        hidden: Tensor | None,
    ) -> None:
        """Hand the draft what the round showed."""
        nodes, awake = 1 + proposal.width, _awake(rows)
        if not awake:
            return
        counts = verdict.num_accepted.tolist()
        paths = [p[:n] for p, n in zip(verdict.path.tolist(), counts, strict=True)]
        if len(awake) < len(rows):
            index = torch.tensor(awake, device=logits.device)
            rows, steps = [rows[b] for b in awake], [steps[b] for b in awake]
            proposal, paths = proposal.select(index), [paths[b] for b in awake]
            hidden = None if hidden is None else hidden[index]
        self.draft.update(
            rows,
            Feedback(
                proposal=proposal,
                committed=[step.tokens for step in steps],
                paths=paths,
                hidden=None if hidden is None else hidden[:, :nodes],
                window_logits=None if proposal.window is None else logits[:, nodes:],
            ),
        )


def _awake(rows: Sequence[Row]) -> list[int]:
    """The rows that a draft is told of."""
    return [b for b, row in enumerate(rows) if not row.asleep]


def _own_tokens(rows: Sequence[Row], logits: Tensor, depths: Tensor, best: Tensor) -> Tensor:
    """The target's own token after the root and every node, [B, 1 + n]: argmax (`best`) or sample.

    The number that samples a position is the one plain decoding would use there: the first for
    the root's successor, the next one level down.
    """
    sampled = [b for b, row in enumerate(rows) if not row.params.greedy]
    if not sampled:
        return best
    deepest = int(depths.max()) + 1
    some = [rows[b] for b in sampled]
    numbers = torch.tensor([row.random.peek(deepest) for row in some], dtype=torch.float64)
    if len(sampled) == len(rows):
        uniforms = numbers.to(logits.device).gather(1, depths.to(logits.device))
        return draw(_probabilities(rows, logits), uniforms)
    index = torch.tensor(sampled, device=logits.device)
    uniforms = numbers.to(logits.device).gather(1, depths.to(logits.device)[index])
    out = best.clone()
    out[index] = draw(_probabilities(some, logits[index]), uniforms)
    return out


def _probabilities(rows: Sequence[Row], logits: Tensor) -> Tensor:
    """Target probabilities [B, 1 + n, V]."""
    return to_probs_rows(logits, [row.params for row in rows])


def _ms_since(began: float) -> float:
    return 1e3 * (time.perf_counter() - began)
