"""vLLM in a process of its own, under the Python that has it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).with_name("vllm_run.py")
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
"""Set unless the caller's environment says otherwise."""
WORTH_SHOWING = ("Error", "error", "assert", "not supported", "no module or parameter")


class EngineError(OSError):
    """vLLM did not run; the message is one line for the user."""


def run_vllm(
    python: Path,
    job: Mapping[str, Any],
    timeout_s: float = 1800,
    env: Mapping[str, str] | None = None,
    log: Path | None = None,
) -> dict[str, Any]:
    """Run a job (see `vllm_run`) and return its result. Raises EngineError when vLLM stops.

    env: further environment variables
    log: file for all that vLLM says
    """
    with tempfile.TemporaryDirectory(prefix="speculant-vllm-") as folder:
        job_file, result_file = Path(folder) / "job.json", Path(folder) / "result.json"
        job_file.write_text(json.dumps(job))
        # copied, since Python looks for modules beside a program, and there is a vllm.py beside ours
        program = shutil.copy(PROGRAM, folder)
        command = [str(python), str(program), str(job_file), str(result_file)]
        place = log or Path(folder) / "log.txt"
        try:
            with place.open("w") as file:
                done = subprocess.run(
                    command,
                    env={**ENVIRONMENT, **os.environ, **(env or {})},
                    stdout=file,
                    stderr=file,
                    timeout=timeout_s,
                )
        except OSError as error:
            raise EngineError(f"{python}: cannot be run ({error.strerror})") from None
        except subprocess.TimeoutExpired:
            raise EngineError(f"vLLM did not finish within {timeout_s:.0f} s") from None
        if done.returncode or not result_file.is_file():
            raise EngineError(f"vLLM stopped: {reason(place.read_text(errors='replace'))}")
        result: dict[str, Any] = json.loads(result_file.read_text())
        return result


def has_vllm(python: Path) -> bool:
    """True when this Python can import vLLM."""
    probe = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    try:
        return subprocess.run([str(python), "-c", probe], capture_output=True).returncode == 0
    except OSError:
        return False


def reason(log: str) -> str:
    """The line of a log that says why it ended: the last that names an error."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    telling = [line for line in lines if any(word in line for word in WORTH_SHOWING)]
    return (telling or lines or ["no output"])[-1][:400]
