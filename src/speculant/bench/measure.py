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

from ..control import Adaptive
from ..drafts import load_draft
from ..drafts.base import Draft
from ..engine import generate
from ..metrics import Counters
from ..pace import forward_times, measure_costs
from ..request import prompt_ids
from ..sampling import SamplingParams
from ..target.base import Target
from .profile import parameters, weight_bytes
from .prompts import PROMPTS
from .quality import Quality, quality

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
    quality: Quality | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


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


def parse_contender(spec: str) -> tuple[str, int, str]:
    """`NAME`, `NAME:NODES`, `NAME@DEPTH` or `NAME@auto` as (name, nodes, depth): 0, "" not given."""
    rest, _, depth = spec.partition("@")
    name, _, nodes = rest.partition(":")
    if nodes and not (nodes.isdecimal() and int(nodes)):
        raise ValueError("after the colon comes a number of nodes")
    if ("@" in spec or depth) and depth != "auto" and not (depth.isdecimal() and int(depth)):
        raise ValueError("after the @ comes a depth from 1, or auto")
    return name, int(nodes or 0), depth


def drafted(target: Target, spec: str, params: SamplingParams) -> Callable[..., Any]:
    """The contender of a spec, see `parse_contender`; auto adapts its depth."""
    name, nodes, depth = parse_contender(spec)
    draft = load_draft(name, target, **({"tree": nodes} if nodes else {}))
    if depth == "auto":
        return ours(target, draft, params, control=Adaptive(measure_costs(target, draft)))
    if depth and int(depth) > draft.info.depth:
        draft = load_draft(name, target, num_draft_tokens=int(depth))
    return ours(target, draft, params, **({"num_draft_tokens": int(depth)} if depth else {}))


def ours(
    target: Target, draft: Draft, params: SamplingParams, **options: Any
) -> Callable[..., Any]:
    """A contender that decodes with a draft; time without the prompt's prefill."""

    def run(prompt: str) -> tuple[int, float, Counters | None]:
        out = generate(target, draft, prompt, params, **options)
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


def peak_memory(
    target_name: str, target: Target, max_tokens: int, weights: str = ""
) -> dict[str, float]:
    """Peak resident memory (MB) of a fresh process that generates, and what it is made of. Linux."""
    code = (
        "import speculant\n"
        f"t = speculant.load_target({target_name!r}, weights={weights!r})\n"
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
        "weights": weight_bytes(target, parameters(target)) / 1e6,
        "cache": target.new_cache(1, capacity).nbytes / 1e6,
    }


def measure_core(
    target_name: str,
    drafts: Sequence[str],
    max_tokens: int,
    runs: int,
    peers: bool,
    progress: Callable[[str], None],
    weights: str = "",
) -> CoreReport:
    """Everything, for one target. weights: see `load_target`."""
    from ..target.load import load_target, resolve

    target = load_target(target_name, weights=weights)
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    contenders = {"plain": ours(target, load_draft("none", target), params)}
    for name in drafts:
        contenders[name] = drafted(target, name, params)
    if peers:
        folder = str(resolve(target_name)[0])
        contenders["transformers"] = transformers_plain(folder, target, params)
    rounded = _quality(target_name, target, params, progress) if weights else None
    progress("t(k)")
    times = dict(forward_times(target, ROWS, CONTEXT, repeats=15))
    speeds = measure_speeds(contenders, runs, progress)
    progress("memory")
    shares = {s.name: s.counters["loop_share"] for s in speeds if s.counters}
    settings = {
        "target": target_name,
        "dtype": str(target.info.dtype).removeprefix("torch."),
        "weights": weights or "as dtype",
        "threads": torch.get_num_threads(),
        "max_tokens": max_tokens,
        "runs": runs,
        "torch": torch.__version__,
        "temperature": 0.0,
        "batch": 1,
        "context_of_t(k)": CONTEXT,
    }
    memory = peak_memory(target_name, target, max_tokens, weights)
    return CoreReport(settings, times, shares, speeds, memory, rounded)


def _quality(
    name: str, target: Target, params: SamplingParams, progress: Callable[[str], None]
) -> Quality:
    """What the rounding changed, on greedy answers of the target in float32."""
    from ..target.load import load_target

    progress("quality of the weights")
    reference = load_target(name)
    plain, texts = load_draft("none", reference), []
    for prompt in PROMPTS.values():
        ids = prompt_ids(reference, prompt)
        out = generate(reference, plain, prompt, params)
        texts.append(([*ids, *out.token_ids], len(ids)))
    return quality(reference, target, texts)


def render(report: CoreReport) -> str:
    """Markdown tables."""
    s = report.settings
    base = report.forward_ms[1]
    lines = [
        f"{s['target']}, {s['dtype']}, weights {s['weights']}, {s['threads']} threads, batch 1, "
        f"temperature 0, {s['max_tokens']} tokens, medians of {s['runs']} runs",
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
    if report.quality is not None:
        q = report.quality
        lines += [
            "",
            f"Weights {s['weights']} against float32, over {q.tokens} tokens of greedy answers: "
            f"perplexity {q.perplexity:.4f} against {q.reference_perplexity:.4f}, the same likeliest "
            f"token in {q.agreement:.2%}, divergence {q.divergence:.2e} nats.",
        ]
    names = [speed.name for speed in report.speeds]
    lines += ["", "| tokens/s | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for task in PROMPTS:
        cells = " | ".join(f"{speed.per_task[task]:.1f}" for speed in report.speeds)
        lines.append(f"| {task} | {cells} |")
    return "\n".join(lines)
