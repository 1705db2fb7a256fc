"""Runs a training: data, features, loop, the best head; every part resumes from its files."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..target.base import LAST, Target, Tokenizer
from ..target.load import load_target, target_fingerprint
from ..train.card import DataCard, check_card, open_folder, read_card
from ..train.data import Corpus, Item, apart, find_shards, plan
from ..train.features import Features, OfflineFeatures, OnlineFeatures, disk_bytes, has_states
from ..train.loop import Trainer
from ..train.settings import LoopSettings, accelerator_for, bfloat16_is_native
from ..train.shards import Sample, read_shard
from ..train.state import RunFolder
from .build import (
    build,
    check_sizes,
    noted_taps,
    taps_for,
    vocabulary_for,
    vocabulary_size,
)
from .curves import plot
from .data import (
    POSITIONS,
    DataProgress,
    conversations_of,
    forget_unfinished,
    make_data,
    maker_for,
    most_tokens,
    recipe_for,
    use_offline,
)
from .result import TrainResult, check_out, result_of, write_head
from .settings import DATA_SHARE, TrainSettings
from .talks import EngineTalks

if TYPE_CHECKING:
    from accelerate import Accelerator

HELD_OUT = 64  # samples that are scored
LIKELY_SPEED = 500  # answer tokens/s, no less: what a time is worth when disk is estimated


@dataclass(frozen=True)
class Watch:
    """Where news of a run go: lines for the user, data made, steps done."""

    say: Callable[[str], None]
    data: Callable[[DataProgress, int], None]
    step: Callable[[dict[str, Any], int], None]


def train(settings: TrainSettings, command: str, watch: Watch) -> TrainResult:
    """Train a head; see `TrainSettings`. Raises ValueError for what cannot work, OSError for a disk."""
    began = time.monotonic()
    check_out(settings.out)
    accelerator = accelerator_for(settings.precision, settings.device)
    if not accelerator.is_main_process:
        watch = Watch(lambda line: None, lambda news, wanted: None, lambda record, total: None)
    target = load_for_data(settings.target, settings.device)
    check_sizes(settings, target)
    folder, loop = RunFolder(settings.run), _loop_settings(settings)
    extra = _identity(settings, target)
    folder.check({**dataclasses.asdict(loop), **extra})
    shards = _shards(settings, target, began, watch, folder, accelerator)
    first, rest = apart(shards)
    held_out, corpus = Corpus(first), Corpus(rest)
    held_out.items = held_out.items[:HELD_OUT]
    if settings.data:
        corpus.keep(settings.answer_tokens, settings.seed)
    vocabulary = vocabulary_for(settings, corpus, target)
    watch.say(
        f"{corpus.answer_tokens} answer tokens in {len(corpus.items)} samples; draft vocabulary "
        f"{len(vocabulary.ids)} of {target.info.vocab_size}, {vocabulary.distinct} of them occur, "
        f"covering {vocabulary.coverage:.2%} of the answers"
    )
    features = _features(settings, target, [corpus, held_out], watch)
    head, objective = build(settings, target, vocabulary, features, corpus)
    trainer = Trainer(
        objective, corpus, held_out, loop, folder, accelerator, total_steps=1,
        extra={**extra, **_data_identity(shards, corpus)},
        report=lambda record: watch.step(record, trainer.progress.total_steps),
    )  # fmt: skip
    if trainer.progress.step == 0:
        trainer.progress.total_steps = _total_steps(settings, trainer, began)
    finished = trainer.run()
    result = result_of(trainer, corpus, finished)
    if finished and accelerator.is_main_process:
        notes = {"command": command, "vocabulary_coverage": round(vocabulary.coverage, 5)}
        fingerprint = fingerprint_of(target)
        write_head(settings, head, trainer, corpus, result, notes, fingerprint)
        plot(folder)
    accelerator.wait_for_everyone()
    return result


def _identity(settings: TrainSettings, target: Target) -> dict[str, Any]:
    """What must stay the same under a run that goes on, beside the loop's settings and the shards."""
    return {
        "kind": settings.kind, "target": target.info.name, "steps": settings.steps,
        "single": settings.single, "copying": settings.copying, "loss": settings.loss,
        "init": settings.init,
        "taps": list(taps_for(settings, target)), "draft_vocab_size": vocabulary_size(settings, target),
    }  # fmt: skip


def _data_identity(shards: list[Path], corpus: Corpus) -> dict[str, Any]:
    """The data must stay the same too; its folder may move."""
    return {"shards": [path.name for path in shards], "answer_tokens": corpus.answer_tokens}


def load_for_data(name: str, device: str = "cpu") -> Target:
    """The target in the precision that data and features are made in: bfloat16 where it is fast."""
    dtype = torch.bfloat16 if bfloat16_is_native(device) else torch.float32
    return load_target(name, dtype=dtype, device=device)


def _shards(
    settings: TrainSettings,
    target: Target,
    began: float,
    watch: Watch,
    folder: RunFolder,
    accelerator: Accelerator,
) -> list[Path]:
    """The run's shards, the held-out one first; one process makes what is missing for all."""
    from accelerate.utils import broadcast_object_list

    shards: list[Path] = []
    if accelerator.is_main_process:
        shards = _data(settings, target, began, watch, folder)
        apart(shards)  # or it fails in one process alone
    everywhere: list[list[Path]] = broadcast_object_list([shards])
    return everywhere[0]


def _data(
    settings: TrainSettings, target: Target, began: float, watch: Watch, folder: RunFolder
) -> list[Path]:
    """Make what is missing of the run's data; all of its shards."""
    if settings.data:
        for place in settings.data:
            _check_answers(place, target)
        return find_shards(settings.data)
    place = settings.run / "data"
    begun = [place / name for name in folder.begun().get("shards", ())]
    if begun and all(path.exists() for path in begun):
        _check_answers(place, target)  # a run that goes on keeps its data, whatever time is left
        return begun
    deadline = None
    if settings.budget_s is not None:
        deadline = began + settings.budget_s * DATA_SHARE
    return gather(settings, target, place, deadline, watch)


def _check_answers(folder: Path, target: Target) -> None:
    """Raise ValueError when a folder says that its answers are another target's."""
    card = read_card(folder)
    if card is not None:
        check_card(card, folder, fingerprint_of(target), target.info.name)


def gather(
    settings: TrainSettings, target: Target, folder: Path, deadline: float | None, watch: Watch
) -> list[Path]:
    """Make the shards of a folder that are missing, see `make_data`."""
    wanted, recipe = settings.answer_tokens, recipe_for(settings, target)
    conversations = conversations_of(settings)
    # answers that are given are not generated, so there are no states to note
    likely = most = most_tokens(settings, conversations, recipe)
    if deadline is not None:
        likely = min(most, round(LIKELY_SPEED * (deadline - time.monotonic())))
    offline = settings.answers == "target" and use_offline(settings, target, likely, folder)
    taps = (*noted_taps(settings, target), LAST) if offline else ()
    made = {**dataclasses.asdict(recipe), "prompts": str(settings.prompts or ""),
            "answers": settings.answers}  # fmt: skip
    card = DataCard(fingerprint_of(target), taps, json.loads(json.dumps(made)))
    taps = open_folder(folder, card, target.info.name).taps
    forget_unfinished(folder)
    talks = EngineTalks(target, taps or None, settings.rows, recipe.longest + 8)
    maker = maker_for(settings, target, conversations, recipe)
    if deadline is None:
        size = disk_bytes(round(most * POSITIONS), target.info.hidden_size, len(taps) - 1)
        states = f"about {size / 1e9:.1f} GB with the target's states" if taps else "without states"
        answers = f"{most} answer tokens" if most else "the file's answers"
        watch.say(f"data: {answers} in {folder}, {states}")
    return make_data(maker, talks, folder, wanted, deadline, lambda news: watch.data(news, wanted))


def one_sample(settings: TrainSettings) -> tuple[Sample, Tokenizer]:
    """The first sample that a run would train on, made if need be, and the tokenizer."""
    target = load_for_data(settings.target, settings.device)
    if settings.data:
        return read_shard(find_shards(settings.data)[0])[0], target.tokenizer
    recipe = recipe_for(settings, target)
    recipe = replace(recipe, conversations=2, begun=0.0, documents=0.0, relays=0.0, max_tokens=96)
    talks = EngineTalks(target, None, 2, recipe.longest + 8)
    conversations = conversations_of(settings)
    if conversations and settings.answers == "target":
        conversations = conversations[:2]  # each costs an answer
    (found,) = talks.run([maker_for(settings, target, conversations, recipe).make(0)])
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
        noted = OfflineFeatures(target, taps, *columns)
        noted.prepare([path for corpus in corpora for path in corpus.shards])
        return noted
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


TIMED = 10
"""Steps that are timed to turn a budget into a number of them."""


def _total_steps(settings: TrainSettings, trainer: Trainer, began: float) -> int:
    """Steps of the run: epochs, or what the rest of the budget holds at the speed measured now."""
    loop, accelerator = trainer.settings, trainer.accelerator
    batches = plan(trainer.corpus.items, 0, loop.seed, loop.batch_answers, loop.batch_tokens)
    world: int = accelerator.num_processes
    epoch = max(1, len(batches) // world)
    if settings.budget_s is None:
        return max(1, round(settings.epochs * epoch))
    share = settings.single if settings.kind == "eagle3" else 0.0
    per_step = share * _seconds(trainer, batches, 0.0) if share else 0.0
    per_step += (1 - share) * _seconds(trainer, batches, 1.0)
    rest = settings.budget_s - (time.monotonic() - began)
    steps = max(50.0, 0.85 * rest / max(1e-9, per_step))  # the rest of the time goes into scoring
    # every process measured another speed, and all must do the same number
    agreed = accelerator.reduce(torch.tensor(steps, device=accelerator.device), "mean")
    return round(float(agreed))


def _seconds(trainer: Trainer, batches: list[list[Item]], share: float) -> float:
    """Seconds a step takes on average, from a few that change nothing, spread over an epoch.

    Batches are of like answer tokens and of very unlike lengths: the first few would tell little.
    """
    times: list[float] = []
    for i, items in enumerate([batches[0], *batches[:: max(1, len(batches) // TIMED)][:TIMED]]):
        trainer.objective.begin(share, i)
        start = time.perf_counter()
        trainer.backward(items)
        trainer.optimizer.zero_grad(set_to_none=True)
        times.append(time.perf_counter() - start)
    return sum(times[1:]) / len(times[1:])  # the first one warms up
