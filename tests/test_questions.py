"""The reader of questions: what it takes, what it refuses by line, and how a limit is spread."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from speculant.bench.prompts import PROMPTS
from speculant.bench.questions import Question, builtin_questions, read_questions, spread

GOOD = {"question_id": 1, "category": "qa", "turns": ["Why?"]}


def write(path: Path, *records: Any) -> Path:
    """A record a line; text and bytes are written as they are."""
    lines = [
        r if isinstance(r, bytes) else (r if isinstance(r, str) else json.dumps(r)).encode()
        for r in records
    ]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def test_reads_the_format(tmp_path: Path) -> None:
    two = {"question_id": "b-2", "category": "writing", "turns": ["One.", "Two."], "reference": []}
    path = write(tmp_path / "q.jsonl", GOOD, "", two, "   ")
    assert read_questions(path) == [
        Question(1, "qa", ("Why?",)),
        Question("b-2", "writing", ("One.", "Two.")),
    ]


def test_line_ends_and_marks_of_other_systems(tmp_path: Path) -> None:
    """A byte-order mark, CRLF, and a line separator that JSON allows inside a string."""
    inner = '{"question_id": 2, "category": "qa", "turns": ["a\u2028b\u0085c"]}'
    path = write(tmp_path / "q.jsonl", b"\xef\xbb\xbf" + json.dumps(GOOD).encode() + b"\r", inner)
    assert [q.turns for q in read_questions(path)] == [("Why?",), ("a\u2028b\u0085c",)]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"question_id": 2,', "broken JSON"),
        ("[1, 2]", "it is a list, no object"),
        ("null", "no object"),
        ({"category": "qa", "turns": ["a"]}, "question_id is missing"),
        ({"question_id": 2, "turns": ["a"]}, "category is missing"),
        ({"question_id": 2, "category": "qa"}, "turns is missing"),
        (GOOD | {"question_id": True}, "question_id is a bool"),
        (GOOD | {"question_id": None}, "question_id is a NoneType"),
        (GOOD | {"question_id": 2, "category": 7}, "category is 7"),
        (GOOD | {"question_id": 2, "category": ["qa"]}, "category is ['qa']"),
        (GOOD | {"question_id": 2, "category": " "}, "category is ' '"),
        (GOOD | {"question_id": 2, "turns": "Why?"}, "turns is no list"),
        (GOOD | {"question_id": 2, "turns": []}, "turns is empty"),
        (GOOD | {"question_id": 2, "turns": ["a", ""]}, "turn 2 is empty or no text"),
        (GOOD | {"question_id": 2, "turns": ["a", 3]}, "turn 2 is empty or no text"),
        ('{"question_id": 2, "category": "qa", "turns": ["\\ud800"]}', "half a surrogate"),
        (b'{"question_id": 2, "category": "qa", "turns": ["\xff"]}', "not UTF-8"),
        ("[" * 100_000, "broken JSON"),
        (GOOD, "question_id 1 is on line 1 too"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: Any, reason: str) -> None:
    path = write(tmp_path / "q.jsonl", GOOD, "", line)
    with pytest.raises(ValueError) as caught:
        read_questions(path)
    message = str(caught.value)
    assert message.startswith(f"{path}:3: not a question: ")
    assert reason in message
    assert "\n" not in message


@pytest.mark.parametrize("content", [b"", b"\n\n  \n"])
def test_a_file_without_questions_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "q.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"q\.jsonl: no question in it"):
        read_questions(path)


def test_a_file_that_cannot_be_read_is_a_users_mistake(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.jsonl", tmp_path):
        with pytest.raises(ValueError, match=f"^{path}: cannot be read"):
            read_questions(path)


def make(**counts: int) -> list[Question]:
    """Questions of categories, in blocks; ids run on."""
    names = [name for name, count in counts.items() for _ in range(count)]
    return [Question(i, name, ("?",)) for i, name in enumerate(names)]


def test_a_limit_is_spread_over_the_categories() -> None:
    """Small categories give all they have; the others share the rest, the first ones one more."""
    questions = make(a=40, b=2, c=40, d=40)
    for limit, expected in (
        (1, {"a": 1}),
        (4, {"a": 1, "b": 1, "c": 1, "d": 1}),
        (9, {"a": 3, "b": 2, "c": 2, "d": 2}),
        (30, {"a": 10, "b": 2, "c": 9, "d": 9}),
        (122, {"a": 40, "b": 2, "c": 40, "d": 40}),
        (500, {"a": 40, "b": 2, "c": 40, "d": 40}),
    ):
        taken = spread(questions, limit)
        assert Counter(q.category for q in taken) == expected
        ids = [int(q.question_id) for q in taken]
        assert ids == sorted(set(ids))
        assert spread(questions, limit) == taken


def test_a_limit_is_spread_within_a_category() -> None:
    assert [q.question_id for q in spread(make(a=10), 4)] == [0, 2, 5, 7]
    assert [q.question_id for q in spread(make(a=3, b=6), 5)] == [0, 1, 2, 3, 6]


def test_a_limit_keeps_the_order_of_the_file() -> None:
    mixed = [Question(i, "ab"[i % 2], ("?",)) for i in range(8)]
    assert [q.question_id for q in spread(mixed, 4)] == [0, 1, 4, 5]


def test_limits_at_the_edge() -> None:
    questions = make(a=2, b=1)
    assert spread(questions, None) == questions
    with pytest.raises(ValueError, match="limit is 0"):
        spread(questions, 0)


def test_the_built_in_questions_are_the_prompts() -> None:
    questions = builtin_questions()
    assert {q.category: q.turns for q in questions} == {t: (p,) for t, p in PROMPTS.items()}
