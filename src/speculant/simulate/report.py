"""The subcommands' results for people: tables in the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .chisquare import SIGNIFICANCE, Verdict
from .theorem import DRIFT, TESTS

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from .compare import Comparison, Contender
    from .quality import Quality
    from .rollback import Rollback
    from .sweep import Sweep
    from .theorem import Theorem

LEAVES = 16  # shown of a tree
ROUNDS = 8  # shown of a roll-back


def theorem(console: Console, found: Theorem, samples: int) -> None:
    """Every rule's chi-square in both worlds."""
    table = _table(f"{samples} tokens of every rule against the target's own distribution")
    _columns(table, "world", "rule")
    _columns(
        table, "chi-\nsquare", "degrees\nof\nfreedom", "critical\nvalue", "p", "p vs.\ndirect\nsamples",
        "tokens/\nforward", right=True,
    )  # fmt: skip
    table.add_column("")
    for kind, control in found.control.items():
        table.add_row(kind, "direct", *_cells(control), "", "1.00", "")
        for row in found.tested:
            if row.world == kind:
                verdict = "pass" if row.passed else "[bold red]FAIL[/]"
                direct, speed = f"{row.direct.p_value:.3g}", f"{row.tokens_per_forward:.2f}"
                table.add_row("", row.rule, *_cells(row.fit), direct, speed, verdict)
        table.add_section()
    console.print(table)
    console.print(
        "A rule fails when its chi-square exceeds the critical value (p < "
        f"{SIGNIFICANCE / TESTS:.2g}); about one lossless run in a thousand has such a rule. "
        "Markov: every token given the one before it. The draft's errors grow by "
        f"{DRIFT:.0%} of the first depth's with every depth."
    )
    if found.broken:
        console.print(f"Broken on purpose: {found.broken}.")
    console.print("verdict: " + ("lossless" if found.passed else "NOT lossless"), style="bold")


def _cells(verdict: Verdict) -> list[str]:
    return [
        f"{verdict.chi_square:.1f}",
        str(verdict.degrees_of_freedom),
        f"{verdict.critical_value:.1f}",
        f"{verdict.p_value:.3g}",
    ]


def sweep(console: Console, found: Sweep) -> None:
    """Every draft length, the best one marked."""
    table = _table(f"alpha {found.alpha:g}, a draft step costs {found.cost:g} of a target forward")
    _columns(table, "drafted\ntokens", "tokens/\nforward", right=True)
    simulated = found.rows[0].simulated is not None
    if simulated:
        _columns(table, "simulated", right=True)
    _columns(table, "time a token\n(plain = 1)", "speed-up", right=True)
    table.add_column("")
    for row in found.rows:
        best = row is found.best
        measured = ["{:.3f} ± {:.3f}".format(*row.simulated)] if row.simulated else []
        table.add_row(
            str(row.num_draft_tokens), f"{row.expected_tokens:.3f}", *measured,
            f"{row.time_per_token:.3f}", f"{row.speedup:.3f}x", "best" if best else "",
            style="bold" if best else "",
        )  # fmt: skip
    console.print(table)
    console.print(found.advice)


def quality(console: Console, found: Quality) -> None:
    """Theory beside simulation, for every noise and length."""
    table = _table(f"tokens a forward in a {found.world} world, {found.rounds} rounds a figure")
    _columns(
        table, "noise", "alpha", "alpha\nmeasured", "N", "token rule\nsimulated", "token\nrule\nexact",
        "constant\nalpha", "block rule\nsimulated", right=True,
    )  # fmt: skip
    for step in found.steps:
        shown = [
            f"{step.noise:g}",
            f"{step.alpha:.3f}",
            f"{step.alpha_measured:.3f} ± {step.alpha_error:.3f}",
        ]
        for i, cell in enumerate(step.cells):
            table.add_row(
                *(shown if i == 0 else ["", "", ""]),
                str(cell.num_draft_tokens),
                f"{cell.simulated:.3f} ± {cell.standard_error:.3f}",
                f"{cell.exact:.3f}",
                f"{cell.constant_alpha:.3f}",
                f"{cell.block:.3f} ± {cell.block_error:.3f}",
            )
        table.add_section()
    console.print(table)
    console.print(
        "N: drafted tokens. noise: standard deviation of the error in the draft's logits at "
        "the first depth. exact: from the world's own probabilities. constant alpha: the textbook's "
        "(1 - alpha^(N+1)) / (1 - alpha). Largest deviation of simulation from theory: "
        f"{found.largest_deviation:.1f} standard errors in {sum(len(s.cells) for s in found.steps)} "
        "figures."
    )


def compare(console: Console, found: Comparison) -> None:
    """Contenders, their acceptance by depth, and the leaves of the full trees."""
    shape = ",".join(map(str, found.shape))
    nodes = found.contenders[0].nodes
    table = _table(f"{nodes} drafted nodes a forward, tree {shape}, {found.world} world")
    table.add_column("")
    _columns(table, "depth", "tokens/forward\nsimulated", "exact", right=True)
    table.add_column("accepted at depth 1, 2, ... (%)\ngiven the one before")
    for row in found.contenders:
        table.add_row(row.name, str(row.depth), *_speed(row), _by_depth(row))
    console.print(table)
    console.print(f"alpha at the first depth: {found.alpha:.3f}")
    for row in found.contenders:
        if row.leaves:
            _leaves(console, row)


def _speed(row: Contender) -> list[str]:
    measured = row.measured
    exact = f"{row.expected.tokens_per_forward:.3f}" if row.expected else "-"
    return [f"{measured.tokens_per_forward:.3f} ± {measured.standard_error:.3f}", exact]


def _by_depth(row: Contender) -> str:
    """Conditional acceptance, as deep as some round got."""
    counters = row.measured.counters
    reached = [counters.num_drafts, *counters.num_accepted_tokens_per_pos]
    rates = zip(counters.conditional_acceptance_per_position, reached, strict=False)
    return " ".join(f"{100 * rate:.0f}" for rate, some in rates if some)


def _leaves(console: Console, row: Contender) -> None:
    table = _table(f"{row.name}, leaf by leaf")
    _columns(table, "siblings taken", "accepted whole", "exact", "alpha\na token", right=True)
    shown = sorted(row.leaves, key=lambda leaf: -leaf.probability)[:LEAVES]
    shown = [leaf for leaf in shown if leaf.probability > 0] or shown[:1]
    for leaf in shown:
        exact = "-" if leaf.exact is None else f"{leaf.exact:.4f}"
        path = ", ".join(map(str, leaf.path))
        table.add_row(path, f"{leaf.probability:.4f}", exact, f"{leaf.alpha:.3f}")
    console.print(table)
    if len(shown) < len(row.leaves):
        console.print(f"and {len(row.leaves) - len(shown)} leaves accepted less often, or never")


def rollback(console: Console, found: Rollback) -> None:
    """Lengths step by step, and the waste."""
    table = _table(
        f"key/value cache entries, logical/physical; {found.drafts} drafted tokens a round"
    )
    _columns(table, "round", "se-\nquence", "rejected", "accepted", right=True)
    _columns(
        table, "before", "after\nforward", "cache\nnow", "after\nnext\nforward",
        "draft's\ncache", "rows\nwasted", right=True,
    )  # fmt: skip
    for i, turn in enumerate(found.turns[: ROUNDS * found.sequences]):
        pairs = zip(turn.logical, turn.physical, strict=True)
        table.add_row(
            str(turn.round), str(turn.sequence),
            "none" if turn.rejected is None else f"at {turn.rejected}",
            f"{turn.accepted} of {turn.drafted}",
            *(f"{logical}/{physical}" for logical, physical in pairs),
            f"{turn.draft_now} (+{turn.catch_up})", str(turn.wasted),
            end_section=(i + 1) % found.sequences == 0,
        )  # fmt: skip
    console.print(table)
    rounds = len(found.turns) // found.sequences
    if rounds > ROUNDS:
        console.print(f"and {rounds - ROUNDS} rounds more")
    console.print(_waste(found))


def _waste(found: Rollback) -> str:
    totals, more = found.totals, ""
    if "expected_tokens_per_forward" in totals:
        more = f" ({totals['expected_tokens_per_forward']:.3f} expected)"
    together = totals["tokens_committed_if_batch_is_cut_to_its_shortest"]
    return (
        "after forward: the root and the drafted tokens were written. cache now: rolled back to "
        "prefix, root and accepted tokens; the recovered or bonus token is the next root "
        "and gets in with the next forward, together with what that round drafts (physical). What "
        "lies behind a logical length is never attended to and is written over. draft's cache: the "
        "draft's own, and the committed tokens it has yet to read.\n"
        f"Wasted: {totals['wasted_rows']} of {totals['rows_verified']} rows "
        f"({totals['wasted_share']:.0%}). Committed: {totals['tokens_committed']} tokens, "
        f"{totals['tokens_per_forward']:.3f} a forward and sequence{more}; {together} if the whole "
        "batch were cut to its shortest row, as without ragged roll-back.\n"
        "Every cache held exactly what its sequence had committed: "
        + ("yes" if found.verified else "NO")
    )


def _table(title: str) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    return Table(title=title, box=SIMPLE_HEAD, title_justify="left", padding=0)


def _columns(table: Table, *names: str, right: bool = False) -> None:
    for name in names:
        table.add_column(name, justify="right" if right else "left", overflow="fold")
