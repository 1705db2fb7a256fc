"""The data of a run: shards made with the engine, resumable, within a time or a number of tokens."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Protocol, TypeVar

from ..drafts.none import NoDraft
from ..drafts.record import RecordDraft
from ..engine import Engine
from ..request import Completion
from ..target.base import Target
from ..train.features import disk_bytes
from ..train.given import FileMaker
from ..train.prompts import Message, read_prompts
from ..train.responses import (
    Answer,
    Generate,
    Recipe,
    Sample,
    ShardMaker,
    Talk,
    read_shard,
    shard_path,
    states_path,
    write_shard,
)
from .settings import TrainSettings

POSITIONS = 1.7
"""Positions (prompt and answer) for every answer token of self-synthesised data: 1.53 to 1.68 in the
shards that the bundled heads were trained on."""
T = TypeVar("T")
MARGIN = 0.1  # share of the free disk that is left alone


class Maker(Protocol):
    """Makes the samples of a shard."""

    def make(self, index: int) -> list[Sample]:
        """The samples of shard `index`, the same every time."""
        ...


@dataclass(frozen=True)
class DataProgress:
    """What is there after a shard."""

    shards: int
    samples: int
    answer_tokens: int
    longest: int
    tokens_per_s: float  # of the shards made in this run; 0 before the first


def recipe_for(settings: TrainSettings, target: Target) -> Recipe:
    """Small shards for a small budget: whole shards are what resumes, and one is held out."""
    longest = min(Recipe.longest, target.info.context_length)
    recipe = Recipe(conversations=256, longest=longest, seed=settings.seed)
    if settings.budget_s is not None:
        size = 48 if settings.budget_s >= 900 else 16
        recipe = replace(recipe, conversations=size, documents=0.15, long=0.0, max_tokens=256)
    if settings.documents is not None:
        recipe = replace(recipe, documents=settings.documents)
    if settings.long is not None:
        recipe = replace(recipe, long=settings.long)
    return recipe if settings.turns is None else replace(recipe, turns=settings.turns)


def conversations_of(settings: TrainSettings) -> list[list[Message]] | None:
    """Those of the user's file, None where the target writes its own requests."""
    if settings.prompts is None:
        return None
    conversations = list(read_prompts(settings.prompts))
    if not conversations:
        raise ValueError(f"{settings.prompts}: holds no prompt")
    return conversations


def most_tokens(
    settings: TrainSettings, conversations: Sequence[list[Message]] | None, recipe: Recipe
) -> int:
    """Answer tokens that are generated at most: as many as are wanted, or as a file's turns take."""
    if conversations is None:
        return settings.answer_tokens
    if settings.answers == "given":
        return 0
    turns = sum(m["role"] == "user" for messages in conversations for m in messages)
    return min(settings.answer_tokens, turns * recipe.max_tokens)


def maker_for(
    settings: TrainSettings,
    target: Target,
    conversations: Sequence[list[Message]] | None,
    generate: Generate,
    recipe: Recipe,
) -> Maker:
    """Requests the target writes itself, or those of a file."""
    if conversations is None:
        return ShardMaker(target.tokenizer, generate, recipe)
    given = settings.answers == "given"
    return FileMaker(target.tokenizer, conversations, generate, recipe, given)


def use_offline(settings: TrainSettings, target: Target, answer_tokens: int, where: Path) -> bool:
    """Whether to note states on disk: when asked, or when they fit and will be read more than once."""
    need = disk_bytes(round(answer_tokens * POSITIONS), target.info.hidden_size, 3)
    free = shutil.disk_usage(_existing(where)).free
    fits = need < free * (1 - MARGIN)
    if settings.features == "offline" and not fits:
        raise OSError(
            f"{where}: noting the states of {answer_tokens} answer tokens takes about "
            f"{need / 1e9:.1f} GB and {free / 1e9:.1f} GB are free: use --features online"
        )
    return settings.features == "offline" or (settings.features == "auto" and fits)


class EngineGenerate:
    """Runs talks on one engine, `rows` at once; with taps, the states of every answer are noted.

    No speculation: at so many rows a forward is bound by arithmetic, and drafts would only add work.
    A talk that goes on keeps its place, and one that ends gives it to the next: the batch is full
    until no talk waits.
    """

    def __init__(
        self, target: Target, taps: Sequence[int] | None, rows: int, capacity: int
    ) -> None:
        draft = NoDraft() if taps is None else RecordDraft(taps)
        self.engine = Engine(target, draft, max_rows=rows, capacity=capacity)
        self.rows = rows

    def __call__(self, talks: Sequence[Talk[T]]) -> list[T]:
        """What each talk returned, in order. Raises FloatingPointError when the logits broke."""
        engine, results = self.engine, dict[int, T]()
        running: dict[int, tuple[int, list[int], Completion]] = {}
        fresh = iter(range(len(talks)))

        def go_on(index: int, answer: Answer | None) -> None:
            try:
                ids, params = next(talks[index]) if answer is None else talks[index].send(answer)
            except StopIteration as end:
                results[index] = end.value
            else:
                running[engine.submit(ids, params)] = (
                    index,
                    ids,
                    Completion(prompt_tokens=len(ids)),
                )

        try:
            while True:
                while len(running) < self.rows and (index := next(fresh, None)) is not None:
                    go_on(index, None)
                if not running:
                    return [results[i] for i in range(len(talks))]
                pieces = engine.step()
                noted = engine.draft.take() if isinstance(engine.draft, RecordDraft) else {}
                for piece in pieces:
                    if piece.error:
                        raise FloatingPointError(piece.error)
                    index, ids, out = running[piece.request]
                    out.add(piece)
                    if piece.finish_reason:
                        del running[piece.request]
                        states = noted.get((*ids, *out.token_ids))
                        go_on(index, Answer(out.token_ids, out.text, out.finish_reason, states))
        finally:
            for number in running:
                engine.cancel(number)


def make_data(
    maker: Maker,
    folder: Path,
    answer_tokens: int,
    deadline: float | None,
    report: Callable[[DataProgress], None],
) -> list[Path]:
    """Make shards until there are enough answer tokens, or no time is left for another one.

    deadline: time.monotonic() at which to stop; two shards are made in any case, since one is
              held out. Shards that exist are kept: a run that stopped goes on.
    """
    paths: list[Path] = []
    total, samples, longest, made, began = 0, 0, 0, 0, time.monotonic()
    for path, mine, fresh in _shards(maker, folder):
        paths.append(path)
        total += sum(len(s.answer) for s in mine)
        made += sum(len(s.answer) for s in mine) if fresh else 0
        samples += len(mine)
        longest = max(longest, *(len(s.prompt) + len(s.answer) for s in mine))
        spent = time.monotonic() - began
        report(DataProgress(len(paths), samples, total, longest, made / spent if made else 0.0))
        per_shard = spent / len(paths)
        late = deadline is not None and time.monotonic() + per_shard > deadline
        if total >= answer_tokens or (late and len(paths) >= 2):
            break
    return paths


def _shards(maker: Maker, folder: Path) -> Iterator[tuple[Path, list[Sample], bool]]:
    """Shards in order, read or made: (path, samples, whether it was made just now)."""
    last = maker.num_shards if isinstance(maker, FileMaker) else None
    for index in count():
        if index == last:
            return
        path = shard_path(folder, index)
        if path.exists():
            yield path, read_shard(path), False
            continue
        samples = maker.make(index)
        if samples:
            write_shard(path, samples)
            yield path, samples, True
        elif last is None:
            raise ValueError(
                f"{path}: none of the target's own requests and answers was usable: pass --prompts"
            )


def forget_unfinished(folder: Path) -> None:
    """Delete what lies beside a shard that was never finished: it is made again with it."""
    for prefix in ("states-", "sums-"):
        for path in folder.glob(f"{prefix}*.safetensors"):
            if not path.with_name(path.name.replace(prefix, "shard-")).exists():
                path.unlink()
    for part in folder.glob("*.part"):
        part.unlink()


def missing_states(paths: Sequence[Path]) -> list[Path]:
    """Shards without states beside them."""
    return [path for path in paths if not states_path(path).exists()]


def _existing(path: Path) -> Path:
    """The nearest folder above a path that exists."""
    path = path.absolute()
    return path if path.exists() else _existing(path.parent)
