"""Questions in Spec-Bench's format: one JSON object a line with question_id, category and turns."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .prompts import PROMPTS

KEYS = ("question_id", "category", "turns")
BUNDLED = Path(__file__).parent / "data" / "questions.jsonl"
"""Eighty questions of our own writing over ten tasks, eight each, for the benchmark."""


@dataclass(frozen=True)
class Question:
    """One conversation to hold with the target.

    category: the task that figures are pooled by
    turns:    what the user says, in order; the target's own answers go between
    """

    question_id: int | str
    category: str
    turns: tuple[str, ...]

    def __post_init__(self) -> None:
        kind = type(self.question_id).__name__
        if kind not in ("int", "str"):  # JSON's true would pass for an int
            raise ValueError(f"question_id is a {kind}: it must be a number or a string")
        if not isinstance(self.category, str) or not self.category.strip():
            raise ValueError(f"category is {self.category!r}: it must be the name of a task")
        if not self.turns:
            raise ValueError("turns is empty: give at least one text")
        for number, turn in enumerate(self.turns, 1):
            if not isinstance(turn, str) or not turn.strip():
                raise ValueError(f"turn {number} is empty or no text")
        for text in (self.category, *self.turns):
            _check_unicode(text)


def read_questions(path: Path) -> list[Question]:
    """All questions of a JSONL file, in its order; blank lines and further keys are passed over.

    Raises ValueError, one line naming file and line, for anything else than a question, for a
    second question of the same question_id, and for a file that is missing or holds none.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    questions: list[Question] = []
    lines: dict[int | str, int] = {}  # question_id -> its line
    # not splitlines: a JSON string may hold U+2028 and its like as they are
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            question = _question(json.loads(line.decode()))
            if question.question_id in lines:
                first = lines[question.question_id]
                raise ValueError(f"question_id {question.question_id!r} is on line {first} too")
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}:{number}: not a question: {_reason(error)}") from None
        lines[question.question_id] = number
        questions.append(question)
    if not questions:
        raise ValueError(f"{path}: no question in it: give one JSON object a line")
    return questions


def builtin_questions() -> list[Question]:
    """The built-in prompts, one a task, for when no file is given."""
    return [Question(task, task, (prompt,)) for task, prompt in PROMPTS.items()]


def spread(questions: Sequence[Question], limit: int | None) -> list[Question]:
    """`limit` questions spread evenly over the categories, in the order of the file.

    The places are dealt to the categories in turn, in the order the file names them, until a
    category has no question left or all are dealt. A category's places are spread evenly over its
    questions: place i of k takes number floor(i * n / k) of its n. No randomness.
    """
    if limit is None:
        return list(questions)
    if limit < 1:
        raise ValueError(f"limit is {limit}: it must be at least 1")
    members: dict[str, list[int]] = {}  # category -> places in the file
    for index, question in enumerate(questions):
        members.setdefault(question.category, []).append(index)
    shares = dict.fromkeys(members, 0)
    left = min(limit, len(questions))
    while left:
        for category, places in members.items():
            if left and shares[category] < len(places):
                shares[category] += 1
                left -= 1
    taken = [
        members[category][i * len(members[category]) // share]
        for category, share in shares.items()
        for i in range(share)
    ]
    return [questions[index] for index in sorted(taken)]


def _question(record: Any) -> Question:
    """One line's question; ValueError says what is wrong with it."""
    if not isinstance(record, dict):
        raise ValueError(f"it is a {type(record).__name__}, no object")
    missing = [key for key in KEYS if key not in record]
    if missing:
        raise ValueError(f"{missing[0]} is missing")
    if not isinstance(record["turns"], list):
        raise ValueError("turns is no list of texts")
    return Question(record["question_id"], record["category"], tuple(record["turns"]))


def _check_unicode(text: str) -> None:
    """JSON can spell half a surrogate pair, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("a text holds half a surrogate pair, which is no character") from None


def _reason(error: Exception) -> str:
    """What a line's reader says, without Python's own vocabulary."""
    if isinstance(error, json.JSONDecodeError):
        return f"broken JSON ({error.msg} at column {error.colno})"
    if isinstance(error, UnicodeDecodeError):
        return "not UTF-8 text"
    if isinstance(error, RecursionError):
        return "broken JSON (nested too deep)"
    return str(error)
