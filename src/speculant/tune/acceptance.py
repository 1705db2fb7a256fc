"""Published acceptance of each family on each task: what stands in where nothing was measured."""

from __future__ import annotations

from dataclasses import dataclass

from ..cost import FAMILIES, DraftPlan
from ..cost.trees import chain_or_tree
from .facts import data, rank_decay

HOT = 0.5  # temperatures from here on use the figures published at temperature 1


@dataclass(frozen=True)
class Prior:
    """A constant alpha with its quartiles over published rows.

    exact: whether the family was measured on this very task, rather than on any
    """

    alpha: float
    low: float
    high: float
    rows: int
    exact: bool

    def tokens(self, work: DraftPlan, alpha: float | None = None) -> float:
        """Tokens a round commits at this acceptance (or at another alpha)."""
        rate = self.alpha if alpha is None else alpha
        if FAMILIES[work.family].free:  # look-ups follow one match: siblings add nothing
            return chain_or_tree(rate, work.depth, work.depth, 1, rank_decay())
        branch = max(FAMILIES[work.family].branch, 4)
        return chain_or_tree(rate, work.depth, work.nodes, branch, rank_decay())


def prior(family: str, task: str, temperature: float) -> Prior | None:
    """Published acceptance of a family on a task; of the family on any task; None if none."""
    table = data("acceptance")["families"].get(family)
    if table is None:
        return None
    heat = "hot" if temperature >= HOT else "greedy"
    for where, exact in ((task, True), ("all", False)):
        for kind in (heat, "greedy"):
            row = table.get(where, {}).get(kind)
            if row:
                return Prior(row["alpha"], row["low"], row["high"], row["rows"], exact)
    return None
