"""Progress of a run on stderr: bars on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from .data import DataProgress
from .run import Watch

EVERY_S = 30.0  # between two lines where there is no terminal
ENDLESS = 10**11  # answer tokens beyond which the time is the limit, not the number


class Display:
    """A context manager whose `watch` is handed to a run."""

    def __init__(self) -> None:
        self.console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[news]}"))
        self.progress = Progress(*columns, TimeRemainingColumn(), console=self.console)
        self._tasks: dict[str, TaskID] = {}
        self._last = 0.0
        self.watch = Watch(self._say, self._data, self._step)

    def __enter__(self) -> Display:
        """Start drawing, where there is a terminal."""
        if self.console.is_terminal:
            self.progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop drawing."""
        if self.console.is_terminal:
            self.progress.stop()

    def _say(self, line: str) -> None:
        self.console.print(line, highlight=False, soft_wrap=True)

    def _data(self, news: DataProgress, wanted: int) -> None:
        text = (
            f"{news.answer_tokens} answer tokens, {news.samples} samples, longest {news.longest}, "
            f"{news.tokens_per_s:.0f} tokens/s ({news.generated_per_s:.0f} generated)"
        )
        total = wanted if wanted < ENDLESS else None
        self._show("data", news.answer_tokens, total, text, always=True)

    def _step(self, record: dict[str, Any], total: int) -> None:
        speed = record["tokens"] / max(1e-9, record["seconds"])
        text = f"step {record['step']}/{total}, loss {record['loss']:.3f}, {speed:.0f} tokens/s"
        scored = "mean_acceptance_length" in record
        if scored:
            shares = " ".join(f"{c:.2f}" for c in record["conditional"])
            length = record["mean_acceptance_length"]
            self._say(f"step {record['step']}: mean acceptance length {length:.3f} ({shares})")
        self._show("training", record["step"], total, text, always=False)

    def _show(self, name: str, done: int, total: int | None, text: str, always: bool) -> None:
        if name not in self._tasks:
            self._tasks[name] = self.progress.add_task(name, total=total, news="")
        self.progress.update(self._tasks[name], completed=done, news=text)
        now = time.monotonic()
        if not self.console.is_terminal and (always or now - self._last > EVERY_S):
            self._say(f"{name}: {text}")
            self._last = now
