"""Closed forms of speculative decoding, in units of one plain forward of the target.

With acceptance `u_i` at position i (unconditional: position i accepted / rounds) a round of N
drafted tokens commits E = 1 + u_1 + ... + u_N tokens on average. A constant acceptance alpha is
the case u_i = alpha^i, whose sum is (1 - alpha^(N+1)) / (1 - alpha) (Leviathan et al. 2023,
equation 1). The round takes `verify + N * cost_ratio + overhead` (their theorem 3.8 has
`verify = 1` and no overhead).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

MAX_DRAFT_TOKENS = 64
TOLERANCE = 1e-12  # two lengths whose time differs by less are a tie, and the shorter one wins

Acceptance = float | Sequence[float]
Verify = Callable[[int], float]


def position_rates(acceptance: Acceptance, num_draft_tokens: int) -> list[float]:
    """Unconditional acceptance of positions 1..num_draft_tokens.

    A number is alpha, constant in depth. A sequence holds the unconditional rates measured
    (`acceptance_per_position` of vLLM and of `metrics.Counters`); past its end the last
    conditional rate goes on. Raises ValueError for rates outside 0..1 or that rise with depth.
    """
    if num_draft_tokens < 0:
        raise ValueError(f"num_draft_tokens is {num_draft_tokens}: 0 or more")
    if isinstance(acceptance, (int, float)):
        check_rate("alpha", acceptance)
        return [float(acceptance) ** i for i in range(1, num_draft_tokens + 1)]
    rates = [float(rate) for rate in acceptance]
    if not rates:
        raise ValueError("acceptance per position is empty")
    before = 1.0
    for i, rate in enumerate(rates, start=1):
        check_rate(f"acceptance at position {i}", rate)
        if rate > before + TOLERANCE:
            raise ValueError(
                f"acceptance at position {i} is {rate:g}, above {before:g} before it: "
                "give unconditional rates (position accepted / rounds)"
            )
        before = rate
    start = rates[-2] if len(rates) > 1 else 1.0
    ratio = rates[-1] / start if start > 0 else 0.0
    while len(rates) < num_draft_tokens:
        rates.append(rates[-1] * ratio)
    return rates[:num_draft_tokens]


def check_rate(name: str, value: float) -> None:
    """Raise ValueError, naming the value, unless it is a number in 0..1."""
    if not (math.isfinite(value) and 0.0 <= value <= 1.0):
        raise ValueError(f"{name} is {value}: it lies in 0..1")


def expected_tokens(acceptance: Acceptance, num_draft_tokens: int) -> float:
    """Tokens committed per target forward, the recovered or bonus token included."""
    return 1.0 + math.fsum(position_rates(acceptance, num_draft_tokens))


def alpha_of(expected: float, num_draft_tokens: int) -> float:
    """The constant alpha at which a chain of N commits `expected` tokens (inverse by bisection).

    Raises ValueError unless 1 <= expected <= N + 1.
    """
    if not 1.0 <= expected <= num_draft_tokens + 1:
        raise ValueError(
            f"{expected:g} tokens a forward from {num_draft_tokens} drafted: "
            f"it lies in 1..{num_draft_tokens + 1}"
        )
    return _bisect(lambda alpha: expected_tokens(alpha, num_draft_tokens) - expected)


def round_time(
    num_draft_tokens: int,
    cost_ratio: float,
    overhead: float = 0.0,
    verify: Verify | None = None,
) -> float:
    """Time of one round, in plain forwards.

    cost_ratio: one draft step / one target forward of one token
    overhead:   what a round costs beside drafting and the forward, in plain forwards; a round
                without drafted tokens is a plain forward and has none
    verify:     drafted tokens -> time of the verification forward, in plain forwards; free (1)
                without it
    """
    for name, value in (("cost ratio", cost_ratio), ("overhead", overhead)):
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} is {value}: 0 or more")
    if num_draft_tokens == 0:
        return 1.0
    check = 1.0 if verify is None else verify(num_draft_tokens)
    return check + num_draft_tokens * cost_ratio + overhead


def time_per_token(
    acceptance: Acceptance,
    num_draft_tokens: int,
    cost_ratio: float,
    overhead: float = 0.0,
    verify: Verify | None = None,
) -> float:
    """Time per committed token, in plain forwards: below 1 speculation pays."""
    spent = round_time(num_draft_tokens, cost_ratio, overhead, verify)
    return spent / expected_tokens(acceptance, num_draft_tokens)


def speedup(
    acceptance: Acceptance,
    num_draft_tokens: int,
    cost_ratio: float,
    overhead: float = 0.0,
    verify: Verify | None = None,
) -> float:
    """Plain time per token / speculative time per token."""
    return 1.0 / time_per_token(acceptance, num_draft_tokens, cost_ratio, overhead, verify)


def best_num_draft_tokens(
    acceptance: Acceptance,
    cost_ratio: float,
    max_draft: int = MAX_DRAFT_TOKENS,
    overhead: float = 0.0,
    verify: Verify | None = None,
) -> int:
    """The N in 0..max_draft of least time per token; the shorter of two equal ones; 0 means off."""
    if max_draft < 0:
        raise ValueError(f"max_draft is {max_draft}: 0 or more")
    best, least = 0, 1.0
    for n in range(1, max_draft + 1):
        spent = time_per_token(acceptance, n, cost_ratio, overhead, verify)
        if spent < least - TOLERANCE:
            best, least = n, spent
    return best


def break_even_alpha(
    num_draft_tokens: int,
    cost_ratio: float,
    overhead: float = 0.0,
    verify: Verify | None = None,
) -> float | None:
    """The constant alpha at which a chain of N costs as much as plain decoding.

    None when even alpha = 1 does not pay. 0.0 when drafting is free.
    """
    if num_draft_tokens < 1:
        raise ValueError(f"num_draft_tokens is {num_draft_tokens}: 1 or more")
    spent = round_time(num_draft_tokens, cost_ratio, overhead, verify)
    if spent > num_draft_tokens + 1:
        return None
    if spent <= 1.0:
        return 0.0
    return _bisect(lambda alpha: expected_tokens(alpha, num_draft_tokens) - spent)


def _bisect(gap: Callable[[float], float]) -> float:
    """The root in 0..1 of an increasing function."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if gap(middle) < 0 else (low, middle)
    return (low + high) / 2
