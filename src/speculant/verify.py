"""Verification: which drafted tokens stand, and the one token that follows them.

Every rule is a pure function of probabilities and uniforms, batched over rows, and keeps the
target's distribution exactly (docs/theory.md has the proofs, tests/test_verify.py enumerates
them). Throughout:

target_probs  [B, 1 + n, V]  the target after the root (row 0) and after each node (row i + 1)
draft_probs   [B, n, V]      what node i was drawn from
uniforms      [B, n + 1]     in [0, 1); column i decides node i, column n draws the last token
"""

from __future__ import annotations

import torch
from torch import Tensor

from .proposal import Proposal, Verdict
from .sampling import draw


def verify_chosen(proposal: Proposal, target_tokens: Tensor) -> Verdict:
    """Chosen nodes (design, law 2): follow the target's own token while it is a child.

    target_tokens: [B, 1 + n] int64, the target's token after the root and after every node: its
    argmax, or a sample from target_probs. Greedy verification is this rule with the argmax.
    """
    tokens, above = proposal.tokens, proposal.parents + 1  # shape: [B, n]
    rows, n = tokens.shape
    if n == 0:  # plain decoding, every round: as few operators as it takes
        whole = torch.ones(rows, dtype=torch.bool, device=tokens.device)
        return Verdict(proposal.num_nodes, tokens, target_tokens[:, 0], whole)
    if proposal.is_chain:
        match = (tokens == target_tokens[:, :n]) & proposal.real
        accepted = match.to(torch.int64).cumprod(dim=1).sum(dim=1)  # shape: [B]
        order = torch.arange(n, device=tokens.device)
        path = torch.where(order < accepted[:, None], order, -1)
        last = target_tokens.gather(1, accepted[:, None]).squeeze(1)
        return Verdict(accepted, path, last, accepted == proposal.num_nodes)
    node = torch.zeros(rows, 1, dtype=torch.int64, device=tokens.device)
    steps: list[Tensor] = []
    while True:
        wanted = target_tokens.gather(1, node)  # shape: [B, 1]
        children = (above == node) & proposal.real
        match = children & (tokens == wanted)
        found = match.any(dim=1)
        if not bool(found.any()):
            break
        step = match.to(torch.int8).argmax(dim=1)
        steps.append(torch.where(found, step, -1))
        node = torch.where(found[:, None], step[:, None] + 1, node)
    return _verdict(steps, wanted.squeeze(1), ~children.any(dim=1), rows, tokens.device)


def verify_chain(proposal: Proposal, target_probs: Tensor, uniforms: Tensor) -> Verdict:
    """A sampled chain, token by token (Leviathan et al. 2023, algorithm 1).

    Accept x with min(1, target_probs[x] / draft_probs[x]); the first rejection is replaced by a
    draw from the residual; when all stand, a bonus token comes from the target.
    """
    draft_probs, n = _drawn(proposal), proposal.width
    ratio = _ratios(proposal, target_probs, draft_probs)  # shape: [B, n]
    accept = (uniforms[:, :n] < ratio) & proposal.real
    accepted = accept.to(torch.int64).cumprod(dim=1).sum(dim=1)  # shape: [B]
    return _chain_verdict(accepted, torch.ones_like(accepted), proposal, target_probs, uniforms)


def verify_block(proposal: Proposal, target_probs: Tensor, uniforms: Tensor) -> Verdict:
    """A sampled chain, jointly (block verification, Sun et al. 2024, arXiv 2403.10444, alg. 2).

    With w_0 = 1 and w_i = min(1, w_{i-1} target(x_i) / draft(x_i)), prefix i stands with
    h_i = s_i / (s_i + 1 - w_i), s_i = sum over x of (w_i target(x) - draft(x))+, and h_n = w_n;
    the longest prefix that stands is kept, and what follows comes from the residual
    (w_i target - draft)+. Never accepts fewer tokens in expectation than the token rule.
    """
    draft_probs, lengths = _drawn(proposal), proposal.num_nodes
    n = proposal.width
    ratio = _ratios(proposal, target_probs, draft_probs)
    weights = [torch.ones_like(uniforms[:, 0])]  # w_0 .. w_n, each [B]
    for i in range(n):
        weights.append((weights[-1] * ratio[:, i]).clamp(max=1.0))
    accepted = torch.zeros_like(lengths)
    weight = torch.ones_like(uniforms[:, 0])
    for i in range(1, n + 1):
        stands = weights[i]  # h_n = w_n, where row i is the row's last
        if i < n:
            spare = (weights[i][:, None] * target_probs[:, i] - draft_probs[:, i]).clamp(min=0)
            mass = spare.sum(dim=1)
            # mass = 0 with w = 1: the two distributions agree here, so the prefix stands
            inner = torch.where(
                mass > 0, mass / (mass + 1 - weights[i]), (weights[i] == 1).to(mass)
            )
            stands = torch.where(lengths == i, stands, inner)
        ok = (uniforms[:, i - 1] < stands) & (lengths >= i)
        accepted = torch.where(ok, i, accepted)
        weight = torch.where(ok, weights[i], weight)
    return _chain_verdict(accepted, weight, proposal, target_probs, uniforms)


def verify_tree(proposal: Proposal, target_probs: Tensor, uniforms: Tensor) -> Verdict:
    """A sampled tree: siblings drawn without replacement, tried in order (design, law 2).

    At a node with residual r (at first the target) and children from p: accept child x with
    min(1, r(x) / p(x)) and descend; else r <- norm((r - p)+), take x out of p, renormalise, next.
    A chain is a tree with one branch: there this is the token rule.
    """
    draft_probs, (rows, n) = _drawn(proposal), proposal.tokens.shape
    above = proposal.parents + 1
    node = torch.zeros_like(proposal.num_nodes)
    residuals = target_probs[:, 0].clone()  # r, [B, V]
    remaining = torch.zeros_like(residuals)  # p, [B, V]
    tried = torch.zeros_like(node, dtype=torch.bool)  # has a child of the current node been tried?
    path = torch.full_like(proposal.tokens, -1)
    for i in range(n):  # parents come before children: one pass meets every sibling in order
        here = ((above[:, i] == node) & (i < proposal.num_nodes)).nonzero().squeeze(1)
        if not len(here):
            continue
        x = proposal.tokens[here, i, None]
        r = residuals[here]
        p = torch.where(tried[here, None], remaining[here], draft_probs[here, i])
        chance = _positive(p.gather(1, x).squeeze(1), x)
        accept = uniforms[here, i] * chance < r.gather(1, x).squeeze(1)
        node[here] = torch.where(accept, i + 1, node[here])
        path[here, i] = torch.where(accept, i, -1)
        residuals[here] = torch.where(accept[:, None], target_probs[here, i + 1], residual(r, p))
        remaining[here] = _normalise(p.scatter(1, x, 0.0))
        tried[here] = ~accept
    steps = list(_left_aligned(path).unbind(1))
    last = draw(residuals, uniforms[:, n])
    return _verdict(steps, last, ~tried, rows, proposal.tokens.device)


def residual(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """norm((target - draft)+), [..., V]: what a rejected token is replaced from.

    Where no mass is left the two agree up to rounding, a rejection was rounding too, and the
    target itself is returned.
    """
    spare = (target_probs - draft_probs).clamp(min=0)
    mass = spare.sum(dim=-1, keepdim=True)
    return torch.where(mass > 0, spare / mass, target_probs)


def _drawn(proposal: Proposal) -> Tensor:
    if proposal.draft_probs is None:
        raise ValueError("this rule needs draft_probs; chosen nodes go through verify_chosen")
    return proposal.draft_probs


def _positive(chance: Tensor, tokens: Tensor) -> Tensor:
    """draft_probs of drafted tokens, checked (design, law 6)."""
    if not bool((chance > 0).all()):
        bad = int(tokens.reshape(-1)[(~(chance > 0)).reshape(-1)][0])
        raise ValueError(f"draft_probs of the drafted token {bad} is 0 or NaN: it was not drawn so")
    return chance


def _ratios(proposal: Proposal, target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """target(x) / draft(x) at every drafted token, [B, n]; 0 at padding."""
    x = proposal.tokens[:, :, None]
    real = proposal.real
    draft = draft_probs.gather(2, x).squeeze(2)
    draft = _positive(draft.masked_fill(~real, 1.0), proposal.tokens)
    target = target_probs[:, :-1].gather(2, x).squeeze(2)
    return (target / draft).masked_fill(~real, 0.0)


def _chain_verdict(
    accepted: Tensor, weight: Tensor, proposal: Proposal, target_probs: Tensor, uniforms: Tensor
) -> Verdict:
    """Accepted prefix lengths [B] of chains -> the verdict, with the last token drawn.

    weight: [B], what scales the target in the residual (1 in the token rule, w_i in the block's).
    """
    draft_probs, rows = _drawn(proposal), torch.arange(len(accepted), device=accepted.device)
    n, whole = proposal.width, accepted == proposal.num_nodes
    target = target_probs[rows, accepted]  # shape: [B, V]
    if n:
        drafted = draft_probs[rows, accepted.clamp(max=n - 1)]
        rejected = residual(weight[:, None] * target, drafted)
        target = torch.where(whole[:, None], target, rejected)
    order = torch.arange(n, device=accepted.device)
    steps = list(torch.where(order < accepted[:, None], order, -1).unbind(1))
    return _verdict(steps, draw(target, uniforms[:, n]), whole, len(rows), accepted.device)


def _normalise(probs: Tensor) -> Tensor:
    mass = probs.sum(dim=-1, keepdim=True)
    return torch.where(mass > 0, probs / mass, torch.zeros_like(probs))


def _left_aligned(path: Tensor) -> Tensor:
    """Accepted nodes in ascending order first, -1 after: (-1, 1, -1, 3) -> (1, 3, -1, -1)."""
    order = (path < 0).to(torch.int8).argsort(dim=1, stable=True)
    return path.gather(1, order)


def _verdict(
    steps: list[Tensor], last: Tensor, is_bonus: Tensor, rows: int, device: torch.device
) -> Verdict:
    empty = torch.zeros(rows, 0, dtype=torch.int64, device=device)
    path = torch.stack(steps, dim=1) if steps else empty
    return Verdict((path >= 0).sum(dim=1), path, last, is_bonus)
