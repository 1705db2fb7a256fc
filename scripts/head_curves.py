"""Heads under equal conditions: scaling curve, order of the methods, training-time test on and off.

Trains every head on the same data (nested parts of it for the scaling curve) with `speculant train`,
decodes the same questions with each (`speculant eval`), and draws what came out. What is done is
kept: the same command goes on where it stopped.

    python scripts/head_curves.py --data data/a --data data/b --questions questions.jsonl --out curves

Writes `curves.json`, `curves.md` and the pictures `scaling.png` and `ttt.png`; `--only` picks runs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from speculant.pictures import pyplot, save

SIZES = (25_000, 50_000, 100_000, 200_000, 400_000)
TABLE = 200_000  # answer tokens that every method gets
EPOCHS = 2.0
PLAIN = ["--epochs", str(EPOCHS)]
RUNS: dict[str, list[str]] = {
    **{
        f"eagle3-{size // 1000}k": ["eagle3", "--answer-tokens", str(size), *PLAIN, "--single", "0.7"]
        for size in SIZES
    },
    "eagle1-200k": ["eagle1", "--answer-tokens", str(TABLE), *PLAIN],
    "medusa-200k": ["medusa", "--answer-tokens", str(TABLE), *PLAIN],
    "vanilla-200k": ["vanilla", "--answer-tokens", str(TABLE), *PLAIN],
    # no training-time test: the same tokens, and the tokens that fit into the same time
    "eagle3-200k-off": ["eagle3", "--answer-tokens", str(TABLE), *PLAIN, "--steps", "1"],
    "eagle3-200k-off-long": [
        "eagle3", "--answer-tokens", str(TABLE), "--epochs", "3.2", "--steps", "1",
    ],
}  # fmt: skip


def speculant(arguments: list[str]) -> None:
    """Run a command of ours; its output goes where ours goes."""
    command = [sys.executable, "-m", "speculant.cli", *arguments]
    if subprocess.run(command, check=False).returncode:
        raise SystemExit(f"failed: speculant {' '.join(arguments)}")


def train(name: str, options: argparse.Namespace) -> None:
    """Train a head where it is missing, and note how long that took."""
    head = options.out / name
    if (head / "config.json").exists():
        return
    where = [part for folder in options.data for part in ("--data", str(folder))]
    began = time.monotonic()
    speculant(["train", *RUNS[name], *where, "--out", str(head), *options.threads])
    (options.out / f"{name}.seconds").write_text(f"{time.monotonic() - began:.0f}\n")


def evaluate(name: str, options: argparse.Namespace) -> None:
    """Decode the questions with a head where that is missing: chain and tree, temperature 0.

    An EAGLE-1 head also with the fixed tree of its paper.
    """
    asked = ["--questions", str(options.questions)] if options.questions else []
    for draft, report in drafts(name, options.out).items():
        if not report.exists():
            speculant(
                ["eval", draft, *asked, "--limit", str(options.limit), "-t", "0",
                 "--max-tokens", str(options.max_tokens), "--out", str(report), *options.threads]
            )  # fmt: skip


def drafts(name: str, out: Path) -> dict[str, Path]:
    """What a head is decoded as -> where the figures go."""
    found = {str(out / name): out / f"{name}.eval.json"}
    if name.startswith("eagle1"):
        found[f"eagle1-tree={out / name}"] = out / f"{name}.fixed.eval.json"
    return found


def row(name: str, out: Path) -> dict[str, Any] | None:
    """What is known about a run, or None before it is done."""
    config, report = out / name / "config.json", out / f"{name}.eval.json"
    if not (config.exists() and report.exists()):
        return None
    training = json.loads(config.read_text())["training"]
    seconds = out / f"{name}.seconds"
    found: dict[str, Any] = {
        "name": name,
        "answer_tokens": training["answer_tokens"],
        "tokens_seen": training["tokens_seen"],
        "minutes": round(int(seconds.read_text()) / 60, 1) if seconds.exists() else None,
        "held_out": training["held_out"],
    }
    for draft, path in drafts(name, out).items():
        decoded = json.loads(path.read_text()) if path.exists() else {"results": []}
        for run in decoded.get("results", [decoded]):
            shape = "tree" if run["settings"].get("tree") else "chain"
            found["fixed tree" if draft.startswith("eagle1-tree") else shape] = {
                key: run[key]
                for key in ("mean_acceptance_length", "conditional_acceptance_per_position")
            }
    return found


def draw(rows: list[dict[str, Any]], out: Path) -> None:
    """The two pictures, as far as there is something to draw."""
    by_name = {r["name"]: r for r in rows}
    sizes = [by_name[f"eagle3-{s // 1000}k"] for s in SIZES if f"eagle3-{s // 1000}k" in by_name]
    if len(sizes) > 1:
        figure, (left, right) = pyplot().subplots(1, 2, figsize=(10, 4))
        tokens = [r["answer_tokens"] for r in sizes]
        held_out = [r["held_out"]["conditional_acceptance_per_position"][0] for r in sizes]
        decoded = [r["chain"]["conditional_acceptance_per_position"][0] for r in sizes]
        left.plot(tokens, held_out, "o-", label="held-out answers")
        left.plot(tokens, decoded, "s-", label="questions, decoded")
        left.set_ylabel("acceptance at the first position")
        right.plot(tokens, [r["held_out"]["mean_acceptance_length"] for r in sizes], "o-",
                   label="held-out answers, chain of 5")  # fmt: skip
        for shape, mark in (("chain", "s-"), ("tree", "^-")):
            lengths = [r[shape]["mean_acceptance_length"] for r in sizes]
            right.plot(tokens, lengths, mark, label=f"questions, {shape}")
        right.set_ylabel("mean acceptance length")
        for axis in (left, right):
            axis.set_xscale("log")
            axis.set_xlabel("answer tokens of the data")
            axis.grid(alpha=0.3, which="both")
            axis.legend()
        figure.tight_layout()
        save(figure, out / "scaling.png")
    names = {"eagle3-200k": "on, five steps", "eagle3-200k-off": "off, the same tokens",
             "eagle3-200k-off-long": "off, the same time"}  # fmt: skip
    if sum(name in by_name for name in names) > 1:
        figure, axes = pyplot().subplots(1, 2, figsize=(10, 4), sharey=True)
        for name, label in names.items():
            if name in by_name:
                found = by_name[name]
                for axis, part in zip(axes, (found["held_out"], found["chain"]), strict=True):
                    line = part["conditional_acceptance_per_position"]
                    axis.plot(range(1, len(line) + 1), line, "o-", label=label)
        for axis, title in zip(axes, ("held-out answers", "questions, decoded"), strict=True):
            axis.set_title(title)
            axis.set_xlabel("draft position")
            axis.set_xticks(range(1, 6))
            axis.grid(alpha=0.3)
            axis.legend(title="training-time test")
        axes[0].set_ylabel("acceptance, given the one before")
        figure.tight_layout()
        save(figure, out / "ttt.png")


def table(rows: list[dict[str, Any]]) -> str:
    """The rows in Markdown: acceptance given the position before, and mean acceptance lengths."""
    lines = [
        "| head | answer tokens | seen | minutes | held-out: positions 1 to 5 | length "
        "| decoded, chain of 5: positions 1 to 5 | length | tree of 32: length | fixed tree of 25 |",
        "|---" * 10 + "|",
    ]
    for r in rows:
        cells = [r["name"], f"{r['answer_tokens']:,}", f"{r['tokens_seen']:,}", f"{r['minutes']}"]
        for part in (r["held_out"], r.get("chain")):
            if part is None:
                cells += ["", ""]
                continue
            rates = part["conditional_acceptance_per_position"][:5]
            cells += [", ".join(f"{x:.2f}" for x in rates), f"{part['mean_acceptance_length']:.2f}"]
        for shape in ("tree", "fixed tree"):
            cells.append(f"{r[shape]['mean_acceptance_length']:.2f}" if shape in r else "")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Read the command line and do what is missing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, action="append", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--questions", type=Path)
    parser.add_argument("--limit", type=int, default=24)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--only", nargs="*", choices=list(RUNS))
    parser.add_argument("--threads", type=lambda n: ["--threads", n], default=[])
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.only or RUNS:
        train(name, options)
        evaluate(name, options)
        rows = [found for known in RUNS if (found := row(known, options.out))]
        (options.out / "curves.json").write_text(json.dumps(rows, indent=1) + "\n")
        (options.out / "curves.md").write_text(table(rows))
        draw(rows, options.out)


if __name__ == "__main__":
    main()
