"""Fit the latency model's constants on published measurements, and report the error on the rest.

    python scripts/fit_constants.py published_results.json [--write]

Rows are parted by source and target together (every row of one source about one target is on the
same side, by a checksum of the two names), so that the held-out rows are of pairs never seen.
Without --write the figures are printed only; --leave-out SOURCE fits without any row whose source
begins so, and reports those. The engines' constants minimise the mean of
|log(predicted / published)|, clipped at CLIP so that a few odd rows do not lead; a second term,
weighted by ABSOLUTE, holds the predicted plain forward to the baselines that some fitted rows
print in their note (tokens/s), so that times and not only ratios are right (PyTorch code: one
published plain speed, ANCHOR). `rank_decay` is fitted on EAGLE-1's own table of chain and tree
acceptance. The acceptance of each family on each task is the median over the fitted rows.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import minimize

from speculant.cost import Engine, forward_ms
from speculant.cost.trees import alpha_of_tree, best_tree
from speculant.tune import facts
from speculant.tune.hardware import find_machines, find_model
from speculant.tune.predict import CONTEXT, Prediction, predict_speedup, read_records, summarise
from speculant.tune.records import Inputs, SkippedError, read_inputs
from speculant.tune.tasks import task_of

DATA = Path(__file__).parents[1] / "src" / "speculant" / "tune" / "data"
CLIP, ABSOLUTE = 0.3, 0.3
PART = "rows whose crc32(source|target_model) is even; the held-out rows are all others"
FIXED = {
    "eager": {"bandwidth_efficiency": 0.6, "splits": False},
    "graph": {"bandwidth_efficiency": 0.9, "share_ms": 0.02, "splits": True},
}
"""Not fitted: speed-ups hardly depend on the bandwidth, which trades against layer_ms; a layer
shared by several devices waits for two all-reduces of about 10 microseconds."""
START = {
    "eager": {"flops_efficiency": 0.5, "layer_ms": 0.5, "step_ms": 1.0, "round_ms": 1.0},
    "graph": {"flops_efficiency": 0.5, "layer_ms": 0.05, "round_ms": 1.0, "tree_ms": 0.3},
}
ANCHOR = ("LLaMA2-Chat-7B", "1x RTX 3090", 1e3 / 24.5)
"""A plain step of transformers in fp16: 24.5 tokens/s (EAGLE-1, arXiv:2401.15077, table 4)."""
Row = tuple[Inputs, float, float | None]


def fitted_on(record: dict[str, Any], leave_out: str | None = None) -> bool:
    """Whether a record is one of those that are fitted."""
    if leave_out:
        return not str(record.get("source", "")).startswith(leave_out)
    name = f"{record.get('source')}|{record.get('target_model')}"
    return zlib.crc32(name.encode()) % 2 == 0


def rows_of(
    records: list[dict[str, Any]], train: bool, leave_out: str | None = None
) -> list[tuple[dict[str, Any], Row]]:
    """Records of the fitted part, or of the rest, with a measured tau and an answer."""
    out = []
    for record in records:
        answer = record.get("speedup", record.get("throughput_gain"))
        if answer is None or fitted_on(record, leave_out) != train:
            continue
        try:
            inputs = read_inputs(record)
        except SkippedError:
            continue
        if inputs.source == "tau" and inputs.cost_ratio is None:
            out.append((record, (inputs, float(answer), baseline_ms(record))))
    return out


def baseline_ms(record: dict[str, Any]) -> float | None:
    """Time of a plain step, from a note such as "955 vs 229 tok/s" or "baseline 923 tok/s"."""
    note = record.get("note") or ""
    found = re.search(r"vs ([\d.]+)(?= tok/s)", note) or re.search(r"baseline ([\d.]+) tok/s", note)
    return 1e3 * record["batch_size"] / float(found[1]) if found else None


def engine(kind: str, values: dict[str, float]) -> Engine:
    return Engine(name=kind, **values, **FIXED[kind])


def fit(kind: str, rows: list[Row]) -> dict[str, float]:
    """Nelder-Mead from five deterministic starts."""
    names, first = list(START[kind]), np.array(list(START[kind].values()))
    known = [((i.target, i.machines[0]), i.batch, ms) for i, _, ms in rows if ms is not None] or [
        ((find_model(ANCHOR[0])[0], find_machines(ANCHOR[1])[0]), 1, ANCHOR[2])
    ] * 40

    def loss(values: np.ndarray) -> float:
        values = np.abs(values)
        if not 0.1 <= values[0] <= 0.9:
            return 9.0
        made = engine(kind, dict(zip(names, values.tolist(), strict=True)))
        errors = [min(abs(math.log(predict_speedup(i, made) / a)), CLIP) for i, a, _ in rows]
        total = float(np.mean(errors))
        off = [
            abs(math.log(forward_ms(*place, made, batch, 1, CONTEXT) / ms))
            for place, batch, ms in known
        ]
        total += ABSOLUTE * sum(min(x, 0.5) for x in off) / len(rows)
        return total

    best: Any = None
    for seed in range(5):
        spread = np.exp(np.random.default_rng(seed).normal(0, 0.3, len(first))) if seed else 1.0
        start = first * spread
        start[0] = first[0]
        found = minimize(loss, start, method="Nelder-Mead", options={"maxfev": 1500})
        best = found if best is None or found.fun < best.fun else best
    return {n: float(f"{v:.3g}") for n, v in zip(names, np.abs(best.x), strict=True)}


def fit_decay(records: list[dict[str, Any]]) -> tuple[float, int]:
    """The decay at which EAGLE-1's measured n-alpha give its measured tree tau (25 nodes)."""
    pairs = []
    for record in records:
        found = re.search(r"n-alpha 0\.\.4[^:]*:\s*([\d., ]+)", record.get("note") or "")
        if found and record.get("tau") and "EAGLE-1" in record["source"]:
            rates = [float(x) for x in found[1].split(",") if x.strip()]
            if "CHAIN" not in record["note"] and "tree" in record["note"]:
                pairs.append((rates, record["tau"]))

    def loss(decay: float) -> float:
        out = 0.0
        for rates, tau in pairs:
            steps = np.cumprod(rates).tolist()
            out += abs(best_tree(steps, 25, 5, 4, decay).expected_tokens - tau)
        return out

    return min((round(0.01 * i, 2) for i in range(5, 100)), key=loss), len(pairs)


def alphas(records: list[dict[str, Any]], decay: float) -> list[tuple[dict[str, Any], str, float]]:
    """Records with a tau, their family, and the constant alpha of the rank model behind the tau."""
    out = []
    for record in records:
        if record.get("tau") is None:
            continue
        try:
            inputs = read_inputs(record)
            work = inputs.work
            nodes = work.nodes if work.tree and inputs.family not in FREE else work.depth
            branch = max(4, work.pass_rows)
            alpha = alpha_of_tree(record["tau"], nodes, work.depth, branch, decay)
        except ValueError:
            continue
        out.append((record, inputs.family, alpha))
    return out


def against_eagle3(records: list[dict[str, Any]], decay: float) -> dict[str, float]:
    """Alpha of EAGLE-1's and Medusa's heads / alpha of EAGLE-3's, on the same target and task.

    EAGLE-2 uses EAGLE-1's head, and was measured beside EAGLE-3; Medusa beside EAGLE-1.
    """
    places: dict[tuple[Any, ...], dict[str, float]] = {}
    for record, family, alpha in alphas(records, decay):
        keys = ("source", "target_model", "task", "temperature", "batch_size")
        places.setdefault(tuple(record.get(k) for k in keys), {})[family] = alpha

    def ratio(one: str, other: str) -> float:
        both = [p[one] / p[other] for p in places.values() if one in p and other in p]
        return statistics.median(both)

    head = ratio("eagle2", "eagle3")
    values = {"eagle1": head, "eagle2": head, "medusa": head * ratio("medusa", "eagle1")}
    return {family: round(value, 3) for family, value in values.items()}


def acceptance(records: list[dict[str, Any]], decay: float) -> dict[str, Any]:
    """Family -> task -> greedy or hot -> median alpha and quartiles, over training rows."""
    seen: dict[tuple[str, str, str], list[float]] = {}
    for record, family, alpha in alphas([r for r in records if fitted_on(r)], decay):
        heat = "hot" if (record.get("temperature") or 0.0) >= 0.5 else "greedy"
        for task in (task_of(str(record.get("task", ""))), "all"):
            seen.setdefault((family, task, heat), []).append(alpha)
    table: dict[str, Any] = {}
    for (family, task, heat), rates in sorted(seen.items()):
        low, _, high = statistics.quantiles(rates, n=4) if len(rates) > 1 else (rates[0],) * 3
        table.setdefault(family, {}).setdefault(task, {})[heat] = {
            "alpha": round(statistics.median(rates), 3),
            "low": round(low, 3),
            "high": round(high, 3),
            "rows": len(rates),
        }
    return table


FREE = ("ngram", "lookahead", "retrieval", "recycling")


def report(name: str, rows: list[Row], engines: dict[str, Engine]) -> dict[str, Any]:
    made = [
        Prediction("", predict_speedup(i, engines[kind_of(i)]), a, i, "", "") for i, a, _ in rows
    ]
    summary = summarise(made)
    print(f"{name:44s} {summary}")
    return summary


def kind_of(inputs: Inputs) -> str:
    return "eager" if inputs.stack in facts.EAGER_STACKS else "graph"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records", type=Path)
    parser.add_argument("--write", action="store_true", help="Write the package's data files.")
    parser.add_argument("--leave-out", metavar="SOURCE", help="Fit without this source.")
    arguments = parser.parse_args()
    records, left = read_records(arguments.records), arguments.leave_out
    if left and arguments.write:
        parser.error("--write ships the usual part; leave out --leave-out")
    train, rest = rows_of(records, True, left), rows_of(records, False, left)
    values = {
        kind: fit(kind, [row for _, row in train if kind_of(row[0]) == kind]) for kind in START
    }
    engines = {kind: engine(kind, v) for kind, v in values.items()}
    decay, pairs = fit_decay(records)
    print(json.dumps(values, indent=1), "rank_decay", decay, f"({pairs} pairs)")
    held: dict[str, Any] = {}
    fitted = report("fitted rows", [row for _, row in train], engines)
    held["all"] = report("held-out rows", [row for _, row in rest], engines)
    for source in sorted({record["source"] for record, _ in rest}):
        rows = [row for record, row in rest if record["source"] == source]
        held[source] = report(f"  {source[:42]}", rows, engines)
    if arguments.write:
        text = {
            "how": "scripts/fit_constants.py on a file of published measurements",
            "fitted_on": PART,
            "rows_fitted": len(train),
            "fitted": fitted,
            "held_out": held,
            "units": "efficiencies are shares of the vendor's peaks, *_ms are milliseconds",
            "engines": {kind: {**FIXED[kind], **v} for kind, v in values.items()},
            "not_fitted": "bandwidth_efficiency, share_ms",
            "rank_decay": decay,
            "rank_decay_from": f"EAGLE-1, arXiv:2401.15077, {pairs} pairs of chain and tree",
        }
        (DATA / "constants.json").write_text(json.dumps(text, indent=1) + "\n")
        priors = {
            "how": "median constant alpha, with quartiles, over the fitted rows with a tau; "
            "a tree's tau is turned into the alpha of the acceptance-per-rank model",
            "fitted_on": PART,
            "against_eagle3": against_eagle3(records, decay),
            "families": acceptance(records, decay),
        }
        (DATA / "acceptance.json").write_text(json.dumps(priors, indent=1) + "\n")


if __name__ == "__main__":
    main()
