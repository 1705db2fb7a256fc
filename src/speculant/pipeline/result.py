"""What a run gave: the head's folder with its record, and the figures of its best step."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..heads.medusa import MedusaHead
from ..heads.weights import Head, is_head, save_head
from ..train.data import Corpus, plan
from ..train.init import fold
from ..train.loop import Trainer
from ..train.medusa import MedusaObjective, accuracies
from .settings import TrainSettings

RANKS = 10  # choices a head is measured at, for Medusa's tree


@dataclass(frozen=True)
class TrainResult:
    """What a run gave. finished is False when it was interrupted: the same command goes on."""

    finished: bool
    mean_acceptance_length: float
    conditional: tuple[float, ...]
    steps: int
    answer_tokens: int
    tokens_per_s: float


def result_of(trainer: Trainer, corpus: Corpus, finished: bool) -> TrainResult:
    """The figures of a run's best step so far."""
    progress = trainer.progress
    scores = [r for r in trainer.folder.records() if "conditional" in r]
    best = next((r for r in scores if r["step"] == progress.best_step), None)
    return TrainResult(
        finished,
        progress.best_length,
        tuple(best["conditional"]) if best else (),
        progress.step,
        corpus.answer_tokens,
        progress.tokens / progress.seconds if progress.seconds else 0.0,
    )


def check_out(out: Path) -> None:
    """Raise ValueError when writing a head to `out` would replace what is no head."""
    if out.name in ("", "..") or (out.exists() and not is_head(out) and not _is_empty(out)):
        raise ValueError(f"--out {out}: is there and is no head: give a folder of its own")


def write_head(
    settings: TrainSettings,
    head: Head,
    trainer: Trainer,
    corpus: Corpus,
    result: TrainResult,
    notes: Mapping[str, Any],
    target: Mapping[str, Any],
) -> None:
    """Write a head of the best weights with its record.

    notes: what else the record holds; target: its fingerprint
    """
    head.load_state_dict(trainer.best)
    record = {
        "speculant": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "git_commit": git_commit(),
        "answer_tokens": corpus.answer_tokens,
        "samples": len(corpus.items),
        "tokens_seen": trainer.progress.tokens,
        "steps": trainer.progress.step,
        "best_step": trainer.progress.best_step,
        "held_out": {
            "mean_acceptance_length": round(result.mean_acceptance_length, 4),
            "conditional_acceptance_per_position": [round(c, 4) for c in result.conditional],
        },
        "loop": dataclasses.asdict(trainer.settings),
        **notes,
    }
    changes: dict[str, Any] = {"target": dict(target), "training": record}
    if isinstance(head, MedusaHead):
        changes["accuracies"] = _accuracies(trainer)
    head.config = replace(head.config, **changes)
    fold(head)
    save_head(head, settings.out)


def _accuracies(trainer: Trainer) -> tuple[tuple[float, ...], ...]:
    """How often each of Medusa's heads' choices are right on the held-out samples."""
    objective, loop = trainer.objective, trainer.settings
    assert isinstance(objective, MedusaObjective)
    ranks = min(RANKS, objective.target.info.vocab_size)
    heads = len(objective.head.blocks)
    hits, tried = torch.zeros(heads, ranks), torch.zeros(heads)
    for items in plan(trainer.held_out.items, 0, 0, loop.batch_answers, loop.batch_tokens):
        more = objective.rank_hits(
            trainer.held_out.batch(items).to(objective.target.info.device), ranks
        )
        hits, tried = hits + more[0], tried + more[1]
    return accuracies(hits, tried)


def git_commit() -> str:
    """The commit of the package's checkout, or '' outside one."""
    import subprocess

    try:
        out = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=Path(__file__).parent, capture_output=True, text=True, timeout=5, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return ""
    return out.stdout.strip()


def _is_empty(folder: Path) -> bool:
    return folder.is_dir() and not any(folder.iterdir())
