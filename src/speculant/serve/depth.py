"""`--adaptive`: how deep a request drafts, by what it has shown and by how many run at once.

What pays alone may cost in a batch: a target forward of one row has arithmetic to spare, one of many
rows has none. So costs are measured at several batch sizes, and a round goes by those of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ..control import Adaptive, Costs, Track
from ..drafts.base import Draft
from ..pace import measure_costs
from ..sampling import SamplingParams
from ..target.base import Target


class ByLoad:
    """A `Control` of one lane: `Adaptive`, by the costs of the batch at hand.

    tables:  rows at once -> costs of such rounds; 1 among them
    samples: the draft samples chains, so that a sampled row's text depends on its depths

    A round with a sampled row of such a draft goes by the costs of one row, whatever its size: what a
    request says must not depend on what runs beside it (design, law 10). No other text depends on
    the depth.
    """

    def __init__(self, tables: Mapping[int, Costs], samples: bool) -> None:
        if 1 not in tables:
            raise ValueError("there must be costs of one row")
        self.tables, self.samples = tables, samples
        self._choices = {rows: Adaptive(costs) for rows, costs in tables.items()}
        self._now = self._choices[1]

    def enter(self, rows: Sequence[SamplingParams]) -> None:
        """The next round has these rows. The batch size that was measured nearest to theirs counts."""
        own = self.samples and not all(params.greedy for params in rows)
        count = 1 if own else min(self._choices, key=lambda size: abs(size - len(rows)))
        self._now = self._choices[count]

    def budget(self, remaining: int, track: Track) -> int:
        """See `Control`."""
        return self._now.budget(remaining, track)


def by_load(target: Target, draft: Draft, num_draft_tokens: int | None, max_rows: int) -> ByLoad:
    """Measure a draft's costs at 1, 2, 4, ... and `max_rows` rows. Takes seconds for a small model.

    num_draft_tokens: deepest; None: the draft's own
    """
    tables = {
        size: measure_costs(target, draft, num_draft_tokens, size) for size in sizes(max_rows)
    }
    model = bool(draft.info.taps) or draft.info.name == "vanilla"
    return ByLoad(tables, model and draft.info.max_nodes == draft.info.depth)


def sizes(most: int) -> Iterator[int]:
    """1, 2, 4, ... below `most`, and `most`."""
    size = 1
    while size < most:
        yield size
        size *= 2
    yield most
