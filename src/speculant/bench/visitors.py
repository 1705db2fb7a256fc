"""Other decoders beside ours: those that are found, started, with the heads they may draft with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch

from ..drafts import NEEDS, bundled_head, find_draft
from ..heads.weights import check_target, load_head
from ..target.base import Target
from ..target.load import target_fingerprint
from .contenders import Contender, Peer, parse_contender, theirs
from .peers import find_peers

SHIPPED = ("eagle3", "vanilla")
"""Drafts of ours that a peer may use, of which a head ships with the package."""


def wanted_peers(
    folder: str, target: Target, specs: Sequence[str], wanted: Sequence[str] | None
) -> list[Peer]:
    """The peers that are found, of `wanted` where it is given; not started yet.

    folder: of the target's weights; specs: our drafts, whose heads peers may use too
    Raises ValueError for the name of a peer that there is none of.
    """
    if wanted is not None and not wanted:
        return []
    heads = draft_folders(specs, target)
    return find_peers(folder, target, heads, wanted, torch.get_num_threads())


def enter_peers(
    peers: Sequence[Peer],
    max_tokens: int,
    stack: ExitStack,
    progress: Callable[[str], None] = lambda text: None,
) -> tuple[list[Contender], dict[str, str], list[str]]:
    """Start peers within `stack`: those that run, their versions, and a line on each that does not."""
    entered: list[Contender] = []
    versions: dict[str, str] = {}
    notes: list[str] = []
    for peer in peers:
        progress(f"starting {peer.name}")
        try:
            stack.enter_context(peer)
        except Exception as error:  # somebody else's program: it may raise anything
            reason = " ".join(str(error).split()) or type(error).__name__
            notes.append(f"{peer.name} does not start: {reason}")
        else:
            entered.append(theirs(peer, max_tokens))
            versions[peer.name] = str(getattr(peer, "version", ""))
    return entered, versions, notes


def draft_folders(specs: Sequence[str], target: Target) -> dict[str, str]:
    """Draft -> folder of its head: those that the specs name, else the package's, for this target."""
    out: dict[str, str] = {}
    for kind in SHIPPED:
        try:
            folder = bundled_head(NEEDS.get(kind, kind))
            if target.info.folder is None:
                continue
            print_of = target_fingerprint(target.info.folder, target.tokenizer)
            check_target(load_head(folder), print_of, target.info.name)
        except ValueError:
            continue  # there is none for this target
        out[kind] = str(folder)
    for spec in specs:
        kind, given = find_draft(parse_contender(spec)[0])
        for named in given.values():
            out[kind] = str(named)
    return out
