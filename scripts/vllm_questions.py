"""Forty questions of our own for the runs on vLLM: eight tasks, each about five things."""

from __future__ import annotations

TASKS = (
    "Explain in a few sentences how {} work.",
    "Write a short story about two friends who find {} in an old house.",
    "List five facts about {}.",
    "Write a polite letter to a shop that sold you broken {}.",
    "What are the advantages and the drawbacks of {}?",
    "Write a Python function that counts the {} in a list of words, with a docstring.",
    "A box holds 12 {}, and a shelf holds 7 boxes. How many are on 3 shelves? Show the steps.",
    "Describe {} to a child of six years.",
)
THINGS = ("bicycles", "lighthouses", "clocks", "umbrellas", "telescopes")


def questions() -> list[str]:
    """Every task about every thing, 40 in all."""
    return [task.format(thing) for task in TASKS for thing in THINGS]
