"""Roll-back, step by step: what a batch's key/value caches hold, and the work that was in vain.

Words (design, section 1): the *root* is the last committed token, not in the cache yet; it is the
first row of every verification forward. Of a round that drafts n tokens and accepts a:

    before       the prefix
    forward      prefix + root + n drafted tokens are written
    cache now    prefix + root + a accepted; the n - a behind them are stale
                 (the recovered or bonus token is committed, the next root, and in no cache)
    after the next forward: one more, for that token, and whatever that forward drafted

Nothing here is computed from these formulas: tokens are written into slots, lengths are cut, and
after every round each slot is compared with the tokens that its sequence has committed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..cost import expected_tokens
from .draws import Ints

LIMITS = {"drafts": (0, 256), "prefix": (0, 100_000), "rounds": (1, 1000)}
MOST_SEQUENCES = 64
RANDOM = "random"
VOCAB = 1000
STEPS = ("before", "forward", "cache_now", "after_next_forward")

Move = int | str | None
"""The drafted token (from 1) that is rejected; None: none is; RANDOM: drawn with alpha."""
Plan = Sequence[Sequence[Move]]
"""Of every sequence, round by round."""


class Slots:
    """The caches of B sequences, one slot each. A cut moves a length and erases nothing.

    tokens:  [B, capacity], whose keys and values an entry holds
    logical: [B], entries that may be attended to; physical: [B], entries that were ever written
    """

    def __init__(self, rows: int, capacity: int) -> None:
        self.tokens = np.full((rows, capacity), -1)
        self.logical = np.zeros(rows, np.int64)
        self.physical = np.zeros(rows, np.int64)

    def append(self, tokens: Ints, counts: Ints) -> None:
        """Write the first counts[b] of tokens [B, k] behind each row's logical length."""
        order = np.arange(tokens.shape[1])
        rows, columns = (order < counts[:, None]).nonzero()
        self.tokens[rows, self.logical[rows] + columns] = tokens[rows, columns]
        self.logical = self.logical + counts
        self.physical = np.maximum(self.physical, self.logical)

    def cut(self, lengths: Ints) -> None:
        """Roll back to `lengths` [B]."""
        if (lengths > self.logical).any():
            raise ValueError(f"cannot roll back {self.logical} entries to {lengths}")
        self.logical = lengths.copy()

    def copy(self) -> Slots:
        """The same caches, to try something out."""
        other = Slots(*self.tokens.shape)
        other.tokens = self.tokens.copy()
        other.logical, other.physical = self.logical.copy(), self.physical.copy()
        return other

    def holds(self, texts: Sequence[Sequence[int]]) -> bool:
        """True when every row holds exactly its text."""
        return all(
            self.tokens[b, : self.logical[b]].tolist() == list(text) for b, text in enumerate(texts)
        )


@dataclass(frozen=True)
class Turn:
    """One round of one sequence.

    rejected:  which drafted token was rejected, from 1; None for none
    logical:   entries that may be attended to, after each of STEPS. After the next forward those
               of committed tokens are meant: what that forward drafted is yet to be judged
    physical:  entries ever written, the stale ones included, after each of STEPS
    draft_now: entries of the draft's own cache after its roll-back
    catch_up:  committed tokens that the draft has to read before it can draft again
    """

    sequence: int
    round: int
    drafted: int
    rejected: int | None
    accepted: int
    logical: tuple[int, ...]
    physical: tuple[int, ...]
    draft_now: int
    catch_up: int

    @property
    def wasted(self) -> int:
        """Rows of the forward, and entries it wrote, that yielded no token."""
        return self.drafted - self.accepted

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        lengths = zip(STEPS, self.logical, self.physical, strict=True)
        steps = {name: {"logical": now, "physical": all_} for name, now, all_ in lengths}
        rest = {k: v for k, v in vars(self).items() if k not in ("logical", "physical")}
        return rest | {"kv": steps, "wasted": self.wasted}


@dataclass(frozen=True)
class Rollback:
    """All rounds, in order; `verified`: after each, every cache held exactly what it should."""

    drafts: int
    prefix: int
    sequences: int
    turns: tuple[Turn, ...]
    verified: bool
    alpha: float | None = None
    totals: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        rows = sum(turn.drafted + 1 for turn in self.turns)
        accepted = sum(turn.accepted for turn in self.turns)
        rounds = len(self.turns) // self.sequences
        by_round = [self.turns[i * self.sequences :][: self.sequences] for i in range(rounds)]
        together = sum(min(t.accepted for t in batch) + 1 for batch in by_round) * self.sequences
        wasted = sum(turn.wasted for turn in self.turns)
        totals: dict[str, Any] = {
            "rows_verified": rows,
            "tokens_committed": accepted + len(self.turns),
            "wasted_rows": wasted,
            "wasted_share": wasted / rows,
            "tokens_per_forward": 1 + accepted / len(self.turns),
            "tokens_committed_if_batch_is_cut_to_its_shortest": together,
        }
        if self.alpha is not None:
            totals["expected_tokens_per_forward"] = expected_tokens(self.alpha, self.drafts)
        object.__setattr__(self, "totals", totals)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "drafts": self.drafts,
            "prefix": self.prefix,
            "sequences": self.sequences,
            "turns": [turn.as_dict() for turn in self.turns],
            "totals": self.totals,
            "verified": self.verified,
        }


def roll_back(
    drafts: int, plan: Plan, prefix: int = 8, rounds: int = 1, alpha: float = 0.8, seed: int = 0
) -> Rollback:
    """Run `rounds` rounds over a batch; a sequence whose plan is shorter goes through it again.

    plan:  see Plan; RANDOM draws the rejection, every drafted token standing with `alpha`
    """
    _check(drafts, plan, prefix, rounds, alpha)
    rng, rows = np.random.default_rng(seed), len(plan)
    capacity = prefix + (rounds + 1) * (drafts + 1) + 1
    target, draft = Slots(rows, capacity), Slots(rows, capacity)
    texts = rng.integers(0, VOCAB, (rows, prefix + 1)).tolist()  # the last is the first root
    for slots in (target, draft):
        slots.append(np.array(texts)[:, :prefix], np.full(rows, prefix))
    turns, verified = [], True
    for number in range(rounds):
        rejected = [_rejection(moves[number % len(moves)], drafts, alpha, rng) for moves in plan]
        accepted = np.array([drafts if j is None else j - 1 for j in rejected])
        drafted = rng.integers(0, VOCAB, (rows, drafts))
        lengths = [(target.logical, target.physical)]
        _forward(target, texts, drafted)
        lengths.append((target.logical, target.physical))
        _draft_reads(draft, texts, drafted)
        for text, tokens, count in zip(texts, drafted.tolist(), accepted.tolist(), strict=True):
            text += [*tokens[:count], int(rng.integers(0, VOCAB))]  # recovered or bonus
        committed = np.array([len(text) for text in texts])
        target.cut(committed - 1)  # the recovered or bonus token, the next root, is in no cache
        draft.cut(np.minimum(draft.logical, committed - 1))
        lengths.append((target.logical, target.physical))
        verified &= target.holds([text[:-1] for text in texts])
        verified &= draft.holds([t[:n] for t, n in zip(texts, draft.logical, strict=True)])
        ahead = target.copy()
        _forward(ahead, texts, rng.integers(0, VOCAB, (rows, drafts)))
        ahead.cut(committed)  # of that forward, what is committed whatever it drafted
        verified &= ahead.holds(texts)
        lengths.append((ahead.logical, ahead.physical))
        for b in range(rows):
            logical, physical = (tuple(int(x[i][b]) for x in lengths) for i in (0, 1))
            read = int(draft.logical[b])
            turns.append(
                Turn(
                    b + 1, number + 1, drafts, rejected[b], int(accepted[b]), logical, physical,
                    read, len(texts[b]) - read,
                )
            )  # fmt: skip
    chance = alpha if all(move == RANDOM for moves in plan for move in moves) else None
    return Rollback(drafts, prefix, rows, tuple(turns), verified, chance)


def _forward(target: Slots, texts: Sequence[Sequence[int]], drafted: Ints) -> None:
    """A verification forward writes the root and the drafted tokens [B, n]."""
    roots = np.array([[text[-1]] for text in texts])
    written = np.concatenate([roots, drafted], axis=1)
    target.append(written, np.full(len(texts), written.shape[1]))


def _draft_reads(draft: Slots, texts: Sequence[Sequence[int]], drafted: Ints) -> None:
    """The draft reads what was committed since, the root last, then its own tokens but the last."""
    if not drafted.shape[1]:
        return  # nothing is drafted, so the draft does not run
    behind = np.array([len(text) for text in texts]) - draft.logical
    missed = np.zeros((len(texts), int(behind.max())), np.int64)
    for b, text in enumerate(texts):
        missed[b, : behind[b]] = text[len(text) - behind[b] :]
    draft.append(missed, behind)
    draft.append(drafted[:, :-1], np.full(len(texts), drafted.shape[1] - 1))


def _rejection(move: Move, drafts: int, alpha: float, rng: np.random.Generator) -> int | None:
    """Which drafted token is rejected in this round."""
    if not isinstance(move, str):
        return move
    refused = (rng.random(drafts) >= alpha).nonzero()[0]
    return int(refused[0]) + 1 if len(refused) else None


def _check(drafts: int, plan: Plan, prefix: int, rounds: int, alpha: float) -> None:
    for name, value in (("drafts", drafts), ("prefix", prefix), ("rounds", rounds)):
        low, high = LIMITS[name]
        if not low <= value <= high:
            raise ValueError(f"{name} is {value}: it lies in {low}..{high}")
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha is {alpha}: it lies in 0..1")
    if not 1 <= len(plan) <= MOST_SEQUENCES or not all(plan):
        raise ValueError(f"{len(plan)} sequences: give 1 to {MOST_SEQUENCES}")
    for moves in plan:
        for move in moves:
            if isinstance(move, int) and not 1 <= move <= drafts:
                raise ValueError(
                    f"rejected at {move}: drafted tokens count from 1 to {drafts}, "
                    "none is for no rejection"
                )


def parse_plan(text: str) -> list[list[Move]]:
    """`none,2` or `none/3,random`: sequences by commas, their rounds by slashes."""
    return [[_move(word.strip()) for word in part.split("/")] for part in text.split(",")]


def _move(word: str) -> Move:
    if word in ("none", RANDOM):
        return None if word == "none" else RANDOM
    try:
        return int(word)
    except ValueError:
        raise ValueError(f"rejected at {word!r}: give none, random or a number from 1") from None
