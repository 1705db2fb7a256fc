"""Ready-to-run configuration of each stack, the telemetry plan, and the calibration run."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from .stacks import dynamic_length, has_family, stack_facts, why_missing
from .workload import Workload

if TYPE_CHECKING:
    from .figures import Ranked

STACKS = ("vllm", "sglang", "tensorrt-llm", "speculant")
VLLM_METHOD = {"eagle1": "eagle", "eagle3": "eagle3", "medusa": "medusa", "ngram": "ngram",
               "vanilla": "draft_model"}  # fmt: skip
SGLANG_ALGORITHM = {"eagle1": "EAGLE", "eagle2": "EAGLE", "eagle3": "EAGLE3", "ngram": "NGRAM",
                    "vanilla": "STANDALONE"}  # fmt: skip
TRT_TYPE = {"eagle3": "Eagle3", "ngram": "NGram", "vanilla": "DraftTarget"}
LOOKUP = (2, 5)  # shortest and longest suffix that an n-gram draft looks up
FIRST_WEEK = 0.85  # alert below this share of the expected acceptance


def configuration(
    workload: Workload, chosen: Ranked | None, page: dict[str, Any]
) -> dict[str, str | None]:
    """Configuration text per stack, the workload's own first; None where the stack cannot."""
    own = workload.stack.name
    order = [own, *(name for name in STACKS if name != own)]
    if chosen is None or (chosen.best.work.nodes == 0 and not page["dynamic_length"]):
        return {name: _off(name, workload) for name in order}
    return {name: _one(name, workload, chosen, page) for name in order}


def _off(name: str, workload: Workload) -> str | None:
    """How to run without speculation: the plain command."""
    target = page_target(workload)
    return {
        "vllm": f"vllm serve {target}",
        "sglang": f"python3 -m sglang.launch_server --model-path {target}",
        "tensorrt-llm": f"trtllm-serve {target}",
        "speculant": f"speculant serve --target {target} --draft none",
    }.get(name)


def page_target(workload: Workload) -> str:
    """The target as a command takes it."""
    return workload.target.model or workload.target.config or "TARGET"


def _one(name: str, workload: Workload, chosen: Ranked, page: dict[str, Any]) -> str | None:
    family = chosen.candidate.family
    version = workload.stack.version if name == workload.stack.name else None
    if not has_family(name, version, family):
        return f"# {why_missing(name, version or stack_facts(name)['last_checked'], family)}"
    made = {"vllm": _vllm, "sglang": _sglang, "tensorrt-llm": _tensorrt, "speculant": _speculant}
    build = made.get(name)
    return build(workload, chosen, page, version) if build else None


def _model(chosen: Ranked) -> str:
    head = chosen.candidate.head
    return head.model if head is not None else f"PATH_TO_YOUR_{chosen.candidate.family.upper()}"


def _length(page: dict[str, Any]) -> int:
    """The longest chain of the per-batch table, and at least 1: the fixed length of a server."""
    longest = max((row[2] for row in page["num_speculative_tokens_per_batch_size"]), default=0)
    return max(1, page["num_draft_tokens"] or longest)


def _vllm(workload: Workload, chosen: Ranked, page: dict[str, Any], version: str | None) -> str:
    family = chosen.candidate.family
    table = page["num_speculative_tokens_per_batch_size"]
    longest = max(row[2] for row in table)
    config: dict[str, Any] = {"method": VLLM_METHOD[family]}
    if family == "ngram":
        config |= {"prompt_lookup_min": LOOKUP[0], "prompt_lookup_max": LOOKUP[1]}
    else:
        config["model"] = _model(chosen)
    dynamic = dynamic_length("vllm", version) and len(table) > 1
    config["num_speculative_tokens"] = max(1, longest) if dynamic else _length(page)
    if dynamic:
        config["num_speculative_tokens_per_batch_size"] = table
    tensor = f" --tensor-parallel-size {workload.hardware.count}" * (workload.hardware.count > 1)
    return f"vllm serve {page_target(workload)}{tensor} --speculative-config '{json.dumps(config)}'"


def _sglang(workload: Workload, chosen: Ranked, page: dict[str, Any], version: str | None) -> str:
    family, best = chosen.candidate.family, chosen.best
    words = [f"python3 -m sglang.launch_server --model-path {page_target(workload)}"]
    if workload.hardware.count > 1:
        words.append(f"--tp {workload.hardware.count}")
    words.append(f"--speculative-algorithm {SGLANG_ALGORITHM[family]}")
    if family == "ngram":
        words.append(f"--speculative-num-draft-tokens {_length(page) + 1}")
        words.append(f"--speculative-ngram-max-match-window-size {LOOKUP[1]}")
    else:
        words.append(f"--speculative-draft-model-path {_model(chosen)}")
        tree = (best.work.tree and workload.stack.name == "sglang") or family == "eagle2"
        steps = best.work.depth if tree else _length(page)
        nodes = best.work.nodes if tree else steps
        words.append(f"--speculative-num-steps {steps}")
        words.append(f"--speculative-eagle-topk {best.work.pass_rows if tree else 1}")
        # SGLang counts the root among its draft tokens
        words.append(f"--speculative-num-draft-tokens {nodes + 1}")
    return " \\\n  ".join([*words, "--enable-metrics"])


def _tensorrt(workload: Workload, chosen: Ranked, page: dict[str, Any], version: str | None) -> str:
    family, best = chosen.candidate.family, chosen.best
    if family == "medusa":
        return (
            "# TensorRT backend (before 1.3), Python\n"
            "from tensorrt_llm.llmapi import MedusaDecodingConfig\n"
            f"speculative_config = MedusaDecodingConfig(speculative_model={_model(chosen)!r},\n"
            f"    max_draft_len={max(best.work.nodes, 1)}, num_medusa_heads={best.work.depth or 4},\n"
            "    medusa_choices=TREE)  # the paths of the head's own tree, as it was trained for"
        )
    if family == "lookahead":
        return (
            "# TensorRT backend (before 1.3), Python\n"
            "from tensorrt_llm.llmapi import LookaheadDecodingConfig\n"
            "speculative_config = LookaheadDecodingConfig(max_window_size=15,\n"
            "    max_ngram_size=5, max_verification_set_size=15)"
        )
    lines = [f"# trtllm-serve {page_target(workload)} --config config.yaml", "speculative_config:"]
    lines.append(f"  decoding_type: {TRT_TYPE[family]}")
    tree = best.work.tree and family == "eagle3"
    lines.append(f"  max_draft_len: {best.work.depth if tree else _length(page)}")
    if family == "ngram":
        lines.append(f"  max_matching_ngram_size: {LOOKUP[1]}")
    else:
        lines.append(f"  speculative_model: {_model(chosen)}")
    if tree:
        lines += [
            "  use_dynamic_tree: true",
            f"  dynamic_tree_max_topK: {best.work.pass_rows}",
            f"  max_total_draft_tokens: {best.work.nodes}",
        ]
    return "\n".join(lines)


def _speculant(
    workload: Workload, chosen: Ranked, page: dict[str, Any], version: str | None
) -> str:
    family, best = chosen.candidate.family, chosen.best
    head = chosen.candidate.head
    words = [f"speculant serve --target {page_target(workload)}"]
    if family == "vanilla":
        words.append(f"--draft vanilla --draft-model {_model(chosen)}")
    elif head is not None and not head.model.startswith("bundled"):
        words.append(f"--draft {head.model}")
    else:
        words.append(f"--draft {family}")
    if best.work.tree and family in ("eagle2", "eagle3", "medusa"):
        words.append(f"--tree {best.work.nodes}")
    elif family not in ("lookahead", "medusa"):
        words.append(f"--num-draft-tokens {_length(page)}")
    words.append(f"--max-rows {max(workload.traffic.batch_sizes)}")
    return " ".join(words)


def telemetry_plan(
    workload: Workload, shown: Ranked | None, page: dict[str, Any]
) -> dict[str, Any]:
    """The metrics of the stack to watch in the first week, with thresholds from the prediction."""
    metrics = stack_facts(workload.stack.name)["metrics"]
    alerts: list[dict[str, Any]] = []
    if shown is not None and shown.best.work.nodes:
        e = shown.best
        even = e.round_ms / e.plain_ms
        expected = e.expected_tokens
        first = shown.candidate.evidence.rates[0]
        alerts = [
            {"watch": metrics["acceptance_length"], "expect": round(expected, 2),
             "warn_below": round(max(even, FIRST_WEEK * expected), 2),
             "off_below": round(even, 2),
             "why": "below the second figure a round costs more than it commits"},
            {"watch": metrics["per_position"], "expect": round(first, 3),
             "warn_below": round(FIRST_WEEK * first, 3),
             "why": "the first position falls first when head and target do not match"},
            {"watch": metrics["latency"], "expect_ms": round(e.token_ms, 3),
             "warn_above_ms": round(e.plain_ms, 3),
             "why": "plain decoding is predicted to take this long"},
        ]  # fmt: skip
    stop = page.get("stops_paying_at_batch")
    load = {"watch": metrics["load"], "why": "the load at which the draft length has to change"}
    if stop is not None:
        load["alert_above"] = stop - 1
    return {
        "metrics": metrics,
        "alerts": [*alerts, load],
        "first_week": [
            "day 1: a tenth of the traffic, compare the output's length and stop reasons with plain",
            "days 1-3: read acceptance per position and per task; run speculant tune again with it",
            "days 4-7: all traffic; measure both lengths around each batch threshold",
        ],
    }


def calibration(workload: Workload, shown: Ranked | None) -> dict[str, Any]:
    """The run that replaces published acceptance by your own."""
    target = page_target(workload)
    family = shown.candidate.family if shown is not None else "ngram"
    commands = [f"speculant profile --target {target} --draft {family} --out profile.json"]
    if workload.stack.name in ("vllm", "speculant"):
        commands.append("curl -s http://localhost:8000/metrics > metrics.txt")
    if workload.stack.name == "sglang":
        commands.append("# keep meta_info of some hundred answers as a JSON list in meta_info.json")
    return {
        "commands": commands,
        "how": "serve some hundred of your own prompts at your temperatures with the draft on, "
        "then name the file under telemetry and run speculant tune again",
    }
