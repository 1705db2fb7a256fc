"""Training data: what becomes a request, what a sample holds, what a shard keeps.

Independent truth: a tokenizer of one id per character, whose template is written out by hand, and
a scripted `generate` that records every prompt it is given.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from speculant.pipeline.data import DataProgress, make_data
from speculant.sampling import SamplingParams
from speculant.train.data import Corpus, Item, apart, find_shards
from speculant.train.prompts import (
    RELAYS,
    Unique,
    before_loop,
    follow_up,
    looping,
    opening,
    read_prompts,
    usable,
)
from speculant.train.responses import Answer, Recipe, ShardMaker
from speculant.train.shards import (
    Sample,
    read_shard,
    shard_path,
    states_path,
    write_shard,
    write_text,
)
from talking import InRounds, in_rounds


class Characters:
    """One id a character; the template is <role>text| and ends with <assistant>."""

    eos_ids = frozenset({ord("|")})

    def __init__(self, has_chat_template: bool = True) -> None:
        self.has_chat_template = has_chat_template

    def encode(self, text: str) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(i) for i in ids)

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        text = "".join(f"<{m['role']}>{m['content']}|" for m in messages)
        return self.encode(text + "<assistant>")

    def fingerprint(self) -> str:
        return "characters"


class Script:
    """Answers openings with numbered requests, everything else with a text that names its prompt."""

    def __init__(self) -> None:
        self.tokenizer = Characters()
        self.prompts: list[str] = []
        self.params: list[SamplingParams] = []
        self.loops = False

    def __call__(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> list[Answer]:
        out = []
        for ids, mine in zip(prompts, params, strict=True):
            prompt = self.tokenizer.decode(ids)
            self.prompts.append(prompt)
            self.params.append(mine)
            if prompt == "<user>":
                text = f"Please tell me about the number {mine.seed}"
            elif self.loops:
                text = "and again we go " * 20
            else:
                text = f"An answer number {mine.seed} to you."
            finish = "stop" if len(text) < mine.max_tokens * 10 else "length"
            out.append(Answer(self.tokenizer.encode(text + "|"), text, finish))
        return out


@dataclass(frozen=True)
class Made:
    """A maker whose talks a script answers."""

    maker: ShardMaker
    script: Script

    def make(self, index: int) -> list[Sample]:
        return in_rounds(self.maker.make(index), self.script)


def maker(script: Script, **recipe: object) -> Made:
    return Made(ShardMaker(Characters(), Recipe(**recipe)), script)  # type: ignore[arg-type]


def test_opening_is_the_template_up_to_the_users_text() -> None:
    found = opening(Characters())
    assert Characters().decode(found.ids) == "<user>"
    with pytest.raises(ValueError, match=r"no chat template.*--prompts"):
        opening(Characters(has_chat_template=False))
    with pytest.raises(ValueError, match=r"no chat template.*--prompts"):  # before anything runs
        ShardMaker(Characters(has_chat_template=False), Recipe())


@pytest.mark.real
def test_opening_of_the_bundled_model(bundled: Path) -> None:
    from speculant.target.tokenizer import FileTokenizer

    tokenizer = FileTokenizer.from_folder(bundled)
    ids = opening(tokenizer).ids
    text = tokenizer.backend.decode(list(ids), skip_special_tokens=False)
    assert text.endswith("<|im_start|>user\n")


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("What is the capital of Portugal?", True),
        ("hi", False),
        ("x" * 2000, False),
        ("12345 67890 12345", False),
        ("A half character \ufffd here, sadly", False),
        ("What does <|im_start|> stand for?", False),
        ("tell me more and " * 10, False),
    ],
)
def test_usable_requests(text: str, good: bool) -> None:
    assert usable(text) == good


def test_unique_ignores_case_and_punctuation() -> None:
    unique = Unique(["What is love?"])
    assert not unique("what is LOVE")
    assert unique("What is hate?")
    assert not unique("What is hate")


def test_looping() -> None:
    assert looping("the same four words " * 6)
    assert not looping(" ".join(str(i) for i in range(100)))


def test_a_shard_answers_requests_documents_and_turns() -> None:
    script = Script()
    samples = maker(script, conversations=40, documents=0.5, relays=0.0, turns=1.0).make(3)
    texts = [Characters().decode(s.prompt) for s in samples]
    assert all(text.endswith("|<assistant>") for text in texts)
    turns = [text.count("<user>") for text in texts]
    assert {1, 2, 3} <= set(turns)
    # a task about a document holds the document the target wrote
    documents = [s for s in samples if "Write a" in Characters().decode(s.prompt)]
    assert documents
    written = {Characters().decode(s.answer).rstrip("|") for s in samples}
    alone = [t for t in texts if "\n\nAn answer number" in t and t.count("<user>") == 1]
    assert alone
    assert all(t.split("\n\n")[1].split("|")[0] in written for t in alone)
    temperatures = {p.temperature for p in script.params}
    assert temperatures == {0.9, 0.0, 0.7, 1.0}
    seeds = [p.seed for p in script.params]
    assert len(set(seeds)) == len(seeds)


def test_a_shard_repeats_and_shards_differ() -> None:
    first = maker(Script(), conversations=12).make(0)
    assert maker(Script(), conversations=12).make(0) == first
    assert maker(Script(), conversations=12).make(1) != first
    assert maker(Script(), conversations=12, seed=1).make(0) != first


def test_loops_are_left_out() -> None:
    script = Script()
    script.loops = True
    assert maker(script, conversations=8).make(0) == []


def test_an_answer_ends_where_its_loop_begins() -> None:
    fresh = list(range(100))
    assert before_loop(fresh) == 100
    assert before_loop([]) == 0
    assert before_loop(fresh + [7, 8, 9, 5, 4, 3, 2] * 3) == 121  # too short a loop to be one
    loop = [7, 8, 9, 5, 4, 3, 2, 1]
    cut = before_loop(fresh + loop * 12)
    assert 100 <= cut <= 108  # one pass is new
    assert before_loop(fresh + loop * 12 + fresh) == cut
    assert before_loop([1] * 90) <= 6


def test_a_looping_answer_is_cut_with_its_states() -> None:
    text = "Some forty characters that repeat nothing; " + "again and " * 20
    ids = Characters().encode(text)

    def generate(
        prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> list[Answer]:
        if prompts and Characters().decode(prompts[0]) == "<user>":
            return Script()(prompts, params)
        states = [torch.arange(len(p) + len(ids) - 1.0)[:, None] for p in prompts]
        return [Answer(ids, text, "length", s) for s in states]

    recipe = Recipe(conversations=12, documents=0.0, relays=0.0, turns=0.0)
    samples = in_rounds(ShardMaker(Characters(), recipe).make(0), generate)
    assert samples
    for sample in samples:
        assert 32 <= len(sample.answer) < 60
        assert sample.answer == ids[: len(sample.answer)]
        assert sample.states is not None
        assert len(sample.states) == len(sample.prompt) + len(sample.answer) - 1


def test_a_relay_asks_the_target_what_it_wrote() -> None:
    """The answer to the first request is the second one's text, in a conversation of its own."""
    script = Script()
    samples = maker(script, conversations=40, documents=0.0, relays=1.0, turns=0.0).make(3)
    texts = [Characters().decode(s.prompt) for s in samples]
    assert all(text.count("<user>") == 1 for text in texts)
    requests = [first.split("{seed}")[0] for first, _ in RELAYS]
    asked = [i for i, t in enumerate(texts) if any(r in t for r in requests)]
    answered = [i for i in range(len(samples)) if i not in asked]
    assert len(asked) >= 20
    assert answered
    written = [Characters().decode(samples[i].answer).rstrip("|") for i in asked]
    assert all(any(w in texts[i] for w in written) for i in answered)


def test_long_conversations_fill_the_context() -> None:
    recipe = {"conversations": 30, "documents": 0.0, "relays": 0.0, "turns": 0.0, "longest": 900}
    samples = maker(Script(), **recipe, long=0.2).make(0)
    texts = [Characters().decode(s.prompt) for s in samples]
    turns = [text.count("<user>") for text in texts]
    assert max(turns) > 6
    assert max(len(s.prompt) + len(s.answer) for s in samples) > 800
    firsts = [text for text, n in zip(texts, turns, strict=True) if n == 1 and "Write a" in text]
    assert len(firsts) == 6
    for text, n in zip(texts, turns, strict=True):  # every turn stands behind all earlier ones
        assert n == 1 or any(text.startswith(other) and text != other for other in texts)
    without = maker(Script(), **recipe, long=0.0).make(0)
    assert all(Characters().decode(s.prompt).count("<user>") == 1 for s in without)


def test_no_sample_is_longer_than_asked() -> None:
    script = Script()
    samples = maker(script, conversations=30, documents=1.0, longest=200).make(0)
    assert samples
    assert all(p.max_tokens <= 200 for p in script.params)
    assert all(len(s.prompt) < 200 for s in samples)


def test_shards_round_trip_and_resume(tmp_path: Path) -> None:
    script = Script()
    news: list[DataProgress] = []

    def make() -> list[Path]:
        made = maker(script, conversations=10)
        return make_data(made.maker, InRounds(script), tmp_path, 1500, None, news.append)

    paths = make()
    assert news[-1].answer_tokens >= 1500
    assert len(paths) > 1
    asked, samples = len(script.prompts), [read_shard(path) for path in paths]
    paths[-1].unlink()  # as if interrupted before the last was whole
    assert make() == paths
    assert [read_shard(path) for path in paths] == samples
    assert len(script.prompts) - asked < asked  # only the missing shard was made again


def test_a_broken_shard_is_named(tmp_path: Path) -> None:
    path = shard_path(tmp_path, 0)
    write_shard(path, [Sample([1, 2, 3], [4, 5])])
    assert read_shard(path) == [Sample([1, 2, 3], [4, 5])]
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    save_file(load_file(path) | {"tokens": torch.zeros(9, dtype=torch.int32)}, path)
    with pytest.raises(ValueError, match=r"shard-00000.*add up to 5 of 9"):
        read_shard(path)
    with pytest.raises(ValueError, match="no sample"):
        write_shard(path, [])


@pytest.mark.parametrize(
    "change",
    [{"conversations": 0}, {"temperatures": ()}, {"documents": 1.5}, {"turns": -0.1}],
)
def test_wrong_recipes_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        Recipe(**change)  # type: ignore[arg-type]


def test_prompt_files(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    records = [
        {"prompt": "One?"},
        {"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "Two?"}]},
        {"conversations": [{"from": "human", "value": "Three?"}, {"from": "gpt", "value": "3"}]},
    ]
    path.write_text("\n\n".join(json.dumps(r) for r in records))
    found = list(read_prompts(path))
    assert found[0] == [{"role": "user", "content": "One?"}]
    assert [m["role"] for m in found[1]] == ["system", "user"]
    assert found[2][1] == {"role": "assistant", "content": "3"}
    plain = tmp_path / "prompts.txt"
    plain.write_text("First\n\nSecond\n")
    assert [m[0]["content"] for m in read_prompts(plain)] == ["First", "Second"]


@pytest.mark.parametrize(
    "line",
    ["{", '{"text": "x"}', '{"prompt": ""}', '{"messages": [{"role": "user"}]}', "[1]",
     '{"conversations": [{"from": "alien", "value": "x"}]}'],
)  # fmt: skip
def test_a_broken_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"prompts\.jsonl:2: not a prompt"):
        list(read_prompts(path))


def test_follow_up_holds_the_whole_document() -> None:
    text = "A document.\n\nWith {braces} in it."
    assert follow_up(text, random.Random(0)).endswith(text)


def test_a_file_that_is_no_shard_is_named(tmp_path: Path) -> None:
    path = shard_path(tmp_path, 0)
    write_shard(path, [Sample([1, 2, 3], [4, 5])])
    whole = path.read_bytes()
    for broken in (whole[:50], b""):
        path.write_bytes(broken)
        with pytest.raises(ValueError, match=r"shard-00000.*not a shard.*delete it"):
            read_shard(path)
    save_file({"states": torch.zeros(3)}, path)
    with pytest.raises(ValueError, match=r"shard-00000.*not a shard.*tokens"):
        read_shard(path)


@pytest.mark.parametrize("noted", [True, False])
def test_a_full_disk_leaves_no_half_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noted: bool
) -> None:
    """Nor a shard without the states it was made with."""

    def full(tensors: dict[str, Tensor], path: Path) -> None:
        path.write_bytes(b"half")
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    sample = Sample([1, 2, 3], [4, 5], torch.zeros(4, 2) if noted else None)
    name = "states-00000" if noted else "shard-00000"
    with pytest.raises(OSError, match=rf"{name}.*No space left.*free some space and go on"):
        write_shard(shard_path(tmp_path, 0), [sample])
    assert list(tmp_path.iterdir()) == []


def test_small_files_are_whole_or_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.json"
    write_text(path, "old")
    monkeypatch.setattr("os.replace", _refuse)
    with pytest.raises(OSError):
        write_text(path, "new")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("a.json", "old")]


def _refuse(*args: object) -> None:
    raise OSError(28, "No space left on device")


def test_states_lie_beside_their_shard(tmp_path: Path) -> None:
    """Sample after sample, one row less than tokens each; all of them or none."""
    path = shard_path(tmp_path, 3)
    samples = [Sample([1, 2], [3], torch.ones(2, 4)), Sample([1], [2, 3, 4], torch.zeros(3, 4))]
    write_shard(path, samples)
    assert states_path(path).name == "states-00003.safetensors"
    states = load_file(states_path(path))["states"]
    assert states.sum(dim=1).tolist() == [4, 4, 0, 0, 0]
    other = shard_path(tmp_path, 4)
    write_shard(other, [samples[0], Sample([1], [2])])
    assert not states_path(other).exists()


def test_a_corpus_knows_where_samples_and_states_lie(tmp_path: Path) -> None:
    """Samples beyond the longest are left out and still take their rows in the states file."""
    first, second = shard_path(tmp_path / "a", 0), shard_path(tmp_path / "b", 0)
    write_shard(first, [Sample([1, 2], [3]), Sample([1] * 9, [2] * 9), Sample([4, 5, 6], [7, 7])])
    write_shard(second, [Sample([8, 9], [3, 3, 3])])
    corpus = Corpus(find_shards([tmp_path / "a", tmp_path / "b"]), longest=10)
    assert corpus.items == [
        Item(first, 0, 0, 2, 1), Item(first, 2, 2 + 17, 3, 2), Item(second, 0, 0, 2, 3),
    ]  # fmt: skip
    assert corpus.answer_tokens == 6
    assert corpus.counts(10).tolist() == [0, 0, 0, 4, 0, 0, 0, 2, 0, 0]
    batch = corpus.batch([corpus.items[1], corpus.items[0]])
    assert batch.tokens.tolist() == [[4, 5, 6, 7, 7], [1, 2, 3, 0, 0]]
    assert (batch.prompts.tolist(), batch.answers.tolist()) == ([3, 2], [2, 1])
    with pytest.raises(ValueError, match="make data first"):
        find_shards([tmp_path / "none"])


def test_a_part_of_a_corpus_lies_in_the_larger_ones(tmp_path: Path) -> None:
    """At least what was asked for, no sample more than that takes, in the order they had."""
    path = shard_path(tmp_path, 0)
    write_shard(path, [Sample([1, 2], [3] * n) for n in (1, 5, 2, 7, 3, 4, 6, 2)])
    parts = []
    for wanted in (1, 9, 16, 29, 30, 1000):
        corpus = Corpus([path])
        whole, longest = list(corpus.items), max(item.answer for item in corpus.items)
        corpus.keep(wanted, seed=3)
        assert corpus.items == [item for item in whole if item in corpus.items]
        assert min(wanted, 30) <= corpus.answer_tokens < min(wanted, 30) + longest
        parts.append(set(corpus.items))
    assert all(small <= large for small, large in itertools.pairwise(parts))
    assert len(parts[-1]) == 8
    other = Corpus([path])
    other.keep(9, seed=4)
    assert set(other.items) != parts[1]


def test_what_is_held_out_is_never_trained_on(tmp_path: Path) -> None:
    """A folder may stand in the list twice, or under another name: it weighs twice, but for that."""
    for name in ("a", "b"):
        for index in range(2):
            write_shard(shard_path(tmp_path / name, index), [Sample([1, 2, 3], [4, 5])])
    again = tmp_path / "again"
    again.symlink_to(tmp_path / "a")
    shards = find_shards([tmp_path / "a", tmp_path / "b", tmp_path / "a", again])
    held, rest = apart(shards)
    assert held == [shard_path(tmp_path / "a", 0)]
    a, b = shard_path(tmp_path / "a", 1), [shard_path(tmp_path / "b", i) for i in range(2)]
    assert rest == [a, *b, a, shard_path(again, 1)]
    with pytest.raises(ValueError, match="1 shards of data: the first is held out"):
        apart(find_shards([tmp_path / "a"])[:1] * 2)
