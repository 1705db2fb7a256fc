"""Training samples from a user's own file: its prompts answered by the target, or answers it holds."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from ..sampling import SamplingParams
from ..target.base import Tokenizer
from .prompts import Message, looping
from .responses import Answer, Recipe, Talk
from .shards import Sample

SHARD = 128
"""Most conversations of a file in one shard."""
SHARES = 8
"""Shards that a small file makes at least: the first one is held out, and must not be half of it."""
SHORTEST = 2  # tokens of a prompt, see `data.check_mask`


@dataclass(frozen=True)
class FileMaker:
    """Makes shards of a file's conversations.

    given: take the assistant's turns of the file as they are; else its user turns are answered by
           the target one after another, and what the file's assistant said is left out

    A target without a chat template goes on with a prompt as plain text.
    """

    tokenizer: Tokenizer
    conversations: Sequence[list[Message]]
    recipe: Recipe
    given: bool

    def __post_init__(self) -> None:
        if self.given and not self.tokenizer.has_chat_template:
            raise ValueError(
                "--answers given needs a target with a chat template, and this one has none; leave "
                "it out and the target goes on with each prompt itself"
            )
        if self.given and not any(m["role"] == "assistant" for c in self.conversations for m in c):
            raise ValueError(
                "--answers given: no conversation of the file has an assistant's turn; leave it out "
                "and the target answers"
            )

    @property
    def shard_size(self) -> int:
        """Conversations of a shard."""
        return max(1, min(SHARD, -(-len(self.conversations) // SHARES)))

    @property
    def num_shards(self) -> int:
        """Shards that the file makes."""
        return -(-len(self.conversations) // self.shard_size)

    def make(self, index: int) -> Talk[list[Sample]]:
        """The samples of one shard; there may be none."""
        size = self.shard_size
        mine = self.conversations[index * size : (index + 1) * size]
        if self.given:
            return [sample for messages in mine for sample in self._given(messages)]
        rngs = [random.Random(f"{self.recipe.seed}/{index}/{i}") for i in range(len(mine))]
        talks = [self._answered(c, rng) for c, rng in zip(mine, rngs, strict=True)]
        made: list[list[Sample]] = yield talks
        return [sample for samples in made for sample in samples]

    def _given(self, messages: Sequence[Message]) -> list[Sample]:
        """One sample a turn of the assistant, by the template's own tokens."""
        turns = [i for i, m in enumerate(messages) if i > 0 and m["role"] == "assistant"]
        samples = []
        for at in turns:
            prompt = self.tokenizer.chat(list(messages[:at]))
            whole, other = (
                self.tokenizer.chat([*messages[: at + 1], {"role": "user", "content": text}])
                for text in ("?", "!")
            )
            if whole[: len(prompt)] != prompt:
                text = self.tokenizer.decode(prompt)
                if self.tokenizer.decode(whole).startswith(text):
                    continue  # the answer's first characters became one token with the opening's last
                raise ValueError(
                    "the chat template writes an assistant's turn unlike the opening it gives to "
                    "generate one: give prompts without answers, and the target answers"
                )
            # what follows the turn, up to the user's text: the turn's own end lies before it
            pairs = enumerate(zip(whole, other, strict=False))
            last = next((i for i, (a, b) in pairs if a != b), len(whole))
            ends = [i for i in range(len(prompt), last) if whole[i] in self.tokenizer.eos_ids]
            if not ends:
                raise ValueError("the chat template ends no assistant's turn with an EOS token")
            if ends[0] < self.recipe.longest:
                samples.append(Sample(prompt, whole[len(prompt) : ends[0] + 1]))
        return samples

    def _answered(self, messages: Sequence[Message], rng: random.Random) -> Talk[list[Sample]]:
        """The target's own answers to the user's turns, each behind its own earlier ones."""
        spoken = [m for m in messages if m["role"] == "system"]
        samples: list[Sample] = []
        for asked in (m for m in messages if m["role"] == "user"):
            spoken.append(asked)
            prompt = self._opened(spoken)
            if not SHORTEST <= len(prompt) < self.recipe.longest - 16:
                continue
            answer: Answer = yield prompt, self._params(rng)
            usable = len(answer.token_ids) > 1 and not looping(answer.text)
            if usable and len(prompt) + len(answer.token_ids) <= self.recipe.longest:
                samples.append(Sample(prompt, answer.token_ids, answer.states))
            if not usable or answer.finish_reason != "stop":
                break
            spoken.append({"role": "assistant", "content": answer.text})
        return samples

    def _opened(self, messages: list[Message]) -> list[int]:
        """Token ids of a conversation, up to where the target speaks."""
        if self.tokenizer.has_chat_template:
            return self.tokenizer.chat(messages)
        return self.tokenizer.encode("\n\n".join(m["content"] for m in messages))

    def _params(self, rng: random.Random) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.recipe.max_tokens,
            temperature=rng.choice(self.recipe.temperatures),
            min_p=self.recipe.min_p,
            seed=rng.getrandbits(48),
        )
