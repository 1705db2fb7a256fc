"""vLLM's server as a context manager; repaired, with its CPU build's sampling bug mended.

vLLM 0.32 on CPUs converts a tensor to int64 before it calls the operator that expands per-request
values (temperature, top-k, top-p) to drafted tokens; the result goes into the copy and is lost, and
what the rejection sampler reads is uninitialised memory. The repair is a plug-in that vLLM loads in
each of its processes: it puts the plain computation in the function's place.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType

REPAIR = '''\
"""Replaces one function of vLLM 0.32's CPU build."""


def expand(output, input_val, cu_num_tokens, replace_from, replace_to, MAX_NUM_TOKENS=None):
    """Every request's value to its drafted tokens, into `output` itself."""
    start = 0
    for value, end in zip(input_val.tolist(), cu_num_tokens.tolist()):
        output[start:end] = replace_to if value == replace_from else value
        start = end


def repair():
    """Entry point of the plug-in."""
    from vllm.triton_utils.dispatcher import register_kernels
    from vllm.utils import cpu_triton_utils

    cpu_triton_utils._expand_kernel_impl = expand
    register_kernels({"vllm.v1.sample.rejection_sampler.expand_kernel": expand})
'''
METADATA = "Metadata-Version: 2.1\nName: vllm-repair\nVersion: 0\n"
ENTRY_POINT = "[vllm.general_plugins]\nrepair = vllm_repair:repair\n"
START_S = 300
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0-1",
}


class Server:
    """A server with a head on a port of this machine, stopped on leaving.

    speculation: JSON for --speculative-config; "" serves without
    log:         folder of its log
    """

    def __init__(
        self,
        python: Path,
        model: Path,
        speculation: str,
        port: int,
        log: Path,
        repaired: bool = False,
    ) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.command = [
            str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
            "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager",
            "--max-model-len", "1024", "--max-num-seqs", "16",
        ]  # fmt: skip
        if speculation:
            self.command += ["--speculative-config", speculation]
        self.log = log / f"server-{'repaired' if repaired else 'stock'}.log"
        self.plugin = tempfile.TemporaryDirectory(prefix="vllm-repair-")
        self.env = {**ENVIRONMENT, **os.environ}
        if repaired:
            folder = Path(self.plugin.name)
            (folder / "vllm_repair.py").write_text(REPAIR)
            info = folder / "vllm_repair-0.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(METADATA)
            (info / "entry_points.txt").write_text(ENTRY_POINT)
            self.env["PYTHONPATH"] = str(folder)

    def __enter__(self) -> Server:
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                self.command, stdout=log, stderr=log, env=self.env, start_new_session=True
            )
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise SystemExit(f"vLLM stopped: see {self.log}")
            try:
                self.get("/health")
                return self
            except (urllib.error.URLError, ConnectionError):
                time.sleep(2)
        self.__exit__(None, None, None)
        raise SystemExit(f"vLLM did not start within {START_S} s: see {self.log}")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
        self.plugin.cleanup()

    def get(self, path: str) -> str:
        """The answer to a GET."""
        with urllib.request.urlopen(self.url + path, timeout=30) as reply:
            text: str = reply.read().decode()
        return text
