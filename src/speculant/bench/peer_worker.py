"""The loop of a peer's process: run by the Python that has the peer, which needs no speculant.

    python -I peer_worker.py peer_ENGINE.py

JSON lines on standard input, one JSON line each on standard output:

    {"do": "load", "job": {...}}                     {"version": "..."}
    {"do": "run", "ids": [...], "max_tokens": 48}    {"tokens": [...], "steps": [[ms, tokens], ...]}
    {"do": "quit"}

What fails is answered by {"error": "..."}. The engine's file defines `load(job)`, which returns its
version and the function that runs: (ids, max_tokens) -> (tokens, steps). A step is when tokens came
out, in milliseconds since the start of the run, and how many there were then.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable
from typing import Any

Step = tuple[float, int]
Run = Callable[[list[int], int], tuple[list[int], list[Step]]]


def main(path: str) -> None:
    """Answer until told to quit, or until standard input ends."""
    # what the engine prints must not get between the answers: its standard output is the log
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    spec = importlib.util.spec_from_file_location("engine", path)
    assert spec is not None
    assert spec.loader is not None
    engine = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(engine)
    loaded: list[Run] = []
    for line in sys.stdin:
        ask = json.loads(line)
        if ask["do"] == "quit":
            break
        try:
            answer = reply(ask, engine, loaded)
        except Exception as error:  # whatever an engine raises, the other side is to hear of it
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def reply(ask: dict[str, Any], engine: Any, loaded: list[Run]) -> dict[str, Any]:
    """The answer to one line. loaded: the function that runs, once there is one."""
    if ask["do"] == "load":
        version, run = engine.load(ask["job"])
        loaded[:] = [run]
        return {"version": version}
    tokens, steps = loaded[0](ask["ids"], ask["max_tokens"])
    return {"tokens": tokens, "steps": steps}


if __name__ == "__main__":
    main(sys.argv[1])
