"""A peer in a process of its own, under the Python that has it: `peer_worker`'s other side."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

WORKER = Path(__file__).with_name("peer_worker.py")
LOAD_S, RUN_S, QUIT_S = 1800.0, 900.0, 10.0
"""Longest waits for an answer."""
TELLING = ("Error", "error", "Killed", "not supported")


class PeerError(OSError):
    """A peer that does not start or stops working; the message is one line for the user."""


def decode_ms(steps: Sequence[Sequence[float]]) -> float:
    """Milliseconds that all tokens but the first took.

    steps: (ms since the start, tokens so far) whenever tokens came out, at least one

    The first step holds the prefill, so that time counts from its end. Where it gave several tokens
    (a draft verified together with the prompt), what came after it is scaled up to all but one. 0.0
    where nothing came after it.
    """
    (first_ms, first), (last_ms, last) = steps[0], steps[-1]
    return (last_ms - first_ms) * (last - 1) / (last - first) if last > first else 0.0


class ProcessPeer:
    """A peer behind a process, which runs while the peer is entered.

    name, weights: see `Peer`
    command:       Python and the engine's file
    job:           makes what the engine is told to load; called on entering, may take a minute
    env:           further environment variables
    version:       the engine's, once entered
    """

    def __init__(
        self,
        name: str,
        weights: str,
        command: tuple[Path, Path],
        job: Callable[[], Mapping[str, Any]],
        env: Mapping[str, str],
    ) -> None:
        self.name, self.weights = name, weights
        self.version = ""
        python, engine = command
        # isolated: else Python would look for modules beside the worker, and there is a profile.py
        self._command = [str(python), "-I", str(WORKER), str(engine)]
        self._job, self._env = job, env
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> ProcessPeer:
        """Start the process and load the model. Raises PeerError when it cannot."""
        job = self._job()
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
        try:
            self._process = subprocess.Popen(
                self._command,
                env={**os.environ, **self._env},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                start_new_session=True,
            )
        except OSError as error:
            self._log.close()
            raise PeerError(f"{self._command[0]}: cannot be run ({error.strerror})") from None
        assert self._process.stdout is not None
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        parts = (self._process.stdout, self._answers)
        self._reader = threading.Thread(target=_forward, args=parts, daemon=True)
        self._reader.start()
        try:
            self.version = self._ask({"do": "load", "job": dict(job)}, LOAD_S)["version"]
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        if self._process is not None and self._process.poll() is None:
            try:
                self._send({"do": "quit"})
                self._process.wait(QUIT_S)
            except (PeerError, subprocess.TimeoutExpired):
                pass  # it is ended below
        self._stop()

    def run(self, prompt_ids: list[int], max_tokens: int) -> tuple[list[int], float]:
        """See `Peer`. Raises PeerError when the process fails or stops."""
        ask = {"do": "run", "ids": prompt_ids, "max_tokens": max_tokens}
        answer = self._ask(ask, RUN_S)
        return list(answer["tokens"]), decode_ms(answer["steps"])

    def _ask(self, ask: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        self._send(ask)
        try:
            line = self._answers.get(timeout=limit_s)
        except queue.Empty:
            self._stop()
            raise PeerError(f"{self.name} gave no answer within {limit_s:.0f} s") from None
        if not line:
            reason = self._reason()
            self._stop()
            raise PeerError(f"{self.name} stopped: {reason}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(f"{self.name}: {' '.join(str(answer['error']).split())[:400]}")
        return answer

    def _send(self, ask: Mapping[str, Any]) -> None:
        if self._process is None or self._process.stdin is None:
            raise PeerError(f"{self.name} is not running")
        try:
            self._process.stdin.write(json.dumps(ask) + "\n")
            self._process.stdin.flush()
        except (OSError, ValueError):
            reason = self._reason()
            self._stop()
            raise PeerError(f"{self.name} stopped: {reason}") from None

    def _reason(self) -> str:
        """Why the process ended: the last line of its log that names an error."""
        self._log.seek(0)
        lines = [line.strip() for line in self._log if line.strip()]
        telling = [line for line in lines if any(word in line for word in TELLING)]
        return (telling or lines or ["it wrote nothing"])[-1][:400]

    def _stop(self) -> None:
        """End the process and what it started. Safe to call twice."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self._reader.join(QUIT_S)  # it holds standard output, whose other end is gone now
        for stream in (process.stdin, process.stdout, self._log):
            _close(stream)


def _forward(answers: IO[str], into: queue.SimpleQueue[str]) -> None:
    """Put every line into a queue, and "" at the end."""
    try:
        for line in answers:
            into.put(line)
    except ValueError:
        pass  # closed meanwhile
    into.put("")


def _close(stream: IO[str] | None) -> None:
    """Close a stream, be its other end gone or not."""
    try:
        if stream is not None:
            stream.close()
    except OSError:
        pass  # what was still to be written has no reader
