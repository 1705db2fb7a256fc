"""Beginnings of users' turns: words out of a vocabulary, and what the target makes of them."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from speculant.sampling import SamplingParams
from speculant.train.beginnings import FEWEST, KINDS, TEXT, Words, begin, words_of
from speculant.train.prompts import opening
from speculant.train.responses import Answer, Recipe, ShardMaker
from speculant.train.shards import Sample
from talking import in_rounds
from test_train_data import Characters

LETTERS = "abcdefghijklmnopqrstuvwxyz"
VOCABULARY = (
    [" the", "ing", " Ab", " 12", "Paris", " don't", " NASA", " iPhone", "<s>"]
    + [f" Name{a}{b}" for a in LETTERS for b in LETTERS]
    + [f" word{a}{b}" for a in LETTERS for b in LETTERS]
)


class WithWords(Characters):
    """`Characters` whose ids, behind an "a", are a word list's."""

    def decode(self, ids: Sequence[int]) -> str:
        if len(ids) == 2 and ids[0] == ord("a") and ids[1] < len(VOCABULARY):
            return "a" + VOCABULARY[ids[1]]
        return super().decode(ids)


def words() -> Words:
    found = words_of(WithWords(), len(VOCABULARY))
    assert found is not None
    return found


def test_words_are_whole_tokens_of_letters_in_the_vocabularys_order() -> None:
    found = words()
    assert found.common[:2] == ("the", "wordaa")
    assert len(found.common) == 1 + 26 * 26
    assert found.names[0] == "Nameaa"
    assert len(found.names) == 26 * 26


def test_a_vocabulary_without_words_gives_none() -> None:
    assert words_of(Characters(), 5000) is None
    assert words_of(WithWords(), FEWEST) is None  # names, and too few common words


@pytest.mark.real
def test_words_of_the_bundled_model(bundled: Path) -> None:
    from speculant.target.tokenizer import FileTokenizer

    tokenizer = FileTokenizer.from_folder(bundled)
    found = words_of(tokenizer, 49152)
    assert found is not None
    assert {"London", "Einstein", "Monday"} <= set(found.names)
    assert {"because", "water", "seven"} <= set(found.common)
    assert len(found.common) > 10_000
    ids = opening(tokenizer, "Summarize: London").ids
    text = tokenizer.backend.decode(list(ids), skip_special_tokens=False)
    assert text.endswith("<|im_start|>user\nSummarize: London")


def test_every_beginning_can_be_filled_and_frequent_words_come_more_often() -> None:
    rng, found = random.Random(0), words()
    begun = [begin(found, rng) for _ in range(3000)]
    assert not any(re.search(r"\{(word|Name|number|de|fr)\}", b.text) for b in begun)
    firsts = [w for b in begun for w in re.findall(r"\bword[a-z]{2}\b", b.text)]
    early = sum(w < "wordgn" for w in firsts)  # the first quarter of them
    assert 0.4 < early / len(firsts) < 0.6
    kinds = {(b.ask != "", b.most == TEXT) for kind in KINDS for b in kind}
    assert kinds == {(False, False), (False, True), (True, True)}
    same = random.Random(5), random.Random(5)
    assert [begin(found, same[0]) for _ in range(9)] == [begin(found, same[1]) for _ in range(9)]


class Begun:
    """Goes on with users' turns, and answers the rest; `ends` says whether a turn comes to an end."""

    def __init__(self, ends: bool, text: str = " goes on for a while, number {seed}") -> None:
        self.ends, self.text = ends, text
        self.turns: list[str] = []
        self.params: list[SamplingParams] = []

    def __call__(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> list[Answer]:
        out = []
        for ids, mine in zip(prompts, params, strict=True):
            prompt = Characters().decode(ids)
            if prompt.endswith("<assistant>"):
                text, finish = f"An answer, number {mine.seed}.", "stop"
            else:
                self.turns.append(prompt)
                self.params.append(mine)
                text, finish = self.text.format(seed=mine.seed), "stop" if self.ends else "length"
            out.append(Answer(Characters().encode(text + "|"), text, finish))
        return out


def samples_of(script: Begun, **recipe: float) -> list[Sample]:
    made = Recipe(conversations=60, begun=1.0, turns=0.0, **recipe)  # type: ignore[arg-type]
    return in_rounds(ShardMaker(WithWords(), made, len(VOCABULARY)).make(0), script)


def test_what_the_target_writes_behind_a_beginning_is_answered() -> None:
    script = Begun(ends=True)
    samples = samples_of(script)
    assert len(samples) == 60
    asked = [Characters().decode(s.prompt) for s in samples]
    for text in asked:  # a turn is what it was begun with and what the target wrote, and no more
        inner = text.removeprefix("<user>").removesuffix("|<assistant>")
        assert any(
            inner == (turn.removeprefix("<user>") + script.text.format(seed=params.seed)).strip()
            for turn, params in zip(script.turns, script.params, strict=True)
        )
    questions = [t for t in script.turns if "\n" in t and "goes on" in t]
    assert questions  # a text and, behind it, the beginning of a question about it
    assert all(re.search(r"number \d+\n(What|Who|Whe|How|Why|Which|Desc)", t) for t in questions)
    assert len(script.turns) == 60 + len(questions)
    assert all(p.temperature == 0.9 and p.top_p == 0.95 for p in script.params)
    assert samples_of(Begun(ends=True)) == samples  # a shard can be made again


def test_a_request_that_does_not_end_is_dropped_and_a_text_that_is_cut_is_kept() -> None:
    asked = [Characters().decode(s.prompt) for s in samples_of(Begun(ends=False))]
    assert 0 < len(asked) < 30
    starts = ("Summarize", "Extract", "Rewrite")  # a question that does not end is dropped too
    assert all(t.removeprefix("<user>").startswith(starts) for t in asked)


def test_a_looping_turn_is_dropped() -> None:
    assert samples_of(Begun(ends=True, text=" and again we go" * 20 + "{seed}")) == []


def test_share_of_begun_requests() -> None:
    """Half of the conversations; the others are what they were without."""
    script = Begun(ends=True, text="A request without a beginning, number {seed}")
    recipe = Recipe(conversations=40, begun=0.5, documents=0.0, relays=0.0, long=0.0, turns=0.0)
    samples = in_rounds(ShardMaker(WithWords(), recipe, len(VOCABULARY)).make(0), script)
    plain = [s for s in samples if Characters().decode(s.prompt).startswith("<user>A request")]
    assert (len(plain), len(samples)) == (20, 40)
    none = in_rounds(
        ShardMaker(Characters(), recipe, 5000).make(0), Begun(ends=True, text=script.text)
    )
    assert len(none) == 40  # a vocabulary without words: all of them are the target's own
