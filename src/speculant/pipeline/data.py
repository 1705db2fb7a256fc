"""The data of a run: shards made with the engine, resumable, within a time or a number of tokens."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeVar

from ..target.base import Target
from ..train.features import disk_bytes
from ..train.given import FileMaker
from ..train.prompts import Message, read_prompts
from ..train.responses import Recipe, ShardMaker, Talk
from ..train.shards import Sample, read_shard, shard_path, states_path, write_shard
from .settings import TrainSettings

POSITIONS = 1.8
"""Positions (prompt and answer) for every answer token of self-synthesised data, half of it begun: the
bundled heads' shards had 1.53 to 1.68 without begun requests, 1.85 and 2.05 of hardly anything else."""
T = TypeVar("T")
MARGIN = 0.1  # share of the free disk that is left alone


class Maker(Protocol):
    """Makes the samples of a shard."""

    def make(self, index: int) -> Talk[list[Sample]]:
        """The samples of shard `index`, the same every time."""
        ...


class Talks(Protocol):
    """Runs talks: `pipeline.talks.EngineTalks`."""

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        ...

    def stream(self, more: Callable[[], Talk[T] | None]) -> Iterator[T]:
        """What each talk that `more` gives returned, in order."""
        ...


@dataclass(frozen=True)
class DataProgress:
    """What is there after a shard."""

    shards: int
    samples: int
    answer_tokens: int
    longest: int
    tokens_per_s: float  # of the shards made in this run; 0 before the first
    generated_per_s: float  # requests, and what was thrown away, included


def recipe_for(settings: TrainSettings, target: Target) -> Recipe:
    """Small shards for a small budget: whole shards are what resumes, and one is held out."""
    longest = min(Recipe.longest, target.info.context_length)
    recipe = Recipe(conversations=256, longest=longest, seed=settings.seed)
    if settings.budget_s is not None:
        size = 48 if settings.budget_s >= 900 else 16
        recipe = replace(recipe, conversations=size, documents=0.15, long=0.0, max_tokens=256)
    if settings.begun is not None:
        recipe = replace(recipe, begun=settings.begun)
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
    recipe: Recipe,
) -> Maker:
    """Requests the target writes itself, or those of a file."""
    if conversations is None:
        return ShardMaker(target.tokenizer, recipe, target.info.vocab_size)
    given = settings.answers == "given"
    return FileMaker(target.tokenizer, conversations, recipe, given)


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


def make_data(
    maker: Maker,
    talks: Talks,
    folder: Path,
    answer_tokens: int,
    deadline: float | None,
    report: Callable[[DataProgress], None],
) -> list[Path]:
    """Make shards until there are enough answer tokens, or no time is left for another one.

    talks:    runs them: while the last answers of a shard are written, the next one begins
    deadline: time.monotonic() at which to stop; two shards are made in any case, since one is
              held out. Shards that exist are kept: a run that stopped goes on.
    """
    making = _Making(maker, talks, folder, answer_tokens, deadline, report)
    for samples in talks.stream(making.more):
        making.keep(samples)
    return making.paths


class _Making:
    """Which shards are there, which are being made, and whether another one is needed."""

    def __init__(
        self,
        maker: Maker,
        talks: Talks,
        folder: Path,
        answer_tokens: int,
        deadline: float | None,
        report: Callable[[DataProgress], None],
    ) -> None:
        self.maker, self.talks, self.folder, self.report = maker, talks, folder, report
        self.wanted, self.deadline, self.began = answer_tokens, deadline, time.monotonic()
        self.last = maker.num_shards if isinstance(maker, FileMaker) else None
        self.index, self.open = 0, list[int]()  # the next shard; those being made, in order
        self.there: dict[int, tuple[int, int, int]] = {}  # shard -> samples, answer tokens, longest
        self.made = self.made_tokens = 0

    @property
    def paths(self) -> list[Path]:
        """The shards that are there."""
        return [shard_path(self.folder, index) for index in sorted(self.there)]

    def more(self) -> Talk[list[Sample]] | None:
        """The next shard that is missing, None while none is needed beyond those being made."""
        while self.index != self.last and not self._enough():
            index, self.index = self.index, self.index + 1
            path = shard_path(self.folder, index)
            if not path.exists():
                self.open.append(index)
                return self.maker.make(index)
            self._count(index, read_shard(path))
        return None

    def keep(self, samples: list[Sample]) -> None:
        """Write the oldest shard that was being made."""
        index = self.open.pop(0)
        path = shard_path(self.folder, index)
        if samples:
            write_shard(path, samples)
            self.made += 1
            self.made_tokens += sum(len(s.answer) for s in samples)
            self._count(index, samples)
        elif self.last is None:
            raise ValueError(
                f"{path}: none of the target's own requests and answers was usable: pass --prompts"
            )

    def _enough(self) -> bool:
        """Whether what is there and being made suffices, taking the shards so far as typical."""
        total = sum(tokens for _, tokens, _ in self.there.values())
        if self.open and not self.there:
            return True  # how much a shard holds is not known yet
        expected = total + len(self.open) * (total / len(self.there) if self.there else 0)
        if expected >= self.wanted:
            return True
        each = (time.monotonic() - self.began) / self.made if self.made else 0.0
        late = self.deadline is not None and time.monotonic() + each > self.deadline
        return late and len(self.there) + len(self.open) >= 2

    def _count(self, index: int, samples: Sequence[Sample]) -> None:
        longest = max(len(s.prompt) + len(s.answer) for s in samples)
        self.there[index] = (len(samples), sum(len(s.answer) for s in samples), longest)
        counts, tokens, lengths = zip(*self.there.values(), strict=True)
        spent = max(1e-9, time.monotonic() - self.began)
        speeds = (self.made_tokens / spent, self.talks.generated / spent)
        self.report(DataProgress(len(counts), sum(counts), sum(tokens), max(lengths), *speeds))


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
