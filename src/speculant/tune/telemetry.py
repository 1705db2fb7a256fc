"""Readers of what servers report about acceptance: vLLM's and our `/metrics`, SGLang's meta_info."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

COUNTER = re.compile(
    r"^(?:\w+:)?spec_decode_(num_drafts|num_draft_tokens|num_accepted_tokens|"
    r"num_accepted_tokens_per_pos)(?:_total)?(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)(?:\s+\d+)?$"
)
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Counted:
    """Raw acceptance counters of one draft on one task ("" where the server has no such label).

    accepted_per_pos: rounds that accepted position i + 1; empty where only the total is known
    """

    draft: str
    task: str
    num_drafts: float
    num_draft_tokens: float
    num_accepted_tokens: float
    accepted_per_pos: tuple[float, ...]

    @property
    def mean_acceptance_length(self) -> float:
        """Committed tokens per round that drafted."""
        return 1 + self.num_accepted_tokens / self.num_drafts

    @property
    def per_position(self) -> list[float]:
        """Unconditional acceptance per position; counters may be scraped a round apart."""
        rates: list[float] = []
        for count in self.accepted_per_pos:
            rates.append(min(count / self.num_drafts, rates[-1] if rates else 1.0))
        return rates


def read_prometheus(text: str, name: str) -> list[Counted]:
    """Speculation counters of a Prometheus text, by the labels `draft` and `task` where present.

    Raises ValueError when there are none, when no round drafted, or for NaN and negative values.
    """
    sums: dict[tuple[str, str], dict[str, float]] = {}
    places: dict[tuple[str, str], dict[int, float]] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        found = COUNTER.match(line.strip())
        if found is None:
            continue
        labels = dict(LABEL.findall(found["labels"] or ""))
        key = (labels.get("draft", ""), labels.get("task", ""))
        value = _value(found["value"], f"{name}: line {number}")
        counts = sums.setdefault(key, {})
        if found[1] == "num_accepted_tokens_per_pos":
            at = _position(labels.get("position"), f"{name}: line {number}")
            spots = places.setdefault(key, {})
            spots[at] = spots.get(at, 0.0) + value
        else:
            counts[found[1]] = counts.get(found[1], 0.0) + value
    if not sums:
        raise ValueError(
            f"{name} has no spec_decode counters (vllm:spec_decode_num_drafts_total and the like): "
            "was the server speculating?"
        )
    out = []
    for key, counts in sorted(sums.items()):
        drafts = counts.get("num_drafts", 0.0)
        if drafts <= 0:
            continue
        spots = places.get(key, {})
        positions = tuple(spots.get(i, 0.0) for i in range(max(spots, default=-1) + 1))
        accepted = counts.get("num_accepted_tokens", sum(positions))
        drafted = counts.get("num_draft_tokens", 0.0)
        out.append(Counted(*key, drafts, drafted, accepted, positions))
    if not out:
        raise ValueError(f"{name}: num_drafts is 0: the server has not drafted yet")
    return out


def read_meta_info(text: str, name: str) -> Counted:
    """SGLang's meta_info of one answer or a list of them, summed.

    Each is an object with `spec_verify_ct` and `completion_tokens`, as itself or under the key
    `meta_info`; `spec_accept_histogram` (or `spec_correct_drafts_histogram`) gives positions.
    """
    try:
        parsed = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{name}: line {error.lineno}: not JSON: {error.msg}") from None
    entries = parsed if isinstance(parsed, list) else [parsed]
    rounds = tokens = drafted = 0.0
    histogram: list[float] = []
    for i, entry in enumerate(entries):
        info = entry.get("meta_info", entry) if isinstance(entry, dict) else None
        if not isinstance(info, dict) or not info.get("spec_verify_ct"):
            continue
        where = f"{name}: entry {i}"
        rounds += _value(info["spec_verify_ct"], where)
        tokens += _value(info.get("completion_tokens"), where)
        drafted += _value(info.get("spec_draft_token_num", 0), where)
        counts = (
            info.get("spec_accept_histogram") or info.get("spec_correct_drafts_histogram") or []
        )
        histogram += [0.0] * (len(counts) - len(histogram))
        for at, count in enumerate(counts):
            histogram[at] += _value(count, where)
    if rounds <= 0:
        raise ValueError(f"{name} has no entry with spec_verify_ct: was the server speculating?")
    if sum(histogram) > 0:
        positions = tuple(sum(histogram[at:]) for at in range(1, len(histogram)))
        return Counted("", "", sum(histogram), drafted, sum(positions), positions)
    # the first token of an answer comes from the prompt's forward, not from a round
    return Counted("", "", rounds, drafted, max(0.0, tokens - len(entries) - rounds), ())


def _value(value: Any, where: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{where}: {value!r} is no number") from None
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"{where}: {value!r}: counters are 0 or more")
    return number


def _position(value: str | None, where: str) -> int:
    if value is None or not value.isdigit() or int(value) > 255:
        raise ValueError(f"{where}: position is {value!r}: a whole number was expected")
    return int(value)


def summed(counts: Sequence[Counted]) -> Counted:
    """Counters of several tasks together."""
    longest = max(len(c.accepted_per_pos) for c in counts)
    positions = tuple(
        sum(c.accepted_per_pos[at] for c in counts if at < len(c.accepted_per_pos))
        for at in range(longest)
    )
    totals = (
        sum(c.num_drafts for c in counts),
        sum(c.num_draft_tokens for c in counts),
        sum(c.num_accepted_tokens for c in counts),
    )
    return Counted(counts[0].draft, "", *totals, positions)
