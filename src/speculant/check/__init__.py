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
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..decode import RULES
from ..drafts import load_draft
from ..drafts.base import Draft
from ..engine import Engine, generate_many
from ..request import prompt_ids
from ..sampling import SamplingParams, draw
from ..target.base import Target
from ..tree import is_chain
from ..verify import verify_chosen, verify_tree
from .contexts import LENGTH, PROMPTS, TOP_K, Contexts, choose_prompt, plain_logits
from .report import Check, Report, chi_square

__all__ = ["Check", "Report", "run_checks"]

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Difference in probabilities, and in keys and values relative to the largest, that rounding
explains; a wrong mask or a wrong roll-back differs by tenths."""
NEAR_TIE = {torch.float64: 1e-9, torch.float32: 1e-3}
"""Logit gap of a greedy near-tie that may flip between forwards of one row and of many."""
COARSE_TOLERANCE, COARSE_TIE = 0.05, 0.5  # bfloat16, float16


def run_checks(
    target: Target,
    draft: Draft,
    samples: int = 50_000,
    seed: int = 0,
    rule: str = "block",
    depth: int | None = None,
    progress: Callable[[str], None] = lambda stage: None,
) -> Report:
    """Run every check.

    depth: tokens to draft a round in the greedy and loop checks; progress: told what runs now.
    """
    if samples < 1000:
        raise ValueError(f"samples is {samples}: a chi-square needs at least 1000")
    progress("looking for a context where the draft proposes")
    prompt, drafting = choose_prompt(target, draft)
    contexts = Contexts(target, draft, prompt)
    checks = []
    progress("greedy decoding, plain and speculative")
    checks.append(check_greedy(target, draft, rule, depth))
    progress("one tree forward against plain forwards")
    checks.append(check_forward(target, contexts))
    progress(f"{samples} samples of proposals and rule")
    checks += check_distribution(contexts, samples, seed, rule)
    progress("requests through the whole engine")
    checks += check_loop(target, draft, contexts, seed, rule, depth)
    progress("replaying the cache after every round")
    checks.append(check_rollback(target, draft, seed, rule, depth))
    silent = not drafting and draft.info.max_nodes > 0
    return Report(target.info.name, draft.info.name, checks, silent)


def check_greedy(target: Target, draft: Draft, rule: str, depth: int | None) -> Check:
    """Temperature 0: the same tokens as plain decoding, batched, over all prompts."""
    params = SamplingParams(max_tokens=48, temperature=0.0)
    options: dict[str, Any] = {"rule": rule, "num_draft_tokens": depth}
    plain = generate_many(target, load_draft("none", target), PROMPTS, params)
    ours = generate_many(target, draft, PROMPTS, params, **options)
    gaps = []
    for prompt, a, b in zip(PROMPTS, plain, ours, strict=True):
        if a.token_ids != b.token_ids:
            gaps.append(gap(target, prompt_ids(target, prompt), a.token_ids, b.token_ids))
    allowed = NEAR_TIE.get(target.info.dtype, COARSE_TIE)
    same, tokens = len(PROMPTS) - len(gaps), sum(len(a.token_ids) for a in plain)
    detail = f"{same} of {len(PROMPTS)} prompts identical, {tokens} tokens"
    if gaps:
        detail += f"; largest logit gap at a first difference {max(gaps):.2g} (allowed {allowed:g})"
    numbers = {"identical": same, "prompts": len(PROMPTS), "tokens": tokens, "logit_gaps": gaps}
    return Check("greedy", max(gaps, default=0.0) <= allowed, detail, numbers)


def gap(target: Target, prompt: list[int], plain: list[int], ours: list[int]) -> float:
    """How much less likely than the plain token ours was, in logits, at the first difference."""
    pairs = enumerate(zip(plain, ours, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), None)
    if at is None:  # one is longer than the other: no rounding explains that
        return math.inf
    logits = plain_logits(target, [prompt + plain[:at]], 1)[0, -1]
    return abs(float(logits[plain[at]] - logits[ours[at]]))


def check_forward(target: Target, contexts: Contexts) -> Check:
    """The tree forward against plain forwards: largest difference in probability."""
    seen = contexts.probs(contexts.seen_logits)
    worst = float((seen - contexts.truth_full).abs().max())
    allowed = TOLERANCE.get(target.info.dtype, COARSE_TOLERANCE)
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
    elif is_chain(proposal.parents):
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
        chi_square(f"{name} 1st", seen_first, first),
        chi_square(f"{name} 2nd+3rd", seen_joint, joint.reshape(-1)),
    ]


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
    scale = TOLERANCE.get(target.info.dtype, COARSE_TOLERANCE)
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
