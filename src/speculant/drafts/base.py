"""What the loop needs of a draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from ..history import History
from ..prices import Prices
from ..proposal import Proposal
from ..sampling import Random, SamplingParams


@dataclass
class DraftRow:
    """What a draft may know of one running request.

    tokens: prompt and committed output; the last one is the root, not yet in any cache
    budget: the deepest this round's proposal may go; 0 means: draft nothing for this row
    history: what penalties depend on, for a draft that samples through the same transform
    asleep:  it drafts nothing to its end, and the draft is told nothing of it: no draft sees such a row
    prices: what a node must be worth, for drafts whose `DraftInfo.priced` says so; None: nothing
    """

    slot: int
    tokens: list[int]
    params: SamplingParams
    random: Random
    history: History
    budget: int = 0
    asleep: bool = False
    prices: Prices | None = None


@dataclass(frozen=True)
class Feedback:
    """What a round taught, for `Draft.update`. One entry a row of that round's proposal.

    committed:     tokens each row committed, the new root last (a row that just finished too)
    paths:         accepted nodes of each row, from the root down
    hidden:        [B, 1 + n, len(taps) * H], tapped states of the root and every node, or None
    window_logits: [B, w, V] logits of the proposal's window rows, or None
    """

    proposal: Proposal
    committed: Sequence[Sequence[int]]
    paths: Sequence[Sequence[int]]
    hidden: Tensor | None = None
    window_logits: Tensor | None = None


@dataclass(frozen=True)
class DraftInfo:
    """Name, the hidden states it taps, and the largest proposal it makes.

    max_nodes: most nodes of a row's proposal, for which the engine reserves cache
    max_depth: the deepest of them; None is a chain's, as deep as it has nodes
    priced: it chooses nodes by their confidence, and leaves out what is not worth `DraftRow.prices`
    """

    name: str
    taps: tuple[int, ...] = ()
    max_nodes: int = 0
    max_window: int = 0
    options: dict[str, object] = field(default_factory=dict)
    max_depth: int | None = None
    priced: bool = False

    def __post_init__(self) -> None:
        if self.max_depth is not None and not 0 <= self.max_depth <= self.max_nodes:
            raise ValueError(f"max_depth is {self.max_depth}: from 0 to max_nodes {self.max_nodes}")

    @property
    def depth(self) -> int:
        """The deepest a proposal goes: the largest `DraftRow.budget` that is of use."""
        return self.max_nodes if self.max_depth is None else self.max_depth

    @property
    def samples(self) -> bool:
        """It draws chains from distributions of its own: with a temperature, a text depends on how
        deep they go."""
        model = bool(self.taps) or self.name == "vanilla"
        return model and self.max_nodes == self.depth and not self.priced


class Depths(Protocol):
    """How deep each part of a draft in parts goes; see `control.ByPart`."""

    def begin(self) -> Any:
        """The record of a request that has shown nothing yet."""
        ...

    def ask(self, record: Any, part: int, most: int) -> int:
        """How deep a part drafts next, at most `most`. Asked once a round, of one that could."""
        ...

    def worth(self, record: Any, part: int) -> Prices | None:
        """What a node of a part must be worth; None: nothing. Asked after `ask`."""
        ...

    def tell(self, record: Any, part: int, depth: int, accepted: int, nodes: int) -> None:
        """A part that was asked drafted `nodes`, `depth` deep, and `accepted` were committed."""
        ...


class Draft(Protocol):
    """Whatever proposes tokens. A draft keeps per-slot state and rolls it back itself."""

    info: DraftInfo

    def start(self, rows: int, capacity: int) -> None:
        """Prepare for `rows` slots of at most `capacity` tokens; called once by the engine."""
        ...

    def open(self, row: DraftRow) -> None:
        """A request took `row.slot`; its tokens are the whole prompt (the last is the root)."""
        ...

    def resume(self, row: DraftRow, shared: int) -> int:
        """As `open`, of a slot that was not closed: its last request began with the same `shared`
        tokens, less than the prompt has, and was this draft's.

        Returns how many of them the target need not run again, for which no `prefill` comes: the
        draft knows as much of those as if it had run them itself, so that a warm request accepts
        what a cold one does.
        """
        ...

    def prefill(self, row: DraftRow, start: int, hidden: Tensor | None) -> None:
        """The target cached prompt tokens [start, start + T); hidden: [T, len(taps) * H] or None."""
        ...

    def propose(self, rows: Sequence[DraftRow]) -> Proposal:
        """Draft at most `row.budget` deep for every row. Nothing for a row is always allowed."""
        ...

    def update(self, rows: Sequence[DraftRow], feedback: Feedback) -> None:
        """The round is over and `row.tokens` holds what was committed: roll back, take features."""
        ...

    def close(self, slot: int) -> None:
        """The slot's request is gone."""
        ...


@runtime_checkable
class InParts(Protocol):
    """A draft made of others, one of which drafts a row in a round.

    depths: one that says how deep each goes, or none yet; copies of the draft share the list
    """

    parts: tuple[Draft, Draft]
    depths: list[Depths]
