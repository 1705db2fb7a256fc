"""A published measurement as inputs of the latency model.

Only a record's inputs are read: method, target, hardware, batch size, temperature, task, tau or
alpha, draft length, tree, cost ratio, and the table's and source's names, for the engine. The
answers (`speedup`, `throughput_gain`) and the free-text note are never looked at here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..cost import FAMILIES, DraftPlan, Machine, ModelShape, plan
from .acceptance import prior
from .hardware import devices_needed, find_machines, find_model
from .tasks import task_of

METHODS = (
    ("samd", "eagle2"), ("dflash-ar", "eagle3"), (r"eagle[- ]?3|fused multi", "eagle3"),
    (r"eagle[- ]?2|hass", "eagle2"), ("dflash|dspark", "dflash"), (r"eagle[- ]?4", ""),
    ("eagle", "eagle1"), ("medusa head", ""), ("medusa", "medusa"), ("hydra", "hydra"),
    ("mtp", "mtp"), ("lookahead", "lookahead"), ("suffix", ""), ("pld|n-gram|ngram|prompt", "ngram"),
    (r"\brest\b", "retrieval"), ("recycling", "recycling"),
    (r"^sps|draft model|speculative (sampling|decoding)|token-level|vanilla", "vanilla"),
)  # fmt: skip
"""Pattern of a method's name -> draft family, the first match; "" for methods not modelled."""
BASELINE = re.compile(r"^(none|hf|vanilla$|autoregressive|gpt-fast|baseline)", re.IGNORECASE)
LOSSY = re.compile(r"lenien|typical|relaxed|not lossless", re.IGNORECASE)
ENGINES = (
    ("sglang", "sglang"),
    ("sgl-project", "sglang"),
    ("vllm", "vllm"),
    ("tensorrt", "tensorrt-llm"),
)
"""Word of a method, table or source -> serving stack; otherwise a paper's PyTorch code."""
ASSUMED = {"graph": "1x H200", "eager": "1x A100-80G"}
"""Hardware of a record that names none, by kind of engine: what most records of the kind name."""
ASSUMED_PARAMS = 8e9  # of a target that is not named: the size most used in papers
ASSUMED_DRAFT = 68e6  # of a draft model that is not named: Vicuna-68M, Spec-Bench's
CHAIN_FAMILIES = ("vanilla", "mtp", "dflash")  # their usual length is an engine's setting


class SkippedError(ValueError):
    """A record that gives too few inputs; the message says which."""


@dataclass(frozen=True)
class Inputs:
    """What the model needs of one record.

    tokens:  committed per round (tau), or what the acceptance and the draft length come to
    machines: more than one where the record names several (a paper that contradicts itself); the
             prediction is then the geometric mean
    source:  where `tokens` comes from: "tau", "alpha", or "prior" (published acceptance of the
             family on the task, when the record gives none)
    assumed: what the record does not say and the model took from a default
    """

    family: str
    stack: str
    work: DraftPlan
    tokens: float
    source: str
    target: ModelShape | None
    machines: tuple[Machine, ...]
    batch: int
    draft_params: float | None
    cost_ratio: float | None
    assumed: tuple[str, ...] = field(default_factory=tuple)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "family": self.family,
            "stack": self.stack,
            "num_draft_tokens": self.work.depth,
            "nodes": self.work.nodes,
            "expected_tokens": round(self.tokens, 4),
            "acceptance_from": self.source,
            "target": self.target.name if self.target else None,
            "hardware": " or ".join(f"{m.count}x {m.name}" for m in self.machines) or None,
            "batch_size": self.batch,
            "cost_ratio": self.cost_ratio,
            "assumed": list(self.assumed),
        }


def read_inputs(record: Mapping[str, Any]) -> Inputs:
    """The inputs of a record. Raises SkippedError with the reason when they do not suffice."""
    method = _text(record, "method")
    if not method:
        raise SkippedError("no method")
    if BASELINE.match(method):
        raise SkippedError("a baseline, not speculation")
    family = next((f for pattern, f in METHODS if re.search(pattern, method.lower())), "")
    if not family:
        raise SkippedError(f"method {method!r} is not one of the modelled families")
    if LOSSY.search(method):
        raise SkippedError("a lossy method")
    assumed: list[str] = []
    stack = _stack(record)
    cost_ratio = _number(record, "cost_ratio_c", 0.0)
    work = _work(record, family, method, stack, assumed)
    tokens, source = _tokens(record, family, work)
    depth = max(work.depth, math.ceil(tokens - 1e-9) - 1)
    if depth > work.depth:
        if _number(record, "num_draft_tokens", 1.0) is not None:
            raise SkippedError(
                f"tau {tokens:g} is more than {work.depth} drafted tokens can commit"
            )
        assumed.append(f"depth {depth}: a round that commits {tokens:g} is at least that deep")
        work = plan(family, depth, max(work.nodes, depth))
    target, machines = _place(record, stack, cost_ratio, assumed)
    params = _number(record, "draft_params_b", 0.0)
    if family == "vanilla" and params is None and cost_ratio is None:
        params = ASSUMED_DRAFT / 1e9
        assumed.append("draft model of 68 million parameters")
    batch = _number(record, "batch_size", 1.0)
    if batch is None:
        batch = 1.0
        assumed.append("batch 1")
    return Inputs(
        family, stack, work, tokens, source, target, machines, int(batch),
        params * 1e9 if params else None, cost_ratio, tuple(assumed),
    )  # fmt: skip


def _stack(record: Mapping[str, Any]) -> str:
    words = " ".join(_text(record, key) for key in ("method", "table", "source")).lower()
    return next((stack for word, stack in ENGINES if word in words), "transformers")


def _work(
    record: Mapping[str, Any], family: str, method: str, stack: str, assumed: list[str]
) -> DraftPlan:
    """The round: the record's draft length and tree, the family's usual ones otherwise."""
    length = _number(record, "num_draft_tokens", 1.0)
    nodes = _number(record, "tree_nodes", 1.0)
    block = re.search(r"block (?:of )?(\d+)", method.lower())
    if length is None and block:
        length = float(block[1]) - 1
    if (
        length is None
        and nodes is None
        and family in ("mtp", "vanilla")
        and (family == "mtp" or stack != "transformers")
    ):
        raise SkippedError("no draft length")
    depth = int(length) if length is not None else None
    size = int(nodes) if nodes is not None else None
    top = re.search(r"top-(\d+)", method.lower())
    if stack == "sglang" and size is not None and top:
        size -= 1  # SGLang's num_draft_tokens counts the root
    if family == "eagle1" and size is None and "chain" not in method.lower():
        if stack == "transformers":  # the authors' code drafts a fixed tree; N is its depth
            size = max(FAMILIES["eagle1"].nodes, depth or 0)
            assumed.append(f"EAGLE-1's own tree of {size} nodes")
        elif depth is None:
            raise SkippedError("no draft length")
    if depth is None and size is None:
        assumed.append(f"the family's usual {FAMILIES[family].nodes} nodes")
    if depth is not None and size is not None and size < depth:
        raise SkippedError(f"a tree of {size} nodes cannot be {depth} deep")
    return plan(family, depth, size)


def _tokens(record: Mapping[str, Any], family: str, work: DraftPlan) -> tuple[float, str]:
    """Tokens a round commits, and where that comes from."""
    tau = _number(record, "tau", 1.0)
    if tau is not None:
        return tau, "tau"
    alpha = _number(record, "alpha", 0.0)
    if alpha is not None:
        if alpha > 1:
            raise SkippedError(f"alpha is {alpha:g}")
        if _number(record, "num_draft_tokens", 1.0) is None:
            raise SkippedError("alpha without a draft length")
        from ..cost import expected_tokens

        return expected_tokens(alpha, work.depth), "alpha"
    for key in ("target_model", "batch_size"):
        if record.get(key) is None:
            raise SkippedError(f"no tau or alpha, and no {key} either")
    temperature = _number(record, "temperature", 0.0) or 0.0
    guess = prior(family, task_of(_text(record, "task")), temperature)
    if guess is None:
        raise SkippedError("no tau or alpha, and no published acceptance of this method to go by")
    return guess.tokens(work), "prior"


def _place(
    record: Mapping[str, Any], stack: str, cost_ratio: float | None, assumed: list[str]
) -> tuple[ModelShape | None, tuple[Machine, ...]]:
    """Target and machines; neither is needed when the record gives the cost ratio."""
    if cost_ratio is not None:
        return None, ()
    params = _number(record, "target_params_b", 0.0)
    name = _text(record, "target_model")
    target, exact = find_model(name, params * 1e9 if params else None)
    if target is None:
        if name:
            raise SkippedError(f"the size of {name!r} is not known")
        target, _ = find_model("target", ASSUMED_PARAMS)
        assumed.append("a dense target of 8 billion parameters")
    elif not exact:
        assumed.append(f"the shape of {name or 'the target'}, from its parameters")
    assert target is not None
    text = _text(record, "hardware")
    machines = find_machines(text)
    if text and not machines:
        raise SkippedError(f"hardware {text!r} is not in the table")
    if not machines:
        usual = ASSUMED["eager" if stack == "transformers" else "graph"]
        machines = find_machines(usual)
        assumed.append(usual)
    if stack != "transformers":
        machines = [replace(m, count=max(m.count, devices_needed(target, m))) for m in machines]
    return target, tuple(machines)


def _text(record: Mapping[str, Any], key: str) -> str:
    value = record.get(key)
    return value.strip() if isinstance(value, str) else ""


def _number(record: Mapping[str, Any], key: str, least: float) -> float | None:
    """A number of a record, None when absent. Raises SkippedError for what is no sensible number."""
    value = record.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise SkippedError(f"{key} is {value!r}: not a number")
    if value < least:
        raise SkippedError(f"{key} is {value:g}: below {least:g}")
    return float(value)
