"""Is a server exact? Its answers against the target's own, which this machine computes.

1. greedy:    at temperature 0 the tokens of plain decoding, over several prompts; and those of a second
              server without speculation, where one is given
2. sampling:  many samples of three tokens behind one prompt: at each position, behind every context
              that occurred often enough, a chi-square against the target's own distribution

A server verifies its first round behind the prompt's prefill, so that the first token is right where
the second and third are not, if its rejection sampler is wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..drafts import load_draft
from ..engine import generate_many
from ..request import prompt_ids
from ..sampling import SamplingParams, to_probs
from ..target.base import Target
from . import COARSE_TIE, NEAR_TIE, gap
from .client import Endpoint
from .contexts import LENGTH, PROMPTS, SURE, plain_logits
from .report import SIGNIFICANCE, Check, Report

GREEDY_TOKENS = 48
AT_ONCE = 50  # completions a request
OFTEN = 40  # samples behind a context, for it to be tested
CELL = 5.0  # least expected count of a cell
ORDINALS = ("1st", "2nd", "3rd")


def run_endpoint_checks(
    target: Target,
    endpoint: Endpoint,
    baseline: Endpoint | None = None,
    samples: int = 1500,
    temperature: float = 1.0,
    seed: int = 0,
    progress: Callable[[str], None] = lambda stage: None,
) -> Report:
    """Run every check.

    baseline: the same model on a server without speculation
    samples:  of three tokens
    """
    if samples < 500:
        raise ValueError(f"samples is {samples}: a chi-square of an endpoint needs at least 500")
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}: samples need one above 0")
    before = endpoint.num_drafts()
    progress("greedy decoding, there and here")
    checks = [check_greedy(target, endpoint)]
    if baseline is not None:
        progress("greedy decoding, with speculation and without")
        checks.append(check_baseline(target, endpoint, baseline))
    prompt = unsure_prompt(target, temperature)
    drawn: list[list[int]] = []
    for begin in range(0, samples, AT_ONCE):
        progress(f"{begin} of {samples} samples")
        count = min(AT_ONCE, samples - begin)
        drawn += endpoint.complete(prompt, LENGTH, temperature, count, seed + begin)
    progress("the target's own distribution")
    checks += check_samples(target, prompt, drawn, temperature)
    after = endpoint.num_drafts()
    drafted = None if before is None or after is None else after - before
    name = f"the server at {endpoint.url}"
    return Report(target.info.name, name, checks, silent=drafted == 0)


def check_greedy(target: Target, endpoint: Endpoint) -> Check:
    """Temperature 0 against plain decoding here; a near-tie of the logits may fall either way."""
    params = SamplingParams(max_tokens=GREEDY_TOKENS, temperature=0.0)
    plain = generate_many(target, load_draft("none", target), PROMPTS, params)
    gaps = []
    for prompt, mine in zip(PROMPTS, plain, strict=True):
        ids = prompt_ids(target, prompt)
        theirs = stripped(endpoint.complete(ids, GREEDY_TOKENS, 0.0)[0], target)
        ours = stripped(mine.token_ids, target)
        if theirs != ours:
            gaps.append(gap(target, ids, ours, theirs))
    allowed = NEAR_TIE.get(target.info.dtype, COARSE_TIE)
    same = len(PROMPTS) - len(gaps)
    detail = f"{same} of {len(PROMPTS)} prompts as plain decoding here"
    if gaps:
        detail += f"; largest logit gap at a first difference {max(gaps):.2g} (allowed {allowed:g})"
    numbers = {"identical": same, "prompts": len(PROMPTS), "logit_gaps": gaps}
    return Check("greedy", max(gaps, default=0.0) <= allowed, detail, numbers)


def stripped(tokens: list[int], target: Target) -> list[int]:
    """Tokens without the EOS behind them, which one side may report and the other not."""
    return tokens[:-1] if tokens and tokens[-1] in target.tokenizer.eos_ids else tokens


def check_baseline(target: Target, endpoint: Endpoint, baseline: Endpoint) -> Check:
    """Temperature 0 on both servers: the same tokens."""
    same = 0
    for prompt in PROMPTS:
        ids = prompt_ids(target, prompt)
        pair = [server.complete(ids, GREEDY_TOKENS, 0.0)[0] for server in (endpoint, baseline)]
        same += pair[0] == pair[1]
    detail = f"{same} of {len(PROMPTS)} prompts as {baseline.url}"
    return Check("baseline", same == len(PROMPTS), detail, {"identical": same})


def unsure_prompt(target: Target, temperature: float) -> list[int]:
    """The prompt whose next token the target is least sure of, after up to 16 greedy tokens."""
    greedy = SamplingParams(max_tokens=16, temperature=0.0)
    answers = generate_many(target, load_draft("none", target), PROMPTS, greedy)
    best: tuple[float, list[int]] = (2.0, [])
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        for taken in range(0, len(answer.token_ids), 4):
            ids = prompt_ids(target, prompt) + answer.token_ids[:taken]
            sure = float(probabilities(target, [ids], temperature)[0].max())
            best = min(best, (sure, ids))
            if sure < SURE / 3:
                return ids
    return best[1]


def check_samples(
    target: Target, prompt: list[int], drawn: Sequence[Sequence[int]], temperature: float
) -> list[Check]:
    """A chi-square for every position, summed over its contexts."""
    checks = []
    for position in range(LENGTH):
        seen: dict[tuple[int, ...], Counter[int]] = {}
        for tokens in drawn:
            if len(tokens) > position:
                behind = tuple(tokens[:position])
                seen.setdefault(behind, Counter())[tokens[position]] += 1
        often = [context for context, counts in seen.items() if counts.total() >= OFTEN]
        statistic, freedom, samples = 0.0, 0, 0
        if often:
            probs = probabilities(target, [prompt + list(c) for c in often], temperature)
            for context, row in zip(often, probs, strict=True):
                part, cells = pearson(seen[context], row)
                statistic, freedom = statistic + part, freedom + cells
                samples += seen[context].total()
        checks.append(
            verdict(f"{ORDINALS[position]} token", statistic, freedom, len(often), samples)
        )
    return checks


def probabilities(target: Target, sequences: Sequence[list[int]], temperature: float) -> Tensor:
    """What is sampled from behind sequences of one length, [N, V] float64."""
    logits = plain_logits(target, sequences, 1)[:, -1]
    return to_probs(logits.double(), SamplingParams(temperature=temperature))


def pearson(counts: Counter[int], probs: Tensor) -> tuple[float, int]:
    """Pearson's statistic of counts against probabilities [V], and its degrees of freedom.

    Cells that expect less than CELL are pooled, and the pool joins the smallest other one if it expects
    too little itself. No freedom is left where the target is all but sure.
    """
    total = counts.total()
    kept = (probs * total >= CELL).nonzero().squeeze(1).tolist()
    kept.sort(key=lambda token: -float(probs[token]))
    expected = [float(probs[token]) * total for token in kept]
    observed = [float(counts[token]) for token in kept]
    rest = total - sum(expected)
    other = total - sum(observed)
    if rest >= CELL or not kept:
        expected.append(rest)
        observed.append(other)
    else:
        expected[-1] += rest
        observed[-1] += other
    statistic = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
    return statistic, len(expected) - 1


def verdict(name: str, statistic: float, freedom: int, contexts: int, samples: int) -> Check:
    """The check of one position."""
    if not freedom:
        detail = f"nothing to test: no context with {OFTEN} samples whose next token is open"
        return Check(name, True, detail, {"degrees_of_freedom": 0, "samples": samples})
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    p_value = float(torch.special.gammaincc(half[0], half[1]))
    detail = (
        f"chi-square {statistic:.1f}, {freedom} degrees of freedom, p = {p_value:.3g} ({samples} "
        f"samples behind {contexts} contexts; fails below {SIGNIFICANCE:g})"
    )
    numbers = {
        "chi_square": statistic, "degrees_of_freedom": freedom, "p_value": p_value,
        "samples": samples, "contexts": contexts,
    }  # fmt: skip
    return Check(name, p_value >= SIGNIFICANCE, detail, numbers)
