"""What a draft keeps of a finished request for the next turn of the same conversation."""

from __future__ import annotations

from ..drafts.base import Draft, DraftRow
from ..drafts.eagle import EagleDraft
from ..drafts.vanilla import VanillaDraft


def resume(draft: Draft, row: DraftRow, shared: int) -> int:
    """A request took `row.slot`, whose last request began with the same `shared` tokens.

    Returns how many of them the target need not run again. The draft knows as much of those as if
    it had run them itself, so that a warm request accepts what a cold one does.
    """
    if isinstance(draft, VanillaDraft):  # a cache of its own, which catches up by itself
        draft.cache.truncate(row.slot, min(draft.cache.lengths[row.slot], shared))
        return shared
    if isinstance(draft, EagleDraft):
        return _eagle(draft, row, shared)
    draft.close(row.slot)
    draft.open(row)
    # Medusa reads the state of the last prompt token only: it is run again
    return min(shared, len(row.tokens) - 2) if draft.info.taps else shared


def _eagle(draft: EagleDraft, row: DraftRow, shared: int) -> int:
    """Pair t holds the features of t and token t + 1: of the last shared token it is another."""
    cache, slot = draft.passes.cache, row.slot
    kept = max(0, min(shared - 1, cache.lengths[slot], len(row.tokens) - 2))
    if not bool(cache.data[:, :, slot, :, :kept].isfinite().all()):
        kept = 0
    cache.erase(slot, kept)
    draft.open(row)
    return kept
