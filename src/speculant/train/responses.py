"""Training samples: requests the target wrote itself, answered by the target, in shards.

A shard is made from its own seed, so it can be made again and an interrupted run goes on with the
next one that is missing. A sample is one turn: the token ids of the conversation so far, and of the
answer exactly as it was generated (nothing is tokenised a second time). Only the answer is
supervised.
"""

from __future__ import annotations

import random
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import Tensor

from ..sampling import SamplingParams
from ..target.base import Tokenizer
from .beginnings import SHORT, TEXT, Words, begin, words_of
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
from .shards import Sample

SHORTEST_CUT = 32
"""Tokens that must be left of an answer that was cut before its loop."""


@dataclass(frozen=True)
class Answer:
    """What the target generated for one prompt."""

    token_ids: list[int]
    text: str
    finish_reason: str
    states: Tensor | None = None  # [T - 1, n * H] tapped states of prompt and answer, if noted


T = TypeVar("T")
Ask = tuple[list[int], SamplingParams]
"""A prompt's token ids, and how to sample its answer."""
Talk = Generator["Ask | list[Talk[Any]]", Any, T]
"""What goes on step by step with the target: it yields what it asks next and is sent the answer, or
yields talks that then go on side by side and is sent what they returned, in order. Who runs talks
(`pipeline.talks`) gives every question its place as soon as there is one: no turn waits for the
slowest answer of the turn before, and no shard for the end of the one before."""


def single(ask: Ask) -> Talk[Answer]:
    """A talk of one question; its answer."""
    answer: Answer = yield ask
    return answer


@dataclass(frozen=True)
class Recipe:
    """What a shard is made of.

    conversations: synthesised requests a shard starts from
    begun:         share of them that begin with a kind of task and a random word, see `beginnings`,
                   and are answered as they are, in half of max_tokens, so that there are more;
                   none where the vocabulary holds no words
    documents:     share of the others that become a long text and a task about it
    pairs:         share of the documents that stand in one request with another one
    relays:        share of the rest that become a problem, a question or a text that the target
                   writes and is then asked about, as users ask: maths, facts, translation, code
    long:          share of what is left that becomes a long conversation: a document, then turn upon
                   turn about it until the context is full, so that late positions are learnt too
    turns:         share of the rest that goes on for a second and a third turn
    temperatures:  answers are generated at these, evenly; 0 is greedy
    min_p:         of sampled answers: without it a small target at temperature 1 strays into text that
                   nobody would serve and that has little to learn from (a quarter of all answer
                   tokens, of which the target's likeliest was the one drawn in two of five)
    max_tokens:    of an answer; documents may be twice as long
    longest:       samples beyond this many tokens are left out
    """

    conversations: int = 320
    begun: float = 0.5
    documents: float = 0.25
    pairs: float = 0.3
    relays: float = 0.3
    long: float = 0.06
    turns: float = 0.4
    temperatures: tuple[float, ...] = (0.0, 0.0, 0.7, 1.0)
    min_p: float = 0.1
    max_tokens: int = 320
    longest: int = 2048
    seed: int = 0

    def __post_init__(self) -> None:
        if self.conversations < 1 or not self.temperatures:
            raise ValueError("a shard needs at least one conversation and one temperature")
        shares = (self.begun, self.documents, self.pairs, self.relays, self.long, self.turns)
        if not all(0 <= share <= 1 for share in shares):
            raise ValueError(
                "begun, documents, pairs, relays, long and turns are shares between 0 and 1"
            )


class ShardMaker:
    """Makes shards: synthesise requests, answer them, go on with further turns and documents."""

    def __init__(self, tokenizer: Tokenizer, recipe: Recipe, vocab_size: int = 0) -> None:
        """vocab_size: tokens among which words are looked for, see `beginnings`.

        Raises ValueError for a target without a chat template.
        """
        self.tokenizer, self.recipe = tokenizer, recipe
        self.words = words_of(tokenizer, vocab_size) if recipe.begun else None
        self.opening = opening(tokenizer)

    def make(self, index: int) -> Talk[list[Sample]]:
        """The samples of one shard."""
        rng = random.Random(f"{self.recipe.seed}/{index}")
        begun = round(self.recipe.conversations * self.recipe.begun) if self.words else 0
        requests = yield from self._requests(self.recipe.conversations - begun, rng)
        documents = round(len(requests) * self.recipe.documents)
        relays = documents + round((len(requests) - documents) * self.recipe.relays)
        longs = relays + round((len(requests) - relays) * self.recipe.long)
        # the longest first: what is left running at the end is short
        talks = [self._long(text, _own(rng)) for text in requests[relays:longs]]
        sets = self._sets(requests[:documents], rng)
        talks += [self._documents(texts, _own(rng)) for texts in sets]
        talks += [self._relay(text, _own(rng)) for text in requests[documents:relays]]
        talks += [self._begun(self.words, _own(rng)) for _ in range(begun) if self.words]
        talks += [self._turns([_user(text)], _own(rng), 3) for text in requests[longs:]]
        made: list[list[Sample]] = yield talks
        return [sample for samples in made for sample in samples]

    def _requests(self, wanted: int, rng: random.Random) -> Talk[list[str]]:
        """Distinct, usable requests; one in three of what the target writes is thrown away."""
        start, unique = self.opening, Unique()
        params = [_with(start.params, 0.9, rng) for _ in range(wanted + wanted // 2)]
        answers: list[Answer] = yield [single((list(start.ids), mine)) for mine in params]
        texts = [a.text.strip() for a in answers if a.finish_reason == "stop"]
        return [text for text in texts if usable(text) and unique(text)][:wanted]

    def _begun(self, words: Words, rng: random.Random) -> Talk[list[Sample]]:
        """A user's turn that begins with a random word, and up to two answers behind it."""
        begun = begin(words, rng)
        text, ended = yield from self._go_on(begun.text, begun.most, rng)
        if not ended and begun.most != TEXT:
            return []
        if begun.ask:
            text, ended = yield from self._go_on(f"{text.rstrip()}\n{begun.ask}", SHORT, rng)
            if not ended:
                return []
        if not usable(text, 5 * TEXT):
            return []
        return (yield from self._turns([_user(text.strip())], rng, 2, self.recipe.max_tokens // 2))

    def _go_on(self, text: str, most: int, rng: random.Random) -> Talk[tuple[str, bool]]:
        """A user's turn as the target goes on with it, and whether it came to an end."""
        start = opening(self.tokenizer, text, most)
        room = self.recipe.longest - len(start.ids)
        if room <= 16:
            return text, False
        params = _with(start.params, 0.9, rng)
        answer = yield list(start.ids), replace(params, max_tokens=min(most, room))
        return text + answer.text, answer.finish_reason == "stop"

    def _sets(self, requests: Sequence[str], rng: random.Random) -> Iterator[list[str]]:
        """Requests for documents, one by one or two that will stand together."""
        rest = list(requests)
        while rest:
            # a set of two uses up two: `pairs` is a share of documents, not of sets
            two = len(rest) > 1 and rng.random() < self.recipe.pairs / (2 - self.recipe.pairs)
            yield [rest.pop(0) for _ in range(2 if two else 1)]

    def _documents(self, requests: Sequence[str], rng: random.Random) -> Talk[list[Sample]]:
        """A long text or two, then a task about them: by itself, or where the text was written."""
        samples: list[Sample] = []
        texts: list[str] = []
        messages: list[Message] = []
        for request in requests:
            messages = [_user(document_request(request, rng))]
            answer = yield from self._answer(messages, samples, rng, 2 * self.recipe.max_tokens)
            if answer is not None:
                texts.append(answer.text)
        if len(texts) == 2:
            both = _user(comparison(texts[0], texts[1], rng))
            samples += yield from self._turns([both], rng, 2)
        elif texts:
            there = [*messages, _assistant(texts[0])]
            before = there if len(requests) == 1 and rng.random() < 0.5 else []
            task = _user(follow_up(texts[0], rng))
            samples += yield from self._turns([*before, task], rng, 2)
        return samples

    def _long(self, request: str, rng: random.Random) -> Talk[list[Sample]]:
        """A long text, and turns about it until the context is full or an answer leads nowhere."""
        samples: list[Sample] = []
        messages = [_user(document_request(request, rng))]
        most = 2 * self.recipe.max_tokens
        while (answer := (yield from self._answer(messages, samples, rng, most))) is not None:
            messages = [*messages, _assistant(answer.text), _user(second_turn(rng))]
            most = self.recipe.max_tokens
        return samples

    def _relay(self, request: str, rng: random.Random) -> Talk[list[Sample]]:
        """A problem, a question or a text that the target writes, and is then asked about."""
        samples: list[Sample] = []
        text, then = relay(request, rng)
        answer = yield from self._answer([_user(text)], samples, rng, self.recipe.max_tokens)
        if answer is not None:
            asked = _user(then.replace("{text}", answer.text.strip()))
            samples += yield from self._turns([asked], rng, 2)
        return samples

    def _turns(
        self, messages: list[Message], rng: random.Random, most: int, tokens: int | None = None
    ) -> Talk[list[Sample]]:
        """A conversation that goes on for up to `most` turns, of `tokens` or the recipe's."""
        samples: list[Sample] = []
        for turn in range(1, most + 1):
            limit = tokens or self.recipe.max_tokens
            answer = yield from self._answer(messages, samples, rng, limit)
            if answer is None or turn == most or rng.random() >= self.recipe.turns:
                break
            messages = [*messages, _assistant(answer.text), _user(second_turn(rng))]
        return samples

    def _answer(
        self, messages: list[Message], samples: list[Sample], rng: random.Random, most: int
    ) -> Talk[Answer | None]:
        """Ask for one answer of at most `most` tokens and note it; None when none can follow it.

        Answers end where they fall into a loop: a head learns those in no time, and then scores
        well on nothing else. What is too short then, or loops otherwise, is dropped.
        """
        prompt = self.tokenizer.chat(messages)
        room = self.recipe.longest - len(prompt)
        if room <= 16:
            return None
        base = SamplingParams(max_tokens=min(most, room), min_p=self.recipe.min_p)
        answer: Answer = yield prompt, _with(base, rng.choice(self.recipe.temperatures), rng)
        kept, whole = before_loop(answer.token_ids), len(answer.token_ids)
        short = kept < (2 if kept == whole else SHORTEST_CUT)
        if short or (kept == whole and looping(answer.text)):
            return None
        states = None if answer.states is None else answer.states[: len(prompt) + kept - 1]
        samples.append(Sample(prompt, answer.token_ids[:kept], states))
        return answer if answer.finish_reason == "stop" and kept == whole else None


def _with(params: SamplingParams, temperature: float, rng: random.Random) -> SamplingParams:
    values = vars(params) | {"temperature": temperature, "seed": rng.getrandbits(48)}
    return SamplingParams(**values)


def _own(rng: random.Random) -> random.Random:
    """A talk's own numbers: what it asks does not depend on when the others are answered."""
    return random.Random(rng.getrandbits(64))


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}
