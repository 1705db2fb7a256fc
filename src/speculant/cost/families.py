"""What a round of each draft family consists of: passes of the draft, rows of the target.

A head's size follows from its target's: a decoder layer of hidden size h has about 12 h^2
parameters (attention 4 h^2, a gated MLP of width 8/3 h another 8 h^2), an LM head h x vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .machine import Engine, Machine, ModelShape, forward_ms

REDUCED_VOCAB = 32_000  # EAGLE-3 heads draft over this many frequent tokens (its released heads)
LAYER_SQUARES = 12  # parameters of one decoder layer / hidden size squared
MEDUSA_HEADS = 4
LOOKAHEAD_WINDOW, LOOKAHEAD_NGRAM = 15, 5  # W and N of the authors' defaults for 7B targets
BLOCK_LAYERS = 5  # layers of DFlash's block-diffusion head (arXiv:2602.06036)


@dataclass(frozen=True)
class DraftPlan:
    """One round's work.

    family:     a key of FAMILIES
    depth:      longest accepted path, N for a chain
    nodes:      drafted tokens that are verified; depth for a chain
    passes:     forwards of the draft
    pass_rows:  rows of each of these forwards (a tree's branches)
    extra_rows: rows beside root and nodes in the target's forward (lookahead's window)
    """

    family: str
    depth: int
    nodes: int
    passes: int
    pass_rows: int = 1
    extra_rows: int = 0

    def __post_init__(self) -> None:
        if self.depth < 0 or self.nodes < self.depth or self.passes < 0 or self.pass_rows < 1:
            raise ValueError(
                f"{self.family}: depth {self.depth}, nodes {self.nodes}, passes {self.passes}: "
                "depth and passes are 0 or more, and the nodes reach the depth"
            )

    @property
    def rows(self) -> int:
        """Rows of the verification forward, the root included."""
        return 1 + self.nodes + self.extra_rows

    @property
    def tree(self) -> bool:
        """Whether some node has a sibling."""
        return self.nodes > self.depth


@dataclass(frozen=True)
class Family:
    """A draft family's defaults: the papers' or reference codes' own settings.

    depth, nodes: of the family's usual proposal; nodes == depth is a chain
    branch:       rows of a draft pass when the proposal is a tree
    one_pass:     the whole proposal comes from one draft pass
    free:         no draft model at all
    """

    depth: int
    nodes: int
    branch: int = 1
    one_pass: bool = False
    free: bool = False


FAMILIES: dict[str, Family] = {
    "off": Family(0, 0, free=True),
    "vanilla": Family(5, 5),
    "medusa": Family(MEDUSA_HEADS, 63, one_pass=True),
    "hydra": Family(MEDUSA_HEADS, 63),
    "eagle1": Family(5, 25, branch=4),
    "eagle2": Family(6, 60, branch=10),
    "eagle3": Family(8, 60, branch=10),
    "mtp": Family(3, 3),
    "dflash": Family(15, 15, one_pass=True),
    "lookahead": Family(4, 60, free=True),
    "ngram": Family(10, 10, free=True),
    "retrieval": Family(10, 64, free=True),
    "recycling": Family(6, 80, free=True),
}
"""Family -> its defaults. Medusa-1, EAGLE-1..3, lookahead: the authors' repositories; n-gram:
prompt look-up's 10 tokens; retrieval: REST's 64 nodes; recycling: token recycling's 80 nodes."""


def plan(family: str, num_draft_tokens: int | None = None, nodes: int | None = None) -> DraftPlan:
    """The round of a family at a draft length and a tree size; None takes the family's usual.

    A length without nodes is a chain for the families that can draft one. Raises ValueError for an
    unknown family or a tree smaller than its depth.
    """
    if family not in FAMILIES:
        raise ValueError(f"unknown draft family {family!r}: it is one of {', '.join(FAMILIES)}")
    usual = FAMILIES[family]
    always_tree = family in ("lookahead", "recycling", "retrieval")
    if num_draft_tokens is None:
        depth = usual.depth if nodes is None else min(usual.depth, nodes)
        count = usual.nodes if nodes is None else nodes
    else:
        depth = num_draft_tokens
        count = nodes if nodes is not None else usual.nodes if always_tree else depth
    tree = count > depth
    if family == "off":
        return DraftPlan("off", 0, 0, 0)
    passes = 0 if usual.free else 1 if usual.one_pass else depth
    wide = count + 1 if family == "dflash" else usual.branch if tree else 1
    window = LOOKAHEAD_WINDOW * (LOOKAHEAD_NGRAM - 1) if family == "lookahead" else 0
    return DraftPlan(family, depth, max(count, depth), passes, wide, window)


def draft_shape(family: str, target: ModelShape, params: float | None = None) -> ModelShape | None:
    """Sizes of a family's draft for a target; None for families without one.

    params: the draft's own parameters where they are known; an EAGLE head's count leaves out the
            LM head, as the papers' counts do. A vanilla draft needs them.
    """
    h, vocab = target.hidden, target.vocab
    layer = params if params is not None else LAYER_SQUARES * h * h
    if FAMILIES[family].free:
        return None
    if family == "vanilla":
        if params is None:
            raise ValueError("the size of the draft model is not known")
        return dense_shape("draft", params, vocab)
    if family in ("medusa", "hydra"):
        heads = MEDUSA_HEADS if family == "medusa" else 1
        return ModelShape(family, 1, h, vocab, target.kv_width, heads * (h * h + h * vocab))
    if family == "dflash":
        body = params if params is not None else BLOCK_LAYERS * layer
        return ModelShape(family, BLOCK_LAYERS, h, vocab, target.kv_width, body + h * vocab)
    reduced = min(vocab, REDUCED_VOCAB) if family == "eagle3" else vocab
    joined = 0 if params is not None else (3 if family == "eagle3" else 2) * h * h
    return ModelShape(family, 1, h, reduced, target.kv_width, layer + joined + h * reduced)


def dense_shape(name: str, params: float, vocab: int = 128_000) -> ModelShape:
    """A plausible dense model of a given number of parameters.

    Depth grows as the 0.43rd power of size through 32 layers at 7 billion (Llama 1 to 3 at 7 to
    70 billion are within two layers or a fifth of it); the hidden size makes 12 h^2 a layer.
    """
    if not (math.isfinite(params) and params > 0):
        raise ValueError(f"{name}: {params} parameters: it must be above 0")
    layers = max(2, round(32 * (params / 7e9) ** 0.43))
    hidden = max(64, round(math.sqrt(params / (LAYER_SQUARES * layers))))
    return ModelShape(name, layers, hidden, vocab, max(64, hidden // 4), params)


def draft_ms(
    shape: ModelShape | None,
    work: DraftPlan,
    machine: Machine,
    engine: Engine,
    batch: int,
    context: int,
) -> float:
    """Milliseconds that a round spends drafting."""
    if shape is None or work.passes == 0:
        return 0.0
    once = forward_ms(shape, machine, engine, batch, work.pass_rows, context)
    return work.passes * (once + engine.step_ms)


def round_ms(
    target: ModelShape,
    shape: ModelShape | None,
    work: DraftPlan,
    machine: Machine,
    engine: Engine,
    batch: int,
    context: int,
) -> float:
    """Milliseconds of one round: drafting, the verification forward, the engine's own work."""
    spent = forward_ms(target, machine, engine, batch, work.rows, context)
    if work.nodes == 0:
        return spent
    spent += draft_ms(shape, work, machine, engine, batch, context) + engine.round_ms
    return spent + (engine.tree_ms if work.tree else 0.0)
