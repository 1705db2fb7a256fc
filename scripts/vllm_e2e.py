"""Prove on real vLLM that exported heads work: same text, and the acceptance we measure ourselves.

    make vllm-e2e

1. Offline: every bundled head in every format that vLLM reads, at temperature 0, over 40 questions.
   The text must be what vLLM writes without the head, and acceptance per position within three
   points of ours for a chain of the same length.
2. Served: the OpenAI client answers come from the written configuration, and /metrics counts them.
3. Exactness: `speculant check --endpoint` calls stock vLLM 0.32 on CPUs wrong above temperature 0, and
   the same server with one function repaired right.

Needs the two environments that the Makefile makes: .venv with speculant, .venv-vllm with vLLM.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from vllm_questions import questions as own_questions
from vllm_server import Server

from speculant.bench.acceptance import Setting, pooled
from speculant.bench.evaluate import conversation_ids, evaluate
from speculant.bench.questions import Question, read_questions, spread
from speculant.commands.lend import lend
from speculant.drafts import bundled_head, load_draft
from speculant.export.running import run_vllm
from speculant.heads.weights import load_head
from speculant.target.base import Target
from speculant.target.load import load_target

ROOT = Path(__file__).parents[1]
NAME = "smollm2-135m-instruct"
EXPORTS = {
    "eagle3": ("eagle3", "native"),
    "eagle3 (speculators)": ("eagle3", "speculators"),
    "eagle1": ("eagle1", "native"),
    "medusa": ("medusa", "native"),
    "vanilla": ("vanilla", "native"),
}
POINTS = 0.03
"""Largest difference in acceptance at a position."""


def main() -> int:
    """Run the parts asked for; 1 when one failed."""
    options = arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    options.python = options.python.absolute()
    folders = {name: export(name, options) for name in EXPORTS}
    good = True
    if "offline" in options.parts:
        good &= offline(options, folders)
    if "served" in options.parts:
        good &= served(options, folders["eagle3"])
    if "exact" in options.parts:
        good &= exact(options, folders["eagle3"])
    print("all good" if good else "FAILED")
    return 0 if good else 1


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--python", type=Path, default=ROOT / ".venv-vllm/bin/python")
    parser.add_argument("--out", type=Path, default=ROOT / "build/vllm-e2e")
    parser.add_argument("--questions", type=Path, help="JSONL in Spec-Bench's format")
    parser.add_argument("--limit", type=int, default=40)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--heads", nargs="*", default=list(EXPORTS))
    parser.add_argument("--parts", nargs="*", default=["offline", "served", "exact"])
    parser.add_argument("--port", type=int, default=8193)
    return parser.parse_args()


def export(name: str, options: argparse.Namespace) -> Path:
    """Export a bundled head, as a user would."""
    kind, layout = EXPORTS[name]
    out: Path = options.out / f"{kind}-{layout}"
    words = [
        "export",
        "vllm",
        kind,
        "--out",
        str(out),
        "--format",
        layout,
        "-n",
        str(options.depth),
    ]
    speculant(*words)
    return out


def model_folder() -> Path:
    """The target as engines load it."""
    return Path(lend(NAME, ends=False).parts.name)


def speculant(*words: str) -> subprocess.CompletedProcess[str]:
    """Run our command."""
    command = [sys.executable, "-m", "speculant.cli", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        raise SystemExit(f"{' '.join(words)}: {done.stderr}")
    return done


def offline(options: argparse.Namespace, folders: dict[str, Path]) -> bool:
    """Part 1: a table of both sides, written to offline.json."""
    target = load_target(NAME)
    asked = ask(options)
    ids = [conversation_ids(target, question.turns[:1]) for question in asked]
    job = {
        "model": str(model_folder()),
        "prompts": ids,
        "max_tokens": options.max_tokens,
        "dtype": "float32",
        "max_model_len": max(map(len, ids)) + options.max_tokens + 16,
        "max_num_seqs": 16,
    }
    plain = once(options, "plain", job)
    rows = []
    for name in options.heads:
        spec = json.loads((folders[name] / "speculative_config.json").read_text())
        theirs = once(options, name, {**job, "speculative_config": spec})
        rows.append(compare(name, plain, theirs, ours(target, name, asked, options)))
        print(line(rows[-1]), flush=True)
    report = {
        "vllm": plain["version"],
        "questions": len(asked),
        "max_tokens": options.max_tokens,
        "depth": options.depth,
        "tokens": sum(map(len, plain["token_ids"])),
        "rows": rows,
    }
    (options.out / "offline.json").write_text(json.dumps(report, indent=2) + "\n")
    return all(row["passed"] for row in rows)


def once(options: argparse.Namespace, name: str, job: dict[str, Any]) -> dict[str, Any]:
    """vLLM's result of a job, kept in a file: a run that was stopped goes on behind what is done."""
    path: Path = options.out / f"run-{name.replace(' ', '-')}.json"
    if path.is_file():
        kept = json.loads(path.read_text())
        if kept["job"] == job:
            result: dict[str, Any] = kept["result"]
            return result
    result = run_vllm(options.python, job, timeout_s=7200)
    path.write_text(json.dumps({"job": job, "result": result}))
    return result


def ask(options: argparse.Namespace) -> list[Question]:
    """The questions, one turn each."""
    if options.questions is not None:
        asked = spread(read_questions(options.questions), options.limit)
        return [dataclasses.replace(question, turns=question.turns[:1]) for question in asked]
    texts = own_questions()[: options.limit]
    return [Question(i, "own", (text,)) for i, text in enumerate(texts)]


def ours(
    target: Target, name: str, asked: list[Question], options: argparse.Namespace
) -> dict[str, Any]:
    """Our counters for the same questions and the same chain."""
    kind = EXPORTS[name][0]
    head: Any = load_head(bundled_head(kind))
    extra: dict[str, Any] = {"num_draft_tokens": options.depth}
    if kind == "medusa":  # vLLM drafts every head's first choice: a tree with one branch
        firsts = tuple((ranks[0],) for ranks in head.config.accuracies[: options.depth])
        padded = firsts + ((0.0,),) * (head.config.num_heads - len(firsts))
        head.config = dataclasses.replace(head.config, accuracies=padded)
        extra = {"tree": options.depth}
    key = "model" if kind == "vanilla" else "head"
    made: Any = bundled_head(kind) if kind == "vanilla" else head
    draft = load_draft(kind, target, **{key: made}, **extra)
    setting = Setting(num_draft_tokens=options.depth, max_tokens=options.max_tokens, batch=8)
    counters = pooled(evaluate(target, draft, asked, setting).answers)
    return {
        "acceptance_per_position": counters.acceptance_per_position,
        "num_drafts": counters.num_drafts,
        "mean_acceptance_length": counters.mean_acceptance_length,
    }


def compare(
    name: str, plain: dict[str, Any], theirs: dict[str, Any], mine: dict[str, Any]
) -> dict[str, Any]:
    """One row of the table."""
    pairs = list(zip(plain["token_ids"], theirs["token_ids"], strict=True))
    rounds = max(1, theirs["num_drafts"])
    rates = [count / rounds for count in theirs["num_accepted_tokens_per_pos"]]
    own = mine["acceptance_per_position"]
    own = own + [0.0] * (len(rates) - len(own))
    worst = max(abs(a - b) for a, b in zip(rates, own, strict=True))
    same = sum(a == b for a, b in pairs)
    return {
        "head": name,
        "same_text": same,
        "texts": len(pairs),
        "vllm": rates,
        "ours": own,
        "rounds": rounds,
        "our_rounds": mine["num_drafts"],
        "vllm_length": 1 + theirs["num_accepted_tokens"] / rounds,
        "our_length": mine["mean_acceptance_length"],
        "largest_difference": worst,
        "seconds_plain": plain["seconds"],
        "seconds": theirs["seconds"],
        "passed": same == len(pairs) and worst <= POINTS,
    }


def line(row: dict[str, Any]) -> str:
    """A row of Markdown."""
    rates = [" / ".join(f"{rate:.1%}" for rate in row[side]) for side in ("vllm", "ours")]
    lengths = f"{row['vllm_length']:.2f} | {row['our_length']:.2f}"
    verdict = "" if row["passed"] else " FAILED |"
    same = f"{row['same_text']} of {row['texts']}"
    return f"| {row['head']} | {same} | {rates[0]} | {rates[1]} | {lengths} |{verdict}"


def served(options: argparse.Namespace, folder: Path) -> bool:
    """Part 2: the written configuration, the OpenAI client, and /metrics kept for the tuner."""
    settings = (folder / "speculative_config.json").read_text()
    with Server(options.python, model_folder(), settings, options.port, options.out) as server:
        program = ROOT / "scripts/vllm_client.py"
        command = [str(options.python), str(program), server.url, *own_questions()[:4]]
        done = subprocess.run(command, capture_output=True, text=True)
        metrics = server.get("/metrics")
    print(done.stdout + done.stderr[-2000:])
    (options.out / "metrics.txt").write_text(metrics)
    wanted = ("num_drafts_total", "num_draft_tokens_total", "num_accepted_tokens_total",
              "num_accepted_tokens_per_pos_total")  # fmt: skip
    counted = [name for name in wanted if f"vllm:spec_decode_{name}" in metrics]
    print(f"served: {len(counted)} of {len(wanted)} counters of speculation in /metrics")
    return done.returncode == 0 and len(counted) == len(wanted) and tuned(options)


def tuned(options: argparse.Namespace) -> bool:
    """The tuner takes acceptance from the metrics that were kept."""
    telemetry = "{vllm_metrics: metrics.txt, draft: eagle3, temperature: 0}"
    example = speculant("tune", "--example").stdout
    workload = options.out / "workload.yaml"
    workload.write_text(example.replace("telemetry: {}", f"telemetry: {telemetry}"))
    page = speculant("tune", str(workload), "--json").stdout
    read = "the server's counters (metrics.txt)" in page
    print(f"tuner: {'read' if read else 'did not read'} the server's counters")
    return read


def exact(options: argparse.Namespace, folder: Path) -> bool:
    """Part 3: stock vLLM must be found wrong, the repaired one right."""
    settings, good = (folder / "speculative_config.json").read_text(), True
    for repaired in (False, True):
        began = time.perf_counter()
        with Server(
            options.python, model_folder(), settings, options.port, options.out, repaired
        ) as server:
            done = speculant("check", "--endpoint", server.url, "--target", NAME, "--json")
        print(done.stdout, done.stderr[-1000:], f"{time.perf_counter() - began:.0f} s")
        report = json.loads(done.stdout)
        name = "repaired" if repaired else "stock"
        (options.out / f"exact-{name}.json").write_text(json.dumps(report, indent=2) + "\n")
        print(f"{name}: {'exact' if report['passed'] else 'not exact'}")
        good &= report["passed"] == repaired
    return good


if __name__ == "__main__":
    sys.exit(main())
