"""EAGLE-2's dynamic tree (Li et al. 2024b, arXiv 2406.16858, section 4) on known distributions."""

from __future__ import annotations

import numpy as np

from .draws import Floats, Ints
from .trees import ROOT, ChosenTree, chosen_tree, likeliest
from .world import World


def dynamic_tree(world: World, nodes: int, depth: int, branch: int) -> ChosenTree:
    """Expand the `branch` nodes of highest confidence at each depth, then keep the best `nodes`.

    A node's confidence is the product of the draft's probabilities along its path. A child's is
    never higher than its parent's and parents come first among equals, so what is kept hangs
    together. A function of the root's state alone, hence one tree a state.
    """
    branch = min(branch, world.vocab)
    if min(nodes, depth, branch) < 1:
        raise ValueError(f"a tree of {nodes} nodes, depth {depth}, branching {branch}")
    if branch + (depth - 1) * branch**2 < nodes:
        raise ValueError(f"depth {depth} and branching {branch} offer fewer than {nodes} nodes")
    scores, parents, tokens = _candidates(world, depth, branch)
    kept = np.sort(np.argsort(-scores, axis=1, kind="stable")[:, :nodes], axis=1)
    place = np.zeros((world.states, scores.shape[1] + 1), np.int64)  # candidate row -> kept row
    np.put_along_axis(place, kept + 1, np.arange(1, nodes + 1)[None], axis=1)
    above = np.take_along_axis(place, np.take_along_axis(parents, kept, axis=1), axis=1)
    return chosen_tree(world, above, np.take_along_axis(tokens, kept, axis=1))


def _candidates(world: World, depth: int, branch: int) -> tuple[Floats, Ints, Ints]:
    """Confidence, row of the parent (ROOT: none) and token of all that is offered, [S, N] each."""
    states = np.arange(world.states)[:, None]  # of the nodes expanded next, shape: [S, k]
    above = np.full((world.states, 1), ROOT)
    confidence = np.ones((world.states, 1))
    scores, parents, tokens, made = [], [], [], 0
    for level in range(depth):
        probs = world.draft[world.level(level)]
        ids = likeliest(probs, branch)[states]  # shape: [S, k, branch]
        offered = confidence[:, :, None] * np.take_along_axis(probs[states], ids, axis=2)
        flat = offered.reshape(world.states, -1)
        scores.append(flat)
        tokens.append(ids.reshape(world.states, -1))
        parents.append(above.repeat(branch, axis=1))
        best = likeliest(flat, branch)
        above = best + made + 1
        made += flat.shape[1]
        confidence = np.take_along_axis(flat, best, axis=1)
        states = world.after(np.take_along_axis(tokens[-1], best, axis=1))
    confidences = np.concatenate(scores, axis=1)
    return confidences, np.concatenate(parents, axis=1), np.concatenate(tokens, axis=1)
