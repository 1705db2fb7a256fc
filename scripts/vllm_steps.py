"""Steps of a long check: each with a log and a time limit, kept on disk so that none is done twice."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GOOD = "PASS"
BAD = "FAIL"


class StepError(Exception):
    """A step that did not come to its end; one line for the user."""


@dataclass(frozen=True)
class Row:
    """One line of the table.

    seconds: of the work behind it, when it was done
    """

    name: str
    passed: bool
    outcome: str
    seconds: float


@dataclass
class Steps:
    """Runs steps in a folder.

    out:       the folder: results/ and logs/
    timeout_s: of one step
    """

    out: Path
    timeout_s: float
    rows: list[Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in ("results", "logs"):
            (self.out / name).mkdir(parents=True, exist_ok=True)

    def log(self, name: str) -> Path:
        """Where a step's log goes."""
        return self.out / "logs" / f"{name}.log"

    def keep(self, name: str, key: Any, work: Callable[[Path], Any]) -> tuple[Any, float]:
        """The result of some work and its seconds: read where it was done before with the same key.

        key: all that the result depends on, as JSON; work: told the log's path

        Raises StepError where the work fails, and then keeps nothing.
        """
        path = self.out / "results" / f"{name}.json"
        if path.is_file():
            kept = json.loads(path.read_text())
            if kept["key"] == json.loads(json.dumps(key)):
                print(f"{name}: kept ({kept['seconds']:.0f} s then)", flush=True)
                return kept["result"], kept["seconds"]
        print(f"{name} ...", flush=True)
        began = time.perf_counter()
        try:
            result = work(self.log(name))
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            raise StepError(f"{error}; log: {self.log(name)}") from None
        seconds = time.perf_counter() - began
        part = path.with_suffix(".part")
        part.write_text(json.dumps({"key": key, "seconds": seconds, "result": result}) + "\n")
        os.replace(part, path)
        print(f"{name}: done in {seconds:.0f} s", flush=True)
        return result, seconds

    def call(
        self, words: Sequence[str], log: Path, codes: tuple[int, ...] = (0,)
    ) -> subprocess.CompletedProcess[str]:
        """Run a command, its output into the log too. Raises OSError for an exit code not in codes."""
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=self.timeout_s)
        except subprocess.TimeoutExpired:
            raise OSError(f"{words[0]} did not finish within {self.timeout_s:.0f} s") from None
        with log.open("a") as file:
            file.write(f"$ {' '.join(words)}\n{done.stdout}{done.stderr}\n")
        if done.returncode not in codes:
            last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
            raise OSError(f"{last[:200]} (exit code {done.returncode})")
        return done

    def judge(self, name: str, passed: bool, outcome: str, seconds: float) -> bool:
        """Add a line to the table."""
        self.rows.append(Row(name, passed, outcome, seconds))
        print(f"{GOOD if passed else BAD}  {name}: {outcome}", flush=True)
        return passed

    @property
    def passed(self) -> bool:
        """True when nothing failed."""
        return all(row.passed for row in self.rows)

    def table(self) -> str:
        """All lines, and the verdict."""
        wide = max(len(row.name) for row in self.rows)
        lines = [
            f"{GOOD if row.passed else BAD}  {row.name:<{wide}}  {row.seconds:6.0f} s  {row.outcome}"
            for row in self.rows
        ]
        bad = sum(not row.passed for row in self.rows)
        verdict = GOOD if self.passed else f"{BAD}: {bad} of {len(self.rows)}"
        return "\n".join([*lines, verdict])
