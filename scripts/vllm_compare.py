"""What is asked of vLLM and of ours, and how what came back compares."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

from vllm_questions import questions as own_questions

from speculant.bench.questions import Question, read_questions, spread


def ask(file: Path | None, count: int) -> list[Question]:
    """So many questions, one turn each: of a file, or own ones."""
    if file is not None:
        asked = spread(read_questions(file), count)
        return [dataclasses.replace(question, turns=question.turns[:1]) for question in asked]
    texts = spread_texts(own_questions(), count)
    return [Question(i, "own", (text,)) for i, text in enumerate(texts)]


def spread_texts(texts: list[str], count: int) -> list[str]:
    """So many of them, evenly over the list."""
    count = min(count, len(texts))
    return [texts[i * len(texts) // count] for i in range(count)]


def digest(folder: Path) -> str:
    """SHA-256 of a folder's config and weights."""
    sha = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.name == "config.json" or path.suffix == ".safetensors":
            sha.update(path.name.encode() + b"\0" + path.read_bytes())
    return sha.hexdigest()


def compare(
    name: str, plain: dict[str, Any], theirs: dict[str, Any], mine: dict[str, Any]
) -> dict[str, Any]:
    """The two sides of a head."""
    pairs = list(zip(plain["token_ids"], theirs["token_ids"], strict=True))
    rounds = max(1, theirs["num_drafts"])
    rates = [count / rounds for count in theirs["num_accepted_tokens_per_pos"]]
    own = mine["acceptance_per_position"] + [0.0] * len(rates)
    return {
        "head": name,
        "same_text": sum(a == b for a, b in pairs),
        "texts": len(pairs),
        "tokens": sum(len(a) for a, _ in pairs),
        "vllm": rates,
        "ours": own[: len(rates)],
        "vllm_length": 1 + theirs["num_accepted_tokens"] / rounds,
        "our_length": mine["mean_acceptance_length"],
        "largest_difference": max(abs(a - b) for a, b in zip(rates, own, strict=False)),
    }


def shares(rates: list[float]) -> str:
    """Acceptance by position, for people."""
    return " / ".join(f"{rate:.1%}" for rate in rates)
