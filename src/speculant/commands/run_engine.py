"""`check-export --run`: vLLM with an export and without, over a few prompts."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..export.checking import Checked
    from ..export.folder import Checkpoint

MAX_TOKENS = 64
LITTLE = 1.05
"""Mean acceptance length under which a head does nothing: the sign of one that was half loaded."""


@dataclass(frozen=True)
class Outcome:
    """What vLLM did with an export.

    same:                    greedy text with and without it, of so many prompts
    mean_acceptance_length:  1 + accepted / rounds
    acceptance_per_position: accepted at a position / rounds
    """

    version: str
    prompts: int
    same: int
    tokens: int
    mean_acceptance_length: float
    acceptance_per_position: list[float]

    @property
    def passed(self) -> bool:
        """True when the text is the same and something is accepted."""
        return self.same == self.prompts and self.mean_acceptance_length >= LITTLE

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "passed": self.passed}

    def render(self) -> str:
        """Lines for people."""
        rates = ", ".join(f"{rate:.0%}" for rate in self.acceptance_per_position)
        lines = [
            f"vLLM {self.version}, greedy: {self.same} of {self.prompts} texts as without the head "
            f"({self.tokens} tokens)",
            f"  mean acceptance length {self.mean_acceptance_length:.2f}, by position: {rates}",
        ]
        if self.same < self.prompts:
            lines.append("FAIL: speculation changed the text")
        if self.mean_acceptance_length < LITTLE:
            lines.append("FAIL: next to nothing is accepted: part of the head was not loaded")
        return "\n".join(lines)


def run_vllm(
    checkpoint: Checkpoint, checked: Checked, target: str | None, python: Path | None
) -> Outcome:
    """Run it. ValueError for an export that vLLM does not read, EngineError when vLLM stops."""
    from ..bench.prompts import PROMPTS
    from ..export.running import has_vllm
    from ..export.running import run_vllm as run
    from ..options import BUNDLED
    from ..target.convert import cache_folder
    from ..target.load import resolve
    from ..target.tokenizer import load_tokenizer

    if checked.engine != "vLLM":
        raise ValueError(f"--run is vLLM's; this is an export for {checked.engine}")
    program = python or Path(sys.executable)
    if not has_vllm(program):
        raise ValueError(f"--run: {program} has no vLLM; give one that has with --python")
    name = target or (checkpoint.note or {}).get("target", BUNDLED)
    folder, _ = resolve(name)
    tokenizer = load_tokenizer(folder, cache_folder())
    ids = [tokenizer.chat([{"role": "user", "content": text}]) for text in PROMPTS.values()]
    job = {
        "model": str(folder.resolve()),
        "prompts": ids,
        "max_tokens": MAX_TOKENS,
        "dtype": "float32",
        "max_model_len": max(map(len, ids)) + MAX_TOKENS + 16,
    }
    speculation = {
        "method": checked.layout.method,
        "model": str(checkpoint.path.resolve()),
        "num_speculative_tokens": depth(checkpoint),
    }
    plain = run(program, job)
    ours = run(program, {**job, "speculative_config": speculation})
    return outcome(plain, ours)


def depth(checkpoint: Checkpoint) -> int:
    """Tokens to draft a round: as noted, at most as many as there are Medusa heads."""
    wanted = int((checkpoint.note or {}).get("num_speculative_tokens", 3))
    heads = checkpoint.config.get("num_heads", checkpoint.config.get("medusa_num_heads"))
    return wanted if heads is None else min(wanted, int(heads))


def outcome(plain: dict[str, Any], ours: dict[str, Any]) -> Outcome:
    """What two runs say."""
    pairs = list(zip(plain["token_ids"], ours["token_ids"], strict=True))
    rounds = max(1, ours.get("num_drafts", 0))
    return Outcome(
        version=ours["version"],
        prompts=len(pairs),
        same=sum(a == b for a, b in pairs),
        tokens=sum(len(b) for _, b in pairs),
        mean_acceptance_length=1 + ours.get("num_accepted_tokens", 0) / rounds,
        acceptance_per_position=[
            count / rounds for count in ours.get("num_accepted_tokens_per_pos", [])
        ],
    )
