"""Evaluation against a count by hand: a draft whose right guesses follow a known pattern.

Independent truth: the target's plain uncached greedy text, and `by_hand`, which walks over it and
notes every round's drafted and accepted tokens; the rates are written out from that list.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from fake import Broken, FakeTarget, FakeTokenizer
from scripted import Scripted
from speculant.bench.acceptance import RAW, Answer, Evaluation, Setting, figures, warnings
from speculant.bench.eval_report import as_json, plot
from speculant.bench.evaluate import conversation_ids, evaluate
from speculant.bench.questions import Question
from speculant.drafts import load_draft
from speculant.metrics import Counters

DEPTH = 4
QUESTIONS = [
    Question(1, "talk", ("hello there",)),
    Question(2, "maths", ("one and one",)),
    Question(3, "talk", ("good bye now",)),
    Question(4, "maths", ("two by two is",)),
    Question(5, "talk", ("how do you do",)),
]
Pattern = Callable[[int], int]
"""Length of the text so far -> how many drafted tokens are right there."""


class ChatTokenizer(FakeTokenizer):
    """With a chat template, and a record of the conversations that went through it."""

    has_chat_template = True

    def __init__(self) -> None:
        super().__init__()
        self.conversations: list[list[tuple[str, str]]] = []

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        self.conversations.append([(m["role"], m["content"]) for m in messages])
        return self.encode("".join(f"{m['role']}:{m['content']}." for m in messages) + "says:")


@pytest.fixture
def target() -> FakeTarget:
    return FakeTarget(seed=4, tokenizer=ChatTokenizer())


def oracle(target: FakeTarget, pattern: Pattern, siblings: int = 0) -> Scripted:
    """Knows the target's text, and goes wrong where the pattern says."""

    def guess(tokens: Sequence[int], budget: int) -> list[int]:
        if not budget:
            return []
        truth = target.greedy(tokens, budget)
        right = pattern(len(tokens))
        return truth[:right] + [(token + 9) % 32 for token in truth[right:]]

    return Scripted(guess, DEPTH, siblings)


def by_hand(
    target: FakeTarget, prompt: list[int], most: int, pattern: Pattern
) -> tuple[list[tuple[int, int]], int]:
    """Rounds (depth drafted, accepted) of one answer and its length, from the plain text."""
    text = target.greedy(prompt, most)
    text = text[: text.index(0) + 1] if 0 in text else text
    rounds, at = [], 0
    while at < len(text):
        depth = min(DEPTH, most - at - 1)
        accepted = min(pattern(len(prompt) + at), depth, len(text) - at)
        rounds.append((depth, accepted))
        at = min(at + accepted + 1, len(text))
    return rounds, len(text)


def check(
    got: dict[str, object], rounds: Sequence[tuple[int, int]], tokens: int, nodes: int = 1
) -> None:
    """The report's rates, each written out from the rounds; `nodes` a depth."""
    drafting = [(depth, accepted) for depth, accepted in rounds if depth]
    accepted = [a for _, a in drafting]
    n = len(drafting)
    assert got["num_tokens"] == tokens
    assert got["mean_acceptance_length"] == pytest.approx(sum(a + 1 for a in accepted) / n)
    assert got["draft_acceptance_rate"] == pytest.approx(
        sum(accepted) / sum(nodes * depth for depth, _ in drafting)
    )
    at_least = [sum(a >= i for a in accepted) for i in range(DEPTH + 1)]
    assert got["acceptance_per_position"] == pytest.approx([c / n for c in at_least[1:]])
    assert got["conditional_acceptance_per_position"] == pytest.approx(
        [at_least[i + 1] / at_least[i] if at_least[i] else 0.0 for i in range(DEPTH)]
    )
    assert got["tokens_per_forward"] == pytest.approx(tokens / len(rounds))


@pytest.mark.parametrize("seed", [4, 6], ids=["cut at max_tokens", "cut at EOS"])
@pytest.mark.parametrize("siblings", [0, 2], ids=["chain", "tree"])
@pytest.mark.parametrize(
    "pattern",
    [lambda n: n % 3, lambda n: DEPTH, lambda n: 0, lambda n: (n // 5) % 5],
    ids=["0-2", "all", "none", "0-4"],
)
def test_rates_are_those_counted_by_hand(seed: int, pattern: Pattern, siblings: int) -> None:
    """Overall and per task, every rate from the pooled rounds; a tree's positions are depths."""
    target = FakeTarget(seed=seed, tokenizer=ChatTokenizer())
    draft, most = oracle(target, pattern, siblings), 22
    done = evaluate(target, draft, QUESTIONS, Setting(max_tokens=most, batch=2))
    report = done.as_dict()
    rounds: dict[str, list[tuple[int, int]]] = {"talk": [], "maths": []}
    tokens = {"talk": 0, "maths": 0}
    for question in QUESTIONS:
        prompt = conversation_ids(target, question.turns)
        mine, length = by_hand(target, prompt, most, pattern)
        rounds[question.category] += mine
        tokens[question.category] += length
    nodes = 1 + siblings
    check(report, rounds["talk"] + rounds["maths"], sum(tokens.values()), nodes)
    assert list(report["per_task"]) == ["talk", "maths"]
    for task, count in (("talk", 3), ("maths", 2)):
        check(report["per_task"][task], rounds[task], tokens[task], nodes)
        assert report["per_task"][task]["num_questions"] == count
    assert report["num_questions"] == 5


def test_pooling_is_no_mean_of_ratios() -> None:
    """Two answers of 1 and 9 rounds, accepting all and nothing."""
    one, nine = Counters(), Counters()
    one.add_round(4, 4, 4, 5)
    for _ in range(9):
        nine.add_round(2, 2, 0, 1)
    question = Question(1, "a", ("?",))
    got = figures([Answer(question, 0, "", one), Answer(question, 1, "", nine)])
    assert got["mean_acceptance_length"] == pytest.approx(1.4)  # not (5 + 1) / 2
    assert got["draft_acceptance_rate"] == pytest.approx(4 / 22)  # not (1 + 0) / 2
    assert (got["num_questions"], got["num_answers"]) == (1, 2)
    assert got["counters"]["accepted_length_histogram"] == [9, 0, 0, 0, 1]


def test_a_second_turn_follows_the_targets_own_answer(target: FakeTarget) -> None:
    """Both turns are asked, and the conversation holds what greedy decoding says to the first."""
    two = Question(7, "talk", ("tell me a tale", "and then"))
    done = evaluate(target, load_draft("ngram", target), [QUESTIONS[0], two], Setting(max_tokens=9))
    first = target.greedy(target.tokenizer.encode("user:tell me a tale.says:"), 9)
    told = target.tokenizer.decode(first[: first.index(0)] if 0 in first else first)
    assert isinstance(target.tokenizer, ChatTokenizer)
    assert target.tokenizer.conversations == [
        [("user", "hello there")],
        [("user", "tell me a tale")],
        [("user", "tell me a tale"), ("assistant", told), ("user", "and then")],
    ]
    assert [(a.question.question_id, a.turn) for a in done.answers] == [(1, 0), (7, 0), (7, 1)]
    prompt = conversation_ids(target, ["tell me a tale", told, "and then"])
    second = target.greedy(prompt, 9)
    assert done.answers[2].text == target.tokenizer.decode(
        second[: second.index(0)] if 0 in second else second
    )
    report = done.as_dict()
    assert (report["num_questions"], report["num_answers"]) == (2, 3)


def test_without_a_chat_template_turns_are_plain_text() -> None:
    bare = FakeTarget(seed=4)
    assert conversation_ids(bare, ["a", "b", "c"]) == bare.tokenizer.encode("a\n\nb\n\nc")
    done = evaluate(bare, load_draft("ngram", bare), QUESTIONS[:1], Setting(max_tokens=6))
    assert done.answers[0].counters.num_emitted_tokens > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_answer_depends_on_neither_batch_nor_company(
    target: FakeTarget, temperature: float
) -> None:
    def answers(batch: int, questions: Sequence[Question], seed: int = 0) -> dict[object, str]:
        setting = Setting(temperature=temperature, max_tokens=16, batch=batch, seed=seed)
        done = evaluate(target, load_draft("ngram", target), questions, setting)
        return {a.question.question_id: a.text for a in done.answers}

    alone = answers(1, QUESTIONS)
    assert answers(5, QUESTIONS) == alone
    assert answers(2, QUESTIONS[3:]) == {k: v for k, v in alone.items() if int(str(k)) > 3}
    assert (answers(2, QUESTIONS, seed=1) == alone) == (temperature == 0)


def test_every_answer_has_its_own_seed() -> None:
    """Of question and turn: the same words asked twice are not sampled the same way twice."""
    params = [
        Setting(1.0, seed=seed).params(Question(name, "a", ("?",)), turn).seed
        for seed in (0, 1) for name in (1, 2, "1/1") for turn in (0, 1)
    ]  # fmt: skip
    assert len(set(params)) == len(params)


def test_what_does_not_fit_the_context_is_skipped_and_reported() -> None:
    """A long question, and a conversation whose second turn is too long: with what lies behind."""
    small = FakeTarget(seed=4, context_length=60)
    asked = [
        QUESTIONS[0],
        Question("long", "talk", ("x" * 60,)),
        Question("fits", "talk", ("x" * 59,)),
        Question("later", "maths", ("short", "y" * 55, "z")),
    ]
    seen: list[tuple[int, int]] = []
    done = evaluate(
        small, load_draft("ngram", small), asked, Setting(max_tokens=8),
        progress=lambda answers, tokens: seen.append((answers, tokens)),
    )  # fmt: skip
    report = done.as_dict()
    assert [(s["question_id"], s["turn"]) for s in report["skipped"]] == [
        ("long", 1), ("later", 2), ("later", 3),
    ]  # fmt: skip
    assert report["skipped"][0]["tokens"] == 60
    assert (report["num_questions"], report["num_answers"]) == (3, 3)
    assert report["warnings"][0].startswith("3 turns of 2 questions were skipped")
    assert "later, long" in report["warnings"][0]
    assert seen[-1] == (3, report["num_tokens"])
    assert seen == sorted(seen)


def test_a_target_that_breaks_names_the_question() -> None:
    target = Broken(seed=4)
    target.position = 12
    with pytest.raises(FloatingPointError, match=r"^question 1, turn 1: .*12"):
        evaluate(target, load_draft("ngram", target), QUESTIONS[:1], Setting(max_tokens=8))


def counted(drafts: int, accepted: int, plain: int = 0) -> Counters:
    """Rounds of one drafted token each, some accepted, and plain rounds."""
    out = Counters()
    for i in range(drafts):
        right = int(i < accepted)
        out.add_round(1, 1, right, right + 1)
    for _ in range(plain):
        out.add_round(0, 0, 0, 1)
    return out


LOOP = "the sea and the sky " * 20
STRAIGHT = " ".join(f"word{i}" for i in range(60))


def evaluation(*answers: tuple[str, Counters]) -> Evaluation:
    told = [Answer(Question(i, "a", ("?",)), 0, *answer) for i, answer in enumerate(answers)]
    return Evaluation(Setting(), told, [], 1.0)


def test_loops_are_counted_and_left_out_of_a_figure_of_their_own() -> None:
    done = evaluation((LOOP, counted(10, 10)), (STRAIGHT, counted(10, 5)))
    report = done.as_dict()
    assert report["loops"] == 1
    assert report["mean_acceptance_length"] == pytest.approx(1.75)
    assert report["mean_acceptance_length_without_loops"] == pytest.approx(1.5)
    assert report["per_task"]["a"]["loops"] == 1
    assert report["warnings"] == [
        "1 of 2 answers are repetition loops, which any draft guesses: mean acceptance length is "
        "1.75 with them, without them it is 1.50"
    ]
    only = figures(evaluation((LOOP, counted(1, 1))).answers)
    assert only["mean_acceptance_length_without_loops"] is None


def test_few_loops_are_counted_without_a_warning() -> None:
    done = evaluation(*[(STRAIGHT, counted(4, 2))] * 20, (LOOP, counted(4, 2)))
    assert done.as_dict()["loops"] == 1
    assert warnings(done) == []


@pytest.mark.parametrize(
    ("counters", "words"),
    [
        (counted(10, 1), ["mean acceptance length 1.10", "trained for this target"]),
        (counted(10, 5, plain=30), ["only 25% of the rounds", "1.12 tokens a forward"]),
        (counted(0, 0, plain=30), ["proposed nothing in any round"]),
        (counted(10, 5), []),
    ],
)
def test_warnings_say_what_is_wrong(counters: Counters, words: list[str]) -> None:
    said = warnings(evaluation((STRAIGHT, counters)))
    assert len(said) == bool(words)
    for word in words:
        assert word in said[0]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"batch": 0}, "--batch is 0"),
        ({"max_tokens": 1}, "--max-tokens is 1"),
        ({"num_draft_tokens": 0}, "--num-draft-tokens is 0"),
        ({"tree": -1}, "--tree is -1"),
        ({"seed": -1}, "--seed is -1"),
        ({"temperature": -0.5}, "temperature is -0.5"),
        ({"temperature": float("nan")}, "temperature is nan"),
    ],
)
def test_settings_are_checked(wrong: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Setting(**wrong)  # type: ignore[arg-type]


def test_one_setting_is_flat_and_several_are_results(target: FakeTarget) -> None:
    done = evaluate(target, load_draft("ngram", target), QUESTIONS[:2], Setting(max_tokens=6))
    one = done.as_dict()
    assert as_json([one]) == one
    assert as_json([one, one]) == {"results": [one, one]}
    assert set(one["counters"]) == set(RAW)


def test_the_picture_is_whole_or_not_there(tmp_path: Path) -> None:
    results = [
        evaluation((STRAIGHT, counted(10, 5))).as_dict(),
        evaluation((STRAIGHT, counted(0, 0, plain=3))).as_dict(),  # nothing drafted, no curve
    ]
    path = tmp_path / "p.png"
    plot(path, "title", ["one", "two"], results)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [path]
