"""Tables beside the draft length: batch sizes, trees and their memory, the temperature gate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

from ..cost import Estimate, Machine, ModelShape, best_of
from .candidates import TREE_GAIN, Candidate
from .evidence import Measurements, evidence_at
from .workload import Workload

BATCH_LIMIT = 512  # the table's last batch size
KEEP = 0.02  # a length is kept over batch sizes while it stays within this of the best
WORTH = 1.05  # below this speed-up a temperature is not worth drafting at
HOTTEST = 2.0
MEMORY_SHARE = 0.9  # of a device's memory that an engine uses
MOST_NODES = 60  # no tree beyond this is considered


def batch_table(candidate: Candidate, largest: int) -> list[list[int]]:
    """[first batch, last batch, draft length] from 1 on, lengths kept while they stay near best."""
    last = min(BATCH_LIMIT, max(64, 2 * largest))
    table: list[list[int]] = []
    for batch in range(1, last + 1):
        chain = candidate.chain(batch)
        best = best_of(chain)
        length = best.work.depth
        if table:
            before = table[-1][2]
            kept = next((e for e in chain if e.work.depth == before), None)
            if kept is not None and kept.token_ms <= best.token_ms * (1 + KEEP):
                length = before
        if table and table[-1][2] == length:
            table[-1][1] = batch
        else:
            table.append([batch, batch, length])
    return table


def rechecks(candidate: Candidate, table: list[list[int]]) -> list[dict[str, Any]]:
    """Both lengths at the batch sizes on both sides of every threshold: what to measure again."""
    out = []
    for before, after in pairwise(table):
        for batch in (before[1], after[0]):
            chain = {e.work.depth: e for e in candidate.chain(batch)}
            out.append(
                {
                    "batch": batch,
                    "lengths": [before[2], after[2]],
                    "predicted_token_ms": [
                        round(chain[n].token_ms, 4) for n in (before[2], after[2])
                    ],
                }
            )
    return out


def most_nodes(
    workload: Workload, target: ModelShape, machine: Machine | None, batch: int
) -> tuple[int, str]:
    """Tree nodes per sequence that the memory holds, and the arithmetic in words."""
    per_node = target.kv_bytes_per_token() + 8.0 * target.vocab  # K/V, float32 logits and probs
    if machine is None:
        return MOST_NODES, "the profile says nothing of memory: 60 nodes at most"
    held = target.total_params * target.weight_bytes
    cached = batch * (workload.traffic.prompt_tokens + workload.traffic.output_tokens)
    held += cached * target.kv_bytes_per_token()
    free = MEMORY_SHARE * machine.count * machine.memory_gb * 1e9 - held
    nodes = max(0, min(MOST_NODES, int(free / (batch * per_node))))
    text = (
        f"{MEMORY_SHARE:.0%} of {machine.count}x {machine.memory_gb:g} GB less weights and K/V of "
        f"{batch} sequences leaves {max(0.0, free) / 1e9:.1f} GB; a node takes "
        f"{per_node / 1e6:.2f} MB"
    )
    return nodes, text


def tree_table(
    workload: Workload, candidate: Candidate, target: ModelShape, machine: Machine | None
) -> list[dict[str, Any]]:
    """Per batch size: the best tree within memory, the best chain, and which to use."""
    out = []
    for batch in sorted({*workload.traffic.batch_sizes, workload.traffic.usual_batch}):
        limit, memory = most_nodes(workload, target, machine, batch)
        chain = best_of(candidate.chain(batch))
        tree = candidate.tree(batch, limit)
        row: dict[str, Any] = {
            "batch": batch,
            "chain_length": chain.work.depth,
            "chain_speedup": round(chain.speedup, 3),
            "use": _form(chain),
            "memory": memory,
        }
        if tree is not None:
            row |= {
                "depth": tree.work.depth,
                "branching": tree.work.pass_rows,
                "nodes": tree.work.nodes,
                "expected_tokens": round(tree.expected_tokens, 3),
                "tree_speedup": round(tree.speedup, 3),
            }
            if tree.speedup > max(1.0, chain.speedup * TREE_GAIN):
                row["use"] = "tree"
        out.append(row)
    return out


def _form(best: Estimate) -> str:
    """What a setting is called: off, chain, or lookahead's window."""
    if best.work.nodes == 0:
        return "off"
    return "window" if best.work.extra_rows else "chain"


def speed_at(
    candidate: Candidate,
    workload: Workload,
    measured: Measurements,
    temperatures: Mapping[float, float],
    limit: int,
) -> Estimate:
    """The candidate's best setting at other temperatures, at the usual batch size."""
    evidence = evidence_at(candidate.family, workload, measured, temperatures)
    assert evidence is not None
    return replace(candidate, evidence=evidence).best(workload.traffic.usual_batch, limit)


def temperature_gate(
    candidate: Candidate,
    others: list[Candidate],
    workload: Workload,
    measured: Measurements,
    limit: int,
) -> dict[str, Any]:
    """From which temperature on drafting is no longer worth it, and what to do above."""
    rows = []
    threshold = None
    for step in range(int(HOTTEST / 0.1) + 1):
        heat = round(0.1 * step, 1)
        best = speed_at(candidate, workload, measured, {heat: 1.0}, limit)
        if step % 5 == 0:
            rows.append({"temperature": heat, "speedup": round(best.speedup, 3)})
        if threshold is None and best.speedup < WORTH:
            threshold = heat
    above = "off"
    if threshold is not None:
        for other in others:
            if speed_at(other, workload, measured, {threshold: 1.0}, limit).speedup >= WORTH:
                above = other.family
                break
    return {"threshold": threshold, "above": above, "table": rows, "worth": WORTH}
