"""Beginnings of users' turns, with words of the target's own vocabulary, for it to go on from.

Left to itself, a small chat model asks about the same few things over and over, and a draft trained
on that does worse on what users bring: texts full of names and numbers, questions of fact, problems.
A turn that begins with a kind of task and a random word goes where the target would not have gone,
and needs no data set: a tokenizer's vocabulary is a list of the words that its texts were made of.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..target.base import Tokenizer

SHORT, TEXT = 120, 280
"""Tokens that a turn may go on for: a request, or one with a text in it."""
FEWEST = 200
"""Words of each kind below which a vocabulary is no word list (bytes, characters, a test's)."""


@dataclass(frozen=True)
class Beginning:
    """How a user's turn begins.

    text: {Name}, {word} and {number} stand for random ones, {de} and {fr} for a first word in German
          or French; the target goes on from there
    ask:  appended behind what the target wrote, for it to go on from once more
    most: tokens that it may write before `ask`; where one is given, a text that is cut there is kept
    """

    text: str
    ask: str = ""
    most: int = SHORT


_QUESTIONS = ("What", "Who", "When did", "Where", "How", "Why", "Which", "How many", "Describe")
_SHORT = (
    "{word}", "{Name}", "{Name} {word}", "I {word}", "My {word}", "Can you {word}", "Please {word}",
    "Who", "Who {word}", "Who was {Name}", "When did {Name}", "When was the {word}",
    "What is the {word}", "Where is {Name}", "How many {word}", "Which {word}", "Why do {word}",
    "How do I {word}",
    "What does {word}", "Is it true that {Name}", "Was {Name}", "What happened to {Name}",
    "{Name} has {number} {word}", "{Name} bought {number} {word}", "A {word} costs ${number}",
    "If {number} {word}", "There are {number} {word}", "Solve for x: {number}", "What is {number}",
    "{Name} runs {number} miles", "In a {word}, {number} people", "Find the {word} of {number}",
    "Write a Python function that {word}", "Write a function to {word}", "Implement a {word} in",
    "Here is a Python function:\n\n```python\ndef {word}", "Write a program that reads {word}",
    "Write a {word}", "Draft an email to {Name}", "Describe a {word}", "Describe how {Name}",
    "Imagine you are {Name}", "Pretend to be a {word}", "Embrace the role of {Name}",
    "Explain {word}", "Explain the {word} of {Name}", "Compare {word} and {word}",
    "Give me {number} {word}", "Suggest {word}", "Provide insights into {word}", "Which word",
    "Classify the following {word}", "Each of these statements is about {word}", "Three {word}",
)  # fmt: skip
_TRANSLATIONS = (
    "Translate German to English: {de}", "Translate German to English: {de} {Name}",
    "Translate German to English: {de} {word}", "Translate French to English: {fr}",
    "Translate the following sentence into German: {Name}", "Translate to Spanish: {Name} {word}",
)  # fmt: skip
_TEXTS = (
    "Summarize: {Name}", "Summarize: {Name} {word}", "Summarize: The {word} of {Name}",
    "Summarize the following text in two sentences.\n\n{Name}",
    "Extract the names and places of the following text.\n\n{Name}",
    "Rewrite the following text in simpler words.\n\n{Name} {word}",
)  # fmt: skip
_ABOUT = ("{Name}", "{Name} {word}", "The {word}", "In {Name}", "{Name} was", "A {word} is")

KINDS: tuple[tuple[Beginning, ...], ...] = (
    tuple(Beginning(text) for text in _SHORT),
    tuple(Beginning(text) for text in _SHORT),
    tuple(Beginning(text) for text in _TRANSLATIONS),
    tuple(Beginning(text, most=TEXT) for text in _TEXTS),
    tuple(Beginning(text, ask, TEXT) for text in _ABOUT for ask in _QUESTIONS),
)
"""One kind of beginning is as likely as another; short requests count twice."""

_GERMAN = (
    "Der Die Das Ein Eine In Wir Ich Es Nach Mit Für Auf Wenn Als Er Sie Im Am Bei Seit Durch Viele"
)
_FRENCH = "Le La Les Un Une Nous Je Il Elle Dans Après Avec Pour Sur Si Quand Depuis Cette Ce En"


@dataclass(frozen=True)
class Words:
    """Words of a vocabulary, the frequent ones first.

    names:  that begin with a capital, most of them of people, places and things
    common: in lower case
    """

    names: tuple[str, ...]
    common: tuple[str, ...]


def words_of(tokenizer: Tokenizer, vocab_size: int) -> Words | None:
    """The words among `vocab_size` tokens; None where they are too few to be a word list.

    A token that begins with a space and goes on in letters is a word or the beginning of one, which
    the target then ends. A vocabulary's ids are in the order in which it was learnt, the most
    frequent first, or nearly so.
    """
    names, common = [], []
    before = tokenizer.encode("a")[-1:]  # some tokenizers leave out a space at a text's beginning
    skip = len(tokenizer.decode(before))
    for token in range(vocab_size):
        text = tokenizer.decode([*before, token])[skip:]
        if re.fullmatch(r" [A-Z][a-z]{2,}", text):
            names.append(text[1:])
        elif re.fullmatch(r" [a-z]{3,}", text):
            common.append(text[1:])
    if min(len(names), len(common)) < FEWEST:
        return None
    return Words(tuple(names), tuple(common))


def begin(words: Words, rng: random.Random) -> Beginning:
    """A random beginning, its words filled in."""
    chosen = rng.choice(rng.choice(KINDS))
    text = re.sub(r"\{(\w+)\}", lambda found: _fill(found[1], words, rng), chosen.text)
    return Beginning(text, chosen.ask, chosen.most)


def _fill(what: str, words: Words, rng: random.Random) -> str:
    if what == "number":
        return str(round(10 ** rng.uniform(0.3, 2.7)))
    if what in ("de", "fr"):
        return rng.choice((_GERMAN if what == "de" else _FRENCH).split())
    return _frequent(words.names if what == "Name" else words.common, rng)


def _frequent(words: Sequence[str], rng: random.Random) -> str:
    """A word, those in front more often: half of them from the first quarter."""
    return words[int(len(words) * rng.random() ** 2)]
