"""A user's own file as training data: what is supervised, which turns, which shards.

Independent truth: a template of one id a character, written out by hand, and a scripted `generate`
that records every prompt it is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from speculant.target.base import LAST
from speculant.train.card import DataCard, check_card, open_folder, read_card
from speculant.train.data import Corpus, check_mask
from speculant.train.given import SHARD, FileMaker
from speculant.train.prompts import Message
from speculant.train.responses import Answer, Recipe
from speculant.train.shards import Sample, shard_path, write_shard
from talking import Answers, in_rounds
from test_train_data import Characters, Script

TALK: list[Message] = [
    {"role": "system", "content": "Be brief"},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "Yes, one"},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "No"},
    {"role": "user", "content": "And?"},
]


@dataclass(frozen=True)
class Made:
    """A maker whose talks a script answers."""

    maker: FileMaker
    answer: Answers

    @property
    def num_shards(self) -> int:
        return self.maker.num_shards

    def make(self, index: int) -> list[Sample]:
        return in_rounds(self.maker.make(index), self.answer)


def maker(
    conversations: Sequence[list[Message]], given: bool, tokenizer: Any = None, **recipe: Any
) -> tuple[Made, Script]:
    script = Script()
    tokenizer = tokenizer or Characters()
    return Made(FileMaker(tokenizer, conversations, Recipe(**recipe), given), script), script


def texts(samples: Sequence[Sample]) -> list[tuple[str, str]]:
    decode = Characters().decode
    return [(decode(s.prompt), decode(s.answer)) for s in samples]


def asking(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def test_given_answers_are_the_assistants_tokens_and_nothing_else() -> None:
    """Each turn is a sample; with its prompt it is what the template writes up to the turn's end."""
    made, script = maker([TALK], given=True)
    samples = made.make(0)
    system = "<system>Be brief|"
    assert texts(samples) == [
        (f"{system}<user>One?|<assistant>", "Yes, one|"),
        (f"{system}<user>One?|<assistant>Yes, one|<user>Two?|<assistant>", "No|"),
    ]
    for sample, upto in zip(samples, (3, 5), strict=True):
        whole = Characters().chat(TALK[:upto])
        assert [*sample.prompt, *sample.answer] == whole[: -len("<assistant>")]
        assert sample.states is None
    assert script.prompts == []


def test_the_loss_mask_of_a_given_answer(tmp_path: Path) -> None:
    write_shard(shard_path(tmp_path, 0), maker([TALK], given=True)[0].make(0))
    corpus = Corpus([shard_path(tmp_path, 0)])
    batch = corpus.batch(corpus.items[1:])
    marked = Characters().decode(batch.tokens[batch.supervised()].tolist())
    assert marked == "No|"


def test_a_turn_that_opens_a_conversation_has_no_prompt() -> None:
    opens = [{"role": "assistant", "content": "Hello"}, *TALK[1:3]]
    assert texts(maker([opens], given=True)[0].make(0)) == [
        ("<assistant>Hello|<user>One?|<assistant>", "Yes, one|")
    ]


def test_samples_beyond_the_longest_are_left_out() -> None:
    made, _ = maker([TALK], given=True)
    length = len(made.make(0)[1].prompt) + 3
    for longest, count in ((length, 2), (length - 1, 1)):
        assert len(maker([TALK], given=True, longest=longest)[0].make(0)) == count


def test_the_target_answers_turn_by_turn() -> None:
    """Behind its own earlier answers, never the file's."""
    made, script = maker([TALK, asking("Other?")], given=False)
    samples = [sample for index in range(made.num_shards) for sample in made.make(index)]
    found = texts(samples)
    assert len(found) == 4
    talk = [(p, a) for p, a in found if "Other?" not in p]
    assert talk[0][0] == "<system>Be brief|<user>One?|<assistant>"
    for (prompt, answer), (following, _) in pairwise(talk):
        assert following.startswith(prompt + answer)
    assert talk[2][0].endswith("<user>And?|<assistant>")
    assert not any("Yes, one" in p + a for p, a in found)
    assert sorted(script.prompts) == sorted(p for p, _ in found)
    assert {p.temperature for p in script.params} <= set(Recipe().temperatures)
    assert len({p.seed for p in script.params}) == 4


def test_states_come_with_the_answers() -> None:
    import torch

    marks = torch.zeros(1)

    def generate(prompts: Any, params: Any) -> list[Answer]:
        return [Answer([65, 66], "AB", "stop", marks) for _ in prompts]

    made = Made(FileMaker(Characters(), [asking("One?")], Recipe(), False), generate)
    assert made.make(0)[0].states is marks


@pytest.mark.parametrize(
    ("answer", "samples", "asked"),
    [
        (Answer([65] * 9, "AAA", "length"), 1, 1),  # cut off: kept, but the talk ends there
        (Answer([65], "A", "stop"), 0, 1),  # EOS alone
        (Answer([65] * 90, "and again we go " * 20, "stop"), 0, 1),  # a loop
        (Answer([65] * 9, "AAA", "stop"), 3, 3),
    ],
)
def test_a_talk_goes_on_only_behind_a_usable_answer(
    answer: Answer, samples: int, asked: int
) -> None:
    seen: list[int] = []

    def generate(prompts: Any, params: Any) -> list[Answer]:
        seen.extend(range(len(prompts)))
        return [answer for _ in prompts]

    made = Made(FileMaker(Characters(), [TALK], Recipe(), False), generate)
    assert len(made.make(0)) == samples
    assert len(seen) == asked


@pytest.mark.parametrize("count", [1, 2, 3, 9, 40, 8 * SHARD + 5])
@pytest.mark.parametrize("given", [True, False])
def test_shards_cover_all_conversations_once(count: int, given: bool) -> None:
    """Small files too: one shard is held out, so several are made, the first no large part."""
    talks = [[*asking(f"Number {i}?"), {"role": "assistant", "content": "x"}] for i in range(count)]
    made, _ = maker(talks, given)
    shards = [made.make(index) for index in range(made.num_shards)]
    prompts = [text for shard in shards for text, _ in texts(shard)]
    assert sorted(prompts) == sorted(f"<user>Number {i}?|<assistant>" for i in range(count))
    assert len(shards) >= min(2, count)
    assert max(map(len, shards)) <= SHARD
    if count >= 40:
        assert len(shards[0]) <= count / 8 + 1


def test_a_shard_repeats_and_shards_differ() -> None:
    talks = [asking(f"Number {i}?") for i in range(20)]
    one, two = maker(talks, False)[0], maker(talks, False)[0]
    assert one.make(1) == two.make(1)
    assert one.make(1) != one.make(2)
    assert maker(talks, False, seed=1)[0].make(1) != one.make(1)


def test_files_without_answers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no conversation .* assistant's turn; leave it out"):
        maker([asking("One?"), asking("Two?")], given=True)


class Endless(Characters):
    """Ends the user's turns, not the assistant's."""

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        ends = {"user": "|", "assistant": ""}
        text = "".join(f"<{m['role']}>{m['content']}{ends[m['role']]}" for m in messages)
        return self.encode(text + "<assistant>")


class Thinking(Characters):
    """Opens an answer with a thought that it leaves out of the turns before."""

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        return [*super().chat(messages), *self.encode("<think></think>")]


class Merging(Characters):
    """One token for '>' and a following space, as a byte-pair encoding may have."""

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        text = self.decode(super().chat(messages))
        return self.encode(text.replace("> ", "\u2063"))

    def decode(self, ids: Sequence[int]) -> str:
        return super().decode(ids).replace("\u2063", "> ")


def test_templates_that_end_no_turn_are_refused() -> None:
    """Not even where the user's own end comes behind it: the mask would cover the user's text."""
    with pytest.raises(ValueError, match="ends no assistant's turn with an EOS token"):
        maker([TALK[1:]], given=True, tokenizer=Endless())[0].make(0)


def test_templates_that_open_an_answer_otherwise_are_refused() -> None:
    with pytest.raises(ValueError, match="unlike the opening it gives to generate one"):
        maker([TALK], given=True, tokenizer=Thinking())[0].make(0)


def test_an_answer_that_merges_with_its_opening_is_left_out() -> None:
    talks = [[*asking("One?"), {"role": "assistant", "content": text}] for text in (" a", "b")]
    made, _ = maker(talks, given=True, tokenizer=Merging())
    found = [sample for index in range(made.num_shards) for sample in made.make(index)]
    assert [answer for _, answer in texts(found)] == ["b|"]


def test_a_base_model_goes_on_with_plain_text() -> None:
    base = Characters(has_chat_template=False)
    made, script = maker([asking("Once upon a time"), asking("x")], False, base)
    found = [sample for index in range(made.num_shards) for sample in made.make(index)]
    assert [p for p, _ in texts(found)] == ["Once upon a time"]
    assert script.prompts == ["Once upon a time"]  # one token alone leaves nothing unsupervised
    several = maker([TALK[:2]], False, base)[0].make(0)
    assert texts(several)[0][0] == "Be brief\n\nOne?"
    with pytest.raises(ValueError, match=r"--answers given needs .* chat template.*leave it out"):
        maker([TALK], given=True, tokenizer=base)


def test_masks_of_nothing_and_of_everything_are_refused(tmp_path: Path) -> None:
    path = Path("shard-00000.safetensors")
    check_mask(path, 0, 2, 1)
    with pytest.raises(ValueError, match=r"shard-00000.*sample 4 has no answer.*mask is empty"):
        check_mask(path, 4, 9, 0)
    for prompt in (0, 1):
        with pytest.raises(ValueError, match=r"sample 4 has a prompt of . tokens.*all ones"):
            check_mask(path, 4, prompt, 9)
    write_shard(shard_path(tmp_path, 0), [Sample([1, 2], [3]), Sample([4], [5, 6])])
    with pytest.raises(ValueError, match="sample 1 has a prompt of 1 tokens"):
        Corpus([shard_path(tmp_path, 0)])


CARD = DataCard({"weights_sha256": "aa", "vocab_size": 9}, (2, 3, LAST), {"seed": 0, "turns": 0.4})


def begun(folder: Path, card: DataCard = CARD) -> Path:
    """A folder with a card and a shard."""
    assert open_folder(folder, card, "tiny") == card
    write_shard(shard_path(folder, 0), [Sample([1, 2], [3])])
    return folder


def test_a_folder_goes_on_with_its_own_taps(tmp_path: Path) -> None:
    folder = begun(tmp_path / "data")
    assert read_card(folder) == CARD
    other = replace(CARD, taps=(1, LAST))
    assert open_folder(folder, other, "tiny") == CARD
    assert read_card(folder) == CARD
    assert sorted(p.name for p in folder.iterdir()) == ["data.json", "shard-00000.safetensors"]


def test_folders_of_other_data_are_refused(tmp_path: Path) -> None:
    folder = begun(tmp_path)
    tuned = replace(CARD, target={**CARD.target, "weights_sha256": "bb"})
    with pytest.raises(ValueError, match=r"another target's than tiny \(weights_sha256 differs\)"):
        open_folder(folder, tuned, "tiny")
    with pytest.raises(ValueError, match=r"begun with turns = 0.4, not 0.5: repeat that"):
        open_folder(folder, replace(CARD, recipe={"seed": 0, "turns": 0.5}), "tiny")
    check_card(CARD, folder, CARD.target, "tiny")
    (folder / "data.json").write_text('{"target": 1}')
    with pytest.raises(ValueError, match=r"data\.json: not a data card"):
        read_card(folder)


def test_a_folder_without_a_shard_is_begun_anew(tmp_path: Path) -> None:
    """The file of prompts was broken, say, and another one is given now."""
    open_folder(tmp_path, CARD, "tiny")
    other = replace(CARD, recipe={"seed": 1}, taps=())
    assert open_folder(tmp_path, other, "tiny") == other
    assert read_card(tmp_path) == other
    assert read_card(tmp_path / "none") is None
