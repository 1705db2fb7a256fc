"""Latency model: acceptance and cost in, expected tokens and speed-up out. No torch."""

from .families import FAMILIES, DraftPlan, dense_shape, draft_shape, plan
from .formulas import (
    MAX_DRAFT_TOKENS,
    Acceptance,
    alpha_of,
    best_num_draft_tokens,
    break_even_alpha,
    expected_tokens,
    position_rates,
    round_time,
    speedup,
    time_per_token,
)
from .latency import (
    Estimate,
    Measured,
    Roofline,
    Times,
    as_measured,
    best_chain,
    best_of,
    break_even,
    estimate,
    stops_paying,
)
from .machine import Engine, Machine, ModelShape, forward_ms
from .profile import Profile, read_profile, write_profile
from .trees import TreeShape, best_tree

__all__ = [
    "FAMILIES",
    "MAX_DRAFT_TOKENS",
    "Acceptance",
    "DraftPlan",
    "Engine",
    "Estimate",
    "Machine",
    "Measured",
    "ModelShape",
    "Profile",
    "Roofline",
    "Times",
    "TreeShape",
    "alpha_of",
    "as_measured",
    "best_chain",
    "best_num_draft_tokens",
    "best_of",
    "best_tree",
    "break_even",
    "break_even_alpha",
    "dense_shape",
    "draft_shape",
    "estimate",
    "expected_tokens",
    "forward_ms",
    "plan",
    "position_rates",
    "read_profile",
    "round_time",
    "speedup",
    "stops_paying",
    "time_per_token",
    "write_profile",
]
