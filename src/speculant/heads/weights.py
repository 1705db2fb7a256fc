"""Heads on disk: config.json and model.safetensors, checked against each other and the target."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch

from .eagle1 import Eagle1Config, Eagle1Head
from .eagle3 import Eagle3Config, Eagle3Head
from .medusa import MedusaConfig, MedusaHead
from .vanilla import VanillaConfig, VanillaHead
from .variants import as_dict

FORMAT = "speculant-head-1"
COMPARED = ("architecture", "hidden_size", "num_layers", "vocab_size", "weights_sha256",
            "tokenizer_sha256")  # fmt: skip

Head: TypeAlias = Eagle3Head | Eagle1Head | MedusaHead | VanillaHead

KINDS: dict[str, tuple[type[Any], type[Any]]] = {
    "eagle3": (Eagle3Config, Eagle3Head),
    "eagle1": (Eagle1Config, Eagle1Head),
    "medusa": (MedusaConfig, MedusaHead),
    "vanilla": (VanillaConfig, VanillaHead),
}
"""Kind of a head -> its config and its module."""


class HeadError(ValueError):
    """A head that cannot be loaded or does not belong to this target; one line for the user."""


def save_head(head: Head, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write a head into a folder: into a temporary one beside it first, then renamed."""
    from safetensors.torch import save_file

    kind = next(kind for kind, (_, module) in KINDS.items() if type(head) is module)
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        tensors = {
            name: (t.to(dtype) if t.is_floating_point() else t).contiguous()
            for name, t in head.state_dict().items()
        }
        save_file(tensors, part / "model.safetensors", metadata={"format": "pt"})
        config = {"format": FORMAT, "kind": kind, **as_dict(head.config)}
        (part / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        old = folder.with_name(f".{folder.name}.old")
        if folder.exists():
            os.replace(folder, old)
        os.replace(part, folder)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def load_head(folder: Path, dtype: torch.dtype = torch.float32) -> Head:
    """Read a head of any kind. Raises HeadError for a broken config, and for missing, unexpected or
    misshaped tensors.

    Everything that must be read starts as NaN, so that nothing can be left at its first value.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    kind, data = _read_config(folder)
    try:
        tensors = load_file(folder / "model.safetensors")
    except (OSError, SafetensorError) as error:
        raise HeadError(f"{folder / 'model.safetensors'}: cannot be read ({error})") from None
    head = _make(folder, kind, data)
    wanted = head.state_dict()
    missing, extra = sorted(set(wanted) - set(tensors)), sorted(set(tensors) - set(wanted))
    if missing:
        raise HeadError(f"{folder}: tensor {missing[0]} is missing; the head would draft at random")
    if extra:
        raise HeadError(f"{folder}: unexpected tensor {extra[0]}: this is another kind of head")
    for name, want in wanted.items():
        if tensors[name].shape != want.shape:
            shapes = f"{tuple(tensors[name].shape)}, the config says {tuple(want.shape)}"
            raise HeadError(f"{folder}: tensor {name} is {shapes}")
        if want.is_floating_point():
            want.fill_(torch.nan)
    head.load_state_dict(tensors)
    if isinstance(head, Eagle3Head):
        _check_vocabulary(head, folder)
    bad = [name for name, t in head.state_dict().items() if not bool(t.float().isfinite().all())]
    if bad:
        raise HeadError(f"{folder}: tensor {bad[0]} holds NaN or infinity")
    return head.to(dtype).eval()


def is_head(folder: Path) -> bool:
    """True when a folder's config.json says that it is a head of this package."""
    try:
        data = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return False
    return isinstance(data, dict) and data.get("format") == FORMAT


def head_kind(folder: Path) -> str:
    """The kind of a head's folder, one of KINDS. Raises HeadError when it is no head."""
    return _read_config(folder)[0]


def check_target(head: Head, fingerprint: Mapping[str, Any], name: str) -> None:
    """Raise HeadError when a head was made for another target than the one of this fingerprint."""
    for key in COMPARED:
        mine = head.config.target.get(key)
        if mine is not None and mine != fingerprint.get(key):
            raise HeadError(
                f"the head was trained for another target than {name}: {key} differs "
                f"({str(mine)[:16]}, not {str(fingerprint.get(key))[:16]}); --force loads it anyway"
            )


def _read_config(folder: Path) -> tuple[str, dict[str, Any]]:
    """The kind and the config's fields."""
    path = folder / "config.json"
    try:
        data = json.loads(path.read_text())
        if data.pop("format") != FORMAT:
            raise HeadError(f"{path}: not a head of this package")
        kind = data.pop("kind")
        if kind not in KINDS:
            raise HeadError(f"{path}: unknown kind of head {kind!r}: one of {', '.join(KINDS)}")
        return kind, data
    except HeadError:
        raise
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise _no_config(path, error) from None


def _make(folder: Path, kind: str, data: Mapping[str, Any]) -> Head:
    """A head of these sizes, its weights still to be read."""
    config, module = KINDS[kind]
    try:
        head: Head = module(config(**{name: _tuples(value) for name, value in data.items()}))
    except (ValueError, TypeError, AttributeError) as error:
        raise _no_config(folder / "config.json", error) from None
    return head


def _no_config(path: Path, error: Exception) -> HeadError:
    if isinstance(error, FileNotFoundError):
        return HeadError(f"{path.parent}: not the folder of a head: it has no {path.name}")
    return HeadError(f"{path}: no head's config ({type(error).__name__}: {error})")


def _tuples(value: Any) -> Any:
    """JSON's lists as the tuples they were."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _check_vocabulary(head: Eagle3Head, folder: Path) -> None:
    """d2t and t2d must name the same target ids, each once, within the vocabulary."""
    ids, vocab = head.target_ids, head.config.vocab_size
    if int(ids.min()) < 0 or int(ids.max()) >= vocab or len(ids.unique()) != len(ids):
        raise HeadError(f"{folder}: d2t maps outside 0..{vocab - 1} or twice to one token")
    if not torch.equal(head.t2d.nonzero().squeeze(1), ids.sort().values):
        raise HeadError(f"{folder}: d2t and t2d name different tokens")
