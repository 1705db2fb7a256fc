"""A run on disk: everything needed to go on exactly where it stopped. Safetensors and JSON only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .shards import write_tensors, write_text

MOMENTS = ("exp_avg", "exp_avg_sq")
PREFIXES = {"model": "model.", "best": "best.", "ema": "ema."}


@dataclass
class Progress:
    """Where a run stands.

    step:        optimiser steps done; total_steps: of the whole run, settled once
    tokens:      answer tokens seen
    best_length: highest held-out mean acceptance length so far, at best_step
    history:     settings that must not change under a run that goes on
    """

    total_steps: int
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best_length: float = 0.0
    best_step: int = -1
    settings: dict[str, Any] = field(default_factory=dict)


class RunFolder:
    """The files of a run: state.json, state.safetensors, metrics.jsonl, curves.png."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.state = path / "state.json"
        self.metrics = path / "metrics.jsonl"
        self.curves = path / "curves.png"

    def save(
        self,
        progress: Progress,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        best: Mapping[str, Tensor],
        ema: Mapping[str, Tensor],
    ) -> None:
        """Write the state; the previous one stays until the new one is whole."""
        tensors = {f"model.{k}": v for k, v in module.state_dict().items()}
        tensors |= {f"best.{k}": v for k, v in best.items()}
        tensors |= {f"ema.{k}": v for k, v in ema.items()}
        moments = optimizer.state_dict()["state"]
        for index, state in moments.items():
            for name in MOMENTS:
                tensors[f"optimizer.{index}.{name}"] = state[name]
        step = {str(i): float(state["step"]) for i, state in moments.items()}
        self.path.mkdir(parents=True, exist_ok=True)
        name = f"state-{progress.step}.safetensors"
        write_tensors(self.path / name, {k: v.detach().contiguous() for k, v in tensors.items()})
        body = {"tensors": name, "optimizer_steps": step, **asdict(progress)}
        try:
            write_text(self.state, json.dumps(body, indent=2) + "\n")
        except OSError:  # the old state stays in force: give back the room that the new one took
            (self.path / name).unlink()
            raise
        for other in self.path.glob("state-*.safetensors"):
            if other.name != name:
                other.unlink()

    def load(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, settings: Mapping[str, Any]
    ) -> tuple[Progress, dict[str, Tensor], dict[str, Tensor]] | None:
        """Restore a run: its progress, best weights and EMA. None where there is none yet.

        Raises ValueError for a state of another kind of head, or of other settings.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        body = self._read()
        if body is None:
            return None
        try:
            tensors = load_file(self.path / body.pop("tensors"))
            steps = body.pop("optimizer_steps")
            progress = Progress(**body)
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise self._unusable(error) from None
        self._compare(progress.settings, settings)
        groups = {group: _strip(tensors, prefix) for group, prefix in PREFIXES.items()}
        wanted = module.state_dict()
        if set(groups["model"]) != set(wanted) or any(
            groups["model"][k].shape != v.shape for k, v in wanted.items()
        ):
            raise ValueError(f"{self.path}: holds a run of another head: give another --out")
        module.load_state_dict(groups["model"])
        state = optimizer.state_dict()
        moments = _strip(tensors, "optimizer.")
        for index, step in steps.items():
            entry: dict[str, Any] = {name: moments[f"{index}.{name}"] for name in MOMENTS}
            state["state"][int(index)] = entry | {"step": torch.tensor(step)}
        optimizer.load_state_dict(state)
        return progress, groups["best"], groups["ema"]

    def begun(self) -> dict[str, Any]:
        """The settings of a run that can go on, {} where there is none."""
        body = self._read()
        return {} if body is None else dict(body["settings"])

    def check(self, settings: Mapping[str, Any]) -> None:
        """Raise ValueError when a run was begun here with one of these settings unlike given."""
        old = self.begun()
        if old:
            self._compare({key: old.get(key) for key in settings}, settings)

    def _read(self) -> dict[str, Any] | None:
        """state.json, None where there is none. Raises ValueError for a broken one."""
        if not self.state.exists():
            return None
        try:
            body: dict[str, Any] = json.loads(self.state.read_text())
            if not isinstance(body["tensors"], str):
                raise TypeError("names no tensors")
            dict(body["settings"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise self._unusable(error) from None
        return body

    def _unusable(self, error: Exception) -> ValueError:
        return ValueError(f"{self.state}: cannot go on from it ({error}): give another --out")

    def _compare(self, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
        """A run goes on only under the settings it was begun with."""
        for key in sorted(set(old) | set(new)):
            if old.get(key) != new.get(key):
                raise ValueError(
                    f"{self.path}: this run was begun with {key} = {old.get(key)}, not "
                    f"{new.get(key)}: repeat that, or give another --out"
                )

    def log(self, record: Mapping[str, Any]) -> None:
        """Append a line to metrics.jsonl."""
        self.path.mkdir(parents=True, exist_ok=True)
        with self.metrics.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def rewind(self, step: int) -> None:
        """Drop the lines behind `step`, which a run that goes on from there writes again."""
        if not self.metrics.exists():
            return
        kept = [record for record in self.records() if record["step"] <= step]
        write_text(self.metrics, "".join(json.dumps(record) + "\n" for record in kept))

    def records(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl; a last line that was cut short is left out."""
        if not self.metrics.exists():
            return []
        out = []
        for line in self.metrics.read_text().splitlines():
            try:
                out.append(json.loads(line))
            except ValueError:
                break
        return out


def _strip(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
