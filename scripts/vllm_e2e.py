"""Prove on real vLLM that exported heads work: same text, and the acceptance we measure ourselves.

    make vllm-e2e

1. Every bundled head is exported in every format that vLLM reads, and checked.
2. Offline, at temperature 0, over 40 questions: the text must be what vLLM writes without the head, and
   acceptance per position within three points of ours for a chain of the same length.
3. Served: `vllm serve` with the written configuration, and on the folder in the speculators format
   alone, answers the OpenAI client and counts in /metrics, which `speculant tune` reads.
4. Exactness: `speculant check --endpoint` calls stock vLLM 0.32 on CPUs wrong above temperature 0, and
   the same server with one function repaired right.

Prints one table and PASS or FAIL; exit code 1 for FAIL. What is done is kept in the folder and not done
again (`results/`), every step has a log (`logs/`) and a time limit.

Needs the two environments that the Makefile makes: .venv with speculant, .venv-vllm with vLLM.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_compare import ask, compare, digest, shares
from vllm_questions import questions as own_questions
from vllm_server import Server, name_distribution
from vllm_steps import StepError, Steps

from speculant.commands.lend import lend
from speculant.drafts import bundled_head
from speculant.export.running import has_vllm, run_vllm
from speculant.heads.weights import load_head, save_head
from speculant.target.convert import cache_folder
from speculant.target.tokenizer import load_tokenizer

ROOT = Path(__file__).parents[1]
NAME = "smollm2-135m-instruct"
EXPORTS = {
    "eagle3": ("eagle3", "native"),
    "eagle3-speculators": ("eagle3", "speculators"),
    "eagle1": ("eagle1", "native"),
    "medusa": ("medusa", "native"),
    "vanilla": ("vanilla", "native"),
}
PARTS = ("offline", "served", "exact")
POINTS = 0.03
"""Largest difference in acceptance at a position."""
COUNTERS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos")


def main() -> int:
    """Run what was asked for; 1 when something failed."""
    options = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # no server is left behind
    steps = Steps(options.out, options.timeout)
    run = Run(options, steps)
    for name in options.only:
        run.attempt(f"{name}: export", run.export, name)
    exported = [name for name in options.only if name in run.folders]
    if "offline" in options.parts:
        for name in exported:
            run.attempt(f"{name}: greedy text and acceptance", run.offline, name)
    served = next((name for name in exported if name.startswith("eagle3")), None)
    if "served" in options.parts:
        for name in exported:
            if name.startswith("eagle3"):
                run.attempt(f"{name}: served", run.served, name)
    if "exact" in options.parts and served is not None:
        for repaired in (False, True):
            label = "repaired" if repaired else "stock"
            run.attempt(f"exactness of {label} vLLM", run.exact, served, repaired)
    print()
    print(steps.table())
    (options.out / "table.md").write_text(run.markdown())
    return 0 if steps.passed else 1


def arguments() -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    add = parser.add_argument
    add("--questions", type=int, default=40, metavar="N", help="how many; default 40")
    add("--file", type=Path, help="JSONL of questions, in Spec-Bench's format; default: own ones")
    add("--only", nargs="+", default=list(EXPORTS), choices=list(EXPORTS), help="these heads")
    add("--parts", nargs="+", default=list(PARTS), choices=PARTS, help="default: all of them")
    add("--max-tokens", type=int, default=64)
    add("--depth", type=int, default=3, help="tokens to draft a round")
    add("--samples", type=int, default=1500, help="of each check for exactness")
    add("--python", type=Path, default=ROOT / ".venv-vllm/bin/python", help="the one with vLLM")
    add("--out", type=Path, default=ROOT / "build/vllm-e2e", help="results and logs")
    add("--timeout", type=float, default=3600, metavar="S", help="of one step; default 3600")
    add("--port", type=int, default=8193)
    options = parser.parse_args()
    options.out = options.out.absolute()
    options.python = options.python.absolute()
    for name, least in (("questions", 1), ("max_tokens", 2), ("depth", 1), ("samples", 500)):
        if getattr(options, name) < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}")
    if not has_vllm(options.python):
        parser.error(f"{options.python} has no vLLM: make vllm-e2e installs it")
    return options


class Run:
    """The steps, over what they share: the questions, the target's folder and the exports."""

    def __init__(self, options: argparse.Namespace, steps: Steps) -> None:
        self.options, self.steps = options, steps
        self.folders: dict[str, Path] = {}
        self.compared: list[dict[str, Any]] = []
        self.model = Path(lend(NAME, ends=False).parts.name)
        tokenizer = load_tokenizer(self.model, cache_folder())
        self.asked = ask(options.file, options.questions)
        ids = [tokenizer.chat([{"role": "user", "content": q.turns[0]}]) for q in self.asked]
        self.job = {
            "model": str(self.model),
            "prompts": ids,
            "max_tokens": options.max_tokens,
            "dtype": "float32",
            "max_model_len": max(map(len, ids)) + options.max_tokens + 16,
            "max_num_seqs": 16,
        }
        self.file = options.out / "questions.jsonl"
        lines = [json.dumps(dataclasses.asdict(question)) for question in self.asked]
        self.file.write_text("\n".join(lines) + "\n")
        name_distribution(options.python)

    def attempt(self, name: str, step: Callable[..., None], *given: Any) -> None:
        """Take a step; one that does not come to its end is a line of the table, not the end."""
        try:
            step(*given)
        except StepError as error:
            self.steps.judge(name, False, str(error), 0.0)

    def export(self, name: str) -> None:
        """A bundled head exported and checked, as a user would."""
        kind, layout = EXPORTS[name]
        out, depth = self.options.out / "exports" / name, str(self.options.depth)
        words = ["export", "vllm", kind, "--out", str(out), "--format", layout, "-n", depth]

        def work(log: Path) -> Any:
            self.speculant(log, *words)
            checked = self.speculant(log, "check-export", str(out), "--target", NAME, "--json")
            return {"made": digest(out), "checked": json.loads(checked)}

        key = [digest(bundled_head(kind)), words[:3], layout, depth, digest(self.model)]
        if not out.is_dir():
            (self.options.out / "results" / f"export-{name}.json").unlink(missing_ok=True)
        result, seconds = self.steps.keep(f"export-{name}", key, work)
        found, passed = result["checked"]["findings"], result["checked"]["passed"]
        self.steps.judge(f"{name}: export", passed, f"checked, {len(found)} findings", seconds)
        self.folders[name] = out

    def offline(self, name: str) -> None:
        """Both sides over the questions: the text, and acceptance per position."""
        plain, before = self.vllm("vllm-plain", self.job)
        spec = json.loads((self.folders[name] / "speculative_config.json").read_text())
        job = {**self.job, "speculative_config": spec}
        theirs, seconds = self.vllm(f"vllm-{name}", job, digest(self.folders[name]))
        mine, more = self.ours(name)
        row = compare(name, plain, theirs, mine)
        self.compared.append(row)
        same, texts = row["same_text"], len(self.asked)
        told = f"{same} of {texts} as without it ({row['tokens']} tokens)"
        self.steps.judge(f"{name}: greedy text", same == texts, told, before + seconds)
        told = f"vLLM {shares(row['vllm'])}, ours {shares(row['ours'])}: at most "
        told += f"{100 * row['largest_difference']:.1f} points apart"
        close = row["largest_difference"] <= POINTS
        self.steps.judge(f"{name}: acceptance", close, told, more)

    def vllm(self, name: str, job: dict[str, Any], head: str = "") -> tuple[Any, float]:
        """vLLM's result of a job."""

        def work(log: Path) -> Any:
            return run_vllm(self.options.python, job, self.steps.timeout_s, log=log)

        return self.steps.keep(name, [job, head], work)

    def ours(self, name: str) -> tuple[Any, float]:
        """Our figures for the same questions and the same chain: `speculant eval`."""
        kind, o = EXPORTS[name][0], self.options
        head, depth = bundled_head(kind), ["--tree", "0", "-n", str(o.depth)]
        if kind == "medusa":  # vLLM drafts every head's first choice: a tree with one branch
            head, depth = self.medusa_chain(head), ["--tree", str(o.depth)]
        elif kind == "vanilla":
            depth = depth[2:]
        words = ["eval", str(head), "--questions", str(self.file), "--temperature", "0", *depth,
                 "--max-tokens", str(o.max_tokens), "--json"]  # fmt: skip

        def work(log: Path) -> Any:
            return json.loads(self.speculant(log, *words))

        key = [digest(head), self.file.read_text(), depth, o.max_tokens]
        return self.steps.keep(f"ours-{kind}", key, work)

    def medusa_chain(self, head: Path) -> Path:
        """The bundled heads with a tree of first choices alone."""
        out: Path = self.options.out / "medusa-chain"
        loaded: Any = load_head(head)
        firsts = [(ranks[0],) for ranks in loaded.config.accuracies]
        kept = tuple(firsts[: self.options.depth]) + ((0.0,),) * (len(firsts) - self.options.depth)
        loaded.config = dataclasses.replace(loaded.config, accuracies=kept)
        save_head(loaded, out)
        return out

    def served(self, name: str) -> None:
        """`vllm serve`, the OpenAI client, /metrics and the tuner that reads it."""
        o, folder = self.options, self.folders[name]
        settings = (folder / "speculative_config.json").read_text()
        model = folder if EXPORTS[name][1] == "speculators" else self.model
        settings = "" if model == folder else settings  # that format names target and length itself

        def work(log: Path) -> Any:
            server = log.with_name(f"server-{name}.log")
            with Server(o.python, model, settings, o.port, server) as running:
                program = str(ROOT / "scripts/vllm_client.py")
                words = [str(o.python), program, running.url, *own_questions()[:4]]
                told = self.steps.call(words, log).stdout
                return {"answers": told.splitlines(), "metrics": running.get("/metrics")}

        result, seconds = self.steps.keep(f"served-{name}", [digest(folder), settings], work)
        answers = len(result["answers"])
        self.steps.judge(f"{name}: openai client", answers == 4, f"{answers} answers", seconds)
        found = [c for c in COUNTERS if f"vllm:spec_decode_{c}_total" in result["metrics"]]
        told = f"{len(found)} of {len(COUNTERS)} counters of speculation"
        self.steps.judge(f"{name}: /metrics", len(found) == len(COUNTERS), told, 0)
        self.tuned(name, result["metrics"])

    def tuned(self, name: str, metrics: str) -> None:
        """The tuner takes acceptance from the metrics of a server."""
        place, log = self.options.out / f"metrics-{name}.txt", self.steps.log(f"tuner-{name}")
        place.write_text(metrics)
        telemetry = f"{{vllm_metrics: {place.name}, draft: eagle3, temperature: 0}}"
        workload = self.options.out / f"workload-{name}.yaml"

        def work(log: Path) -> Any:
            example = self.speculant(log, "tune", "--example")
            text = example.replace("telemetry: {}", f"telemetry: {telemetry}")
            workload.write_text(text)
            page = self.speculant(log, "tune", str(workload), "--json")
            return f"the server's counters ({place.name})" in page

        read, seconds = self.steps.keep(log.stem, [metrics], work)
        told = f"{'read' if read else 'did not read'} the server's counters"
        self.steps.judge(f"{name}: tuner", read, told, seconds)

    def exact(self, name: str, repaired: bool) -> None:
        """Stock vLLM must be found wrong above temperature 0, the repaired one right."""
        o, folder = self.options, self.folders[name]
        label = "repaired" if repaired else "stock"
        settings = (folder / "speculative_config.json").read_text()

        def work(log: Path) -> Any:
            server = log.with_name(f"server-{label}.log")
            with Server(o.python, self.model, settings, o.port, server, repaired) as running:
                words = ["check", "--endpoint", running.url, "--target", NAME, "--json"]
                count = ["--samples", str(o.samples)]
                return json.loads(self.speculant(log, *words, *count, codes=(0, 1)))

        key = [digest(folder), settings, o.samples, repaired]
        report, seconds = self.steps.keep(f"exact-{label}", key, work)
        told = f"called {'exact' if report['passed'] else 'not exact'}"
        right = report["passed"] == repaired
        self.steps.judge(f"exactness of {label} vLLM", right, told, seconds)

    def speculant(self, log: Path, *words: str, codes: tuple[int, ...] = (0,)) -> str:
        """Run our command; its standard output."""
        command = [sys.executable, "-m", "speculant.cli", *words]
        return self.steps.call(command, log, codes).stdout

    def markdown(self) -> str:
        """The rows of docs/deploy.md's table."""
        lines = []
        for row in self.compared:
            same = f"{row['same_text']} of {row['texts']}"
            lengths = f"{row['vllm_length']:.2f} | {row['our_length']:.2f}"
            both = f"{shares(row['vllm'])} | {shares(row['ours'])}"
            lines.append(f"| {row['head']} | {same} | {both} | {lengths} |")
        return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
