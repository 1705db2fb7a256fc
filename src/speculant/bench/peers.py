"""Other engines beside ours in one benchmark: what is installed here, ready to be entered.

transformers runs in this process. llama.cpp, vLLM and OpenVINO each have an environment of their own,
which `make peers` sets up, and run as a process there. docs/peers.md says how each is set and measured.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..target.base import Target
from ..target.load import resolve
from .contenders import Peer
from .peer_files import exported, find_gguf, gguf_weights, openvino_model
from .peer_process import ProcessPeer
from .peer_transformers import Shared, TransformersPeer

CONTEXT = 4096
"""Tokens that a peer makes room for, or the target's context where that is less."""
VLLM_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
VLLM_NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_max": 4,
    "prompt_lookup_min": 2,
}
EXACT = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
"""OpenVINO rounds the cache to 8 bits by itself, and computes in bfloat16 where the CPU has it."""


class Missing(Exception):  # noqa: N818  # not an error: the peer is left out
    """Why a peer cannot run here; one line."""


@dataclass(frozen=True)
class Setup:
    """What the builders of peers need.

    folder:        the target's, in Hugging Face form
    draft_folders: kind -> folder of a head of ours
    context:       tokens to make room for
    dtype, device: the target's
    venvs:         folder of the peers' environments
    """

    folder: Path
    draft_folders: Mapping[str, Path]
    eos_ids: list[int]
    threads: int
    context: int
    dtype: str
    device: str
    venvs: Path
    shared: Shared

    def python(self, venv: str) -> Path:
        """The Python of an environment. Raises Missing where it is not set up."""
        if self.device != "cpu":
            raise Missing(f"runs on the CPU here, and the target on {self.device}")
        if not (self.venvs / venv / ".installed").is_file():
            raise Missing(f"not installed: make peers-{venv}")
        return self.venvs / venv / "bin" / "python"

    def gguf(self) -> Path:
        """The target's GGUF file. Raises Missing without one."""
        found = find_gguf(self.folder)
        if found is None:
            raise Missing(f"needs a GGUF file, and none belongs to {self.folder}")
        return found

    def head(self, kind: str) -> Path:
        """The folder of a head. Raises Missing without one."""
        if kind not in self.draft_folders:
            raise Missing(f"needs a head of kind {kind} for this target")
        return self.draft_folders[kind]

    @property
    def common(self) -> dict[str, Any]:
        """What every process is told."""
        return {"context": self.context, "threads": self.threads, "eos_ids": self.eos_ids}


def find_peers(
    folder: str,
    target: Target,
    draft_folders: Mapping[str, str],
    wanted: Sequence[str] | None,
    threads: int,
) -> list[Peer]:
    """The peers that can run here, in the order of PEERS; none is started yet.

    folder:        of the target's weights, or another name that `load_target` takes
    draft_folders: draft -> folder of a head of ours for this target ("eagle3", "vanilla")
    wanted:        names of PEERS; None is all. One that is named but cannot run is left out with a
                   line on standard error
    threads:       CPU threads of each

    Raises ValueError for a name that is none.
    """
    unknown = [name for name in wanted or () if name not in PEERS]
    if unknown:
        names = ", ".join(PEERS)
        raise ValueError(f"--peers: unknown peer {unknown[0]!r}: the peers are {names}, or none")
    place = resolve(folder)[0]
    dtype = str(target.info.dtype).removeprefix("torch.")
    device, eos_ids = str(target.info.device), sorted(target.tokenizer.eos_ids)
    setup = Setup(
        folder=place,
        draft_folders={kind: Path(head) for kind, head in draft_folders.items()},
        eos_ids=eos_ids,
        threads=threads,
        context=min(CONTEXT, target.info.context_length),
        dtype=dtype,
        device=device,
        venvs=venvs_folder(),
        shared=Shared(place, dtype, device, eos_ids),
    )
    found = []
    for name in PEERS if wanted is None else (n for n in PEERS if n in wanted):
        try:
            found.append(PEERS[name](name, setup))
        except Missing as why:
            if wanted is not None:
                print(f"speculant: {name} is left out: {why}", file=sys.stderr)
    return found


def venvs_folder() -> Path:
    """Where the peers' environments are: $SPECULANT_PEERS, or `.peers` in the checkout."""
    given = os.environ.get("SPECULANT_PEERS")
    return Path(given).expanduser() if given else Path(__file__).parents[3] / ".peers"


def _transformers(name: str, setup: Setup, **options: Any) -> Peer:
    return TransformersPeer(name, setup.shared, setup.threads, options)


def _assisted(name: str, setup: Setup) -> Peer:
    head = setup.head("vanilla")
    draft = partial(exported, head, setup.folder, setup.dtype)
    return TransformersPeer(name, setup.shared, setup.threads, {}, draft)


def _llama(name: str, setup: Setup, draft_tokens: int) -> Peer:
    python, gguf = setup.python("llama"), setup.gguf()
    job = {"model": str(gguf), "draft_tokens": draft_tokens, **setup.common}
    return _process(name, gguf_weights(gguf), python, "llama", lambda: job, {})


def _vllm(name: str, setup: Setup, config: Mapping[str, Any] | None, head: str = "") -> Peer:
    python = setup.python("vllm")
    folder = setup.head(head) if head else None

    def job() -> dict[str, Any]:
        told = None if config is None else dict(config)
        if folder is not None and told is not None:
            told["model"] = str(exported(folder, setup.folder, setup.dtype))
        model = {"model": str(setup.folder), "dtype": setup.dtype, "speculative_config": told}
        return {**model, **setup.common}

    # vLLM's own advice for CPUs; without it GNU's OpenMP runs, and speculation loses the most
    openmp = python.parents[1] / "lib" / "libiomp5.so"
    env = {**VLLM_ENVIRONMENT, "OMP_NUM_THREADS": str(setup.threads)}
    if openmp.is_file():
        env["LD_PRELOAD"] = str(openmp)
    return _process(name, setup.dtype, python, "vllm", job, env)


def _openvino(
    name: str,
    setup: Setup,
    is_lookup: bool = False,
    is_assisted: bool = False,
    is_gguf: bool = False,
    **generation: Any,
) -> Peer:
    python = setup.python("openvino")
    gguf = setup.gguf() if is_gguf else None
    draft = setup.head("vanilla") if is_assisted else None
    tool = python.with_name("optimum-cli")

    def job() -> dict[str, Any]:
        made = gguf or openvino_model(setup.folder, tool)
        assistant = None
        if draft is not None:
            assistant = str(openvino_model(exported(draft, setup.folder, "float32"), tool))
        options = {"INFERENCE_NUM_THREADS": setup.threads, **({} if gguf else EXACT)}
        parts = {"model": str(made), "draft": assistant, "is_lookup": is_lookup}
        return {**parts, "options": options, "generation": generation, **setup.common}

    weights = "float32" if gguf is None else gguf_weights(gguf)
    return _process(name, weights, python, "openvino", job, {})


def _process(
    name: str,
    weights: str,
    python: Path,
    engine: str,
    job: Callable[[], Mapping[str, Any]],
    env: Mapping[str, str],
) -> Peer:
    program = Path(__file__).with_name(f"peer_{engine}.py")
    return ProcessPeer(name, weights, (python, program), job, env)


PEERS: dict[str, Callable[[str, Setup], Peer]] = {
    "transformers": _transformers,
    "transformers prompt-lookup": partial(_transformers, prompt_lookup_num_tokens=10),
    "transformers assisted": _assisted,
    "llama.cpp": partial(_llama, draft_tokens=0),
    "llama.cpp prompt-lookup": partial(_llama, draft_tokens=2),
    "vllm": partial(_vllm, config=None),
    "vllm ngram": partial(_vllm, config=VLLM_NGRAM),
    "vllm eagle3": partial(
        _vllm, config={"method": "eagle3", "num_speculative_tokens": 3}, head="eagle3"
    ),
    "openvino": _openvino,
    "openvino prompt-lookup": partial(
        _openvino, is_lookup=True, num_assistant_tokens=5, max_ngram_size=3
    ),
    "openvino assisted": partial(_openvino, is_assisted=True, num_assistant_tokens=3),
    "openvino gguf": partial(_openvino, is_gguf=True),
    "openvino gguf prompt-lookup": partial(
        _openvino, is_gguf=True, is_lookup=True, num_assistant_tokens=5, max_ngram_size=3
    ),
}
"""Name -> its builder: the name, and the setup. It raises Missing where the peer cannot run.

What each drafts a round is what its own documentation shows for a CPU, where it does."""
