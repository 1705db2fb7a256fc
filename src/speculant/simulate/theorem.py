"""The theorem, watched: texts of every rule against what direct sampling gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .broken import BREAKS, BROKEN_RULES, BestPathTree
from .chains import Chain, block_rule, token_rule
from .chisquare import SIGNIFICANCE, Verdict, goodness_of_fit, homogeneity
from .draws import Ints
from .loop import Direct, Strategy, transitions, write
from .trees import SampledTree, check_shape
from .world import KINDS, World, make_world

LENGTH = 16  # tokens a text
MOST_ROWS = 20_000
DRIFT = 0.25  # the draft's errors grow by this share with every depth
SAMPLES = (1000, 20_000_000)
DRAFTS = (1, 32)
TESTS = 2 * 3 * len(KINDS)  # two tests of each of three rules in each world


@dataclass(frozen=True)
class Tested:
    """One rule in one world.

    fit:       its tokens against the target's probabilities
    direct:    its tokens against as many that were sampled directly
    """

    world: str
    rule: str
    fit: Verdict
    direct: Verdict
    tokens_per_forward: float

    @property
    def passed(self) -> bool:
        """True when both tests pass."""
        return self.fit.passed and self.direct.passed

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return self.fit.as_dict() | {
            "against_direct_samples": self.direct.as_dict(),
            "tokens_per_forward": self.tokens_per_forward,
        }


@dataclass(frozen=True)
class Theorem:
    """Every rule in every world; `control` holds the tests of direct sampling itself."""

    tested: tuple[Tested, ...]
    control: dict[str, Verdict]
    broken: str | None

    @property
    def passed(self) -> bool:
        """True when every rule passed."""
        return all(row.passed for row in self.tested)

    def as_dict(self) -> dict[str, Any]:
        """The textbook's token rule on top, the others under their names."""
        found = {(row.world, row.rule): row for row in self.tested}
        out: dict[str, Any] = found["context-free", "token"].fit.as_dict()
        for kind in KINDS:
            rules = {rule: found[kind, rule].as_dict() for rule in ("token", "block", "tree")}
            rules["direct"] = self.control[kind].as_dict()
            if kind == "context-free":
                out["against_direct_samples"] = rules.pop("token")["against_direct_samples"]
                out |= rules
            else:
                out[kind] = rules
        return out | {
            "all_passed": self.passed,
            "broken": self.broken,
            "significance": SIGNIFICANCE / TESTS,
        }


def prove(
    samples: int = 50_000,
    seed: int = 0,
    vocab: int = 64,
    drafts: int = 4,
    shape: tuple[int, ...] = (2, 2),
    noise: float = 1.0,
    broken: str | None = None,
) -> Theorem:
    """Test the token, block and tree rules in a context-free and in a Markov world.

    Each test's significance is a share of SIGNIFICANCE: of all lossless runs (over seeds)
    about one in a thousand has a rule that fails.

    samples: tokens emitted by each; noise: how far the draft is off, as for `make_world`
    broken:  one of BREAKS, which then takes the place of the rule it is a wrong form of
    """
    if not SAMPLES[0] <= samples <= SAMPLES[1]:
        raise ValueError(f"{samples} samples: give {SAMPLES[0]} to {SAMPLES[1]}")
    if not DRAFTS[0] <= drafts <= DRAFTS[1]:
        raise ValueError(f"{drafts} drafts: give {DRAFTS[0]} to {DRAFTS[1]}")
    if broken is not None and broken not in BREAKS:
        raise ValueError(f"unknown break {broken!r}: choose {', '.join(BREAKS)}")
    check_shape(shape, vocab)
    rng = np.random.default_rng(seed)
    tested, control = [], {}
    for kind in KINDS:
        world = make_world(kind, vocab, noise, rng, DRIFT, max(drafts, len(shape)))
        counts, _ = _sample(world, Direct(), samples, rng)
        control[kind] = goodness_of_fit(counts, world.target, SIGNIFICANCE / TESTS)
        for name, strategy in _strategies(drafts, shape, broken).items():
            mine, speed = _sample(world, strategy, samples, rng)
            fit = goodness_of_fit(mine, world.target, SIGNIFICANCE / TESTS)
            direct = homogeneity(mine, counts, SIGNIFICANCE / TESTS)
            tested.append(Tested(kind, name, fit, direct, speed))
    return Theorem(tuple(tested), control, broken)


def _strategies(drafts: int, shape: tuple[int, ...], broken: str | None) -> dict[str, Strategy]:
    tree = BestPathTree if broken == "best-path" else SampledTree
    return {
        "token": Chain(drafts, BROKEN_RULES.get(broken or "", token_rule)),
        "block": Chain(drafts, block_rule),
        "tree": tree(shape),
    }


def _sample(
    world: World, strategy: Strategy, samples: int, rng: np.random.Generator
) -> tuple[Ints, float]:
    """Transitions [S, V] of exactly `samples` tokens, and the tokens a forward yielded."""
    rows = min(-(-samples // LENGTH), MOST_ROWS)
    length = -(-samples // rows)
    starts = rng.integers(0, world.states, rows)
    texts, forwards = write(world, strategy, starts, length, rng)
    counts = transitions(world, starts, texts)
    surplus = rows * length - samples  # the last tokens of the first texts, whatever they are
    if surplus:
        before = starts if length == 1 else world.after(texts[:, -2])
        np.subtract.at(counts, (before[:surplus], texts[:surplus, -1]), 1)
    return counts, rows * length / forwards
