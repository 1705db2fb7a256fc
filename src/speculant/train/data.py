"""From shards to batches: which samples lie where, what is held out, in which order they come.

A batch is rectangular, [B, T] tokens padded at the tail. Only answers are supervised: answer token
a of a row is token `prompt + a`, predicted by

    the target      after position prompt + a - 1
    EAGLE's head    at base prompt + a - 2, which pairs features there with the token after it
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .shards import Sample, read_shard

WINDOW = 512
"""Samples that are sorted by length together: enough for even batches, few enough to stay random."""


@dataclass(frozen=True)
class Item:
    """Where a sample lies: shard file, number in it, and its first row in the states file."""

    path: Path
    index: int
    row: int
    prompt: int
    answer: int

    @property
    def length(self) -> int:
        """Tokens of prompt and answer."""
        return self.prompt + self.answer


@dataclass(frozen=True)
class Batch:
    """Samples of one optimiser step.

    tokens:  [B, T] int64, 0 behind a row's end
    prompts: [B] int64, where answers begin; answers: [B] int64, their lengths
    items:   where they came from
    """

    tokens: Tensor
    prompts: Tensor
    answers: Tensor
    items: tuple[Item, ...]

    @property
    def bases(self) -> Tensor:
        """[B, A] int64: the base that predicts answer token a, A the longest answer.

        Behind a row's answer they mean nothing, but lie within the T - 1 pairs.
        """
        steps = torch.arange(int(self.answers.max()), device=self.answers.device)
        return (self.prompts[:, None] - 2 + steps).clamp(max=self.tokens.shape[1] - 2)

    @property
    def valid(self) -> Tensor:
        """[B, A] bool: answer token a exists."""
        count = int(self.answers.max())
        return torch.arange(count, device=self.answers.device) < self.answers[:, None]

    def supervised(self) -> Tensor:
        """[B, T] bool: the loss mask over tokens; the answers' and nothing else."""
        at = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        return (at >= self.prompts[:, None]) & (at < (self.prompts + self.answers)[:, None])

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on a device."""
        tokens, prompts = self.tokens.to(device), self.prompts.to(device)
        return Batch(tokens, prompts, self.answers.to(device), self.items)


class Corpus:
    """Samples of some shards, tokens in memory."""

    def __init__(self, shards: Sequence[Path], longest: int = 2048) -> None:
        """Raises ValueError for a shard whose answers are empty or that has no prompt."""
        self.shards = tuple(shards)
        self.samples: dict[Path, list[Sample]] = {}
        self.items: list[Item] = []
        for path in shards:
            self.samples[path] = samples = read_shard(path)
            row = 0
            for index, sample in enumerate(samples):
                prompt, answer = len(sample.prompt), len(sample.answer)
                check_mask(path, index, prompt, answer)
                if prompt + answer <= longest:
                    self.items.append(Item(path, index, row, prompt, answer))
                row += prompt + answer - 1

    @property
    def answer_tokens(self) -> int:
        """Supervised tokens."""
        return sum(item.answer for item in self.items)

    def keep(self, answer_tokens: int, seed: int) -> None:
        """Keep a random part of the samples, at least `answer_tokens` of answers or all of them.

        Of one seed, a smaller part lies inside a larger one: a scaling curve adds data to data.
        """
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(self.items), generator=generator).tolist()
        kept, total = 0, 0
        while kept < len(order) and total < answer_tokens:
            total += self.items[order[kept]].answer
            kept += 1
        self.items = [self.items[i] for i in sorted(order[:kept])]

    def batch(self, items: Sequence[Item]) -> Batch:
        """The rectangle of some samples."""
        width = max(item.length for item in items)
        tokens = torch.zeros(len(items), width, dtype=torch.int64)
        for b, item in enumerate(items):
            sample = self.samples[item.path][item.index]
            tokens[b, : item.length] = torch.tensor([*sample.prompt, *sample.answer])
        prompts = torch.tensor([item.prompt for item in items])
        return Batch(tokens, prompts, torch.tensor([i.answer for i in items]), tuple(items))

    def counts(self, vocab_size: int) -> Tensor:
        """How often each token id is an answer's, [V] int64: what the draft vocabulary is chosen by."""
        ids = [t for i in self.items for t in self.samples[i.path][i.index].answer]
        return torch.bincount(torch.tensor(ids, dtype=torch.int64), minlength=vocab_size)


def check_mask(path: Path, index: int, prompt: int, answer: int) -> None:
    """Refuse a sample that supervises nothing, or everything: a broken template makes both."""
    if answer < 1:
        raise ValueError(f"{path}: sample {index} has no answer: its loss mask is empty")
    if prompt < 2:
        raise ValueError(
            f"{path}: sample {index} has a prompt of {prompt} tokens: its loss mask is all ones, "
            "which a chat template without an assistant's turn makes"
        )


def plan(
    items: Sequence[Item], epoch: int, seed: int, batch_answers: int, batch_tokens: int
) -> list[list[Item]]:
    """Batches of an epoch: the same for the same arguments, so that a run resumes exactly.

    Samples of like length go together; a batch holds at most `batch_answers` answer tokens and
    `batch_tokens` padded ones (a longer sample stands alone).
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(len(items), generator=generator).tolist()
    batches: list[list[Item]] = []
    for start in range(0, len(order), WINDOW):
        window = sorted((items[i] for i in order[start : start + WINDOW]), key=lambda i: i.length)
        current: list[Item] = []
        for item in window:
            answers = sum(i.answer for i in current) + item.answer
            padded = (len(current) + 1) * item.length
            if current and (answers > batch_answers or padded > batch_tokens):
                batches.append(current)
                current = []
            current.append(item)
        batches.append(current)
    shuffled = torch.randperm(len(batches), generator=generator).tolist()
    return [batches[i] for i in shuffled if batches[i]]


def find_shards(folders: Sequence[Path]) -> list[Path]:
    """Shards of some folders in a fixed order. Raises ValueError when there is none."""
    shards = [path for folder in folders for path in sorted(folder.glob("shard-*.safetensors"))]
    if not shards:
        names = ", ".join(str(folder) for folder in folders)
        raise ValueError(f"{names}: no shard-*.safetensors there: make data first")
    return shards


def apart(shards: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """The held-out shard, and those to train on. Raises ValueError when nothing is left for these.

    A folder that is given twice weighs twice, but its first shard stays held out.
    """
    held = shards[:1]
    rest = [path for path in shards[1:] if path.resolve() != held[0].resolve()]
    if not rest:
        raise ValueError(
            f"{len(set(shards))} shards of data: the first is held out, so two are needed: give more "
            "prompts or more time"
        )
    return list(held), rest
