"""What is compared: our own decoding under every setting, and what others offer.

All count the same: tokens appended to the prompt, over the time of decoding without the prompt's
prefill.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..drafts import load_draft
from ..drafts.base import Draft
from ..engine import Engine
from ..metrics import Counters
from ..pace import adapt
from ..sampling import SamplingParams
from ..target.base import Target
from .asked import Asked

PLAIN = "plain"


@dataclass
class Spent:
    """Where the time of decoding went, in milliseconds, over so many rounds.

    draft_ms:    proposing, and keeping the draft up to date
    forward_ms:  the target's forward over root and drafted tokens: verification's arithmetic
    sampling_ms: acceptance rule, sampling, committing and rolling back
    wall_ms:     all of it, as a clock beside the engine saw it
    """

    rounds: int = 0
    draft_ms: float = 0.0
    forward_ms: float = 0.0
    sampling_ms: float = 0.0
    wall_ms: float = 0.0

    def add(self, other: Spent) -> None:
        """Add what another run spent."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def per_round(self) -> dict[str, float]:
        """Milliseconds a round: draft, verify (the target's forward), sampling, other, total."""
        parts = {"draft": self.draft_ms, "verify": self.forward_ms, "sampling": self.sampling_ms}
        parts["other"] = max(0.0, self.wall_ms - sum(parts.values()))
        rounds = max(1, self.rounds)
        return {name: ms / rounds for name, ms in {**parts, "total": self.wall_ms}.items()}

    @property
    def loop_share(self) -> float:
        """Share of the time that is neither the target's forward nor the draft."""
        return 1 - (self.forward_ms + self.draft_ms) / self.wall_ms if self.wall_ms else 0.0


@dataclass(frozen=True)
class Outcome:
    """One group of prompts, answered.

    tokens:    what was appended to each prompt
    counted:   how many of them decode_ms is the time of
    """

    tokens: tuple[tuple[int, ...], ...]
    counted: int
    decode_ms: float
    spent: Spent | None = None
    counters: Counters | None = None


@dataclass(frozen=True)
class Entry:
    """What a contender is called, and under what it runs.

    name:    plain, the draft as it was asked for, or the peer's
    weights: what it computes in
    peer:    it is not ours: at batch 1 and temperature 0 only
    """

    name: str
    weights: str
    temperature: float
    batch: int
    peer: bool = False

    @property
    def label(self) -> str:
        """For a line of progress."""
        return f"{self.name}, {self.weights}, temperature {self.temperature:g}, x{self.batch}"


@dataclass(frozen=True)
class Contender:
    """Something that answers groups of prompts, `entry.batch` at a time."""

    entry: Entry
    run: Callable[[Sequence[Asked]], Outcome]


class Peer(Protocol):
    """Somebody else's decoder of the same model, entered as a context while it runs.

    name:    what tables call it
    weights: what it computes in, such as "float32" or "Q4_1 GGUF"
    """

    name: str
    weights: str

    def __enter__(self) -> Any: ...

    def __exit__(self, *error: Any) -> Any: ...

    def run(self, prompt_ids: list[int], max_tokens: int) -> tuple[list[int], float]:
        """Greedy tokens appended to the prompt, up to EOS or `max_tokens`, and the milliseconds from
        the first of them to the last: the prompt's prefill, which gives the first, is left out."""
        ...


def parse_contender(spec: str) -> tuple[str, int, str]:
    """`NAME`, `NAME:NODES`, `NAME@DEPTH` or `NAME@auto` as (name, nodes, depth): 0, "" not given."""
    rest, _, depth = spec.partition("@")
    name, _, nodes = rest.partition(":")
    if nodes and not (nodes.isdecimal() and int(nodes)):
        raise ValueError("after the colon comes a number of nodes")
    if ("@" in spec or depth) and depth != "auto" and not (depth.isdecimal() and int(depth)):
        raise ValueError("after the @ comes a depth from 1, or auto")
    return name, int(nodes or 0), depth


def is_adaptive(spec: str) -> bool:
    """True for `NAME@auto`."""
    return spec.endswith("@auto")


def family(spec: str) -> str:
    """The draft of a spec, its nodes included and its depth left out."""
    return spec.partition("@")[0]


def make_draft(target: Target, spec: str, batch: int = 1) -> tuple[Draft, dict[str, Any]]:
    """The draft of a spec, or plain decoding's, and the engine's options for it.

    auto measures the costs of rounds first, at up to `batch` rows. Raises ValueError for what does
    not fit.
    """
    if spec == PLAIN:
        return load_draft("none", target), {}
    name, nodes, depth = parse_contender(spec)
    draft = load_draft(name, target, **({"tree": nodes} if nodes else {}))
    if depth == "auto":
        return draft, {"control": adapt(target, draft, None, batch)}
    if depth and int(depth) > draft.info.depth:
        draft = load_draft(name, target, num_draft_tokens=int(depth))
    return draft, ({"num_draft_tokens": int(depth)} if depth else {})


def ours(
    target: Target,
    weights: str,
    spec: str,
    temperatures: Sequence[float],
    batches: Sequence[int],
    max_tokens: int,
) -> list[Contender]:
    """Our decoding with one draft, at every temperature and batch size."""
    draft, options = make_draft(target, spec, max(batches))

    def at(temperature: float, batch: int) -> Callable[[Sequence[Asked]], Outcome]:
        def run(group: Sequence[Asked]) -> Outcome:
            params = [asked.params(max_tokens, temperature) for asked in group]
            ids = [asked.ids for asked in group]
            return decode(target, draft, ids, params, batch, **options)

        return run

    return [Contender(Entry(spec, weights, t, b), at(t, b)) for b in batches for t in temperatures]


def decode(
    target: Target,
    draft: Draft,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    batch: int | None = None,
    **options: Any,
) -> Outcome:
    """Answer prompts, at most `batch` of them (None: all) at once: where one ends, the next begins, as
    in a server that is kept busy. Prompts are read between rounds, beside the clock, which stops when
    none is left to take a free place: what then still runs is answered, and does not count.

    options: of `Engine`. Raises FloatingPointError when the target's logits broke.
    """
    longest = max(len(ids) + mine.max_tokens for ids, mine in zip(prompts, params, strict=True))
    capacity = min(longest, target.info.context_length)
    rows = min(batch or len(prompts), len(prompts))
    engine = Engine(target, draft, max_rows=rows, capacity=capacity, **options)
    counters = [Counters() for _ in prompts]
    numbers = [
        engine.submit(list(ids), mine, counts)
        for ids, mine, counts in zip(prompts, params, counters, strict=True)
    ]
    tokens: dict[int, list[int]] = {number: [] for number in numbers}
    spent, counted = Spent(), 0
    while engine.busy:
        engine.admit()
        while len(engine.slots()) < len(engine.lengths()):
            engine.prefill()
        running = engine.slots()
        counts = len(running) == rows or len(prompts) == rows
        watched = counters[numbers.index(running[0][0])]  # every row notes the whole round's time
        before = _spent(watched)
        began = time.perf_counter()
        pieces = engine.round(engine.lanes[0])
        wall_ms = 1e3 * (time.perf_counter() - began)
        if counts:
            spent.add(_spent(watched, before, wall_ms))
            counted += sum(len(piece.token_ids) for piece in pieces)
        for piece in pieces:
            if piece.error:
                raise FloatingPointError(piece.error)
            tokens[piece.request] += piece.token_ids
    total = Counters()
    for each in counters:
        total.merge(each)
    answers = tuple(tuple(tokens[number]) for number in numbers)
    return Outcome(answers, counted, spent.wall_ms, spent, total)


def _spent(counts: Counters, before: Spent | None = None, wall_ms: float = 0.0) -> Spent:
    """What a request's counters hold; since `before`: of the round in between, which took `wall_ms`."""
    since = before or Spent()
    return Spent(
        counts.target_forwards - since.rounds,
        counts.draft_ms - since.draft_ms,
        counts.forward_ms - since.forward_ms,
        counts.verify_ms - counts.forward_ms - since.sampling_ms,
        wall_ms,
    )


def theirs(peer: Peer, max_tokens: int) -> Contender:
    """A peer at batch 1 and temperature 0.

    Its first token comes out of the prefill, whose time is not counted, so that it does not count.
    """

    def run(group: Sequence[Asked]) -> Outcome:
        (asked,) = group
        tokens, decode_ms = peer.run(list(asked.ids), max_tokens)
        return Outcome((tuple(tokens),), max(0, len(tokens) - 1), decode_ms)

    return Contender(Entry(peer.name, peer.weights, 0.0, 1, peer=True), run)
