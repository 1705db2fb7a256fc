"""Predicted against published speed-ups, for records of published measurements."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..cost import Engine, Roofline, draft_shape, estimate, round_time
from .facts import engine_for
from .records import Inputs, read_inputs
from .workload import read_text

CONTEXT = 1000  # cached tokens assumed behind a sequence: records do not say
ANSWERS = ("speedup", "throughput_gain")


@dataclass(frozen=True)
class Prediction:
    """One record: what was predicted, from what, and what was published (None: nothing)."""

    id: str
    predicted: float
    published: float | None
    inputs: Inputs
    method: str
    source: str

    @property
    def error(self) -> float | None:
        """Relative error against the published speed-up."""
        if self.published is None:
            return None
        return abs(self.predicted - self.published) / self.published

    @property
    def agrees(self) -> bool | None:
        """Whether prediction and publication agree on whether speculation pays."""
        return None if self.published is None else (self.predicted > 1) == (self.published > 1)


def predict_speedup(inputs: Inputs, engine: Engine | None = None) -> float:
    """The model's speed-up for a record's inputs. engine: other constants than the fitted ones."""
    if inputs.cost_ratio is not None:
        return inputs.tokens / round_time(inputs.work.depth, inputs.cost_ratio)
    assert inputs.target is not None
    draft = draft_shape(inputs.family, inputs.target, inputs.draft_params)
    chosen = engine or engine_for(inputs.stack)
    values = []
    for machine in inputs.machines:
        times = Roofline(inputs.target, machine, chosen, draft, CONTEXT)
        values.append(estimate(times, inputs.work, inputs.tokens, inputs.batch).speedup)
    return statistics.geometric_mean(values)


def read_records(path: Path) -> list[dict[str, Any]]:
    """Records of a JSON file: a list of objects. Raises ValueError in one line."""
    try:
        records = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: line {error.lineno}: not JSON: {error.msg}") from None
    if not isinstance(records, list) or not all(isinstance(r, dict) for r in records):
        raise ValueError(f"{path}: give a JSON list of records (objects)")
    if not records:
        raise ValueError(f"{path} holds no records")
    return records


def predict(
    records: Sequence[Mapping[str, Any]],
) -> tuple[list[Prediction], list[dict[str, str]]]:
    """Every record predicted, or skipped with the reason."""
    done, skipped = [], []
    for i, record in enumerate(records):
        name = str(record.get("id", i))
        try:
            inputs = read_inputs(record)
            value = predict_speedup(inputs)
            if not math.isfinite(value):
                raise ValueError("the sizes given have no finite cost")
        except (ValueError, OverflowError) as reason:
            skipped.append({"id": name, "reason": str(reason)})
            continue
        parts = (str(record.get("method", "")), str(record.get("source", "")))
        done.append(Prediction(name, value, _published(record), inputs, *parts))
    return done, skipped


def _published(record: Mapping[str, Any]) -> float | None:
    """The record's answer, only ever compared with."""
    for key in ANSWERS:
        value = record.get(key)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
            return float(value)
    return None


def summarise(predictions: Sequence[Prediction]) -> dict[str, Any]:
    """Rows compared, median absolute relative error, share of rows with the right sign.

    A row whose round would have been faster than one plain forward (published speed-up above the
    tokens a round commits) cannot follow from any cost model; such rows count, and are counted.
    """
    compared = [p for p in predictions if p.published is not None]
    errors = [p.error for p in compared if p.error is not None]
    return {
        "rows": len(compared),
        "median_abs_error": round(statistics.median(errors), 4) if errors else None,
        "sign_agreement": (
            round(sum(bool(p.agrees) for p in compared) / len(compared), 4) if compared else None
        ),
        "within_15_percent": (
            round(sum(e <= 0.15 for e in errors) / len(errors), 4) if errors else None
        ),
        "impossible_rows": sum(
            p.published is not None and p.inputs.source == "tau" and p.published > p.inputs.tokens
            for p in compared
        ),
    }


def as_json(
    predictions: Sequence[Prediction], skipped: Sequence[Mapping[str, str]]
) -> dict[str, Any]:
    """The whole comparison for JSON: records, skipped, summary, and the summary by group."""
    groups: dict[str, dict[str, list[Prediction]]] = {"acceptance_from": {}, "source": {}}
    for p in predictions:
        groups["acceptance_from"].setdefault(p.inputs.source, []).append(p)
        groups["source"].setdefault(p.source, []).append(p)
    return {
        "records": [
            {
                "id": p.id,
                "predicted_speedup": round(p.predicted, 4),
                "published": p.published,
                "inputs_used": p.inputs.as_dict(),
            }
            for p in predictions
        ],
        "skipped": list(skipped),
        "summary": summarise(predictions),
        "by": {
            key: {name: summarise(rows) for name, rows in sorted(parts.items())}
            for key, parts in groups.items()
        },
    }


def render(predictions: Sequence[Prediction], skipped: Sequence[Mapping[str, str]]) -> str:
    """The table of predicted against published as text, then the summary and the skipped."""
    lines = [
        f"{'id':22s} {'method':30s} {'tokens':>6s} {'predicted':>9s} {'published':>9s} {'off':>6s}"
    ]
    for p in predictions:
        if p.published is None:
            continue
        lines.append(
            f"{p.id[:22]:22s} {p.method[:30]:30s} {p.inputs.tokens:6.2f} {p.predicted:9.2f} "
            f"{p.published:9.2f} {(p.predicted / p.published - 1):+6.0%}"
        )
    done = summarise(predictions)
    silent = sum(p.published is None for p in predictions)
    lines.append("")
    if done["rows"]:
        lines.append(
            f"{done['rows']} rows: median absolute error {done['median_abs_error']:.1%}, right sign "
            f"{done['sign_agreement']:.1%}, within 15 % {done['within_15_percent']:.0%}"
        )
    for source in ("tau", "alpha", "prior"):
        part = summarise([p for p in predictions if p.inputs.source == source])
        if part["rows"]:
            lines.append(
                f"  acceptance from {source}: {part['rows']} rows, "
                f"{part['median_abs_error']:.1%}, {part['sign_agreement']:.1%}"
            )
    if done["impossible_rows"]:
        lines.append(
            f"{done['impossible_rows']} rows publish more speed-up than tokens a forward, which no "
            "cost model can give"
        )
    if silent:
        lines.append(f"{silent} more rows were predicted but publish no speed-up to compare with")
    reasons: dict[str, list[str]] = {}
    for one in skipped:
        reasons.setdefault(one["reason"], []).append(one["id"])
    if skipped:
        lines.append(f"skipped {len(skipped)}:")
    for reason, ids in sorted(reasons.items()):
        more = f" and {len(ids) - 3} more" if len(ids) > 3 else ""
        lines.append(f"  {reason}: {', '.join(ids[:3])}{more}")
    return "\n".join(lines) + "\n"
