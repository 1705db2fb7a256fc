"""What one machine does: t(k), the loop's own time, speed against plain and transformers, memory.

Runs of the contenders alternate, after a warm-up, and medians are compared, so that a machine
that slows down slows all of them. Every contender counts the tokens it appended to the prompt.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from ..drafts import load_draft
from ..drafts.base import Draft
from ..engine import generate
from ..metrics import Counters
from ..request import prompt_ids
from ..sampling import SamplingParams
from ..target.base import Target
from .prompts import PROMPTS

ROWS = (1, 2, 4, 8, 16, 32, 64)
CONTEXT = 256
BASELINE_MB = 300  # the allowance beside weights and cache


@dataclass(frozen=True)
class Speed:
    """One contender over the prompts: medians over runs."""

    name: str
    tokens_per_s: float
    spread: float  # (largest - smallest) / median over runs
    per_task: dict[str, float]
    counters: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CoreReport:
    """All measurements of one run."""

    settings: dict[str, Any]
    forward_ms: dict[int, float]
    loop_share: dict[str, float]
    speeds: list[Speed]
    memory_mb: dict[str, float]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def forward_times(target: Target, repeats: int = 15) -> dict[int, float]:
    """Milliseconds of one target forward of k rows behind 256 cached tokens, medians."""
    cache = target.new_cache(1, CONTEXT + max(ROWS))
    cache.advance(0, CONTEXT)
    times: dict[int, list[float]] = {k: [] for k in ROWS}
    for _ in range(repeats + 2):  # the first two are warm-up
        for k in ROWS:
            tokens = torch.full((1, k), 5)
            positions = CONTEXT + torch.arange(k)[None]
            began = time.perf_counter()
            target.forward(tokens, positions, None, cache.rows([0], k))
            times[k].append(1e3 * (time.perf_counter() - began))
    return {k: statistics.median(t[2:]) for k, t in times.items()}


def measure_speeds(
    contenders: dict[str, Callable[[str], tuple[int, float, Counters | None]]],
    runs: int,
    progress: Callable[[str], None],
) -> list[Speed]:
    """Tokens per second of every contender (prompt -> tokens, decode ms, counters)."""
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    per_task: dict[str, dict[str, list[float]]] = {n: {t: [] for t in PROMPTS} for n in contenders}
    counted = {name: Counters() for name in contenders}
    for run in range(runs + 1):  # run 0 warms up
        totals: dict[str, list[float]] = {name: [0.0, 0.0] for name in contenders}
        for task, prompt in PROMPTS.items():
            for name, contender in contenders.items():
                progress(f"run {run}/{runs}  {task}  {name}")
                tokens, ms, counters = contender(prompt)
                totals[name][0] += tokens
                totals[name][1] += ms
                if run:
                    per_task[name][task].append(1e3 * tokens / ms)
                if run and counters is not None:
                    counted[name].merge(counters)
        for name, (emitted, spent) in totals.items() if run else ():
            rates[name].append(1e3 * emitted / spent)
    out = []
    for name, seen in rates.items():
        middle = statistics.median(seen)
        tasks = {task: statistics.median(v) for task, v in per_task[name].items()}
        spread = (max(seen) - min(seen)) / middle
        counts = counted[name].as_dict() if counted[name].target_forwards else {}
        out.append(Speed(name, middle, spread, tasks, counts))
    return out


def ours(target: Target, draft: Draft, params: SamplingParams) -> Callable[..., Any]:
    """A contender that decodes with a draft; time without the prompt's prefill."""

    def run(prompt: str) -> tuple[int, float, Counters | None]:
        out = generate(target, draft, prompt, params)
        return len(out.token_ids), out.metrics.decode_ms, out.metrics

    return run


def transformers_plain(folder: str, target: Target, params: SamplingParams) -> Callable[..., Any]:
    """transformers' greedy `generate` on the same weights, dtype and threads.

    Its prefill is taken off by timing a generation of one token, so that both count decoding only.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=target.info.dtype).eval()

    def timed(ids: torch.Tensor, count: int) -> tuple[int, float]:
        began = time.perf_counter()
        out = model.generate(ids, max_new_tokens=count, do_sample=False)
        return int(out.shape[1] - ids.shape[1]), 1e3 * (time.perf_counter() - began)

    def run(prompt: str) -> tuple[int, float, Counters | None]:
        ids = torch.tensor([prompt_ids(target, prompt)])
        _, first = timed(ids, 1)
        tokens, whole = timed(ids, params.max_tokens)
        return tokens - 1, whole - first, None

    return run


def peak_memory(target_name: str, target: Target, max_tokens: int) -> dict[str, float]:
    """Peak resident memory (MB) of a fresh process that generates, and what it is made of. Linux."""
    code = (
        "import speculant\n"
        f"t = speculant.load_target({target_name!r})\n"
        "d = speculant.load_draft('ngram', t)\n"
        f"p = speculant.SamplingParams(max_tokens={max_tokens}, temperature=0.0)\n"
        f"speculant.generate(t, d, {PROMPTS['coding']!r}, p)\n"
        # not getrusage: a child's figure there starts from its parent's
        "print([line.split()[1] for line in open('/proc/self/status') if 'VmHWM' in line][0])\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    capacity = len(prompt_ids(target, PROMPTS["coding"])) + max_tokens
    return {
        "peak": float(out.strip().splitlines()[-1]) / 1e3,
        "weights": _weight_bytes(target) / 1e6,
        "cache": target.new_cache(1, capacity).nbytes / 1e6,
    }


def _weight_bytes(target: Target) -> int:
    """Bytes of the target's parameters, a tied embedding counted once."""
    from ..target.llama import LlamaTarget

    if not isinstance(target, LlamaTarget):
        raise ValueError("memory is measured for the llama backend only")
    size = target.info.dtype.itemsize
    count = target.embedding.numel * (1 if target.config.tied else 2) + target.norm.numel()
    for layer in target.layers:
        for part in vars(layer).values():
            if isinstance(part, torch.Tensor):
                count += part.numel()
            elif part is not None:
                count += part.in_features * part.out_features
    return count * size


def measure_core(
    target_name: str,
    drafts: Sequence[str],
    max_tokens: int,
    runs: int,
    peers: bool,
    progress: Callable[[str], None],
) -> CoreReport:
    """Everything, for one target."""
    from ..target.load import load_target, resolve

    target = load_target(target_name)
    _weight_bytes(target)  # refuses what cannot be measured before anything is
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    contenders = {"plain": ours(target, load_draft("none", target), params)}
    for name in drafts:
        contenders[name] = ours(target, load_draft(name, target), params)
    if peers:
        folder = str(resolve(target_name)[0])
        contenders["transformers"] = transformers_plain(folder, target, params)
    progress("t(k)")
    times = forward_times(target)
    speeds = measure_speeds(contenders, runs, progress)
    progress("memory")
    shares = {s.name: s.counters["loop_share"] for s in speeds if s.counters}
    settings = {
        "target": target_name,
        "dtype": str(target.info.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "max_tokens": max_tokens,
        "runs": runs,
        "torch": torch.__version__,
        "temperature": 0.0,
        "batch": 1,
        "context_of_t(k)": CONTEXT,
    }
    return CoreReport(settings, times, shares, speeds, peak_memory(target_name, target, max_tokens))


def render(report: CoreReport) -> str:
    """Markdown tables."""
    s = report.settings
    base = report.forward_ms[1]
    lines = [
        f"{s['target']}, {s['dtype']}, {s['threads']} threads, batch 1, temperature 0, "
        f"{s['max_tokens']} tokens, medians of {s['runs']} runs",
        "",
        "| contender | tokens/s | against plain | spread | acceptance | mean length | loop's own |",
        "|---|---|---|---|---|---|---|",
    ]
    plain = next(speed for speed in report.speeds if speed.name == "plain").tokens_per_s
    for speed in report.speeds:
        c = speed.counters
        rate = f"{c['draft_acceptance_rate']:.0%}" if c and c["num_drafts"] else ""
        length = f"{c['mean_acceptance_length']:.2f}" if c and c["num_drafts"] else ""
        own = f"{report.loop_share[speed.name]:.1%}" if c else ""
        lines.append(
            f"| {speed.name} | {speed.tokens_per_s:.1f} | {speed.tokens_per_s / plain:.2f}x "
            f"| {speed.spread:.0%} | {rate} | {length} | {own} |"
        )
    lines += ["", f"| rows k | t(k) ms behind {CONTEXT} tokens | t(k) / t(1) |", "|---|---|---|"]
    lines += [f"| {k} | {t:.1f} | {t / base:.2f} |" for k, t in report.forward_ms.items()]
    m = report.memory_mb
    rest = m["peak"] - m["weights"] - m["cache"]
    lines += [
        "",
        f"Peak memory {m['peak']:.0f} MB: weights {m['weights']:.0f}, cache {m['cache']:.0f}, "
        f"the rest {rest:.0f} (allowed {BASELINE_MB}).",
    ]
    names = [speed.name for speed in report.speeds]
    lines += ["", "| tokens/s | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for task in PROMPTS:
        cells = " | ".join(f"{speed.per_task[task]:.1f}" for speed in report.speeds)
        lines.append(f"| {task} | {cells} |")
    return "\n".join(lines)
