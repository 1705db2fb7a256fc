"""From a target and its drafts to a service."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from ..drafts.base import Draft
from ..engine import Engine
from ..target.base import Target
from .asked import Reader
from .grammar import Grammars
from .metrics import ServeMetrics
from .resume import resume
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
    reuse: bool = True,
    clock: Callable[[], float] = time.monotonic,
) -> Service:
    """A service whose worker has not started.

    drafts:   by the names that requests use, the default first; "none" must be among them
    max_rows: answers that run at once; capacity: most tokens of prompt and output
    reuse:    keep the cache of a finished request for the next turn of its conversation
    """
    if PLAIN not in drafts:
        raise ValueError(f"the drafts must hold {PLAIN!r}")
    names = list(drafts)
    first, *others = drafts.values()
    engine = Engine(
        target,
        first,
        max_rows=max_rows,
        capacity=capacity,
        num_draft_tokens=num_draft_tokens,
        rule=rule,
        others=others,
        resume=resume if reuse else None,
    )
    metrics = ServeMetrics(settings.model_name)
    worker = Worker(engine, names, metrics, max_rows + settings.max_queue, clock)
    depths = {name: draft.info.depth for name, draft in drafts.items()}
    reader = Reader(target, Grammars(target), engine.capacity, depths, PLAIN)
    return Service(target, worker, reader, metrics, settings)
