"""Runs a training: data, features, loop, the best head; every part resumes from its files."""

from __future__ import annotations

import dataclasses
import json
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..heads.medusa import MedusaHead
from ..heads.weights import Head, save_head
from ..target.base import LAST, Target, Tokenizer
from ..target.load import load_target, target_fingerprint
from ..train.card import DataCard, check_card, open_folder, read_card
from ..train.data import Corpus, find_shards, plan
from ..train.features import Features, OfflineFeatures, OnlineFeatures, disk_bytes, has_states
from ..train.loop import Trainer
from ..train.medusa import MedusaObjective, accuracies
from ..train.responses import Sample, read_shard
from ..train.settings import LoopSettings, accelerator_for
from ..train.state import RunFolder
from .build import build, choose_vocabulary, taps_for
from .curves import plot
from .data import (
    POSITIONS,
    DataProgress,
    engine_generate,
    forget_unfinished,
    generation_dtype,
    make_data,
    maker_for,
    recipe_for,
    use_offline,
)
from .settings import DATA_SHARE, TrainSettings

HELD_OUT = 64  # samples that are scored
LIKELY_SPEED = 500  # answer tokens/s, no less: what a time is worth when disk is estimated
RANKS = 10  # choices a head is measured at, for Medusa's tree


@dataclass(frozen=True)
class Watch:
    """Where news of a run go: lines for the user, data made, steps done."""

    say: Callable[[str], None]
    data: Callable[[DataProgress, int], None]
    step: Callable[[dict[str, Any], int], None]


@dataclass(frozen=True)
class TrainResult:
    """What a run gave. finished is False when it was interrupted: the same command goes on."""

    finished: bool
    mean_acceptance_length: float
    conditional: tuple[float, ...]
    steps: int
    answer_tokens: int
    tokens_per_s: float


def train(settings: TrainSettings, command: str, watch: Watch) -> TrainResult:
    """Train a head; see `TrainSettings`. Raises ValueError for what cannot work, OSError for a disk."""
    began = time.monotonic()
    accelerator = accelerator_for(settings.precision)
    target = load_for_data(settings.target)
    if accelerator.is_main_process:
        shards = _data(settings, target, began, watch)
    accelerator.wait_for_everyone()
    if not accelerator.is_main_process:
        shards = find_shards(settings.data or [settings.run / "data"])
    if len(shards) < 2:
        raise ValueError(f"{len(shards)} shard of data: one is held out, so make two at least")
    held_out, corpus = Corpus(shards[:1]), Corpus(shards[1:])
    held_out.items = held_out.items[:HELD_OUT]
    vocabulary = choose_vocabulary(corpus, target, settings.draft_vocab_size)
    watch.say(
        f"{corpus.answer_tokens} answer tokens in {len(corpus.items)} samples; draft vocabulary "
        f"{len(vocabulary.ids)} of {target.info.vocab_size}, {vocabulary.distinct} of them occur, "
        f"covering {vocabulary.coverage:.2%} of the answers"
    )
    features = _features(settings, target, [corpus, held_out], watch)
    head, objective = build(settings, target, vocabulary, features)
    folder = RunFolder(settings.run)
    loop = _loop_settings(settings)
    extra = {
        "kind": settings.kind, "target": target.info.name, "steps": settings.steps,
        "single": settings.single, "loss": settings.loss, "from_target": settings.from_target,
        "shards": [path.name for path in shards],
    }  # fmt: skip
    trainer = Trainer(
        objective, corpus, held_out, loop, folder, accelerator, total_steps=1, extra=extra,
        report=lambda record: watch.step(record, trainer.progress.total_steps),
    )  # fmt: skip
    if trainer.progress.step == 0:
        trainer.progress.total_steps = _total_steps(settings, trainer, corpus, loop, began)
    if not trainer.run():
        return _result(trainer, corpus, finished=False)
    if accelerator.is_main_process:
        head.load_state_dict(trainer.best)
        _finish(settings, head, objective, trainer, target, corpus, command, vocabulary.coverage)
        plot(folder)
    accelerator.wait_for_everyone()
    return _result(trainer, corpus, finished=True)


def load_for_data(name: str) -> Target:
    """The target in the precision that data and features are made in."""
    return load_target(name, dtype=generation_dtype(torch.float32))


def _data(settings: TrainSettings, target: Target, began: float, watch: Watch) -> list[Path]:
    """Make what is missing of the run's data; the shards of all of it, the held-out one first."""
    if settings.data:
        for folder in settings.data:
            card = read_card(folder)
            if card is not None:
                check_card(card, folder, fingerprint_of(target), target.info.name)
        return find_shards(settings.data)
    deadline = None
    if settings.budget_s is not None:
        deadline = began + settings.budget_s * DATA_SHARE
    return gather(settings, target, settings.run / "data", deadline, watch)


def gather(
    settings: TrainSettings, target: Target, folder: Path, deadline: float | None, watch: Watch
) -> list[Path]:
    """Make the shards of a folder that are missing, see `make_data`."""
    wanted, recipe = settings.answer_tokens, recipe_for(settings)
    # answers that are given are not generated, so there are no states to note
    likely = wanted
    if deadline is not None:
        likely = min(wanted, round(LIKELY_SPEED * (deadline - time.monotonic())))
    offline = settings.answers == "target" and use_offline(settings, target, likely, folder)
    taps = (*taps_for(replace(settings, kind="eagle3"), target), LAST) if offline else ()
    made = {**dataclasses.asdict(recipe), "prompts": str(settings.prompts or ""),
            "answers": settings.answers}  # fmt: skip
    card = DataCard(fingerprint_of(target), taps, json.loads(json.dumps(made)))
    taps = open_folder(folder, card, target.info.name).taps
    forget_unfinished(folder)
    if deadline is None:
        size = disk_bytes(round(wanted * POSITIONS), target.info.hidden_size, len(taps) - 1)
        states = f"about {size / 1e9:.1f} GB with the target's states" if taps else "without states"
        watch.say(f"data: {wanted} answer tokens in {folder}, {states}")
    generate = engine_generate(target, taps or None, settings.rows, recipe.longest + 8)
    maker = maker_for(settings, target, generate)
    return make_data(maker, folder, wanted, deadline, lambda news: watch.data(news, wanted))


def one_sample(settings: TrainSettings) -> tuple[Sample, Tokenizer]:
    """The first sample that a run would train on, made if need be, and the tokenizer."""
    target = load_for_data(settings.target)
    if settings.data:
        return read_shard(find_shards(settings.data)[0])[0], target.tokenizer
    recipe = replace(recipe_for(settings), conversations=2, documents=0.0, max_tokens=96)
    generate = engine_generate(target, None, 2, recipe.longest + 8)
    found = maker_for(settings, target, generate, recipe).make(0)
    if not found:
        raise ValueError("no usable sample came out: try another --seed")
    return found[0], target.tokenizer


def fingerprint_of(target: Target) -> dict[str, Any]:
    """The target's fingerprint, or nothing for one without files."""
    folder = target.info.folder
    return {} if folder is None else target_fingerprint(folder, target.tokenizer)


def _features(
    settings: TrainSettings, target: Target, corpora: list[Corpus], watch: Watch
) -> Features:
    """Noted states where every shard has them, else the target's forward every step."""
    taps = taps_for(settings, target)
    folders = {path.parent for corpus in corpora for path in corpus.shards}
    columns = {card.taps if card else () for card in map(read_card, sorted(folders))}
    there = all(has_states(corpus.items) for corpus in corpora)
    usable = there and len(columns) == 1 and set(taps) | {LAST} <= set(*columns)
    if usable and settings.features != "online":
        watch.say("features: noted states, read from disk")
        return OfflineFeatures(target, taps, *columns)
    if settings.features == "offline":
        raise ValueError(
            "--features offline: the data's states were not noted, or with other taps: make it "
            "anew, or use --features online"
        )
    watch.say("features: the target runs every step")
    return OnlineFeatures(target, taps)


def _loop_settings(settings: TrainSettings) -> LoopSettings:
    return LoopSettings(
        lr=settings.lr,
        ema=settings.ema,
        batch_answers=settings.batch_answers,
        batch_tokens=max(2048, 8 * settings.batch_answers),
        score_every=200,
        precision=settings.precision,
        seed=settings.seed,
    )


def _total_steps(
    settings: TrainSettings, trainer: Trainer, corpus: Corpus, loop: LoopSettings, began: float
) -> int:
    """Steps of the run: epochs, or what the rest of the budget holds at the speed measured now."""
    batches = plan(corpus.items, 0, loop.seed, loop.batch_answers, loop.batch_tokens)
    world: int = trainer.accelerator.num_processes
    epoch = max(1, len(batches) // world)
    if settings.budget_s is None:
        return max(1, round(settings.epochs * epoch))
    rest = settings.budget_s - (time.monotonic() - began)
    share = settings.single if settings.kind == "eagle3" else 0.0
    per_step: float = share * _seconds(trainer, batches, 0.0) if share else 0.0
    per_step += (1 - share) * _seconds(trainer, batches, 1.0)
    return max(50, round(0.85 * rest / per_step))  # the rest of the time goes into scoring


def _seconds(trainer: Trainer, batches: list[Any], share: float) -> float:
    """Seconds a step takes, from a few that change nothing."""
    trainer.objective.begin(share)
    times: list[float] = []
    for items in batches[:6]:
        start = time.perf_counter()
        trainer.backward(items)
        trainer.optimizer.zero_grad(set_to_none=True)
        times.append(time.perf_counter() - start)
    return sum(times[1:]) / max(1, len(times) - 1)


def _finish(
    settings: TrainSettings,
    head: Head,
    objective: Any,
    trainer: Trainer,
    target: Target,
    corpus: Corpus,
    command: str,
    coverage: float,
) -> None:
    """Write the best head with its record."""
    score = trainer.score()
    record = {
        "command": command,
        "speculant": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "git_commit": git_commit(),
        "answer_tokens": corpus.answer_tokens,
        "samples": len(corpus.items),
        "tokens_seen": trainer.progress.tokens,
        "steps": trainer.progress.step,
        "best_step": trainer.progress.best_step,
        "vocabulary_coverage": round(coverage, 5),
        "held_out": {
            "mean_acceptance_length": round(score.mean_acceptance_length, 4),
            "conditional_acceptance_per_position": [round(c, 4) for c in score.conditional],
        },
        "loop": dataclasses.asdict(trainer.settings),
    }
    changes: dict[str, Any] = {"target": fingerprint_of(target), "training": record}
    if isinstance(head, MedusaHead):
        changes["accuracies"] = _accuracies(objective, trainer)
    head.config = replace(head.config, **changes)
    save_head(head, settings.out)


def _accuracies(objective: MedusaObjective, trainer: Trainer) -> Any:
    """How often each head's choices are right on the held-out samples."""
    loop, totals = trainer.settings, None
    for items in plan(trainer.held_out.items, 0, 0, loop.batch_answers, loop.batch_tokens):
        hits, tried = objective.rank_hits(trainer.held_out.batch(items), RANKS)
        totals = (hits, tried) if totals is None else (totals[0] + hits, totals[1] + tried)
    assert totals is not None
    return accuracies(*totals)


def _result(trainer: Trainer, corpus: Corpus, finished: bool) -> TrainResult:
    scores = [r for r in trainer.folder.records() if "conditional" in r]
    best = next((r for r in scores if r["step"] == trainer.progress.best_step), None)
    progress = trainer.progress
    return TrainResult(
        finished,
        progress.best_length,
        tuple(best["conditional"]) if best else (),
        progress.step,
        corpus.answer_tokens,
        progress.tokens / progress.seconds if progress.seconds else 0.0,
    )


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
