"""Files that peers load: the GGUF behind a target, and what is converted for them, once.

A vanilla head becomes a whole model in Hugging Face form and an EAGLE-3 head a folder for vLLM, by
`speculant export`; a model is converted to OpenVINO's format by its own tool.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from ..target.convert import cache_folder, convert_gguf
from ..target.load import KNOWN
from .peer_process import PeerError

CONVERT_S = 1800.0
DRAFTED = 3
"""Tokens to draft a round that an export's own notes name; the peers are told theirs."""


def find_gguf(folder: Path) -> Path | None:
    """The GGUF file of a target's folder: in it, beside it by the same name, or a known model's."""
    inside = sorted(folder.glob("*.gguf"))
    if len(inside) == 1:
        return inside[0]
    beside = folder.with_name(folder.name + ".gguf")
    if beside.is_file():
        return beside
    for known in KNOWN.values():
        spec = importlib.util.find_spec(known.package)
        for place in (spec.submodule_search_locations or ()) if spec is not None else ():
            file = Path(place) / known.file
            named = folder.name.startswith(f"{file.stem}-")  # else it would be converted now
            if named and file.is_file() and convert_gguf(file).resolve() == folder.resolve():
                return file
    return None


def gguf_weights(path: Path) -> str:
    """What a GGUF file's matrices are in, such as "Q4_1 GGUF"."""
    from gguf import GGUFReader, LlamaFileType

    field = GGUFReader(path).get_field("general.file_type")
    try:
        name = LlamaFileType(int(field.contents())).name if field is not None else "GGUF"
    except ValueError:
        return "GGUF"
    return f"{name.removeprefix('MOSTLY_').removeprefix('ALL_')} GGUF"


def exported(head: Path, target: Path, dtype: str) -> Path:
    """A head of ours as `speculant export vllm` writes it; a vanilla one is a whole model.

    dtype: of its weights. Raises PeerError where the export refuses.
    """

    def export(out: Path) -> None:
        command = [sys.executable, "-m", "speculant.cli", "export", "vllm", str(head), "--target",
                   str(target), "--out", str(out), "--dtype", dtype, "-n", str(DRAFTED)]  # fmt: skip
        _run(command, f"{head}: the export failed")

    return _cached(f"{head.name}-{dtype}", [head, target], export)


def openvino_model(model: Path, tool: Path) -> Path:
    """A model's folder in OpenVINO's format, float32, as `optimum-cli` converts it.

    tool: that program, of the environment that has it. Raises PeerError when it fails.
    """

    def convert(out: Path) -> None:
        print(f"speculant: converting {model.name} for OpenVINO, once", file=sys.stderr)
        command = [str(tool), "export", "openvino", "--model", str(model), "--task",
                   "text-generation-with-past", "--weight-format", "fp32", str(out)]  # fmt: skip
        _run(command, f"{model}: OpenVINO's conversion failed")

    return _cached(f"{model.name}-openvino", [model], convert)


def _cached(name: str, sources: Sequence[Path], make: Callable[[Path], None]) -> Path:
    """A folder that depends on the files of others, made where it is not there yet."""
    digest = hashlib.sha256(name.encode())
    for source in sources:
        for path in sorted(source.iterdir()):
            facts = path.stat()
            digest.update(f"{path.resolve()} {facts.st_size} {facts.st_mtime_ns}\n".encode())
    out = cache_folder() / "peers" / f"{name}-{digest.hexdigest()[:16]}"
    if out.is_dir():
        return out
    out.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=".making-", dir=out.parent))
    try:
        make(part / "whole")
        os.replace(part / "whole", out)
    except OSError:
        if not out.is_dir():  # else another process was first
            raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return out


def _run(command: Sequence[str], failed: str) -> None:
    """Run a program. Raises PeerError, with its last words, when it fails."""
    env = {"HF_HUB_OFFLINE": "1", **os.environ}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=CONVERT_S, env=env, check=False
        )
    except OSError as error:
        raise PeerError(f"{command[0]}: cannot be run ({error.strerror})") from None
    except subprocess.TimeoutExpired:
        raise PeerError(f"{failed}: not done within {CONVERT_S:.0f} s") from None
    if done.returncode:
        words = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        raise PeerError(f"{failed}: {(words or ['it said nothing'])[-1][:400]}")
