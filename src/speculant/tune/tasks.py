"""Task names: data sets and free words to the tuner's tasks."""

from __future__ import annotations

TASKS = ("chat", "code", "json_sql", "summarisation", "translation", "maths", "rag", "creative")
WORDS = (
    ("creative", ("creative", "writing", "roleplay", "story", "poem")),
    ("json_sql", ("json", "sql", "spider", "extraction", "structured", "function call")),
    ("code", ("code", "coding", "humaneval", "mbpp", "swe-bench", "program", "classeval")),
    ("maths", ("math", "gsm", "aime", "gpqa", "reasoning")),
    ("summarisation", ("summar", "cnn", "xsum")),
    ("translation", ("translat", "wmt")),
    ("rag", ("rag", "retrieval", "natural ques", "question answering", "qa", "nq")),
    ("chat", ("chat", "mt-bench", "mtbench", "alpaca", "sharegpt", "arena", "mean", "average",
              "multi-turn", "humanities", "stem", "instruction", "general", "speed-bench")),
)  # fmt: skip
"""Task -> words of its data sets, the first match."""


def task_of(text: str) -> str:
    """The task that a data set's name belongs to; chat for what is not known."""
    lowered = text.lower()
    return next((t for t, words in WORDS if any(w in lowered for w in words)), "chat")
