"""From a target and its drafts to a service."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from ..drafts.base import Draft
from ..engine import Engine
from ..pace import adapt
from ..target.base import Target
from .asked import Reader
from .grammar import Grammars
from .guarded import Guarded
from .metrics import ServeMetrics
from .service import Service
from .settings import Settings
from .worker import PLAIN, Worker


def build_service(
    target: Target,
    drafts: Mapping[str, Draft],
    settings: Settings,
    *,
    max_rows: int = 8,
    capacity: int | None = None,
    num_draft_tokens: int | None = None,
    rule: str = "block",
    adaptive: bool = False,
    reuse: bool = True,
    clock: Callable[[], float] = time.monotonic,
) -> Service:
    """A service whose worker has not started.

    drafts:   by the names that requests use, the default first; "none" must be among them
    max_rows: answers that run at once; capacity: most tokens of prompt and output
    adaptive: draft as deep as pays in every request, by costs that are measured here
    reuse:    keep the cache of a finished request for the next turn of its conversation
    """
    if PLAIN not in drafts:
        raise ValueError(f"the drafts must hold {PLAIN!r}")
    names = list(drafts)
    first, *others = (Guarded(draft) for draft in drafts.values())
    engine = Engine(
        target,
        first,
        max_rows=max_rows,
        capacity=capacity,
        num_draft_tokens=num_draft_tokens,
        rule=rule,
        others=others,
        reuse=reuse,
    )
    if adaptive:
        for lane, name in zip(engine.lanes, names, strict=True):
            if lane.draft.info.depth:
                deepest = None if lane.index else num_draft_tokens
                lane.control = adapt(target, drafts[name], deepest, max_rows)
    metrics = ServeMetrics(settings.model_name)
    worker = Worker(engine, names, metrics, max_rows + settings.max_queue, clock)
    depths = {name: draft.info.depth for name, draft in drafts.items()}
    if num_draft_tokens is not None:
        depths[names[0]] = min(num_draft_tokens, depths[names[0]])
    reader = Reader(target, Grammars(target), engine.capacity, depths, PLAIN)
    return Service(target, worker, reader, metrics, settings)
