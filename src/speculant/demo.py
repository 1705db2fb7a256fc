"""`speculant demo`: the same prompts with speculation and plainly, side by side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .bench.prompts import PROMPTS as BENCH
from .drafts import load_draft
from .drafts.base import Draft
from .engine import generate
from .pace import adapt
from .request import Completion
from .sampling import SamplingParams
from .target.base import Target

PROMPTS = (
    (
        "quoting",
        "Repeat this poem, then say what it is about:\n\nThe tide comes in, the tide goes out,\n"
        "the gulls above it wheel and shout,\nand I, who came to count the waves,\n"
        "have lost the count, and found the caves.",
    ),
    ("summarising", BENCH["summarisation"]),
    ("explaining", "Explain in a few sentences why the sky is blue and why sunsets are red."),
)


@dataclass(frozen=True)
class Comparison:
    """One prompt, decoded both ways in one run."""

    task: str
    plain: Completion
    ours: Completion

    @property
    def ratio(self) -> float:
        """Tokens per second with speculation over tokens per second without."""
        return self.ours.metrics.tokens_per_s / self.plain.metrics.tokens_per_s


def compare(target: Target, draft: Draft, max_tokens: int = 160, runs: int = 3) -> list[Comparison]:
    """Decode every prompt greedily both ways, alternating; the median run of each way.

    The draft goes as deep as pays here: its costs are measured first.
    """
    from rich.console import Console

    deep: dict[str, Any] = {}
    if draft.info.depth:
        deep["control"] = adapt(target, draft)

    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    none = load_draft("none", target)
    generate(target, draft, "Hello", SamplingParams(max_tokens=8, temperature=0.0))  # warm up
    out = []
    for task, prompt in PROMPTS:
        both: tuple[list[Completion], list[Completion]] = ([], [])
        with Console(stderr=True).status(f"{task}: plainly and with {draft.info.name}"):
            for _ in range(runs):
                both[0].append(generate(target, none, prompt, params))
                both[1].append(generate(target, draft, prompt, params, **deep))
        plain, ours = (sorted(d, key=lambda c: c.metrics.tokens_per_s)[runs // 2] for d in both)
        out.append(Comparison(task, plain, ours))
    return out


def show(target: Target, draft: Draft, comparisons: list[Comparison]) -> bool:
    """Print texts and numbers side by side; False when a text differs from plain decoding's."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    for c in comparisons:
        texts = Table(expand=True, title=f"{c.task}, temperature 0", show_lines=False)
        texts.add_column(f"plain: {c.plain.metrics.tokens_per_s:.1f} tokens/s", ratio=1)
        texts.add_column(f"{draft.info.name}: {c.ours.metrics.tokens_per_s:.1f} tokens/s", ratio=1)
        texts.add_row(Text(c.plain.text), Text(c.ours.text))
        console.print(texts)
    numbers = Table(title=f"{target.info.name} with {draft.info.name} against plain decoding")
    for name in ("task", "tokens", "plain tokens/s", "tokens/s", "ratio", "acceptance", "length"):
        numbers.add_column(name, justify="left" if name == "task" else "right")
    for c in comparisons:
        plain, ours = c.plain.metrics, c.ours.metrics
        numbers.add_row(
            c.task,
            str(ours.num_emitted_tokens),
            f"{plain.tokens_per_s:.1f}",
            f"{ours.tokens_per_s:.1f}",
            f"{c.ratio:.2f}x",
            f"{ours.draft_acceptance_rate:.0%}",
            f"{ours.mean_acceptance_length:.2f}",
        )
    console.print(numbers)
    same = all(c.plain.token_ids == c.ours.token_ids for c in comparisons)
    console.print(
        "The texts are identical, token for token."
        if same
        else "The texts DIFFER: run `speculant check` on this machine."
    )
    console.print("acceptance: accepted / drafted tokens; length: tokens a drafting round commits")
    return same
