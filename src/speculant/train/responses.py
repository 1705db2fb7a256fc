"""Training samples: requests the target wrote itself, answered by the target, in shards.

A shard is made from its own seed, so it can be made again and an interrupted run goes on with the
next one that is missing. A sample is one turn: the token ids of the conversation so far, and of the
answer exactly as it was generated (nothing is tokenised a second time). Only the answer is
supervised.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..sampling import SamplingParams
from ..target.base import Tokenizer
from .prompts import (
    Message,
    Unique,
    before_loop,
    comparison,
    document_request,
    follow_up,
    looping,
    opening,
    relay,
    second_turn,
    usable,
)

SHORTEST_CUT = 32
"""Tokens that must be left of an answer that was cut before its loop."""


@dataclass(frozen=True)
class Answer:
    """What the target generated for one prompt."""

    token_ids: list[int]
    text: str
    finish_reason: str
    states: Tensor | None = None  # [T - 1, n * H] tapped states of prompt and answer, if noted


Generate = Callable[[Sequence[Sequence[int]], Sequence[SamplingParams]], list[Answer]]
"""Runs prompts (token ids) to the end, in order: the engine, handed in by the caller."""


@dataclass(frozen=True)
class Recipe:
    """What a shard is made of.

    conversations: synthesised requests a shard starts from
    documents:     share of them that become a long text and a task about it
    pairs:         share of the documents that stand in one request with another one
    relays:        share of the others that become a problem, a question or a text that the target
                   writes and is then asked about, as users ask: maths, facts, translation, code
    turns:         share of what is left that goes on for a second and a third turn
    temperatures:  answers are generated at these, evenly; 0 is greedy
    min_p:         of sampled answers: without it a small target at temperature 1 strays into text that
                   nobody would serve and that has little to learn from (a quarter of all answer
                   tokens, of which the target's likeliest was the one drawn in two of five)
    max_tokens:    of an answer; documents may be twice as long
    longest:       samples beyond this many tokens are left out
    """

    conversations: int = 320
    documents: float = 0.25
    pairs: float = 0.3
    relays: float = 0.3
    turns: float = 0.4
    temperatures: tuple[float, ...] = (0.0, 0.0, 0.7, 1.0)
    min_p: float = 0.1
    max_tokens: int = 320
    longest: int = 2048
    seed: int = 0

    def __post_init__(self) -> None:
        if self.conversations < 1 or not self.temperatures:
            raise ValueError("a shard needs at least one conversation and one temperature")
        shares = (self.documents, self.pairs, self.relays, self.turns)
        if not all(0 <= share <= 1 for share in shares):
            raise ValueError("documents, pairs, relays and turns are shares between 0 and 1")


@dataclass(frozen=True)
class Sample:
    """One supervised turn."""

    prompt: list[int]
    answer: list[int]
    states: Tensor | None = None  # [T - 1, n * H], where they were noted while answering


class ShardMaker:
    """Makes shards: synthesise requests, answer them, go on with further turns and documents."""

    def __init__(self, tokenizer: Tokenizer, generate: Generate, recipe: Recipe) -> None:
        """Raises ValueError for a target without a chat template."""
        self.tokenizer, self.generate, self.recipe = tokenizer, generate, recipe
        self.opening = opening(tokenizer)

    def make(self, index: int) -> list[Sample]:
        """The samples of one shard."""
        rng = random.Random(f"{self.recipe.seed}/{index}")
        requests = self._requests(rng)
        documents = round(len(requests) * self.recipe.documents)
        relays = round((len(requests) - documents) * self.recipe.relays)
        first = [[_user(document_request(text, rng))] for text in requests[:documents]]
        passed = [relay(text, rng) for text in requests[documents : documents + relays]]
        first += [[_user(request)] for request, _ in passed]
        first += [[_user(text)] for text in requests[documents + relays :]]
        samples, answers = self._answer(first, rng, documents)
        second: list[list[Message]] = []
        other = ""
        for i, (messages, answer) in enumerate(zip(first, answers, strict=True)):
            if answer is None:
                continue
            if i < documents:
                second.append(self._task(messages, answer.text, other, rng))
                other = answer.text
            elif i < documents + relays:
                text = passed[i - documents][1].replace("{text}", answer.text.strip())
                second.append([_user(text)])
            elif rng.random() < self.recipe.turns:
                turn = _user(second_turn(rng))
                second.append([*messages, _assistant(answer.text), turn])
        more, answers = self._answer(second, rng)
        samples += more
        third = [
            [*messages, _assistant(answer.text), _user(second_turn(rng))]
            for messages, answer in zip(second, answers, strict=True)
            if answer is not None and rng.random() < self.recipe.turns
        ]
        return samples + self._answer(third, rng)[0]

    def _task(
        self, messages: list[Message], document: str, other: str, rng: random.Random
    ) -> list[Message]:
        """A request about a document: with another one, alone, or in its own conversation."""
        if other and rng.random() < self.recipe.pairs:
            return [_user(comparison(document, other, rng))]
        before = [*messages, _assistant(document)] if rng.random() < 0.5 else []
        return [*before, _user(follow_up(document, rng))]

    def _requests(self, rng: random.Random) -> list[str]:
        """Distinct, usable requests; one in three of what the target writes is thrown away."""
        wanted, unique = self.recipe.conversations, Unique()
        start = self.opening
        params = [_with(start.params, 0.9, rng) for _ in range(wanted + wanted // 2)]
        answers = self.generate([start.ids] * len(params), params)
        texts = [a.text.strip() for a in answers if a.finish_reason == "stop"]
        return [text for text in texts if usable(text) and unique(text)][:wanted]

    def _answer(
        self, conversations: Sequence[list[Message]], rng: random.Random, documents: int = 0
    ) -> tuple[list[Sample], list[Answer | None]]:
        """Answer conversations; samples, and per conversation the answer when it can go on.

        Answers end where they fall into a loop: a head learns those in no time, and then scores
        well on nothing else. What is too short then, or loops otherwise, is dropped.
        """
        prompts = [self.tokenizer.chat(messages) for messages in conversations]
        recipe, params = self.recipe, []
        for i, prompt in enumerate(prompts):
            room = max(1, recipe.longest - len(prompt))
            most = min(recipe.max_tokens * (2 if i < documents else 1), room)
            base = SamplingParams(max_tokens=most, temperature=0.0, min_p=recipe.min_p)
            params.append(_with(base, rng.choice(recipe.temperatures), rng))
        fits = [i for i, p in enumerate(prompts) if len(p) < recipe.longest - 16]
        done = self.generate([prompts[i] for i in fits], [params[i] for i in fits])
        answers: list[Answer | None] = [None] * len(prompts)
        samples = []
        for i, answer in zip(fits, done, strict=True):
            kept, whole = before_loop(answer.token_ids), len(answer.token_ids)
            if kept < (2 if kept == whole else SHORTEST_CUT) or (
                kept == whole and looping(answer.text)
            ):
                continue
            states = answer.states
            if states is not None:
                states = states[: len(prompts[i]) + kept - 1]
            samples.append(Sample(prompts[i], answer.token_ids[:kept], states))
            if answer.finish_reason == "stop" and kept == whole:
                answers[i] = answer
        return samples, answers


def states_path(path: Path) -> Path:
    """Where the states of a shard lie."""
    return path.with_name(path.name.replace("shard-", "states-"))


def shard_path(folder: Path, index: int) -> Path:
    """Where a shard lies."""
    return folder / f"shard-{index:05d}.safetensors"


def write_shard(path: Path, samples: Sequence[Sample]) -> None:
    """Write samples, and their states where noted: a shard is whole or not there."""
    if not samples:
        raise ValueError(f"{path}: no sample to write")
    tokens = torch.tensor([t for s in samples for t in (*s.prompt, *s.answer)], dtype=torch.int32)
    prompts = torch.tensor([len(s.prompt) for s in samples], dtype=torch.int32)
    answers = torch.tensor([len(s.answer) for s in samples], dtype=torch.int32)
    path.parent.mkdir(parents=True, exist_ok=True)
    states = [s.states for s in samples if s.states is not None]
    if len(states) == len(samples):
        # first, so that a shard never lacks the states it was made with
        write_tensors(states_path(path), {"states": torch.cat(states)})
    write_tensors(path, {"tokens": tokens, "prompt_lengths": prompts, "answer_lengths": answers})


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file to a temporary name, then rename. Raises OSError: a full disk."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        save_file(dict(tensors), part)
        os.replace(part, path)
    except SafetensorError as error:
        raise OSError(f"{path}: cannot be written ({error}); free some space and go on") from None
    finally:
        part.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a small file to a temporary name, then rename: it is whole or the old one."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def read_shard(path: Path) -> list[Sample]:
    """The samples of a shard. Raises ValueError for a file that is no shard or was cut short."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        data: dict[str, Tensor] = load_file(path)
        tokens, prompts = data["tokens"].tolist(), data["prompt_lengths"].tolist()
        answers = data["answer_lengths"].tolist()
    except (SafetensorError, KeyError) as error:
        raise ValueError(f"{path}: not a shard ({error}): delete it") from None
    samples, at = [], 0
    for prompt, answer in zip(prompts, answers, strict=True):
        samples.append(Sample(tokens[at : at + prompt], tokens[at + prompt : at + prompt + answer]))
        at += prompt + answer
    if at != len(tokens):
        raise ValueError(
            f"{path}: lengths add up to {at} of {len(tokens)} tokens: delete the shard"
        )
    return samples


def make_shards(
    maker: ShardMaker, folder: Path, answer_tokens: int
) -> Iterator[tuple[int, list[Sample], int]]:
    """Make missing shards until their answers hold `answer_tokens`: (index, samples, tokens so far)."""
    total, index = 0, 0
    while total < answer_tokens:
        path = shard_path(folder, index)
        if path.exists():
            samples = read_shard(path)
        else:
            samples = maker.make(index)
            write_shard(path, samples)
        total += sum(len(s.answer) for s in samples)
        yield index, samples, total
        index += 1


def _with(params: SamplingParams, temperature: float, rng: random.Random) -> SamplingParams:
    values = vars(params) | {"temperature": temperature, "seed": rng.getrandbits(48)}
    return SamplingParams(**values)


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}
